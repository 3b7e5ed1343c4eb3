"""A head whose vocabulary is split over two processes: loss and gradients of the whole head.

Each process holds half of the head, and so half of its gradient. The ranks exchange four numbers
per token, and sum the gradient of the hidden states. At the end, the script asserts that loss and
gradients equal those of the whole head, and that no rank held more than its half.
"""

from __future__ import annotations

import tempfile

from begin import begin

if __name__ == "__main__":
    begin(__doc__)

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from grpo_kernels import GRPOLoss, Head

B, T, H, V, RANKS = 4, 12, 64, 1000, 2


def batch() -> dict[str, Tensor]:
    """The same on every rank."""
    g = torch.Generator().manual_seed(0)
    return {
        "hidden": torch.randn(B, T, H, generator=g),
        "head": torch.randn(V, H, generator=g) * 0.3,
        "completion_ids": torch.randint(V, (B, T), generator=g),
        "completion_mask": torch.rand(B, T, generator=g) < 0.9,
        "advantages": torch.tensor([1.0, -0.5, 0.25, -1.0]),
    }


def run(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    loss_fn, given = GRPOLoss(loss_type="dapo", entropy_coef=0.01), batch()
    weight = given["head"].requires_grad_()
    hidden = given["hidden"].requires_grad_()
    loss_fn(**given).loss.backward()
    want_loss, want = loss_fn(**given).loss.detach(), (hidden.grad, weight.grad)

    rows = slice(rank * V // RANKS, (rank + 1) * V // RANKS)
    part = weight.detach()[rows].clone().requires_grad_()
    again = hidden.detach().clone().requires_grad_()
    out = loss_fn(**{**given, "hidden": again, "head": Head(part, process_group=dist.group.WORLD)})
    out.loss.backward()

    gaps = [
        ((got - exact).abs().max() / exact.abs().max()).item()
        for got, exact in ((again.grad, want[0]), (part.grad, want[1][rows]))
    ]
    every: list = [None] * RANKS
    dist.all_gather_object(every, (rank, tuple(part.shape), out.loss.item(), max(gaps)))
    if rank == 0:
        for number, shape, loss, gap in every:
            print(f"rank {number}: head {shape}, loss {loss:+.6f}, gradients off by {gap:.1e}")
            assert abs(loss - want_loss.item()) < 1e-6
            assert gap < 1e-5
        worst = max(gap for *_, gap in every)
        print(
            f"loss of the whole head {want_loss.item():+.6f}; largest difference of a gradient "
            f"{worst:.1e}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(f"{folder}/store",), nprocs=RANKS)
