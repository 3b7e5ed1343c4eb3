"""Plan of a call: how it projects, reduces and differentiates its rows, and how many at a time.

A group is rows whose d logits enter one backward product. A chunk is rows of a group whose logits
exist at one time. Both are chosen so that the workspace is not exceeded and the products are large.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels.backends.interface import (
    STATISTICS,
    Chunk,
    DivergenceStats,
    LogitTransform,
    RowBackend,
    RowStats,
)
from grpo_kernels.base.choices import EngineName
from grpo_kernels.base.distributed import gather_stacked
from grpo_kernels.engine.device import (
    AMPLE,
    CHUNKS_OF_A_GROUP,
    CPU,
    LARGE_CHUNK_ROWS,
    LEAST_CHUNK_ROWS,
    Device,
    FreeMemory,
    accumulator_of,
    converted_dtype,
    device_of,
)
from grpo_kernels.engine.gemm import Products
from grpo_kernels.engine.records import (
    CoefficientsOf,
    Gradients,
    HeadTensors,
    NeedsGrad,
    Operands,
    Rows,
)
from grpo_kernels.engine.top_k import TopKTeacher
from grpo_kernels.engine.vocab_parallel import Shard, widest_part
from grpo_kernels.token_loss.record import NO_COEFFICIENTS, Coefficients, TokenLoss

SLICE_BYTES = 32 * 2**20  # of the weight, converted at a time; less only with a small budget
Gather = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class HeadPlan:
    """Backend, dtypes and budget of a head, and how its raw projection becomes logits.

    Attributes:
        compute_dtype: of the products' operands.
        round_logits: True if logits are rounded to the compute dtype.
        shard: this rank's, if the head's rows are divided among ranks.
        teacher: the teacher's plan, with the same accumulator.
        jsd_beta: the divergence from the teacher, see `Teacher`.
    """

    backend: RowBackend
    compute_dtype: torch.dtype
    workspace_bytes: int
    logit_scale: float = 1.0
    softcap: float | None = None
    round_logits: bool = False
    shard: Shard | None = None
    memory: FreeMemory = AMPLE
    teacher: HeadPlan | None = None
    jsd_beta: float = 1.0

    @property
    def accumulator(self) -> torch.dtype:
        """Dtype of logits, statistics, and gradients before their one rounding."""
        return accumulator_of(self.compute_dtype)

    def products(self, weight: Tensor, dtype: torch.dtype | None = None) -> Products:
        """Return the products with `weight`, which may be a part of the head."""
        slice_bytes = min(SLICE_BYTES, self.workspace_bytes // 8)
        return Products(weight, dtype or self.compute_dtype, self.accumulator, slice_bytes)

    def operand_dtypes(self, head: HeadTensors[Tensor]) -> list[torch.dtype]:
        """Return the operands' dtype of each of `HeadTensors.factors`; an adapter keeps its own."""
        _, *adapter = head.factors()
        return [self.compute_dtype, *(torch.promote_types(u.dtype, b.dtype) for u, b in adapter)]

    def all_products(
        self, head: HeadTensors[Tensor], columns: slice = slice(None)
    ) -> list[Products]:
        """Return the products of `HeadTensors.factors`, in their order."""
        pairs = zip(head.factors(), self.operand_dtypes(head), strict=True)
        return [self.products(matrix[columns], dtype) for (_, matrix), dtype in pairs]

    def converted(self, head: Operands) -> Operands:
        """Return `head` with weights in the dtype of 16-bit products, if memory allows copies.

        Otherwise each product converts its weight slice by slice.
        """
        if not self.memory.converts:
            return head
        teacher = head.teacher
        if teacher is not None and self.teacher is not None:
            weight = _converted(teacher.weight, self.teacher.compute_dtype)
            teacher = replace(teacher, weight=weight)
        return replace(head, weight=_converted(head.weight, self.compute_dtype), teacher=teacher)

    def transform(self, bias: Tensor | None, inv_temperature: float | Tensor) -> LogitTransform:
        """Return the transform of raw projections into logits; `bias` as `row_bias` gives it."""
        rounded_to = self.compute_dtype if self.round_logits else None
        return LogitTransform(self.logit_scale, self.softcap, inv_temperature, bias, rounded_to)

    def stats(
        self, chunk: Chunk, rows: Rows, *, entropy: bool, extras: tuple[str, ...]
    ) -> RowStats:
        """Reduce the rows of a chunk, and with a teacher compute the divergence.

        The log-probability is NaN where a row is invalid.
        """
        of_backend = tuple(x for x in extras if x in STATISTICS)
        stats = self._reduced(chunk, entropy=entropy, extras=of_backend)
        if chunk.teacher is not None:
            teacher = self._reduced(chunk.of_teacher(), entropy=False, extras=())
            value, sum_k = self.backend.diverge(chunk, stats, teacher)
            if self.shard is not None:
                parts = gather_stacked(torch.stack([value, sum_k]), self.shard.process_group)
                value, sum_k = parts.sum(dim=0).unbind()
            divergence = DivergenceStats(value, sum_k, teacher.max_logit, teacher.log_sum)
            stats = replace(stats, divergence=divergence)
        if rows.invalid is not None:
            stats.logps.masked_fill_(rows.invalid, torch.nan)
        return stats if rows.top_k is None else rows.top_k.completed(stats, self.shard)

    def _reduced(self, chunk: Chunk, *, entropy: bool, extras: tuple[str, ...]) -> RowStats:
        if self.shard is None:
            return self.backend.stats(chunk, entropy=entropy, extras=extras)
        return self.shard.stats(self.backend, chunk, entropy=entropy, extras=extras)

    def grad(
        self, chunk: Chunk, rows: Rows, stats: RowStats, coefficients: Coefficients, out: Tensor
    ) -> None:
        """``out = d loss / d (raw projection)``, (n, V), of rows with these statistics."""
        if rows.top_k is not None:
            rows.top_k.grad(self.backend, chunk, stats, coefficients, out)
            return
        d_logp, d_entropy, d_divergence, _ = coefficients
        assert d_logp is not None
        self.backend.grad(chunk, stats, d_logp, d_entropy, out, d_divergence)


