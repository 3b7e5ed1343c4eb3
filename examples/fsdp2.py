"""FSDP2: the GRPO loss of a model that is sharded over two processes, computed with its head.

The loss takes the head's module, not its weight. FSDP2 then gathers the weight and reduces its
gradient, as in any forward. The ranks hold different numbers of tokens. At the end, the script
asserts that the gradients equal those of one process with the whole batch, and that the loss falls.
On GPUs, torchrun starts the processes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from begin import begin

if __name__ == "__main__":
    begin(__doc__)

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import start_processes

from grpo_kernels import LossConfig, grpo_loss, linear_logps

RANKS, STEPS, VOCAB, WIDTH = 2, 30, 101, 32
CONFIG = LossConfig(loss_type="dapo", epsilon=0.2, epsilon_high=0.28)


class Model(nn.Module):
    """Its forward gives hidden states; the head is for the loss to call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body(self.embed(tokens))


def batch(rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens, completion ids and mask (8, 12), advantages (8,); rank 1 counts fewer tokens than
    rank 0."""
    generator = torch.Generator().manual_seed(rank)
    tokens, ids = torch.randint(VOCAB, (2, 8, 12), generator=generator)
    mask = torch.arange(12) < torch.randint(1, 12 // (rank + 1) + 1, (8, 1), generator=generator)
    return tokens, ids, mask, torch.randn(8, generator=generator)


def one_process() -> dict[str, Tensor]:
    """Gradients of the plain model for the whole batch."""
    model = Model()
    tokens, ids, mask, advantages = (
        torch.cat(parts) for parts in zip(*map(batch, range(RANKS)), strict=True)
    )
    grpo_loss(model(tokens), model.lm_head, ids, mask, advantages, config=CONFIG).loss.backward()
    return {name: x.grad for name, x in model.named_parameters()}


def train(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    model = Model()
    for unit in (model.body, model.lm_head, model):
        fully_shard(unit)

    tokens, ids, mask, advantages = batch(rank)
    items = mask.sum().double()
    dist.all_reduce(items)
    items /= RANKS  # FSDP2 averages gradients over the ranks
    with torch.no_grad():
        old = linear_logps(
            model(tokens), model.lm_head, ids, completion_mask=mask, entropy=False
        ).logps

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, worst = [], 0.0
    for step in range(STEPS):
        options = {"old_per_token_logps": old, "num_items_in_batch": items, "config": CONFIG}
        loss = grpo_loss(model(tokens), model.lm_head, ids, mask, advantages, **options).loss
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            for name, want in one_process().items():
                got = model.get_parameter(name).grad.full_tensor()
                worst = max(worst, float((got - want).abs().max() / want.abs().max()))
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / RANKS)
        if rank == 0 and step % 10 == 0:
            print(f"step {step:2d}  loss {losses[-1]:+.4f}")
    if rank == 0:
        print(f"loss: {losses[0]:+.4f} before, {losses[-1]:+.4f} after")
        print(f"largest difference from one process: {worst:.1e} of the largest entry")
    assert worst < 1e-5, "the gradients are not those of one process"
    assert losses[-1] < losses[0] - 0.02, "the loss did not fall"
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        # "fork" saves importing torch again; with CUDA it has to be "spawn"
        start_processes(train, (str(Path(folder) / "store"),), nprocs=RANKS, start_method="fork")


if __name__ == "__main__":
    main()
