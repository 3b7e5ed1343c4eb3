"""GSPO on sequences that are split over two processes; ratios and lengths are of whole sequences.

Each process has a part of every sequence's tokens, and the whole head. It scores its own tokens and
gathers the other processes' log-probabilities and entropies, two numbers per token. Then it
computes the loss of the whole sequences. At the end, the script asserts that the loss equals that
of one process with all tokens, that the gradients of the head add up to that process's gradient,
and that each process has the gradient of its own hidden states.
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

from grpo_kernels import GRPOLoss, linear_logps, policy_loss_from_logps, presets

B, T, H, V, RANKS = 4, 12, 64, 1000, 2


def batch() -> dict[str, Tensor]:
    """Whole sequences, the same on every rank; ids are aligned with the hidden states that predict
    them."""
    g = torch.Generator().manual_seed(0)
    made = {
        "hidden": torch.randn(B, T, H, generator=g),
        "head": torch.randn(V, H, generator=g) * 0.3,
        "completion_ids": torch.randint(V, (B, T), generator=g),
        "completion_mask": torch.rand(B, T, generator=g) < 0.8,
        "advantages": torch.tensor([1.0, -0.5, 0.25, -1.0]),
    }
    logps = linear_logps(made["hidden"], made["head"], made["completion_ids"]).logps
    return made | {"old_per_token_logps": logps + 3e-3 * torch.randn(B, T, generator=g)}


def gathered(x: Tensor) -> Tensor:
    """(B, T_local) -> (B, T), with a graph to this rank's own columns."""
    parts = [torch.empty_like(x) for _ in range(RANKS)]
    dist.all_gather(parts, x.detach().contiguous())
    parts[dist.get_rank()] = x
    return torch.cat(parts, dim=1)


def run(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    given = batch()
    given["hidden"].requires_grad_()
    given["head"].requires_grad_()
    whole = GRPOLoss(presets.GSPO)(**given)
    whole.loss.backward()

    columns = slice(rank * T // RANKS, (rank + 1) * T // RANKS)
    hidden, ids, mask = (
        given[x].detach()[:, columns] for x in ("hidden", "completion_ids", "completion_mask")
    )
    hidden = hidden.clone().requires_grad_()
    head = given["head"].detach().clone().requires_grad_()
    scores = linear_logps(hidden, head, ids, completion_mask=mask)
    out = policy_loss_from_logps(
        gathered(scores.logps),
        given["completion_mask"],  # the rest is small and whole on every rank: (B, T) and (B,)
        given["advantages"],
        entropies=gathered(scores.entropies),
        old_per_token_logps=given["old_per_token_logps"],
        config=presets.GSPO,
    )
    # where gradients are averaged over these ranks (DDP, FSDP): RANKS * out.loss
    out.loss.backward()

    loss, d_head = out.loss.detach(), head.grad
    dist.all_reduce(d_head)
    pairs = ((hidden.grad, given["hidden"].grad[:, columns]), (d_head, given["head"].grad))
    worst = torch.tensor([max(((x - y).abs().max() / y.abs().max()).item() for x, y in pairs)])
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if rank == 0:
        clipped = out.metrics["clip_ratio/region_mean"]
        print(f"clipped: {clipped:.2f} of the sequences")
        print(f"loss in one process {whole.loss:+.6f}, of gathered tokens {loss:+.6f}")
        print(f"largest difference of a gradient {worst.item():.1e} of the largest entry")
    assert abs(loss.item() - whole.loss.item()) < 1e-6
    assert worst.item() < 1e-5
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(f"{folder}/store",), nprocs=RANKS)