def _converted(weight: Tensor, compute_dtype: torch.dtype) -> Tensor:
    dtype = converted_dtype(weight, compute_dtype)
    return weight if dtype is None else weight.to(dtype)


class Coupling(Enum):
    """Moment at which a row's coefficients are known."""

    KNOWN = "before the forward"
    TOKEN = "from the row's own log-probability and entropy"
    CROSS_TOKEN = "only when other rows are done"
    UNKNOWN = "only in the backward, since no expected= was given"

    @staticmethod
    def of(*, known: bool, coupled: bool) -> Coupling:
        """Return a loss's coupling: `known` beforehand, `coupled` over its tokens, or neither."""
        return Coupling.KNOWN if known else Coupling.CROSS_TOKEN if coupled else Coupling.TOKEN


class Stored(Enum):
    """Results that a first pass leaves for the backward."""

    NOTHING = "there is no gradient"
    PER_ROW = "d logp / d hidden of each row, or that of the divergence, which the backward scales"
    GRADIENT = "the gradient for coefficients that were known, or expected"
    STATISTICS = "those of the rows, for a second pass that recomputes the logits"


@dataclass(frozen=True)
class Engine:
    """One way to compute a call; its second pass is on the rows with gradient."""

    name: EngineName
    stores: Stored
    first_pass: Callable[[Operands, Request], ForwardResult]
    second_pass: Callable[[Operands, Request, RowStats, Coefficients], Gradients]

    @property
    def recomputes(self) -> bool:
        """True if the whole gradient is computed in a second pass."""
        return self.stores is Stored.STATISTICS

    @property
    def stores_gradient(self) -> bool:
        """True if the first pass computes the gradient, or everything expensive about it."""
        return self.stores in (Stored.PER_ROW, Stored.GRADIENT)


