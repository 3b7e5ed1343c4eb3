"""Sequences split over two processes, GSPO: ratios, lengths and normalisers are those of the whole sequences.

Each process has its part of the tokens of every sequence, and the whole head. The claims at the end: the parts' losses
add up to the loss of the whole sequences, and so do their gradients of the head; d hidden is that of its own tokens.
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

from grpo_kernels import GRPOLoss, linear_logprob, presets

B, T, H, V, RANKS = 4, 12, 64, 1000, 2


def batch() -> dict[str, Tensor]:
    """Whole sequences, the same on every rank; ids are aligned with the hidden states that predict them."""
    g = torch.Generator().manual_seed(0)
    made = {
        "hidden": torch.randn(B, T, H, generator=g),
        "head": torch.randn(V, H, generator=g) * 0.3,
        "completion_ids": torch.randint(V, (B, T), generator=g),
        "completion_mask": torch.rand(B, T, generator=g) < 0.8,
        "advantages": torch.tensor([1.0, -0.5, 0.25, -1.0]),
    }
    logps = linear_logprob(made["hidden"], made["head"], made["completion_ids"]).logps
    return made | {"old_per_token_logps": logps + 3e-3 * torch.randn(B, T, generator=g)}


def run(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    loss_fn, given = GRPOLoss(presets.GSPO), batch()
    given["hidden"].requires_grad_()
    given["head"].requires_grad_()
    whole = loss_fn(**given)
    whole.loss.backward()

    columns = slice(rank * T // RANKS, (rank + 1) * T // RANKS)
    part = {
        name: x if name in ("head", "advantages") else x[:, columns] for name, x in given.items()
    }
    part |= {name: part[name].detach().clone().requires_grad_() for name in ("hidden", "head")}
    out = loss_fn(**part, sequence_group=dist.group.WORLD)
    out.loss.backward()

    loss, d_head = out.loss.detach().clone(), part["head"].grad
    dist.all_reduce(loss)
    dist.all_reduce(d_head)
    pairs = ((part["hidden"].grad, given["hidden"].grad[:, columns]), (d_head, given["head"].grad))
    worst = torch.tensor([max(((x - y).abs().max() / y.abs().max()).item() for x, y in pairs)])
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(
            f"clipped: {whole.metrics['clip_ratio/region_mean']:.2f} of the sequences; engine {out.engine}"
        )
        print(
            f"loss of the whole sequences {whole.loss:+.6f}, of the ranks' parts together {loss:+.6f}"
        )
        print(f"largest difference of a gradient {worst.item():.1e} of the largest entry")
    assert abs(loss.item() - whole.loss.item()) < 1e-6
    assert worst.item() < 1e-5
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(f"{folder}/store",), nprocs=RANKS)
