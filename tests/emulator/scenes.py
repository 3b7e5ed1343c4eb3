"""Launches in which a fault of a kernel should show: a vocabulary of whole tiles and a tail, the gradient in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kernels.backends.interface import (
    Chunk,
    DivergenceStats,
    LogitTransform,
    RowStats,
    Teacher,
)
from grpo_kernels.backends.triton_rows.rows import TritonRows
from tests.emulator.layouts import apart
from tests.support.row_cases import EXTRAS, make_loss

VOCAB = 11_769  # two tiles, and a tail that reaches into its last quarter
BEFORE = 200_000  # rows: times the vocabulary it is more than 2^31
IDS = (0, -1, VOCAB, 4095, 8191, VOCAB - 1)  # the second and the third are none


@dataclass(frozen=True)
class Scene:
    """Launches of `kernel`, whose results tell whether it did its work."""

    name: str
    kernel: str
    play: Callable[[], list[Tensor]]
    rows_before: int = BEFORE


def chunk_of(*, teacher: bool = False, layout: Callable[[Tensor], Tensor] = apart) -> Chunk:
    """Rows with a target in the first tile, at its end, in another, in the tail, and none; all of a transform.

    The last row has a logit far above the others, and the last column counts in every sum.
    """
    n = len(IDS)
    inv_t, bias = torch.rand(n, 1) + 1.0, torch.randn(VOCAB)
    transform = LogitTransform(scale=1.5, softcap=60.0, inv_temperature=inv_t, bias=bias)
    other = (
        Teacher(layout(3 * torch.randn(n, VOCAB)), LogitTransform(scale=0.8), 1.0)
        if teacher
        else None
    )
    raw = 3 * torch.randn(n, VOCAB)
    raw[:, -1], raw[-1, 5000] = 9.0, 200.0
    return Chunk(layout(raw), torch.tensor(IDS), transform, teacher=other)


def known_stats(n: int) -> RowStats:
    """Statistics that need not fit the rows."""
    other = DivergenceStats(torch.rand(n), torch.rand(n), 9 + torch.rand(n), torch.rand(n))
    return RowStats(
        -torch.rand(n), 20 + torch.rand(n), torch.rand(n), torch.rand(n), divergence=other
    )


def _stats() -> list[Tensor]:
    found = TritonRows().stats(chunk_of(), entropy=True, extras=EXTRAS)
    assert found.entropies is not None
    return [found.logps, found.max_logit, found.log_sum, found.entropies, *found.extras.values()]


def _fused() -> list[Tensor]:
    chunk = chunk_of()
    found = TritonRows().fused(chunk, make_loss(torch.zeros(len(IDS)), 9), chunk.logits)
    return [found.logps, *found.terms.values(), chunk.logits]


def _grad() -> list[Tensor]:
    chunk, (a, b) = chunk_of(), torch.randn(2, len(IDS))
    TritonRows().grad(chunk, known_stats(len(IDS)), a, b, chunk.logits)
    return [chunk.logits]


def _diverge() -> list[Tensor]:
    chunk, stats = chunk_of(teacher=True), known_stats(len(IDS))
    return [*TritonRows().diverge(chunk, stats, stats)]


def _teacher_grad() -> list[Tensor]:
    chunk, (a, b, c) = chunk_of(teacher=True), torch.randn(3, len(IDS))
    TritonRows().grad(chunk, known_stats(len(IDS)), a, b, chunk.logits, c)
    return [chunk.logits]


SCENES = (
    Scene("stats", "stats_kernel", _stats),
    Scene("fused, in place", "fused_kernel", _fused),
    Scene("grad, in place", "grad_kernel", _grad),
    Scene("diverge", "diverge_kernel", _diverge),
    Scene("grad with a teacher, in place", "grad_kernel", _teacher_grad),
)
