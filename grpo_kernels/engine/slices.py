"""The gradient by slices of the vocabulary: what `two_pass` recomputes, without an accumulator of the weight's size.

Each slice of the logits is projected once more, for all rows, and becomes d logits. Its part of d weight is then
complete: it is rounded and written once. d hidden is what accumulates, in the accumulator's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels.backends.rows import RowStats
from grpo_kernels.engine.operands import Gradients, Head, HeadConfig, Rows, Wants
from grpo_kernels.engine.plan import padded_rows

MOST_ROWS = 8192  # at a time: with more, slices would get narrow
SLICE_MULTIPLE = 128  # columns; slices start at multiples of it


def sweep_slices(
    head: Head, rows: Rows, config: HeadConfig, stats: RowStats, a: Tensor, b: Tensor | None, wants: Wants
) -> Gradients:
    """The gradient of `rows`, n of them, given their statistics and coefficients a, b (n,).

    Returns:
        As `sweep` does, but d weight and d bias in their own dtype, rounded once.
    """
    n, vocab = len(rows), head.weight.shape[0]
    on_gpu, bias = rows.positions.is_cuda, head.row_bias(config.accumulator)
    m = padded_rows(n, on_gpu=on_gpu)
    new, dtype, wanted = head.hidden.new_zeros, config.accumulator, wants.factors()
    d_rows, d_matrices = [], []  # of each factor
    for (x, matrix), (wants_rows, wants_matrix) in zip(head.factors(), wanted, strict=False):
        d_rows.append(new(m, x.shape[1], dtype=dtype) if wants_rows else None)
        d_matrices.append(new(matrix.shape, dtype=matrix.dtype) if wants_matrix else None)
    d_bias = new(vocab, dtype=dtype) if wants.bias else None
    # one factor for all: what is summed over rows and over slices must carry the same
    a, b, scale = config.products(head.weight).scaled(a, b, config.transform(bias, rows.inv_temperature))
    unscale = 1.0 if scale is None else 1.0 / scale
    columns_at_once = _slice_columns(head, config, m)
    block_rows = min(m, MOST_ROWS)
    with torch.autocast(head.hidden.device.type, enabled=False), torch.no_grad():
        for first_id in range(0, vocab if n > 0 else 0, columns_at_once):
            columns = slice(first_id, min(first_id + columns_at_once, vocab))
            factors = config.all_products(head, columns)
            parts: list[Tensor | None] = [None] * len(factors)
            for start in range(0, m, block_rows):
                block = torch.arange(start, min(start + block_rows, m), device=rows.positions.device)
                index = torch.where(block < n, block, 0)  # padding repeats the first row
                some = rows.at(index)
                features = [p.operand(x[some.positions]) for p, (x, _) in zip(factors, head.factors(), strict=True)]
                logits = features[0].new_empty(block.shape[0], columns.stop - columns.start, dtype=dtype)
                transform = config.transform(None if bias is None else bias[columns], some.inv_temperature)
                for i, (factor, x) in enumerate(zip(factors, features, strict=True)):
                    factor.logits(x, logits, first=i == 0)
                config.backend.prepare_(logits, transform)
                in_place = factors[0].gradient_dtype == dtype
                d_logits = logits if in_place else torch.empty_like(logits, dtype=factors[0].gradient_dtype)
                b_rows = None if b is None else b[index]
                config.backend.grad(
                    logits, some.ids, stats.rows(index), a[index], b_rows, transform, d_logits, first_id=first_id
                )
                del logits
                d_logits[max(0, n - start) :] = 0.0
                for i, (factor, x, of_rows, whole) in enumerate(
                    zip(factors, features, d_rows, d_matrices, strict=True)
                ):
                    if of_rows is not None:
                        factor.d_hidden(d_logits, of_rows[start : start + block.shape[0]], first=first_id == 0)
                    if whole is not None:
                        part = parts[i]
                        if part is None:  # only now that the backend's scratch is gone
                            part = parts[i] = torch.empty_like(whole[columns], dtype=dtype)
                        factor.d_weight(d_logits, x, part, first=start == 0)
                if d_bias is not None:
                    d_bias[columns] += d_logits.sum(dim=0, dtype=dtype)
            for whole, part in zip(d_matrices, parts, strict=True):
                if whole is not None and part is not None:
                    whole[columns] = (part * unscale).to(whole.dtype)
    (hidden, *u), (weight, *adapter_b) = d_rows, d_matrices
    scaled = Gradients(hidden, None, d_bias, *u).apply(lambda x: x.mul_(unscale))
    d_hidden, d_u = (None if x is None else x[:n] for x in (scaled.hidden, scaled.u))
    return Gradients(d_hidden, weight, scaled.bias, d_u, *adapter_b)


def _slice_columns(head: Head, config: HeadConfig, m: int) -> int:
    """How many columns a slice may have so that the workspace stays within its budget; `SLICE_MULTIPLE` at least.

    A column takes its logits and d logits, the backend's scratch, and a row of d weight, and of what an adapter has,
    in the accumulator's dtype.
    """
    vocab, width = head.weight.shape[0], sum(matrix.shape[1] for _, matrix in head.factors())
    products, size = config.products(head.weight), config.accumulator.itemsize
    rows = min(m, MOST_ROWS)
    d_logits = 0 if products.gradient_dtype == config.accumulator else products.gradient_dtype.itemsize
    scratch = config.backend.scratch_rows(rows, min(vocab, SLICE_MULTIPLE))
    column = (rows + scratch) * size + rows * d_logits + width * size
    budget = config.workspace_bytes - products.slice_bytes - rows * products.hidden_bytes()
    return min(vocab, max(1, budget // column // SLICE_MULTIPLE) * SLICE_MULTIPLE)
