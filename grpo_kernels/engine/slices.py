"""The gradient by slices of the vocabulary: what `two_pass` recomputes, without an accumulator of the weight's size.

Each slice of the logits is projected once more, for all rows, and becomes d logits. Its part of d weight is then
complete: it is rounded and written once. d hidden is what accumulates, in the accumulator's dtype.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_kernels.backends.interface import Chunk, RowStats
from grpo_kernels.engine.device import device_of
from grpo_kernels.engine.gradients import Gradients, NeedsGrad
from grpo_kernels.engine.operands import Coefficients, Head, HeadConfig, Rows
from grpo_kernels.engine.products import Products
from grpo_kernels.engine.sweep import matrix_of_logits

MOST_ROWS = 8192  # at a time: with more, slices would get narrow
SLICE_MULTIPLE = 128  # columns; slices start at multiples of it
FEATURES_SHARE = 4  # of the workspace, one part in so many is the most that operands of the rows at a time take


def sweep_slices(
    head: Head, rows: Rows, config: HeadConfig, stats: RowStats, coefficients: Coefficients, needs_grad: NeedsGrad
) -> Gradients:
    """The gradient of `rows`, n of them, given their statistics and coefficients (n,).

    Returns:
        As `sweep` does, but d weight and d bias in their own dtype, rounded once.
    """
    n, vocab, dtype = len(rows), head.weight.shape[0], config.accumulator
    bias = head.row_bias(dtype)
    # one factor for all: what is summed over rows and over slices must carry the same
    a, b, c = coefficients
    a = torch.zeros_like(stats.logps) if a is None else a
    transform = config.transform(bias, rows.inv_temperature)
    a, b, c, scale = config.products(head.weight).scaled(a, b, c, transform, stats.divergence)
    rows_at_once, columns_at_once, _ = plan_slices(rows, head, config, needs_grad)
    blocks = _blocks(rows, stats, Coefficients(a, b, c), rows_at_once)
    m = blocks[-1].indices.stop if blocks else 0
    new = head.hidden.new_empty if blocks else head.hidden.new_zeros  # the first block, or slice, writes
    d_rows, d_matrices = [], []  # of each factor
    for (x, matrix), (needs_rows, needs_matrix) in zip(head.factors(), needs_grad.factors(), strict=False):
        d_rows.append(new(m, x.shape[1], dtype=dtype) if needs_rows else None)
        d_matrices.append(new(matrix.shape, dtype=matrix.dtype) if needs_matrix else None)
    d_bias = head.hidden.new_zeros(vocab, dtype=dtype) if needs_grad.bias else None
    with torch.autocast(head.hidden.device.type, enabled=False), torch.no_grad():
        for first_id in range(0, vocab if blocks else 0, columns_at_once):
            columns = slice(first_id, min(first_id + columns_at_once, vocab))
            part = _Slice(head, config, columns, bias, d_rows, d_matrices, d_bias)
            for block in blocks:
                part.add(block)
            part.finish(scale)
            del part  # before the next one is made
    (hidden, *lora_u), (weight, *lora_b) = d_rows, d_matrices
    scaled = Gradients(hidden, None, d_bias, *lora_u)
    if scale is not None:
        unscale = 1.0 / scale
        scaled = scaled.apply(lambda x: x.mul_(unscale))
    d_hidden, d_lora_u = (None if x is None else x[:n] for x in (scaled.hidden, scaled.lora_u))
    return Gradients(d_hidden, weight, scaled.bias, d_lora_u, *lora_b)


@dataclass(frozen=True)
class _Block:
    """Rows that are projected together, padded to as many as the products are done with."""

    indices: slice  # of all rows, with the last block's padding
    count: int  # without padding
    rows: Rows  # (m,), and so is all below
    stats: RowStats
    coefficients: Coefficients


def _blocks(rows: Rows, stats: RowStats, coefficients: Coefficients, most: int) -> list[_Block]:
    """`rows`, n of them, in blocks of about equal size, at most `most`; all but the last are whole tiles."""
    n, device = len(rows), device_of(rows.positions.device)
    tile = device.fewest_rows
    step = -(-n // max(1, -(-n // most) * tile)) * tile
    blocks = []
    for start in range(0, n, max(1, step)):
        count = min(step, n - start)
        m = device.padded_rows(count)
        index = torch.arange(start, start + m, device=rows.positions.device)
        index[count:] = start  # padding repeats the first row
        of_rows = coefficients.at(index)
        blocks.append(_Block(slice(start, start + m), count, rows.at(index), stats.rows(index), of_rows))
    return blocks


class _Slice:
    """Some columns of the gradient, as blocks of rows add to them; `d_rows` and `d_bias` are of the whole sweep."""

    def __init__(
        self,
        head: Head,
        config: HeadConfig,
        columns: slice,
        bias: Tensor | None,  # (V,)
        d_rows: list[Tensor | None],  # of each factor: (m, K)
        d_matrices: list[Tensor | None],  # (V, K), in their own dtype
        d_bias: Tensor | None,  # (V,)
    ) -> None:
        self._factors, self._config, self._columns = config.all_products(head, columns), config, columns
        self._features = [x for x, _ in head.factors()]
        self._teacher = config.logits_of_teacher(head, columns)
        self._bias = None if bias is None else bias[columns]
        self._d_rows, self._d_bias = d_rows, None if d_bias is None else d_bias[columns]
        self._targets = [None if whole is None else whole[columns] for whole in d_matrices]
        # what is rounded is summed apart; what is not, where it belongs
        dtype = config.accumulator
        self._parts = [x if x is None or x.dtype == dtype else torch.empty_like(x, dtype=dtype) for x in self._targets]

    def add(self, block: _Block) -> None:
        """Add the gradient of a block of rows."""
        factors, start = self._factors, block.indices.start
        features = [p.operand(x[block.rows.positions]) for p, x in zip(factors, self._features, strict=True)]
        d_logits = self._d_logits(block, features)
        for factor, x, rows, part in zip(factors, features, self._d_rows, self._parts, strict=True):
            if rows is not None:
                factor.d_hidden(d_logits, rows[block.indices], first=self._columns.start == 0)
            if part is not None:
                factor.d_weight(d_logits, x, part, first=start == 0)
        if self._d_bias is not None:
            self._d_bias += d_logits.sum(dim=0, dtype=self._d_bias.dtype)

    def finish(self, scale: Tensor | None) -> None:
        """Write what the blocks gave to d weight, without the factor `scale` () that it carries."""
        for target, part in zip(self._targets, self._parts, strict=True):
            if target is None or part is None:
                continue
            if scale is not None:
                self._config.backend.scale(part, 1.0 / scale, target)
            elif part is not target:
                target.copy_(part)

    def _d_logits(self, block: _Block, features: list[Tensor]) -> Tensor:
        """(m, columns), in the products' dtype; 0 in the padding."""
        config, columns, some, products = self._config, self._columns, block.rows, self._factors[0]
        dtype, width = config.accumulator, columns.stop - columns.start
        logits = matrix_of_logits(features[0], len(some), width, dtype)
        chunk = Chunk(logits, some.ids, config.transform(self._bias, some.inv_temperature), columns.start)
        for i, (factor, x) in enumerate(zip(self._factors, features, strict=True)):
            factor.logits(x, logits, first=i == 0)
        z = None if some.top_k is None else some.top_k.gather(logits, chunk.transform, columns.start)
        config.backend.prepare_(logits, chunk.transform)
        if self._teacher is not None:
            hidden, other = self._teacher.hidden[some.positions], matrix_of_logits(logits, len(some), width, dtype)
            chunk = replace(chunk, teacher=self._teacher.project(hidden, other, some.inv_temperature))
        in_place = products.gradient_dtype == dtype
        d_logits = logits if in_place else matrix_of_logits(logits, len(some), width, products.gradient_dtype)
        config.grad(chunk, some, block.stats, block.coefficients, d_logits, z)
        d_logits[block.count :] = 0.0
        return d_logits


