"""The one loop of the engines, a sweep: for each chunk of rows project, do the row work, add up.

Engines differ in the row work (`RowWork`): ``score`` only reduces, ``one_pass`` and ``frozen``
reduce and derive, and the second pass of ``two_pass`` derives with the statistics of the first.
(The second pass of ``lean`` goes by slices of the vocabulary, `slices.py`.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from grpo_kernels.backends.interface import Chunk, FusedRowBackend, RowStats, Teacher
from grpo_kernels.base.tensors import take
from grpo_kernels.engine.device import device_of
from grpo_kernels.engine.gemm import Products
from grpo_kernels.engine.plan import Group, HeadPlan, Request, plan_groups
from grpo_kernels.engine.records import (
    Gradients,
    HeadTensors,
    Index,
    NeedsGrad,
    Operands,
    Rows,
    row_bias,
)
from grpo_kernels.engine.top_k import TOPK_LOGPS, TopKLogps
from grpo_kernels.token_loss.record import Coefficients, TokenLoss

_CoefficientsAt = Callable[[Index, RowStats], Coefficients]


def sweep(
    head: Operands, rows: Rows, plan: HeadPlan, work: RowWork, needs_grad: NeedsGrad | None = None
) -> Gradients | None:
    """Call `work` with the logits of all `rows`, a chunk at a time.

    Returns:
        The gradients that `needs_grad` wants, or None without it. The statistics stay in `work`.
    """
    groups, projection = plan_groups(rows, head, plan, needs_grad), Projection(head, plan)
    sums = None if needs_grad is None else GradientSums(head, len(rows), groups, plan, needs_grad)
    with torch.autocast(head.hidden.device.type, enabled=False), torch.no_grad():
        most = max((group.chunk_rows for group in groups), default=0)
        logits, teacher_logits = projection.new_logits(most)
        d_logits = logits if projection.in_place else None
        for group in groups:
            index = _index(group, rows)
            operands = projection.operands(_positions(rows, index, head.hidden.shape[0]))
            for part in group.chunks:
                at, m = _part(index, part), part.stop - part.start
                out = logits[:m], None if teacher_logits is None else teacher_logits[:m]
                chunk, chunk_rows = projection.project(operands, part, rows, at, out)
                # not before the first product is under way
                if sums is not None and d_logits is None:
                    d_logits = projection.new_d_logits(max(group.rows for group in groups))
                target = None if sums is None or d_logits is None else d_logits[part]
                work(chunk, chunk_rows, at, group.n - part.start, target)
            if sums is not None and d_logits is not None:
                if group.n < group.rows:
                    d_logits[group.n : group.rows] = 0.0
                d_rows = d_logits[: group.rows]
                sums.add(group, projection.products, operands[0], d_rows, work.fp16_scale)
    return None if sums is None else sums.gradients()


def _index(group: Group, rows: Rows) -> Index:
    """Return the index of a group's rows among all rows. Padding repeats the group's first row."""
    if group.n == group.rows:
        return slice(group.start, group.stop)
    index = torch.arange(group.start, group.start + group.rows, device=rows.positions.device)
    index[group.n :] = group.start
    return index


def _part(index: Index, part: slice) -> Index:
    if isinstance(index, slice):
        return slice(index.start + part.start, index.start + part.stop)
    return index[part]


def _positions(rows: Rows, index: Index, n: int) -> Index:
    # a slice, which needs no copy, if the rows are all n positions
    return index if isinstance(index, slice) and len(rows) == n else rows.positions[index]


class Projection:
    """The products that make logits, chunk after chunk.

    Attributes:
        products: one for each pair of `HeadTensors.factors`, on these columns.
        first_id: the id of the first column.
    """

    def __init__(self, head: Operands, plan: HeadPlan, columns: slice = slice(None)) -> None:
        self._plan, self.first_id = plan, columns.start or 0
        self._hidden = [x for x, _ in head.factors()]
        self.products, self._bias = plan.all_products(head, columns), _bias_of(head, plan, columns)
        self._teacher = None if head.teacher is None or plan.teacher is None else head.teacher
        if self._teacher is not None and plan.teacher is not None:
            self._of_teacher = plan.teacher.products(self._teacher.weight[columns])
            self._teacher_bias = _bias_of(self._teacher, plan.teacher, columns)

    @property
    def in_place(self) -> bool:
        """True if d logits take the place of the logits."""
        return self.products[0].gradient_dtype == self._plan.accumulator

    def operands(self, positions: Index) -> tuple[list[Tensor], Tensor | None]:
        """Return the operands of m positions, (m, K) per product, and the teacher's, (m, H')."""
        selected = [x[positions] for x in self._hidden]
        of_teacher = None if self._teacher is None else self._teacher.hidden[positions]
        pairs = zip(self.products, selected, strict=True)
        return [product.operand(x) for product, x in pairs], of_teacher

    def new_logits(self, rows: int) -> tuple[Tensor, Tensor | None]:
        """Return memory for the logits of this many rows, and for the teacher's if there is one."""
        dtype = self._plan.accumulator
        of_rows = self._new(rows, dtype)
        return of_rows, None if self._teacher is None else self._new(rows, dtype)

    def new_d_logits(self, rows: int) -> Tensor:
        """Return memory for the d logits of this many rows."""
        return self._new(rows, self.products[0].gradient_dtype)

    def _new(self, rows: int, dtype: torch.dtype) -> Tensor:
        like, columns = self._hidden[0], self.products[0].weight.shape[0]
        width = device_of(like.device).row_width(columns)
        return like.new_empty(rows, width, dtype=dtype)[:, :columns]

    def project(
        self,
        operands: tuple[list[Tensor], Tensor | None],
        part: slice,
        rows: Rows,
        index: Index,
        out: tuple[Tensor, Tensor | None],
    ) -> tuple[Chunk, Rows]:
        """Project a chunk; return it and its rows, with the logits of a `TopKTeacher` gathered.

        Args:
            operands: those of a group of rows.
            part: the chunk's rows, among those of the group.
            rows, index: the rows of the sweep, and the index of the chunk's rows among them.
            out: memory for the logits, and for the teacher's.
        """
        (of_rows, of_teacher), (logits, teacher_logits), plan = operands, out, self._plan
        for i, (product, x) in enumerate(zip(self.products, of_rows, strict=True)):
            product.logits(x[part], logits, first=i == 0)
        rows, teacher = take(rows, index), None
        transform = plan.transform(self._bias, rows.inv_temperature)
        if plan.teacher is not None and of_teacher is not None and teacher_logits is not None:
            self._of_teacher.logits(self._of_teacher.operand(of_teacher[part]), teacher_logits)
            of_its = plan.teacher.transform(self._teacher_bias, rows.inv_temperature)
            plan.teacher.backend.prepare_(teacher_logits, of_its)
            teacher = Teacher(teacher_logits, of_its, plan.jsd_beta)
        if rows.top_k is not None:
            rows = replace(rows, top_k=rows.top_k.gathered(logits, transform, self.first_id))
        plan.backend.prepare_(logits, transform)
        return Chunk(logits, rows.ids, transform, self.first_id, teacher), rows


