"""The gradient by slices of the vocabulary: as from `two_pass`, but without an accumulator of the weight's size.

Each slice of the logits is projected once more, for all rows, and becomes d logits. Its part of d weight is then
complete: it is rounded and written once. Only d hidden accumulates, in the accumulator's dtype.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kernels.backends.interface import RowStats
from grpo_kernels.base.records import take
from grpo_kernels.engine.device import device_of
from grpo_kernels.engine.head_plan import HeadPlan
from grpo_kernels.engine.products import Products
from grpo_kernels.engine.projection import Projection
from grpo_kernels.engine.records import Gradients, NeedsGrad, Operands, Rows, row_bias
from grpo_kernels.token_loss.record import Coefficients

MOST_ROWS = 8192  # rows at a time; with more, slices would get narrow
SLICE_MULTIPLE = 128  # columns; slices start at multiples of it
FEATURES_SHARE = (
    4  # the operands of the rows at a time take at most 1 / FEATURES_SHARE of the workspace
)


def sweep_slices(
    head: Operands,
    rows: Rows,
    plan: HeadPlan,
    stats: RowStats,
    coefficients: Coefficients,
    needs_grad: NeedsGrad,
) -> Gradients:
    """Return the gradient of `rows`, n of them, given their statistics and coefficients (n,).

    It is the same as from `sweep`, but d weight and d lora_b are in their own dtype, rounded once.
    """
    d_logp, *others = coefficients
    coefficients = Coefficients(
        torch.zeros_like(stats.logps) if d_logp is None else d_logp, *others
    )
    transform = plan.transform(row_bias(head.bias, plan.accumulator), rows.inv_temperature)
    # one factor for all rows and slices, since the gradients are summed over both
    coefficients, fp16_scale = plan.products(head.weight).scaled(
        coefficients, transform, stats.divergence
    )
    n, vocab, dtype = len(rows), head.weight.shape[0], plan.accumulator
    rows_at_once, columns_at_once, _ = plan_slices(rows, head, plan, needs_grad)
    blocks = _blocks(rows, stats, coefficients, rows_at_once)
    m = blocks[-1].indices.stop if blocks else 0
    new = (
        head.hidden.new_empty if blocks else head.hidden.new_zeros
    )  # the first block, or slice, overwrites
    d_rows, d_matrices = [], []  # one per factor
    for (x, matrix), (needs_rows, needs_matrix) in zip(
        head.factors(), needs_grad.factors(), strict=False
    ):
        d_rows.append(new(m, x.shape[1], dtype=dtype) if needs_rows else None)
        d_matrices.append(new(matrix.shape, dtype=matrix.dtype) if needs_matrix else None)
    d_bias = head.hidden.new_zeros(vocab, dtype=dtype) if needs_grad.bias else None
    with torch.autocast(head.hidden.device.type, enabled=False), torch.no_grad():
        for first_id in range(0, vocab if blocks else 0, columns_at_once):
            columns = slice(first_id, min(first_id + columns_at_once, vocab))
            part = _Slice(head, plan, columns, d_rows, d_matrices, d_bias)
            for block in blocks:
                part.add(block)
            part.finish(fp16_scale)
            del part  # before the next one is made
    (hidden, *lora_u), (weight, *lora_b) = d_rows, d_matrices
    if fp16_scale is not None:
        for total in (hidden, d_bias, *lora_u):
            if total is not None:
                total.mul_(1.0 / fp16_scale)
    d_hidden, d_lora_u = (None if x is None else x[:n] for x in (hidden, *lora_u, None)[:2])
    return Gradients(d_hidden, weight, d_bias, d_lora_u, *lora_b)


@dataclass(frozen=True)
class _Block:
    """Rows that are projected together, padded to the number of rows that the products take."""

    indices: slice  # of all rows, with the last block's padding
    count: int  # without padding
    rows: Rows  # (m,) with the padding, like the next two
    stats: RowStats
    coefficients: Coefficients


def _blocks(rows: Rows, stats: RowStats, coefficients: Coefficients, most: int) -> list[_Block]:
    """Return `rows`, n of them, in blocks of about equal size, at most `most`; all but the last are whole tiles."""
    n, device = len(rows), device_of(rows.positions.device)
    tile = device.fewest_rows
    step = -(-n // max(1, -(-n // most) * tile)) * tile
    blocks = []
    for start in range(0, n, max(1, step)):
        count = min(step, n - start)
        m = device.padded_rows(count)
        index = torch.arange(start, start + m, device=rows.positions.device)
        index[count:] = start  # padding repeats the first row
        blocks.append(
            _Block(slice(start, start + m), count, *take((rows, stats, coefficients), index))
        )
    return blocks


class _Slice:
    """Some columns of the gradient, summed over blocks of rows; the arguments `d_*` are those of the whole sweep."""

    def __init__(
        self,
        head: Operands,
        plan: HeadPlan,
        columns: slice,
        d_rows: list[Tensor | None],  # one per factor: (m, K)
        d_matrices: list[Tensor | None],  # (V, K), in their own dtype
        d_bias: Tensor | None,  # (V,)
    ) -> None:
        self._projection, self._plan, self._columns = Projection(head, plan, columns), plan, columns
        self._d_rows, self._d_bias = d_rows, None if d_bias is None else d_bias[columns]
        self._targets = [None if whole is None else whole[columns] for whole in d_matrices]
        # a target in the accumulator's dtype is summed in place; any other apart, and rounded at the end
        dtype = plan.accumulator
        self._parts = [
            x if x is None or x.dtype == dtype else torch.empty_like(x, dtype=dtype)
            for x in self._targets
        ]

    def add(self, block: _Block) -> None:
        """Add the gradient of a block of rows."""
        projection, start = self._projection, block.indices.start
        operands = projection.operands(block.rows.positions)
        d_logits = self._d_logits(block, operands)
        for product, x, rows, part in zip(
            projection.products, operands[0], self._d_rows, self._parts, strict=True
        ):
            if rows is not None:
                product.d_hidden(d_logits, rows[block.indices], first=self._columns.start == 0)
            if part is not None:
                product.d_weight(d_logits, x, part, first=start == 0)
        if self._d_bias is not None:
            self._d_bias += d_logits.sum(dim=0, dtype=self._d_bias.dtype)

    def finish(self, fp16_scale: Tensor | None) -> None:
        """Write the sums of all blocks to d weight, divided by the factor `fp16_scale` () that they carry."""
        for target, part in zip(self._targets, self._parts, strict=True):
            if target is None or part is None:
                continue
            if fp16_scale is not None:
                self._plan.backend.scale(part, 1.0 / fp16_scale, target)
            elif part is not target:
                target.copy_(part)

    def _d_logits(self, block: _Block, operands: tuple[list[Tensor], Tensor | None]) -> Tensor:
        """Return d logits (m, columns) in the products' dtype; 0 in the padding."""
        projection, m = self._projection, len(block.rows)
        out = projection.new_logits(m)
        chunk, rows = projection.project(operands, slice(0, m), block.rows, slice(0, m), out)
        d_logits = out[0] if projection.in_place else projection.new_d_logits(m)
        self._plan.grad(chunk, rows, block.stats, block.coefficients, d_logits)
        d_logits[block.count :] = 0.0
        return d_logits


