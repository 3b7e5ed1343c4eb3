"""Rows of the head, gathered by ids: the operands of kept sets' products (`kept_sets.py`)."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from grpo_kernels.engine.head_plan import HeadPlan
from grpo_kernels.engine.records import HeadTensors


def entry_bytes(head: HeadTensors[Tensor], plan: HeadPlan) -> int:
    """Return the bytes of one entry's gathered rows."""
    pairs = zip(head.factors(), plan.operand_dtypes(head), strict=True)
    return sum(
        matrix.shape[1] * sum(x.itemsize for x in _stages(matrix.dtype, dtype, plan.accumulator))
        for (_, matrix), dtype in pairs
    )


def _stages(*dtypes: torch.dtype) -> list[torch.dtype]:
    """Return the dtypes that a gathered row goes through: as stored, as an operand, as one of fp32 products."""
    return [x for i, x in enumerate(dtypes) if i == 0 or x != dtypes[i - 1]]


class Gathered:
    """The rows of a factor's matrix (V, K) for kept ids, in memory that every block uses again.

    Args:
        dtype: dtype that operands are rounded to.
        accumulator: dtype of the products.
        entries: number of rows to gather at a time.
    """

    def __init__(
        self, matrix: Tensor, dtype: torch.dtype, accumulator: torch.dtype, entries: int
    ) -> None:
        self.entries, self._matrix, self._dtypes = entries, matrix.detach(), (dtype, accumulator)
        stages = _stages(matrix.dtype, *self._dtypes)
        self._stages = [matrix.new_empty(entries, matrix.shape[1], dtype=x) for x in stages]

    def operand(self, x: Tensor) -> Tensor:
        """Return rows of the other factor as an operand of the products."""
        dtype, accumulator = self._dtypes
        return x.to(dtype).to(accumulator)

    def of(self, kept: Tensor) -> Tensor:
        """Gather (r, w) ids -> (r, w, K); valid until the next call."""
        n = kept.numel()
        torch.index_select(self._matrix, 0, kept.reshape(-1), out=self._stages[0][:n])
        for x, y in itertools.pairwise(self._stages):
            y[:n].copy_(x[:n])
        return self._stages[-1][:n].view(*kept.shape, self._matrix.shape[1])

    def outer(self, d_raw: Tensor, x: Tensor) -> Tensor:
        """(r, w) and (r, K) -> (r w, K): d matrix of each entry; valid until the next call."""
        out = self._stages[-1][: d_raw.numel()]
        torch.bmm(d_raw[:, :, None], x[:, None, :], out=out.view(*d_raw.shape, out.shape[1]))
        return out

    def pieces(self, rows: int, width: int) -> list[slice]:
        """Return slices of a (rows, width) block's columns that fit in memory; several only if one row is too long."""
        step = max(1, self.entries // max(1, rows))
        return [slice(start, min(start + step, width)) for start in range(0, width, step)]
