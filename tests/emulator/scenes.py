"""Launches in which a fault of a kernel should show: whole tiles and a tail, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

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
from grpo_kernels.token_loss.record import TokenLoss
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


def chunk_of(*, teacher: bool = False) -> Chunk:
    """Rows with a target in the first tile, at its end, in another, in the tail, and none.

    The last row has a logit far above the others, and the last column counts in every sum.
    """
    n = len(IDS)
    inv_t, bias = torch.rand(n, 1) + 1.0, torch.randn(VOCAB)
    transform = LogitTransform(scale=1.5, softcap=60.0, inv_temperature=inv_t, bias=bias)
    other = (
        Teacher(apart(3 * torch.randn(n, VOCAB)), LogitTransform(scale=0.8), 1.0)
        if teacher
        else None
    )
    raw = 3 * torch.randn(n, VOCAB)
    raw[:, -1], raw[-1, 5000] = 9.0, 200.0
    return Chunk(apart(raw), torch.tensor(IDS), transform, teacher=other)


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


MULTIPLE = 64


def apart(x: Tensor) -> Tensor:
    """A copy of `x` (n, V) with rows at multiples of `MULTIPLE` elements, unwritten between."""
    n, vocab = x.shape
    wide = x.new_empty(n, -(-vocab // MULTIPLE) * MULTIPLE)[:, :vocab]
    return wide.copy_(x)


class RowsApart(TritonRows):
    """`TritonRows` on copies (`apart`) of what it is given; it writes in place there too."""

    def stats(self, chunk: Chunk, *, entropy: bool, extras: tuple[str, ...] = ()) -> RowStats:
        return super().stats(_apart(chunk), entropy=entropy, extras=extras)

    def diverge(self, chunk: Chunk, stats: RowStats, teacher: RowStats) -> tuple[Tensor, Tensor]:
        return super().diverge(_apart(chunk), stats, teacher)

    def grad(
        self,
        chunk: Chunk,
        stats: RowStats,
        a: Tensor,
        b: Tensor | None,
        out: Tensor,
        c: Tensor | None = None,
    ) -> None:
        with _written(chunk, out) as (wide, wide_out):
            super().grad(wide, stats, a, b, wide_out, c)

    def fused(self, chunk: Chunk, token_loss: TokenLoss, out: Tensor | None) -> RowStats:
        if out is None:
            return super().fused(_apart(chunk), token_loss, None)
        with _written(chunk, out) as (wide, wide_out):
            return super().fused(wide, token_loss, wide_out)


def _apart(chunk: Chunk) -> Chunk:
    teacher = chunk.teacher and replace(chunk.teacher, logits=apart(chunk.teacher.logits))
    return replace(chunk, logits=apart(chunk.logits), teacher=teacher)


@contextmanager
def _written(chunk: Chunk, out: Tensor) -> Iterator[tuple[Chunk, Tensor]]:
    """The chunk apart, and a place for `out`, which is copied at the end."""
    wide = _apart(chunk)
    in_place = out.data_ptr() == chunk.logits.data_ptr() and out.dtype == chunk.logits.dtype
    wide_out = wide.logits if in_place else apart(out)
    yield wide, wide_out
    out.copy_(wide_out)


SCENES = (
    Scene("stats", "stats_kernel", _stats),
    Scene("fused, in place", "fused_kernel", _fused),
    Scene("grad, in place", "grad_kernel", _grad),
    Scene("diverge", "diverge_kernel", _diverge),
    Scene("grad with a teacher, in place", "grad_kernel", _teacher_grad),
)
