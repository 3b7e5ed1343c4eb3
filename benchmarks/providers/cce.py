"""Apple's cut cross-entropy, `cut_cross_entropy.linear_cross_entropy`. Written for 25.1.1, the latest on PyPI.

That release is an older tree than the repository's 25.9: gradients are summed in the dtype of the operands.
``reduction="none"`` gives -logp a token; masked tokens are its `ignore_index`, and left out. The logits never leave the
chip: 8 NVH, less the tiles that its gradient filter drops, by default those whose probabilities are all below eps / 32
of the dtype, whatever the advantage. It chooses its Triton kernels everywhere but on macOS, where it compiles all
logits at once, as `compiled` does; on a CPU that was tested, the kernels have not been run. Apple's licence: called,
never copied.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import Inputs
from benchmarks.harness.events import Absence
from benchmarks.providers import Forward, Outcome, from_logps
from benchmarks.providers.packing import without_masked

IGNORE = -100
TILE = 128  # rows, and ids, of the tiles of its backward
LEAST = 2.0**-12  # eps / 32 of bfloat16


def cce(inputs: Inputs) -> Forward:
    """By its own choice of implementation and gradient filter."""
    import cut_cross_entropy as package
    from cut_cross_entropy.linear_cross_entropy import LCE_IMPL_DEFAULT as CHOSEN

    if package.LinearCrossEntropyImpl.CCE == CHOSEN and not inputs.hidden.is_cuda:
        raise Absence("the Triton kernels it chooses serve GPUs only")
    ids = without_masked(inputs, IGNORE)

    def logps() -> tuple[Tensor, None]:
        nll = package.linear_cross_entropy(
            inputs.hidden,
            inputs.weight,
            ids,
            ignore_index=IGNORE,
            softcap=inputs.case.softcap,
            reduction="none",
            impl=CHOSEN,
        )
        return -nll, None

    return from_logps(inputs, logps, f"{package.__version__}, impl={CHOSEN.name.lower()}, no entropy")


def filtered(inputs: Inputs) -> Forward:
    """The gradient that its filter leaves, modelled in torch for what runs no kernel of its: errors, and tiles kept.

    By default the kernels pass over a tile of `TILE` rows and as many ids where no |p - 1[j = y]| reaches `LEAST`, the
    limit for bf16 operands; ids are sorted by their mean logit, so that the small ones meet.
    """
    if inputs.case.softcap is not None:
        raise Absence("the model has no soft-cap")
    tiles: list[float] = []

    def logps() -> tuple[Tensor, None]:
        hidden, ids = inputs.hidden.reshape(-1, inputs.case.h), inputs.ids.reshape(-1)
        found: Tensor = _Filtered.apply(hidden, inputs.weight, ids, tiles)
        return found.view(inputs.ids.shape), None

    forward = from_logps(inputs, logps, f"tiles of {TILE} x {TILE}, least {LEAST:.1e}, all in torch")

    def watched() -> Outcome:
        return replace(forward(), spent=lambda: {"tiles": tiles[-1]})

    return watched


class _Filtered(torch.autograd.Function):
    """Log-probabilities (N,) of `ids` (N,) from `hidden` (N, H) and `weight` (V, H); their gradient without the tiles.

    The share of tiles that are kept is appended to `tiles`.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, ids: Tensor, tiles: list[float]) -> Tensor:
        logits = hidden @ weight.t()
        ctx.save_for_backward(hidden, weight, ids, logits)
        ctx.tiles = tiles
        return logits.gather(1, ids[:, None])[:, 0] - logits.logsumexp(dim=1)

    @staticmethod
    def backward(ctx: Any, a: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, ids, logits = ctx.saved_tensors
        order = logits.mean(dim=0).argsort()
        d = torch.softmax(logits, dim=1).neg_()
        d[torch.arange(len(ids)), ids] += 1.0
        kept, count = 0, 0
        for rows in d.split(TILE):
            found = is_kept(rows[:, order])
            kept, count = kept + int(found.sum()), count + len(found)
            stays = torch.empty_like(order, dtype=torch.bool)
            stays[order] = found.repeat_interleave(TILE)[: len(order)]
            rows.mul_(stays)
        ctx.tiles.append(kept / count)
        d.mul_(a[:, None])
        return d @ weight, d.t() @ hidden if ctx.needs_input_grad[1] else None, None, None


def is_kept(rows: Tensor) -> Tensor:
    """Of `rows` (at most `TILE`, V): which of the ceil(V / TILE) tiles have a number that the filter keeps."""
    largest = rows.abs().amax(dim=0)
    return torch.cat([x.amax()[None] for x in largest.split(TILE)]) >= LEAST