@dataclass(frozen=True)
class Request:
    """A call's inputs and settings, without the head's tensors.

    Attributes:
        rows: n rows; every other position is 0 in all results.
        coefficients_of: the true ones for `PolicyLoss`, the expected ones for `LinearLogprob`.
        token_loss: the same as a loss that a backend fuses; its terms reach `evaluate`.
        compares: True if the backward compares these coefficients with the gradient that arrives.
        may_have_grad: (n,) bool, rows that may have a gradient; None: all of them.
        gathered_weight: context in which the backward has the whole weight (ZeRO-3).
    """

    rows: Rows
    plan: HeadPlan
    needs_grad: NeedsGrad
    engine: Engine
    entropy: bool = True
    extras: tuple[str, ...] = ()
    coefficients_of: CoefficientsOf | None = None
    token_loss: TokenLoss | None = None
    compares: bool = False
    may_have_grad: Tensor | None = None
    gathered_weight: Gather = nullcontext

    @property
    def diverges(self) -> bool:
        """True if the rows have a teacher."""
        return self.plan.teacher is not None or isinstance(self.rows.top_k, TopKTeacher)

    def main(self, coefficients: Coefficients) -> Tensor | None:
        """Return the main one: d_divergence if rows have a teacher, else d_logp."""
        return coefficients.d_divergence if self.diverges else coefficients.d_logp

    def with_main(
        self, value: Tensor, coefficients: Coefficients = NO_COEFFICIENTS
    ) -> Coefficients:
        """Return `coefficients` with `value` (n,) in the place of `main`."""
        if self.diverges:
            return coefficients._replace(d_divergence=value)
        return coefficients._replace(d_logp=value)


@dataclass(frozen=True)
class ForwardResult:
    """Result of a first pass: statistics and, if the engine stores it, a gradient.

    Autograd keeps the parts that the backward reads.

    Attributes:
        stats: (n,).
        grads: of the rows that may have one.
        grad_rows: (m,) indices of those rows.
        coefficients: (n,) those of `grads`, or for the second pass.
    """

    stats: RowStats | None
    grads: Gradients | None = None
    grad_rows: Tensor | None = None
    coefficients: Coefficients = NO_COEFFICIENTS

    @property
    def entropies(self) -> Tensor:
        """The entropies (n,) of a pass that was asked for them."""
        assert self.stats is not None and self.stats.entropies is not None
        return self.stats.entropies


class Group(NamedTuple):
    """The rows [start, stop) of a sweep, whose d logits enter one backward product."""

    start: int
    stop: int
    rows: int  # stop - start, padded
    chunks: tuple[slice, ...]  # of those rows

    @property
    def n(self) -> int:
        """Rows without padding."""
        return self.stop - self.start

    @property
    def chunk_rows(self) -> int:
        """Rows of the largest chunk."""
        return max((chunk.stop - chunk.start for chunk in self.chunks), default=0)


def plan_groups(
    rows: Rows, head: Operands, plan: HeadPlan, needs_grad: NeedsGrad | None
) -> list[Group]:
    """Return the groups of a sweep over `rows`."""
    costs, device = _costs(rows, head, plan, needs_grad), device_of(head.weight.device)
    return divide(len(rows), plan.workspace_bytes, device, **costs)


def planned_bytes(rows: Rows, head: Operands, plan: HeadPlan, needs_grad: NeedsGrad | None) -> int:
    """Return the peak bytes of a sweep's chunks; works on meta tensors too.

    That is at most `HeadPlan.workspace_bytes`, if that is enough for a chunk of
    `Device.fewest_rows`.
    """
    costs = _costs(rows, head, plan, needs_grad)
    groups = plan_groups(rows, head, plan, needs_grad)
    return max(
        (
            group.chunk_rows * costs["chunk_row_bytes"]
            + group.rows * costs["group_row_bytes"]
            + costs["scratch_bytes"](group.chunk_rows)
            for group in groups
        ),
        default=0,
    )


