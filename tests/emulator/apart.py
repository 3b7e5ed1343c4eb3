"""The row kernels of Triton on rows as the engine lays them on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from grpo_kernels.backends.interface import Chunk, Coefficients, FusedLoss, RowStats
from grpo_kernels.backends.triton_rows.rows import TritonRows

MULTIPLE = 64


def apart(x: Tensor) -> Tensor:
    """A copy of `x` (n, V) with rows at multiples of `MULTIPLE` elements, unwritten between."""
    n, vocab = x.shape
    wide = x.new_empty(n, -(-vocab // MULTIPLE) * MULTIPLE)[:, :vocab]
    return wide.copy_(x)


class RowsApart(TritonRows):
    """`TritonRows` on copies (`apart`) of what it is given; it writes in place there too."""

    def stats(self, chunk: Chunk, **options: Any) -> RowStats:
        return super().stats(_apart(chunk), **options)

    def diverge(self, chunk: Chunk, *stats: RowStats) -> tuple[Tensor, Tensor]:
        return super().diverge(_apart(chunk), *stats)

    def grad(self, chunk: Chunk, stats: RowStats, coefficients: Coefficients, out: Tensor) -> None:
        with _written(chunk, out) as (wide, wide_out):
            super().grad(wide, stats, coefficients, wide_out)

    def fused(self, chunk: Chunk, fused_loss: FusedLoss, out: Tensor | None) -> RowStats:
        if out is None:
            return super().fused(_apart(chunk), fused_loss, None)
        with _written(chunk, out) as (wide, wide_out):
            return super().fused(wide, fused_loss, wide_out)


def _apart(chunk: Chunk) -> Chunk:
    reference = chunk.reference and replace(chunk.reference, logits=apart(chunk.reference.logits))
    return replace(chunk, logits=apart(chunk.logits), reference=reference)


@contextmanager
def _written(chunk: Chunk, out: Tensor) -> Iterator[tuple[Chunk, Tensor]]:
    """The chunk apart, and a place for `out`, which is copied at the end."""
    wide = _apart(chunk)
    in_place = out.data_ptr() == chunk.logits.data_ptr() and out.dtype == chunk.logits.dtype
    wide_out = wide.logits if in_place else apart(out)
    yield wide, wide_out
    out.copy_(wide_out)
