"""The gradient by slices of the vocabulary, without an accumulator of the weight's size.

Each slice of the logits is projected once more, for all rows, and becomes d logits. The slice's
part of d weight is then complete: it is rounded and written once. Only d hidden accumulates, in the
accumulator's dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from grpo_kernels.backends import Coefficients, RowStats
from grpo_kernels.base.tensors import take
from grpo_kernels.engine.gemm import Product
from grpo_kernels.engine.plan import Job, Rows
from grpo_kernels.engine.sweep import (
    GradientSums,
    Index,
    Projection,
    padded_index,
    write_gradient,
)
from grpo_kernels.engine.workspace import device_of
from grpo_kernels.head import HeadTensors

MOST_ROWS = 8192  # rows at a time; with more, slices would become narrow
SLICE_MULTIPLE = 128  # slices start at multiples of this many columns
FEATURES_SHARE = 4  # the rows' operands take at most 1 / FEATURES_SHARE of the workspace


def sweep_slices(job: Job, stats: RowStats, coefficients: Coefficients) -> HeadTensors:
    """Compute the gradient of the n rows of `job`, from their statistics and coefficients (n,).

    It equals the gradient of `sweep`, but d weight and d lora_b have the dtype of the weight and of
    lora_b, rounded once.
    """
    rows, tensors, dtype = job.rows, job.head.tensors, job.accumulator_dtype
    transform = replace(job.head.transform, inv_temperature=rows.inv_temperature)
    # one factor for all rows and slices, since the gradients are summed over both
    coefficients, fp16_scale = job.products(job.head)[0].with_fp16_scale(
        coefficients, stats, transform
    )
    n, vocab = len(rows), tensors.weight.shape[0]
    rows_at_once, columns_at_once, _ = plan_slices(job)
    blocks = [
        (row_range, count, *take((rows, stats, coefficients), index))
        for row_range, count, index in _blocks(rows, rows_at_once)
    ]
    padded_rows = blocks[-1][0].stop if blocks else 0
    sums = GradientSums.new(job, padded_rows, rounds=True)

    def add_block(
        projection: Projection,
        columns: slice,
        slice_sums: GradientSums,
        block: tuple[slice, int, Rows, RowStats, Coefficients],
    ) -> None:
        row_range, count, rows, stats, coefficients = block
        operands = projection.operands(rows.positions)
        chunk, rows = projection.project(operands, slice(None), rows)
        d_logits = projection.d_logits(len(rows))
        write_gradient(job, chunk, rows, stats, coefficients, d_logits)
        d_logits[count:] = 0.0
        slice_sums.at(row_range).add(
            projection.products, operands[0], d_logits,
            to_states=columns.start > 0, to_matrices=row_range.start > 0,
        )  # fmt: skip

    def add_slice(columns: slice) -> None:
        projection = Projection(job, max(len(rows) for _, _, rows, *_ in blocks), columns)
        targets = [None if x is None else x[columns] for x in sums.d_matrices]
        # a target in the accumulator's dtype is summed in place; any other is summed in a separate
        # tensor and then rounded
        parts = [
            x if x is None or x.dtype == dtype else torch.empty_like(x, dtype=dtype)
            for x in targets
        ]
        d_bias = None if sums.d_bias is None else sums.d_bias[columns]
        for block in blocks:
            add_block(projection, columns, GradientSums(sums.d_states, parts, d_bias), block)
        for target, part in zip(targets, parts, strict=True):
            if target is None or part is None:
                continue
            if fp16_scale is not None:
                job.backend.scale(part, 1.0 / fp16_scale, target)
            elif part is not target:
                target.copy_(part)

    with torch.autocast(tensors.hidden.device.type, enabled=False), torch.no_grad():
        for first_id in range(0, vocab if blocks else 0, columns_at_once):
            add_slice(slice(first_id, min(first_id + columns_at_once, vocab)))
    if fp16_scale is not None:
        for total in (*sums.d_states, sums.d_bias):
            if total is not None:
                total.mul_(1.0 / fp16_scale)
    return sums.at(slice(n)).tensors()


def _blocks(rows: Rows, rows_at_once: int) -> Iterator[tuple[slice, int, Index]]:
    """Yield blocks of at most `rows_at_once` rows. All but the last are equal, in whole tiles.

    A block is a slice of all rows, including the last block's padding; the number of its rows
    without padding; and the index of its rows.
    """
    n, device = len(rows), device_of(rows.positions.device)
    tile = device.fewest_rows
    step = -(-n // max(1, -(-n // rows_at_once) * tile)) * tile
    for start in range(0, n, max(1, step)):
        count = min(step, n - start)
        m = device.padded_rows(count)
        index = padded_index(start, count, m, rows.positions.device)
        yield slice(start, start + m), count, index


def plan_slices(job: Job) -> tuple[int, int, int]:
    """Rows and columns to take at a time within the workspace, and the bytes that they need.

    Works on meta tensors too. Each row needs its operands. Each column needs its row of d weight
    (and of d lora_b) if that is summed separately. Each row and column together need logits, d
    logits and the backend's scratch. The result is at least a tile of rows and `SLICE_MULTIPLE`
    columns.
    """
    rows, tensors, reference = job.rows, job.head.tensors, job.reference
    vocab, size = tensors.weight.shape[0], job.accumulator_dtype.itemsize
    budget = job.workspace_bytes
    tile, least = device_of(tensors.weight.device).fewest_rows, min(vocab, SLICE_MULTIPLE)
    products = job.products(job.head)
    dtype = products[0].d_logits_dtype
    logit_bytes = size + (0 if dtype == job.accumulator_dtype else dtype.itemsize)
    row_bytes = 0 if rows.topk is None else rows.topk.row_bytes()
    column_bytes = padding_bytes = 0
    triples = zip(products, tensors.factor_pairs(), job.needs_grad.factor_pairs(), strict=False)
    for p, (x, matrix), (_, wanted) in triples:
        # an adapter may be more precise than d logits
        converted = 0 if p.d_logits_dtype == dtype else dtype.itemsize
        row_bytes += p.hidden_bytes() + x.shape[1] * (_copied_bytes(x, p) + converted)
        column_bytes += x.shape[1] * (
            converted + (size if wanted and matrix.dtype != job.accumulator_dtype else 0)
        )
        padding_bytes += tile * x.shape[1] * size  # for d hidden
    if reference is not None:
        (p,), states = job.products(reference), reference.tensors.hidden
        products = [*products, p]
        logit_bytes += size
        row_bytes += p.hidden_bytes() + states.shape[1] * _copied_bytes(states, p)
    # weights are converted one at a time
    row_free = padding_bytes + max(p.slice_bytes for p in products)

    def taken(m: int, columns: int) -> int:
        logits = (
            m * logit_bytes
            + job.backend.scratch_rows(m, least, reference=reference is not None) * size
        )
        return row_free + m * row_bytes + columns * (column_bytes + logits)

    m = max(1, -(-min(len(rows), MOST_ROWS) // tile)) * tile
    while m > tile and (taken(m, least) > budget or m * row_bytes > budget // FEATURES_SHARE):
        m = -(-m // (2 * tile)) * tile
    columns = (budget - taken(m, 0)) // (taken(m, 1) - taken(m, 0))
    columns = min(vocab, max(1, columns // SLICE_MULTIPLE) * SLICE_MULTIPLE)
    return m, columns, taken(m, columns)


def _copied_bytes(x: Tensor, product: Product) -> int:
    """Bytes of copies per element of `x`, besides the operand, while `x` is converted to it."""
    steps = [x.dtype, product.operand_dtype, product.d_logits_dtype]
    return sum(before.itemsize for before, after in itertools.pairwise(steps) if before != after)