def _costs(
    rows: Rows, head: Operands, plan: HeadPlan, needs_grad: NeedsGrad | None
) -> dict[str, Any]:
    """Return the costs of a sweep, as `divide` takes them.

    A chunk has logits; a group has operands, and d logits if these are of another dtype.
    """
    products = plan.products(widest_part(head.weight, plan.shard))
    vocab, with_teacher = products.weight.shape[0], plan.teacher is not None
    width = device_of(head.weight.device).row_width(vocab)
    row_bytes = width * plan.accumulator.itemsize
    separate = needs_grad is not None and products.gradient_dtype != plan.accumulator
    chunk_row_bytes, slice_bytes = row_bytes, products.slice_bytes
    if rows.top_k is not None:
        chunk_row_bytes += rows.top_k.row_bytes()
    if plan.teacher is not None and head.teacher is not None:
        other = plan.teacher.products(widest_part(head.teacher.weight, plan.shard))
        chunk_row_bytes = 2 * row_bytes + other.hidden_bytes()
        slice_bytes = max(slice_bytes, other.slice_bytes)
    d_logits = width * products.gradient_dtype.itemsize if separate else 0

    def scratch_bytes(m: int) -> int:  # products and row work never run at the same time
        scratch = plan.backend.scratch_rows(m, vocab, teacher=with_teacher) * row_bytes
        return max(slice_bytes, scratch)

    grouped = needs_grad is not None and separate and needs_grad.weight
    return {
        "chunk_row_bytes": chunk_row_bytes,
        "group_row_bytes": products.hidden_bytes() + d_logits,
        "grouped": grouped and not products.scales_gradient,
        "scratch_bytes": scratch_bytes,
    }


def divide(
    n: int,
    workspace_bytes: int,
    device: Device = CPU,
    *,
    chunk_row_bytes: int,
    group_row_bytes: int,
    grouped: bool,
    scratch_bytes: Callable[[int], int],
) -> list[Group]:
    """Divide `n` rows into groups whose workspace stays within `workspace_bytes`, if it can.

    Groups differ by at most one row (or by one `Device.row_multiple`), so that none is much smaller
    than the others. A chunk has at least `Device.fewest_rows`.

    Args:
        chunk_row_bytes: for a row of a chunk, as long as the chunk lasts.
        group_row_bytes: for a row of a group, as long as the group lasts.
        grouped: True if several chunks may share a backward product; else a group is one chunk.
            Each product for d weight reads and writes all of its accumulator, so fewer are better.
        scratch_bytes: further bytes for a chunk with the given number of rows; not decreasing.
    """

    def rows_of_chunk(per_group: int) -> int:
        row_bytes = chunk_row_bytes + per_group * group_row_bytes
        return most_rows(row_bytes, workspace_bytes, scratch_bytes, device.fewest_rows)

    sizes = {count: rows_of_chunk(count) for count in (CHUNKS_OF_A_GROUP if grouped else ())}
    choices = itertools.product((LARGE_CHUNK_ROWS, LEAST_CHUNK_ROWS), sizes)
    per_group = next((count for least, count in choices if sizes[count] >= least), 1)
    most = sizes.get(per_group) or rows_of_chunk(per_group)
    multiple = device.row_multiple
    most -= most % multiple  # to which a chunk's rows are padded
    groups = []
    for start, stop in _even_parts(n, per_group * most, multiple):
        rows = device.padded_rows(stop - start)
        parts = [(0, rows)] if per_group == 1 else _even_parts(rows, most, multiple)
        groups.append(Group(start, stop, rows, tuple(slice(*part) for part in parts)))
    return groups


def _even_parts(n: int, most: int, multiple: int) -> list[tuple[int, int]]:
    """Return [0, n) in the fewest parts of at most `most`, from multiples of `multiple`."""
    count = -(-n // most)
    if not count:
        return []
    bounds = (min(n, -(-(n * i // count) // multiple) * multiple) for i in range(count + 1))
    return list(itertools.pairwise(bounds))


def most_rows(
    row_bytes: int, workspace_bytes: int, scratch_bytes: Callable[[int], int], least: int
) -> int:
    """Return the most rows of a chunk for which the workspace stays within `workspace_bytes`.

    Args:
        row_bytes: bytes for a row of a chunk, with the group that it belongs to.
        scratch_bytes: further bytes for a chunk with the given number of rows; not decreasing.
        least: the result, where the budget allows fewer: they would be padded to that.
    """
    low, high = least, max(least, workspace_bytes // row_bytes)
    while low < high:
        middle = (low + high + 1) // 2
        if middle * row_bytes + scratch_bytes(middle) <= workspace_bytes:
            low = middle
        else:
            high = middle - 1
    return low
