"""The gradient by slices of the vocabulary: what `two_pass` recomputes, without an accumulator of the weight's size.

Each slice of the logits is projected once more, for all rows, and becomes d logits. Its part of d weight is then
complete: it is rounded and written once. d hidden is what accumulates, in the accumulator's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels.backends.rows import RowStats
from grpo_kernels.engine.plan import padded_rows
from grpo_kernels.engine.sweep import Gradients, Head, HeadConfig, Rows, Wants

MOST_ROWS = 8192  # at a time: with more, slices would get narrow
SLICE_MULTIPLE = 128  # columns; slices start at multiples of it


def sweep_slices(
    head: Head, rows: Rows, config: HeadConfig, stats: RowStats, a: Tensor, b: Tensor | None, wants: Wants
) -> Gradients:
    """The gradient of `rows`, n of them, given their statistics and coefficients a, b (n,).

    Returns:
        As `sweep` does, but d weight and d bias in their own dtype, rounded once.
    """
    n, (vocab, width) = len(rows), head.weight.shape
    on_gpu, bias = rows.positions.is_cuda, head.row_bias(config.accumulator)
    m = padded_rows(n, on_gpu=on_gpu)
    new = head.hidden.new_zeros
    grads = Gradients(
        hidden=new(m, width, dtype=config.accumulator) if wants.hidden else None,
        weight=new(vocab, width, dtype=head.weight.dtype) if wants.weight else None,
        bias=new(vocab, dtype=config.accumulator) if wants.bias else None,
    )
    # one factor for all: what is summed over rows and over slices must carry the same
    a, b, scale = config.products(head.weight).scaled(a, b, config.transform(bias, rows.inv_temperature))
    unscale = 1.0 if scale is None else 1.0 / scale
    columns_at_once = _slice_columns(head, config, m)
    block_rows = min(m, MOST_ROWS)
    with torch.autocast(head.hidden.device.type, enabled=False), torch.no_grad():
        for first_id in range(0, vocab if n > 0 else 0, columns_at_once):
            columns = slice(first_id, min(first_id + columns_at_once, vocab))
            products = config.products(head.weight[columns])
            d_weight = None
            for start in range(0, m, block_rows):
                block = torch.arange(start, min(start + block_rows, m), device=rows.positions.device)
                index = torch.where(block < n, block, 0)  # padding repeats the first row
                some = rows.at(index)
                hidden = products.operand(head.hidden[some.positions])
                logits = hidden.new_empty(block.shape[0], columns.stop - columns.start, dtype=config.accumulator)
                transform = config.transform(None if bias is None else bias[columns], some.inv_temperature)
                products.logits(hidden, logits)
                config.backend.prepare_(logits, transform)
                in_place = products.gradient_dtype == config.accumulator
                d_logits = logits if in_place else torch.empty_like(logits, dtype=products.gradient_dtype)
                b_rows = None if b is None else b[index]
                config.backend.grad(
                    logits, some.ids, stats.rows(index), a[index], b_rows, transform, d_logits, first_id=first_id
                )
                del logits
                d_logits[max(0, n - start) :] = 0.0
                if grads.hidden is not None:
                    place = slice(start, start + block.shape[0])
                    products.d_hidden(d_logits, grads.hidden[place], first=first_id == 0)
                if grads.weight is not None:
                    if d_weight is None:
                        d_weight = hidden.new_empty(columns.stop - columns.start, width, dtype=config.accumulator)
                    products.d_weight(d_logits, hidden, d_weight, first=start == 0)
                if grads.bias is not None:
                    grads.bias[columns] += d_logits.sum(dim=0, dtype=config.accumulator)
            if grads.weight is not None and d_weight is not None:
                grads.weight[columns] = (d_weight * unscale).to(head.weight.dtype)
    d_hidden = None if grads.hidden is None else grads.hidden[:n].mul_(unscale)
    return Gradients(d_hidden, grads.weight, None if grads.bias is None else grads.bias.mul_(unscale))


def _slice_columns(head: Head, config: HeadConfig, m: int) -> int:
    """How many columns a slice may have so that the workspace stays within its budget; `SLICE_MULTIPLE` at least.

    A column takes its logits and d logits, the backend's scratch, and a row of d weight in the accumulator's dtype.
    """
    vocab, width = head.weight.shape
    products, size = config.products(head.weight), config.accumulator.itemsize
    rows = min(m, MOST_ROWS)
    d_logits = 0 if products.gradient_dtype == config.accumulator else products.gradient_dtype.itemsize
    scratch = config.backend.scratch_rows(rows, min(vocab, SLICE_MULTIPLE))
    column = (rows + scratch) * size + rows * d_logits + width * size
    budget = config.workspace_bytes - products.slice_bytes - rows * products.hidden_bytes()
    return min(vocab, max(1, budget // column // SLICE_MULTIPLE) * SLICE_MULTIPLE)
