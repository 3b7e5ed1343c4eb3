"""Statistics and d logp / d (raw projection) of a row in one pass over it, for heads whose weight is frozen.

The largest logit is not known before the last one is read, so the gradient is written with another reference:

    ref = max(z of the first columns, z of the target) <= m
    out_j = e^(z_j - ref),   out_y = -(1 - p_y) S,   S = sum_j e^(z_j - ref) = e^(m - ref) (1 + rest)

With a soft-cap, out_j has the element's own factor of d z / d x, too (`bend`). The row's common factor, `row_slope`
over -S, is returned as `scale`. A caller that multiplies `out` by a matrix applies `scale` to the product, which has
fewer numbers.

Each logit is read once and each element of the gradient written once: 6 bytes per element with 16-bit `out`.

Where m is more than `FARTHEST` above ref, or one of them is NaN or infinite, the row is read again and gets its
ordinary gradient, and a scale of 1. In place every row is read again: the first pass must not overwrite its logits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.backends.interface import Chunk, RowStats
from grpo_kernels.backends.triton_rows.barrier import barrier
from grpo_kernels.backends.triton_rows.configs import RowConfig
from grpo_kernels.backends.triton_rows.grad import row_terms, store_rows, write_gradient
from grpo_kernels.backends.triton_rows.mathfn import exp, exp_term, expm1
from grpo_kernels.backends.triton_rows.stats import (
    new_statistics,
    pointers,
    store_statistics,
    sums_for,
)
from grpo_kernels.backends.triton_rows.steps import (
    fold_step,
    load_at,
    load_step,
    load_x,
    logits,
    merge_lanes,
    no_logits,
    reduce_rows,
    row_block,
)
from grpo_kernels.backends.triton_rows.transform import (
    PER_ROW,
    bend,
    chunk_arguments,
    head_rows,
    row_slope,
    scaled,
)

FARTHEST = tl.constexpr(
    40.0
)  # e^40 times the size of a vocabulary is far below the largest float32 and bfloat16


def launch_single_pass(
    chunk: Chunk,
    out: Tensor,  # (n, V), may be the chunk's logits if `in_place`
    config: RowConfig,
    *,
    entropy: bool,
    extras: tuple[str, ...],
    in_place: bool,
) -> tuple[RowStats, Tensor]:
    """The statistics, and the scale (n,): d logp / d (raw projection) is ``out * scale[:, None]``."""
    n = len(chunk.logits)
    stats = new_statistics(chunk.logits, entropy=entropy, extras=extras)
    scale = chunk.logits.new_empty(n)
    single_pass_kernel[(triton.cdiv(n, config.block_n),)](
        **chunk_arguments(chunk),
        # results
        **pointers(stats),
        scale_ptr=scale,
        out_ptr=out,
        stride_out_n=out.stride(0),
        IN_PLACE=in_place,
        **config.arguments(),
    )
    return stats, scale


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=PER_ROW)
def single_pass_kernel(
    # data: (n, V), (n, V), (n,)
    logits_ptr,
    out_ptr,
    ids_ptr,
    # results: (n,)
    logps_ptr,
    max_logit_ptr,
    log_sum_ptr,
    entropies_ptr,
    log_sum_sq_probs_ptr,
    mean_logits_ptr,
    is_top1_ptr,
    scale_ptr,
    # shapes and strides
    n,
    V,
    stride_n,
    stride_out_n,
    IN_PLACE: tl.constexpr,
    # the transform: (V,), (n,), numbers
    bias_ptr,
    inv_t_ptr,
    inner,
    outer,
    HAS_SOFTCAP: tl.constexpr,
    ROUNDED_TO: tl.constexpr,
    # the tile
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """`BLOCK_N` rows, from raw projection to statistics and gradient."""
    LANES: tl.constexpr = BLOCK_V // 4
    rows, is_row = row_block(tl.program_id(0), n, BLOCK_N)
    row_ptrs, inner, outer = head_rows(
        logits_ptr, stride_n, rows, inv_t_ptr, inner, outer, HAS_SOFTCAP
    )
    head = (row_ptrs, bias_ptr, inner, outer)
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * stride_out_n
    ids = tl.load(ids_ptr + rows)
    is_id = (ids >= 0) & (ids < V)
    x_target = load_at(head, ids, is_id, ROUNDED_TO)
    z_target = scaled(x_target, head, HAS_SOFTCAP)

    results = (
        logps_ptr, max_logit_ptr, log_sum_ptr, entropies_ptr, log_sum_sq_probs_ptr, mean_logits_ptr, is_top1_ptr,
    )  # fmt: skip
    wanted = sums_for(results)
    ref = z_target
    if IN_PLACE:
        sums = reduce_rows(head, V, HAS_SOFTCAP, ROUNDED_TO, wanted, BLOCK_N, BLOCK_V, NUM_STAGES)
    else:
        x, columns = load_x(head, 0, V, ROUNDED_TO, LANES)
        z = logits(x, columns, V, head, HAS_SOFTCAP)
        ref = tl.maximum(ref, tl.max(z, axis=1)[:, None])
        sums = no_logits(BLOCK_N, LANES)
        whole = V // BLOCK_V * BLOCK_V
        for start in tl.range(0, whole, BLOCK_V, num_stages=NUM_STAGES):
            sums = reduce_and_write(
                sums, head, out_ptrs, start, None, is_row, ref, HAS_SOFTCAP, ROUNDED_TO, wanted
            )
        if whole < V:
            sums = reduce_and_write(
                sums, head, out_ptrs, whole, V, is_row, ref, HAS_SOFTCAP, ROUNDED_TO, wanted
            )
        sums = merge_lanes(sums, V, wanted)
    rest, log_sum, logp = store_statistics(
        rows, is_row, ids, V, sums, tl.reshape(z_target, ids.shape), results
    )

    m = sums[0][:, None]
    rest = rest[:, None]
    log_sum = log_sum[:, None]
    is_near = (m - ref <= FARTHEST) & (not IN_PLACE)  # False if NaN
    sum_exp = exp(m - ref) * (1.0 + rest)
    in_row = row_slope(head, HAS_SOFTCAP)
    scale = tl.where(is_near, -in_row / sum_exp, 1.0)
    d_target = expm1(logp)[:, None] * tl.where(
        is_near, sum_exp, -in_row
    )  # 1 - p, which must not cancel
    if HAS_SOFTCAP:
        d_target *= bend(x_target, head)
    tl.store(scale_ptr + rows[:, None], scale, mask=is_row[:, None])
    again = tl.reshape(is_near == 0, rows.shape) & is_row
    barrier()  # all threads have read and written before one writes again
    if tl.max(again.to(tl.int32), axis=0) > 0:
        one = tl.full(m.shape, 1.0, tl.float32)
        level, tilt = row_terms(head, log_sum, 0.0, one, 0.0, False, HAS_SOFTCAP)
        whole = V // BLOCK_V * BLOCK_V
        for start in tl.range(0, whole, BLOCK_V, num_stages=NUM_STAGES):
            write_gradient(
                head,
                out_ptrs,
                start,
                None,
                again,
                m,
                level,
                tilt,
                False,
                HAS_SOFTCAP,
                ROUNDED_TO,
                BLOCK_V,
            )
        if whole < V:
            write_gradient(
                head,
                out_ptrs,
                whole,
                V,
                again,
                m,
                level,
                tilt,
                False,
                HAS_SOFTCAP,
                ROUNDED_TO,
                BLOCK_V,
            )
        barrier()
    mask = (is_id & is_row)[:, None]
    tl.store(out_ptrs + ids[:, None], d_target.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def reduce_and_write(
    sums,
    head,
    out_ptrs,
    start,
    end,
    is_row,
    ref,
    HAS_SOFTCAP: tl.constexpr,
    ROUNDED_TO: tl.constexpr,
    wanted,
):
    """Reduce as `reduce_step` does, and write e^(z - ref)."""
    LANES: tl.constexpr = sums[0].shape[1]
    if end is None:
        x0, x1, x2, x3, id0, id1, id2, id3 = load_step(head, start, None, ROUNDED_TO, LANES)
        z0 = write_unscaled(x0, id0, None, out_ptrs, is_row, ref, head, HAS_SOFTCAP)
        z1 = write_unscaled(x1, id1, None, out_ptrs, is_row, ref, head, HAS_SOFTCAP)
        z2 = write_unscaled(x2, id2, None, out_ptrs, is_row, ref, head, HAS_SOFTCAP)
        z3 = write_unscaled(x3, id3, None, out_ptrs, is_row, ref, head, HAS_SOFTCAP)
    else:  # masks take registers: one tile after the other
        x0, id0 = load_x(head, start, end, ROUNDED_TO, LANES)
        z0 = write_unscaled(x0, id0, end, out_ptrs, is_row, ref, head, HAS_SOFTCAP)
        x1, id1 = load_x(head, start + LANES, end, ROUNDED_TO, LANES)
        z1 = write_unscaled(x1, id1, end, out_ptrs, is_row, ref, head, HAS_SOFTCAP)
        x2, id2 = load_x(head, start + 2 * LANES, end, ROUNDED_TO, LANES)
        z2 = write_unscaled(x2, id2, end, out_ptrs, is_row, ref, head, HAS_SOFTCAP)
        x3, id3 = load_x(head, start + 3 * LANES, end, ROUNDED_TO, LANES)
        z3 = write_unscaled(x3, id3, end, out_ptrs, is_row, ref, head, HAS_SOFTCAP)
    return fold_step(sums, z0, z1, z2, z3, id0, id1, id2, id3, end, wanted)


@triton.jit
def write_unscaled(x, columns, end, out_ptrs, is_row, ref, head, HAS_SOFTCAP: tl.constexpr):
    """Write e^(z - ref) of x (R, W), times `bend` with a soft-cap; return z."""
    z = logits(x, columns, end, head, HAS_SOFTCAP)
    d = exp_term(z - ref)
    if HAS_SOFTCAP:
        d = d * bend(x, head)
    store_rows(out_ptrs, d, columns, end, is_row)
    return z