def _bias_of(head: HeadTensors[Tensor], plan: HeadPlan, columns: slice) -> Tensor | None:
    return None if head.bias is None else row_bias(head.bias[columns], plan.accumulator)


class GradientSums:
    """The gradients of the head's tensors, summed over the groups."""

    def __init__(
        self, head: Operands, n: int, groups: list[Group], plan: HeadPlan, needs_grad: NeedsGrad
    ) -> None:
        self._head, self._n, self._dtype, self._wants = head, n, plan.accumulator, needs_grad
        self._backend = plan.backend
        self._padded = max((group.start + group.rows for group in groups), default=0)
        # per factor: (n, K), and padding, which the next group overwrites
        self._rows: list[Tensor | None] = []
        self._matrices: list[Tensor | None] = []  # (V, K)
        self._bias: Tensor | None = None  # (V,)
        # () factor that matrices and bias carry, but the rows do not
        self._fp16_scale: Tensor | None = None

    def _allocate(self) -> None:
        # not before the first group's d logits are under way
        new, dtype, wants = self._head.hidden, self._dtype, self._wants
        # the first group's product writes the matrices; without a group they are 0
        new_matrix = new.new_empty if self._n > 0 else new.new_zeros
        pairs = zip(self._head.factors(), wants.factors(), strict=False)
        for (x, matrix), (needs_rows, needs_matrix) in pairs:
            rows = new.new_empty(self._padded, x.shape[1], dtype=dtype) if needs_rows else None
            self._rows.append(rows)
            self._matrices.append(new_matrix(matrix.shape, dtype=dtype) if needs_matrix else None)
        if wants.bias:
            self._bias = new.new_zeros(self._head.weight.shape[0], dtype=dtype)

    def add(
        self,
        group: Group,
        products: list[Products],
        features: list[Tensor],
        d_logits: Tensor,
        fp16_scale: Tensor | None,
    ) -> None:
        """Add a group's gradient, from its operands (m, K) and d logits (m, V).

        D logits carry `fp16_scale` ().
        """
        if not self._rows:
            self._allocate()
        if fp16_scale is not None and self._fp16_scale is not None:
            self._rescale(fp16_scale / self._fp16_scale)
        self._fp16_scale = fp16_scale
        factors = zip(products, features, self._rows, self._matrices, strict=True)
        for factor, x, rows, matrix in factors:
            if rows is not None:
                factor.d_hidden(d_logits, rows[group.start : group.start + group.rows])
                if fp16_scale is not None:
                    rows[group.start : group.stop].div_(fp16_scale)
            if matrix is not None:
                factor.d_weight(d_logits, x, matrix, first=group.start == 0)
        if self._bias is not None:
            self._bias.add_(d_logits.sum(dim=0, dtype=self._bias.dtype))

    def gradients(self) -> Gradients:
        if not self._rows:
            self._allocate()
        if self._fp16_scale is not None:
            self._rescale(1.0 / self._fp16_scale)
        rows = [None if x is None else x[: self._n] for x in self._rows]
        return Gradients.of_factors(rows, self._matrices, self._bias)

    def _rescale(self, factor: Tensor) -> None:
        for x in (*self._matrices, self._bias):
            if x is not None:
                self._backend.scale(x, factor, x)