def plan_slices(rows: Rows, head: Head, config: HeadConfig, needs_grad: NeedsGrad) -> tuple[int, int, int]:
    """Return the rows and the columns to take at a time, so that the workspace stays within its budget, and the bytes
    that they take; works on meta tensors too.

    A row takes its operands, a column its row of d weight (and of what an adapter has) where that is summed apart, both
    together their logits, d logits and the backend's scratch. A tile of rows and `SLICE_MULTIPLE` columns at least.
    """
    vocab, budget, size = head.weight.shape[0], config.workspace_bytes, config.accumulator.itemsize
    tile, least = device_of(head.weight.device).fewest_rows, min(vocab, SLICE_MULTIPLE)
    factors = config.all_products(head)
    dtype = factors[0].gradient_dtype
    logit_bytes = size + (0 if dtype == config.accumulator else dtype.itemsize)
    row_bytes = 0 if rows.top_k is None else rows.top_k.row_bytes()
    column_bytes = padding_bytes = 0
    for p, (x, matrix), (_, wanted) in zip(factors, head.factors(), needs_grad.factors(), strict=False):
        converted = 0 if p.gradient_dtype == dtype else dtype.itemsize  # of an adapter more precise than d logits
        row_bytes += p.hidden_bytes() + x.shape[1] * (_copied_bytes(x, p) + converted)
        column_bytes += x.shape[1] * (converted + (size if wanted and matrix.dtype != config.accumulator else 0))
        padding_bytes += tile * x.shape[1] * size  # of d hidden
    with_teacher = config.teacher is not None
    if config.teacher is not None:
        teacher = head.teacher()
        p = config.teacher.products(teacher.weight)
        factors = [*factors, p]
        logit_bytes += size
        row_bytes += p.hidden_bytes() + teacher.hidden.shape[1] * _copied_bytes(teacher.hidden, p)
    row_free = padding_bytes + max(p.slice_bytes for p in factors)  # of the weights one after the other

    def taken(m: int, columns: int) -> int:
        logits = m * logit_bytes + config.backend.scratch_rows(m, least, teacher=with_teacher) * size
        return row_free + m * row_bytes + columns * (column_bytes + logits)

    m = max(1, -(-min(len(rows), MOST_ROWS) // tile)) * tile
    while m > tile and (taken(m, least) > budget or m * row_bytes > budget // FEATURES_SHARE):
        m = -(-m // (2 * tile)) * tile
    columns = (budget - taken(m, 0)) // (taken(m, 1) - taken(m, 0))
    columns = min(vocab, max(1, columns // SLICE_MULTIPLE) * SLICE_MULTIPLE)
    return m, columns, taken(m, columns)


def _copied_bytes(x: Tensor, products: Products) -> int:
    """Return the bytes that an element of `x` takes besides its operand, while it becomes one."""
    steps = [x.dtype, products.compute_dtype, products.gradient_dtype]
    return sum(before.itemsize for before, after in itertools.pairwise(steps) if before != after)