def plan_slices(
    rows: Rows, head: Operands, plan: HeadPlan, needs_grad: NeedsGrad
) -> tuple[int, int, int]:
    """Return the rows and the columns to take at a time, so that the workspace stays within its budget, and the bytes
    that they take; works on meta tensors too.

    Each row needs its operands. Each column needs its row of d weight (and of d lora_b) if that is summed apart. Both
    together need logits, d logits and the backend's scratch. At least a tile of rows and `SLICE_MULTIPLE` columns.
    """
    vocab, budget, size = head.weight.shape[0], plan.workspace_bytes, plan.accumulator.itemsize
    tile, least = device_of(head.weight.device).fewest_rows, min(vocab, SLICE_MULTIPLE)
    factors = plan.all_products(head)
    dtype = factors[0].gradient_dtype
    logit_bytes = size + (0 if dtype == plan.accumulator else dtype.itemsize)
    row_bytes = 0 if rows.top_k is None else rows.top_k.row_bytes()
    column_bytes = padding_bytes = 0
    for p, (x, matrix), (_, wanted) in zip(
        factors, head.factors(), needs_grad.factors(), strict=False
    ):
        converted = (
            0 if p.gradient_dtype == dtype else dtype.itemsize
        )  # for an adapter more precise than d logits
        row_bytes += p.hidden_bytes() + x.shape[1] * (_copied_bytes(x, p) + converted)
        column_bytes += x.shape[1] * (
            converted + (size if wanted and matrix.dtype != plan.accumulator else 0)
        )
        padding_bytes += tile * x.shape[1] * size  # for d hidden
    with_teacher = plan.teacher is not None
    teacher = head.teacher
    if plan.teacher is not None and teacher is not None:
        p = plan.teacher.products(teacher.weight)
        factors = [*factors, p]
        logit_bytes += size
        row_bytes += p.hidden_bytes() + teacher.hidden.shape[1] * _copied_bytes(teacher.hidden, p)
    row_free = padding_bytes + max(
        p.slice_bytes for p in factors
    )  # the weights are converted one after the other

    def taken(m: int, columns: int) -> int:
        logits = m * logit_bytes + plan.backend.scratch_rows(m, least, teacher=with_teacher) * size
        return row_free + m * row_bytes + columns * (column_bytes + logits)

    m = max(1, -(-min(len(rows), MOST_ROWS) // tile)) * tile
    while m > tile and (taken(m, least) > budget or m * row_bytes > budget // FEATURES_SHARE):
        m = -(-m // (2 * tile)) * tile
    columns = (budget - taken(m, 0)) // (taken(m, 1) - taken(m, 0))
    columns = min(vocab, max(1, columns // SLICE_MULTIPLE) * SLICE_MULTIPLE)
    return m, columns, taken(m, columns)


def _copied_bytes(x: Tensor, products: Products) -> int:
    """Return the bytes per element of `x`, beside its operand, while it is converted to that."""
    steps = [x.dtype, products.compute_dtype, products.gradient_dtype]
    return sum(before.itemsize for before, after in itertools.pairwise(steps) if before != after)