class RowWork:
    """The row work of a sweep: called with one chunk of logits after the other.

    Each row is reduced to its statistics. With `coefficients_of`, the gradient follows for the
    coefficients that it returns for the rows at an index, given their statistics. If the loss is
    `token_loss`, one kernel computes statistics, loss and gradient (if d logits must be scaled
    before they are rounded, a second kernel computes the gradient).

    Attributes:
        fp16_scale: () factor that the last chunk's d logits carry, in fp16, where a group is one
            chunk; None: 1.
    """

    def __init__(
        self,
        request: Request,
        head: Operands,
        coefficients_of: _CoefficientsAt | None = None,
        token_loss: TokenLoss | None = None,
    ) -> None:
        self._request, self._plan = request, request.plan
        self._products = request.plan.products(head.weight)
        self._coefficients_of, self._token_loss = coefficients_of, token_loss
        self.fp16_scale: Tensor | None = None
        self._parts: list[RowStats] = []

    def __call__(
        self, chunk: Chunk, rows: Rows, index: Index, count: int, d_logits: Tensor | None
    ) -> None:
        """Do the work on a chunk.

        Args:
            rows: the rows of the chunk.
            index: their index among the rows of the sweep.
            count: number of rows before the padding; 0 or less: all are padding.
            d_logits: (m, V) memory to write the gradient to; None: no gradient.
        """
        request, derives = self._request, d_logits is not None
        if self._token_loss is None:
            entropy, extras = request.entropy, request.extras
            stats = self._plan.stats(chunk, rows, entropy=entropy, extras=extras)
        else:
            backend, derives = self._plan.backend, derives and self._products.scales_gradient
            assert isinstance(backend, FusedRowBackend)
            marked = chunk if rows.marked is None else replace(chunk, ids=rows.marked)
            loss = take(self._token_loss, index)
            stats = backend.fused(marked, loss, None if derives else d_logits)
        if derives and d_logits is not None:
            self._derive(chunk, rows, index, stats, d_logits)
        self._parts.append(take(stats, slice(max(0, count))))

    def _derive(
        self, chunk: Chunk, rows: Rows, index: Index, stats: RowStats, d_logits: Tensor
    ) -> None:
        assert self._coefficients_of is not None
        coefficients, self.fp16_scale = self._products.scaled(
            self._coefficients_of(index, stats), stats, chunk.transform
        )
        self._plan.grad(chunk, rows, stats, coefficients, d_logits)

    def statistics(self, like: Tensor) -> RowStats:
        """Return the statistics of all rows, (n,) each, on the device of `like`."""
        fused, request, top_k = self._token_loss, self._request, self._request.rows.top_k
        stats = RowStats.concatenate(
            self._parts,
            like,
            self._plan.accumulator,
            entropy=request.entropy or fused is not None,
            extras=() if fused is not None else request.extras,
            terms=() if fused is None else fused.terms,
            divergence=request.diverges,
        )
        if not self._parts and isinstance(top_k, TopKLogps):
            stats.extras[TOPK_LOGPS] = stats.logps.new_empty(0, top_k.given)
        return stats


class Derive(RowWork):
    """The gradient of `coefficients` (n,), given the rows' statistics `stats` (n,)."""

    def __init__(
        self, request: Request, head: Operands, coefficients: Coefficients, stats: RowStats
    ) -> None:
        super().__init__(request, head, lambda index, _: take(coefficients, index))
        self._all_stats = stats

    def __call__(
        self, chunk: Chunk, rows: Rows, index: Index, count: int, d_logits: Tensor | None
    ) -> None:
        assert d_logits is not None
        self._derive(chunk, rows, index, take(self._all_stats, index), d_logits)
