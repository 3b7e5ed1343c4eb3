"""The row work of a sweep, one class for each kind: chosen once, then called with one chunk of logits after the other.

=================== ============================================================================
`Reduce`            the statistics of each row
`ReduceThenDerive`  the statistics, and the gradient for the coefficients that follow
`Derive`            the gradient, from coefficients and statistics of all rows
`Fuse`              statistics, loss and gradient by one kernel
=================== ============================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from grpo_kernels.backends.interface import Chunk, FusedRowBackend, RowStats
from grpo_kernels.base.records import take
from grpo_kernels.engine.head_plan import HeadPlan
from grpo_kernels.engine.products import Products
from grpo_kernels.engine.records import Index, Rows
from grpo_kernels.token_loss.record import Coefficients, TokenLoss

_CoefficientsAt = Callable[
    [Index, RowStats], Coefficients
]  # of the rows at an index, given their statistics


class Reduce:
    """The statistics of each row; the other classes change or replace the work on a chunk.

    Args:
        plan: plan of the head.
        diverges: True if the rows have a teacher.
        entropy, extras: statistics besides the log-probability.

    Attributes:
        fp16_scale: () factor that the last chunk's d logits carry, in fp16, where a group is one chunk; None: 1.
    """

    terms: tuple[str, ...] = ()  # of a fused loss

    def __init__(
        self, plan: HeadPlan, *, diverges: bool, entropy: bool, extras: tuple[str, ...] = ()
    ) -> None:
        self.plan, self.entropy, self.extras, self._diverges = plan, entropy, extras, diverges
        self.fp16_scale: Tensor | None = None
        self._parts: list[RowStats] = []

    def __call__(
        self, chunk: Chunk, rows: Rows, index: Index, count: int, d_logits: Tensor | None
    ) -> None:
        """Do the row work on a chunk.

        Args:
            rows: the rows of the chunk.
            index: their index among the rows of the sweep.
            count: number of rows before the padding; 0 or less: all are padding.
            d_logits: (m, V) memory to write the gradient to; None: no gradient.
        """
        self._keep(self._stats(chunk, rows), count)

    def _stats(self, chunk: Chunk, rows: Rows) -> RowStats:
        return self.plan.stats(chunk, rows, entropy=self.entropy, extras=self.extras)

    def _keep(self, stats: RowStats, count: int) -> None:
        self._parts.append(take(stats, slice(max(0, count))))

    def statistics(self, like: Tensor) -> RowStats:
        """Return the statistics of all rows, (n,) each, on the device of `like`."""
        return RowStats.concatenate(
            self._parts,
            like,
            self.plan.accumulator,
            entropy=self.entropy,
            extras=self.extras,
            terms=self.terms,
            divergence=self._diverges,
        )


class ReduceThenDerive(Reduce):
    """The statistics of each row, and the gradient for the coefficients that follow."""

    def __init__(
        self,
        plan: HeadPlan,
        products: Products,
        coefficients_of: _CoefficientsAt,
        *,
        diverges: bool,
        entropy: bool,
        extras: tuple[str, ...] = (),
    ) -> None:
        super().__init__(plan, diverges=diverges, entropy=entropy, extras=extras)
        self._products, self._coefficients_of = products, coefficients_of

    def __call__(
        self, chunk: Chunk, rows: Rows, index: Index, count: int, d_logits: Tensor | None
    ) -> None:
        stats = self._stats(chunk, rows)
        if d_logits is not None:
            self._derive(chunk, rows, index, stats, d_logits)
        self._keep(stats, count)

    def _derive(
        self, chunk: Chunk, rows: Rows, index: Index, stats: RowStats, d_logits: Tensor
    ) -> None:
        d_logp, *others = self._coefficients_of(index, stats)
        coefficients = Coefficients(
            torch.zeros_like(stats.logps) if d_logp is None else d_logp, *others
        )
        coefficients, self.fp16_scale = self._products.scaled(
            coefficients, chunk.transform, stats.divergence
        )
        self.plan.grad(chunk, rows, stats, coefficients, d_logits)


class Derive(ReduceThenDerive):
    """The gradient of `coefficients` (n,), given the rows' statistics `stats` (n,)."""

    def __init__(
        self, plan: HeadPlan, products: Products, coefficients: Coefficients, stats: RowStats
    ) -> None:
        super().__init__(
            plan,
            products,
            lambda index, _: take(coefficients, index),
            diverges=False,
            entropy=False,
        )
        self._all_stats = stats

    def __call__(
        self, chunk: Chunk, rows: Rows, index: Index, count: int, d_logits: Tensor | None
    ) -> None:
        assert d_logits is not None
        self._derive(chunk, rows, index, take(self._all_stats, index), d_logits)


class Fuse(ReduceThenDerive):
    """Statistics, loss and gradient of rows whose loss is `token_loss`, by one kernel.

    If d logits must be scaled before they are rounded, a second kernel computes the gradient.
    """

    def __init__(
        self,
        plan: HeadPlan,
        products: Products,
        coefficients_of: _CoefficientsAt,
        token_loss: TokenLoss,
        *,
        diverges: bool,
    ) -> None:
        super().__init__(plan, products, coefficients_of, diverges=diverges, entropy=True)
        self._token_loss, self.terms = token_loss, token_loss.terms

    def __call__(
        self, chunk: Chunk, rows: Rows, index: Index, count: int, d_logits: Tensor | None
    ) -> None:
        backend, scales = self.plan.backend, self._products.scales_gradient
        assert isinstance(backend, FusedRowBackend)
        marked = chunk if rows.marked is None else replace(chunk, ids=rows.marked)
        stats = backend.fused(marked, take(self._token_loss, index), None if scales else d_logits)
        if scales and d_logits is not None:
            self._derive(chunk, rows, index, stats, d_logits)
        self._keep(stats, count)
