"""d loss / d (raw logits) of a chunk, from its statistics; and a gradient times a number.

A program first writes all elements as if none were the target, and after a barrier overwrites the
target's column. So it compares no column with the target.

With a reference, ``d_divergence (k_j - p_j sum k)`` is added to d z_j (see `backends.divergence`).
The sum of k is known beforehand, so its part of the gradient is one more coefficient of -p_j, like
d_logp.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.backends import Chunk, Coefficients, RowStats
from grpo_kernels.backends.triton_rows.device import RowConfig
from grpo_kernels.backends.triton_rows.divergence import k_of, normalizers, reference_arguments
from grpo_kernels.backends.triton_rows.mathfn import exp, exp_term, expm1
from grpo_kernels.backends.triton_rows.reduce import LOWEST
from grpo_kernels.backends.triton_rows.transform import (
    PER_ROW,
    bend,
    chunk_arguments,
    load_at,
    load_tile,
    row_block,
    row_pointers,
    row_slope,
    scaled,
)

TILES = 4  # tiles of a program, so that its work once per row is a tenth of the total
SCALE_BLOCK = 4096  # for 8 warps: a thread handles 8 neighbors, 16 bytes of 16-bit results


def launch_grad(
    chunk: Chunk,
    stats: RowStats,
    coefficients: Coefficients,  # (n,) each
    out: Tensor,  # (n, V), may be the chunk's logits
    config: RowConfig,
) -> None:
    """Write d loss / d (raw logits) to `out`."""
    d_logp, d_entropy, d_divergence, _ = coefficients
    assert d_logp is not None
    n, vocab = chunk.logits.shape
    with_reference: dict[str, Any] = {}
    if d_divergence is not None:
        assert stats.divergence is not None
        config = config.for_two_heads(vocab)
        with_reference = {
            "d_divergence_ptr": d_divergence.contiguous(),
            **reference_arguments(chunk, stats.divergence),
        }
    grid = (triton.cdiv(n, config.block_n) * triton.cdiv(vocab, TILES * config.block_v),)
    grad_kernel[grid](
        **chunk_arguments(chunk),
        **with_reference,
        # statistics and coefficients
        logps_ptr=stats.logps, max_logit_ptr=stats.max_logit, log_sum_ptr=stats.log_sum,
        entropies_ptr=None if d_entropy is None else stats.entropies,
        d_logp_ptr=d_logp.contiguous(),  # the gradient of a sum may be one number, expanded
        d_entropy_ptr=None if d_entropy is None else d_entropy.contiguous(),
        # result
        out_ptr=out, stride_out_n=out.stride(0), TILES=TILES,
        **config.arguments(),
    )  # fmt: skip


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=PER_ROW)
def grad_kernel(
    # data: (n, V), (n, V), (n,)
    logits_ptr, out_ptr, ids_ptr,
    # statistics and coefficients: (n,)
    logps_ptr, max_logit_ptr, log_sum_ptr, entropies_ptr, d_logp_ptr, d_entropy_ptr,
    # shapes and strides
    n, V, stride_n, stride_out_n,
    # the transform: (V,), (n,), numbers
    bias_ptr, inv_t_ptr, inner, outer, HAS_SOFTCAP: tl.constexpr, ROUNDED_TO: tl.constexpr,
    # the tile
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, TILES: tl.constexpr, NUM_STAGES: tl.constexpr,
    # a reference: logits, statistics, d_divergence, transform, divergence
    reference_logits_ptr=None, reference_stride_n=None,
    reference_max_logit_ptr=None, reference_log_sum_ptr=None, sum_k_ptr=None, d_divergence_ptr=None,
    reference_bias_ptr=None, reference_inv_t_ptr=None, reference_inner=None, reference_outer=None,
    REFERENCE_HAS_SOFTCAP: tl.constexpr = False, REFERENCE_ROUNDED_TO: tl.constexpr = None,
    jsd_beta=None, DIVERGENCE: tl.constexpr = None,
):  # fmt: skip
    """Write up to `TILES` tiles of the gradient, with the divergence's part if there is one."""
    parts = tl.cdiv(V, TILES * BLOCK_V)
    rows, is_row = row_block(tl.program_id(0) // parts, n, BLOCK_N)
    first_column = (tl.program_id(0) % parts) * (TILES * BLOCK_V)
    end_column = tl.minimum(first_column + TILES * BLOCK_V, V)
    row_ptrs, inner, outer = row_pointers(
        logits_ptr, stride_n, rows, inv_t_ptr, inner, outer, HAS_SOFTCAP
    )
    source = (row_ptrs, bias_ptr, inner, outer)
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * stride_out_n

    m = tl.load(max_logit_ptr + rows)[:, None]
    log_sum = tl.load(log_sum_ptr + rows)[:, None]
    d_logp = tl.load(d_logp_ptr + rows)[:, None]
    entropy = 0.0
    d_entropy = 0.0
    if d_entropy_ptr is not None:
        entropy = tl.load(entropies_ptr + rows)[:, None]
        d_entropy = tl.load(d_entropy_ptr + rows)[:, None]

    # after the row's numbers: before them, a thread spills 8 bytes on sm_100 by Triton 3.6
    target = tl.load(ids_ptr + rows)
    is_here = is_row & (target >= first_column) & (target < end_column)
    has_target = tl.max(is_here.to(tl.int32), axis=0) > 0
    x_target = tl.zeros((BLOCK_N, 1), tl.float32)
    d_target = x_target
    if HAS_SOFTCAP or DIVERGENCE is not None:
        x_target = load_at(source, target, is_here, ROUNDED_TO)
        if has_target:
            barrier()  # `out` may be `logits`: all threads must have read before one writes

    p_coefficient = d_logp  # of -p_j
    reference_part = None
    if DIVERGENCE is not None:
        reference_ptrs, reference_inner, reference_outer = row_pointers(
            reference_logits_ptr, reference_stride_n, rows, reference_inv_t_ptr,
            reference_inner, reference_outer, REFERENCE_HAS_SOFTCAP,
        )  # fmt: skip
        reference = (reference_ptrs, reference_bias_ptr, reference_inner, reference_outer)
        reference_m = tl.load(reference_max_logit_ptr + rows)[:, None]
        reference_log_sum = tl.load(reference_log_sum_ptr + rows)[:, None]
        norms = normalizers(m, log_sum, reference_m, reference_log_sum)
        sum_k = tl.load(sum_k_ptr + rows)[:, None]
        d_divergence = tl.load(d_divergence_ptr + rows)[:, None]
        p_coefficient = d_logp + d_divergence * sum_k
        d_k = d_divergence * row_slope(source, HAS_SOFTCAP)
        reference_part = (reference, norms, d_k, jsd_beta)
        if has_target:  # before the loop, which has no registers left for this
            logp = tl.load(logps_ptr + rows)[:, None]
            y_target = load_at(reference, target, is_here, REFERENCE_ROUNDED_TO)
            k = k_of(
                x_target, y_target, source, reference, norms, jsd_beta, DIVERGENCE,
                HAS_SOFTCAP, REFERENCE_HAS_SOFTCAP,
            )  # fmt: skip
            d_target = target_gradient(
                logp, entropy, d_logp, d_entropy, d_entropy_ptr is not None
            ) + d_divergence * (k - exp(logp) * sum_k)
            d_target = through_transform(d_target, x_target, source, HAS_SOFTCAP)
    level, tilt = level_and_tilt(
        source, log_sum, entropy, p_coefficient, d_entropy, d_entropy_ptr is not None, HAS_SOFTCAP
    )
    whole = tl.minimum(end_column, V // BLOCK_V * BLOCK_V)
    for start in tl.range(first_column, whole, BLOCK_V, num_stages=NUM_STAGES):
        write_tile(
            source, out_ptrs, start, None, is_row, m, level, tilt,
            d_entropy_ptr is not None, HAS_SOFTCAP, ROUNDED_TO, BLOCK_V,
            reference_part, DIVERGENCE, REFERENCE_HAS_SOFTCAP, REFERENCE_ROUNDED_TO,
        )  # fmt: skip
    if whole < end_column:
        write_tile(
            source, out_ptrs, whole, V, is_row, m, level, tilt,
            d_entropy_ptr is not None, HAS_SOFTCAP, ROUNDED_TO, BLOCK_V,
            reference_part, DIVERGENCE, REFERENCE_HAS_SOFTCAP, REFERENCE_ROUNDED_TO,
        )  # fmt: skip
    if has_target:
        if DIVERGENCE is None:
            logp = tl.load(logps_ptr + rows)[:, None]
            d_target = target_gradient(logp, entropy, d_logp, d_entropy, d_entropy_ptr is not None)
            d_target = through_transform(d_target, x_target, source, HAS_SOFTCAP)
        store_target(out_ptrs, target, is_here, d_target)


@triton.jit
def level_and_tilt(
    source, log_sum, entropy, d_logp, d_entropy,
    HAS_ENTROPY_GRADIENT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """(level, tilt), (R, 1) each, of a gradient d x_j = e^(z_j - m) (level + tilt (z_j - m)).

    d z_j = d_logp (1[j = id] - p_j) - d_entropy p_j (log p_j + entropy), and log p_j = z_j - m -
    log_sum. Both include the factors of p and of d z / d x that all columns of a row share.
    """
    common = exp(-log_sum) * row_slope(source, HAS_SOFTCAP)
    level = -d_logp
    tilt = 0.0
    if HAS_ENTROPY_GRADIENT:
        level = level - d_entropy * (entropy - log_sum)
        tilt = -d_entropy * common
    return level * common, tilt


@triton.jit
def target_gradient(logp, entropy, d_logp, d_entropy, HAS_ENTROPY_GRADIENT: tl.constexpr):
    """d loss / dz of the target."""
    d = d_logp * -expm1(logp)  # 1 - p of the target
    if HAS_ENTROPY_GRADIENT:
        d -= d_entropy * exp(logp) * (tl.where(logp < LOWEST, LOWEST, logp) + entropy)
    return d


@triton.jit
def write_tile(
    source,
    # row pointers (R, 1), first column, the vocabulary's end or None if beyond the tile, which
    # rows count (R,)
    out_ptrs, start, end, is_row,
    # per row: (R, 1)
    m, level, tilt,
    HAS_ENTROPY_GRADIENT: tl.constexpr, HAS_SOFTCAP: tl.constexpr, ROUNDED_TO: tl.constexpr,
    BLOCK_V: tl.constexpr,
    # with a reference: (its source, `normalizers`, d_divergence times `row_slope` (R, 1), jsd_beta)
    reference_part=None, DIVERGENCE: tl.constexpr = None,
    REFERENCE_HAS_SOFTCAP: tl.constexpr = False, REFERENCE_ROUNDED_TO: tl.constexpr = None,
):  # fmt: skip
    """Write one tile (R, BLOCK_V) of d loss / d (raw logits), as if no column were the target.

    The tile is read and written in quarters, so that a thread handles four neighbors at a time and
    a warp whole sectors, even of 16-bit elements. All quarters are read before the first is
    written: the compiler has to assume that a write changes what is read next.
    """
    x0, x1, x2, x3, columns0, columns1, columns2, columns3 = load_tile(
        source, start, end, ROUNDED_TO, BLOCK_V // 4
    )
    y0, y1, y2, y3 = x0, x1, x2, x3
    if DIVERGENCE is not None:
        y0, y1, y2, y3, _id0, _id1, _id2, _id3 = load_tile(
            reference_part[0], start, end, REFERENCE_ROUNDED_TO, BLOCK_V // 4
        )
    common = (source, m, level, tilt, out_ptrs, end, is_row)
    write_quarter(
        x0, y0, columns0, common, HAS_ENTROPY_GRADIENT, HAS_SOFTCAP,
        reference_part, DIVERGENCE, REFERENCE_HAS_SOFTCAP,
    )  # fmt: skip
    write_quarter(
        x1, y1, columns1, common, HAS_ENTROPY_GRADIENT, HAS_SOFTCAP,
        reference_part, DIVERGENCE, REFERENCE_HAS_SOFTCAP,
    )  # fmt: skip
    write_quarter(
        x2, y2, columns2, common, HAS_ENTROPY_GRADIENT, HAS_SOFTCAP,
        reference_part, DIVERGENCE, REFERENCE_HAS_SOFTCAP,
    )  # fmt: skip
    write_quarter(
        x3, y3, columns3, common, HAS_ENTROPY_GRADIENT, HAS_SOFTCAP,
        reference_part, DIVERGENCE, REFERENCE_HAS_SOFTCAP,
    )  # fmt: skip


@triton.jit
def write_quarter(
    x, y, columns, common, HAS_ENTROPY_GRADIENT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    reference_part, DIVERGENCE: tl.constexpr, REFERENCE_HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Write d loss / dx of x (R, W), up to column `end`; y is the reference's x.

    `common` is what the quarters of a tile share.
    """
    source, m, level, tilt, out_ptrs, end, is_row = common
    shifted = scaled(x, source, HAS_SOFTCAP) - m
    d = level
    if HAS_ENTROPY_GRADIENT:
        d = tl.fma(tl.where(shifted < LOWEST, LOWEST, shifted), tilt, level)
    d = d * exp_term(shifted)
    if HAS_SOFTCAP:
        d = d * bend(x, source)
    if DIVERGENCE is not None:
        reference, norms, d_k, jsd_beta = reference_part
        divergence_part = d_k * k_of(
            x, y, source, reference, norms, jsd_beta, DIVERGENCE,
            HAS_SOFTCAP, REFERENCE_HAS_SOFTCAP,
        )  # fmt: skip
        if HAS_SOFTCAP:
            divergence_part = divergence_part * bend(x, source)
        d = d + divergence_part
    d = d.to(out_ptrs.dtype.element_ty)
    if is_row.shape[0] > 1:
        mask = tl.broadcast_to(is_row[:, None], d.shape)
        if end is not None:
            mask = mask & (columns < end)
        tl.store(out_ptrs + columns, d, mask=mask)
    elif end is not None:  # a single row always counts
        tl.store(out_ptrs + columns, d, mask=columns < end)
    else:
        tl.store(out_ptrs + columns, d)


@triton.jit
def through_transform(d, x, source, HAS_SOFTCAP: tl.constexpr):
    """d loss / dx from d = d loss / dz, (R, 1)."""
    d = d * row_slope(source, HAS_SOFTCAP)
    if HAS_SOFTCAP:
        d = d * bend(x, source)
    return d


@triton.jit
def store_target(out_ptrs, target, mask, d):
    """Overwrite one column of each row for which `mask` (R,) is set."""
    barrier()  # another thread wrote that column
    tl.store(out_ptrs + target[:, None], d.to(out_ptrs.dtype.element_ty), mask=mask[:, None])


# Triton does not order reads and writes of global memory by different threads of a program: a
# thread that writes where another has read or written must wait for all threads. The builtin is
# `debug_barrier`, to be renamed to `barrier` (https://github.com/triton-lang/triton/pull/11437).
IS_RENAMED = tl.constexpr(not hasattr(tl, "debug_barrier"))


@triton.jit
def barrier():
    """Wait until all threads of the program have arrived, their reads and writes finished."""
    if IS_RENAMED:
        tl.barrier()
    else:
        tl.debug_barrier()


def launch_scale(x: Tensor, factor: Tensor, out: Tensor) -> None:
    """``out = x * factor`` in one pass, rounded once: x in fp32, factor (); both contiguous."""
    n = x.numel()
    if n > 0:
        scale_kernel[(triton.cdiv(n, SCALE_BLOCK),)](
            x_ptr=x, factor_ptr=factor, out_ptr=out, n=n,
            BLOCK=SCALE_BLOCK, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["factor_ptr"])
def scale_kernel(x_ptr, factor_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Compute one block of the product; only the last block has a mask."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = first + tl.arange(0, BLOCK)
    factor = tl.load(factor_ptr)
    if first + BLOCK <= n:
        x = tl.load(x_ptr + offsets)
        tl.store(out_ptr + offsets, (x * factor).to(out_ptr.dtype.element_ty))
    else:
        x = tl.load(x_ptr + offsets, mask=offsets < n)
        tl.store(out_ptr + offsets, (x * factor).to(out_ptr.dtype.element_ty), mask=offsets < n)
