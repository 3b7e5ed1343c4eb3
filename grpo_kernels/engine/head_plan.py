"""Plan of how a call projects, reduces and differentiates its rows; the same for all its sweeps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_kernels.backends.interface import (
    Chunk,
    DivergenceStats,
    LogitTransform,
    RowBackend,
    RowStats,
)
from grpo_kernels.base.distributed import gather_stacked
from grpo_kernels.engine.memory import AMPLE, FreeMemory
from grpo_kernels.engine.products import Products, accumulator_of, converted_dtype
from grpo_kernels.engine.records import HeadTensors, Operands, Rows
from grpo_kernels.engine.vocab_parallel import Shard
from grpo_kernels.token_loss.record import Coefficients

SLICE_BYTES = 32 * 2**20  # of the weight, converted at a time; less only with a small budget


@dataclass(frozen=True)
class HeadPlan:
    """Backend, dtypes and budget of a head, and how its raw projection becomes logits."""

    backend: RowBackend
    compute_dtype: torch.dtype  # of the products' operands
    workspace_bytes: int
    logit_scale: float = 1.0
    softcap: float | None = None
    round_logits: bool = False  # to the compute dtype
    shard: Shard | None = None  # this rank's, if the head's rows are divided among ranks
    memory: FreeMemory = AMPLE
    teacher: HeadPlan | None = None  # the teacher's plan, with the same accumulator
    jsd_beta: float = 1.0  # the divergence from the teacher, see `Teacher`

    @property
    def accumulator(self) -> torch.dtype:
        """Dtype of logits, statistics, and gradients before their one rounding."""
        return accumulator_of(self.compute_dtype)

    def products(self, weight: Tensor) -> Products:
        """Return the products with `weight`, which may be a part of the head."""
        return Products(weight, self.compute_dtype, self.accumulator, self._slice_bytes)

    def operand_dtypes(self, head: HeadTensors[Tensor]) -> list[torch.dtype]:
        """Return the dtype of the operands of each of `HeadTensors.factors`; an adapter keeps its own precision."""
        _, *adapter = head.factors()
        return [self.compute_dtype, *(torch.promote_types(u.dtype, b.dtype) for u, b in adapter)]

    def all_products(
        self, head: HeadTensors[Tensor], columns: slice = slice(None)
    ) -> list[Products]:
        """Return the products of `HeadTensors.factors`, in their order."""
        pairs = zip(head.factors(), self.operand_dtypes(head), strict=True)
        return [
            Products(matrix[columns], dtype, self.accumulator, self._slice_bytes)
            for (_, matrix), dtype in pairs
        ]

    @property
    def _slice_bytes(self) -> int:
        return min(SLICE_BYTES, self.workspace_bytes // 8)

    def converted(self, head: Operands) -> Operands:
        """Return `head` with its weights converted, once, to the dtype of 16-bit products, if memory allows that.

        Otherwise each product converts its weight slice by slice.
        """
        if not self.memory.converts:
            return head
        teacher = head.teacher
        if teacher is not None and self.teacher is not None:
            teacher = replace(
                teacher, weight=_converted(teacher.weight, self.teacher.compute_dtype)
            )
        return replace(head, weight=_converted(head.weight, self.compute_dtype), teacher=teacher)

    def transform(self, bias: Tensor | None, inv_temperature: float | Tensor) -> LogitTransform:
        """Return the transform of the raw projection of rows into logits; `bias` as `row_bias` gives it."""
        rounded_to = self.compute_dtype if self.round_logits else None
        return LogitTransform(self.logit_scale, self.softcap, inv_temperature, bias, rounded_to)

    def stats(
        self, chunk: Chunk, rows: Rows, *, entropy: bool, extras: tuple[str, ...]
    ) -> RowStats:
        """Reduce the rows of a chunk; the log-probability is NaN where a row is invalid.

        With a teacher, compute the divergence, too, from both heads' statistics.
        """
        stats = self._reduced(chunk, entropy=entropy, extras=() if rows.top_k else extras)
        if chunk.teacher is not None:
            teacher = self._reduced(chunk.of_teacher(), entropy=False, extras=())
            value, sum_k = self.backend.diverge(chunk, stats, teacher)
            if self.shard is not None:
                parts = gather_stacked(torch.stack([value, sum_k]), self.shard.process_group)
                value, sum_k = parts.sum(dim=0).unbind()
            stats = replace(
                stats, divergence=DivergenceStats(value, sum_k, teacher.max_logit, teacher.log_sum)
            )
        if rows.invalid is not None:
            stats.logps.masked_fill_(rows.invalid, torch.nan)
        return stats if rows.top_k is None else rows.top_k.diverged(stats, self.shard)

    def _reduced(self, chunk: Chunk, *, entropy: bool, extras: tuple[str, ...]) -> RowStats:
        if self.shard is None:
            return self.backend.stats(chunk, entropy=entropy, extras=extras)
        return self.shard.stats(self.backend, chunk, entropy=entropy, extras=extras)

    def grad(
        self, chunk: Chunk, rows: Rows, stats: RowStats, coefficients: Coefficients, out: Tensor
    ) -> None:
        """``out = d loss / d (raw projection)``, (n, V), of rows with these statistics.

        With a `TopKTeacher`, d_divergence is the only coefficient that is read.
        """
        d_logp, d_entropy, d_divergence = coefficients
        if rows.top_k is None:
            assert d_logp is not None
            self.backend.grad(chunk, stats, d_logp, d_entropy, out, d_divergence)
            return
        assert d_entropy is None
        assert d_divergence is not None
        rows.top_k.grad(self.backend, chunk, stats, d_divergence, out)


def _converted(weight: Tensor, compute_dtype: torch.dtype) -> Tensor:
    dtype = converted_dtype(weight, compute_dtype)
    return weight if dtype is None else weight.to(dtype)
