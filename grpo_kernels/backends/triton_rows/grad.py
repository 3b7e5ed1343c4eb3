"""d loss / d (raw projection) of a chunk of logits from its statistics.

All elements are written as if none were the target; whoever wrote the target's column then writes it again, after all
have arrived at a barrier. So no column is compared with the target.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.backends.interface import Chunk, RowStats
from grpo_kernels.backends.triton_rows.barrier import barrier
from grpo_kernels.backends.triton_rows.configs import RowConfig
from grpo_kernels.backends.triton_rows.mathfn import exp, exp_term, expm1
from grpo_kernels.backends.triton_rows.reduce import LOWEST
from grpo_kernels.backends.triton_rows.steps import load_at, load_step, row_block
from grpo_kernels.backends.triton_rows.transform import (
    PER_ROW,
    bend,
    chunk_arguments,
    row_factors,
    row_slope,
    scaled,
)

STEPS = 4  # a program: what it computes once for its rows is then a tenth of its work


def launch_grad(
    chunk: Chunk,
    stats: RowStats,
    a: Tensor,  # (n,)
    b: Tensor | None,  # (n,)
    out: Tensor,  # (n, V), may be the chunk's logits
    config: RowConfig,
) -> None:
    """Write d loss / d (raw projection) to `out`."""
    n, vocab = chunk.logits.shape
    grid = (triton.cdiv(n, config.block_n) * triton.cdiv(vocab, STEPS * config.block_v),)
    grad_kernel[grid](
        **chunk_arguments(chunk),
        first_id=chunk.first_id,
        # statistics and coefficients
        logps_ptr=stats.logps,
        max_logit_ptr=stats.max_logit,
        log_sum_ptr=stats.log_sum,
        entropies_ptr=None if b is None else stats.entropies,
        a_ptr=a.contiguous(),  # the gradient of a sum may be one number, expanded
        b_ptr=None if b is None else b.contiguous(),
        # result
        out_ptr=out,
        stride_out_n=out.stride(0),
        STEPS=STEPS,
        **config.arguments(),
    )


@triton.jit(do_not_specialize=["n", "first_id"], do_not_specialize_on_alignment=PER_ROW)
def grad_kernel(
    # data: (n, V), (n, V), (n,)
    logits_ptr,
    out_ptr,
    ids_ptr,
    # statistics and coefficients: (n,)
    logps_ptr,
    max_logit_ptr,
    log_sum_ptr,
    entropies_ptr,
    a_ptr,
    b_ptr,
    # shapes and strides
    n,
    V,
    first_id,
    stride_n,
    stride_out_n,
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
    STEPS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Up to `STEPS` tiles of the gradient; without `b_ptr` the entropy has no part in it."""
    parts = tl.cdiv(V, STEPS * BLOCK_V)
    rows, counts = row_block(tl.program_id(0) // parts, n, BLOCK_N)
    first = (tl.program_id(0) % parts) * (STEPS * BLOCK_V)
    last = tl.minimum(first + STEPS * BLOCK_V, V)
    inner, outer = row_factors(inv_t_ptr, rows[:, None], inner, outer, HAS_SOFTCAP)
    row_ptrs = logits_ptr + rows.to(tl.int64)[:, None] * stride_n
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * stride_out_n

    target = tl.load(ids_ptr + rows) - first_id
    is_here = counts & (target >= first) & (target < last)
    has_target = tl.max(is_here.to(tl.int32), axis=0) > 0
    x_target = tl.zeros((BLOCK_N, 1), tl.float32)
    if HAS_SOFTCAP:
        x_target = load_at(row_ptrs, bias_ptr, target, is_here, ROUNDED_TO)
        if has_target:
            barrier()  # `out` may be `logits`: that is read before anybody writes

    m = tl.load(max_logit_ptr + rows)[:, None]
    log_sum = tl.load(log_sum_ptr + rows)[:, None]
    a = tl.load(a_ptr + rows)[:, None]
    entropy = 0.0
    b = 0.0
    if b_ptr is not None:
        entropy = tl.load(entropies_ptr + rows)[:, None]
        b = tl.load(b_ptr + rows)[:, None]
    level, tilt = row_terms(log_sum, entropy, a, b, b_ptr is not None, inner, outer, HAS_SOFTCAP)
    whole = tl.minimum(last, V // BLOCK_V * BLOCK_V)
    for start in tl.range(first, whole, BLOCK_V, num_stages=NUM_STAGES):
        write_gradient(
            row_ptrs, out_ptrs, bias_ptr, start, None, counts, m, level, tilt,
            b_ptr is not None, inner, outer, HAS_SOFTCAP, ROUNDED_TO, BLOCK_V,
        )  # fmt: skip
    if whole < last:
        write_gradient(
            row_ptrs, out_ptrs, bias_ptr, whole, V, counts, m, level, tilt,
            b_ptr is not None, inner, outer, HAS_SOFTCAP, ROUNDED_TO, BLOCK_V,
        )  # fmt: skip
    if has_target:
        d = target_gradient(tl.load(logps_ptr + rows)[:, None], entropy, a, b, b_ptr is not None)
        write_target(out_ptrs, target, is_here, d, x_target, inner, outer, HAS_SOFTCAP)


@triton.jit
def row_terms(log_sum, entropy, a, b, HAS_ENTROPY_GRADIENT: tl.constexpr, inner, outer, HAS_SOFTCAP: tl.constexpr):
    """Return the row terms (R, 1) that `write_gradient` needs: d x_j is e^(z_j - m) (level + tilt (z_j - m)).

    d z_j = a (1[j = y] - p_j) - b p_j (log p_j + entropy), and log p_j = z_j - m - log_sum. What p and d z / d x
    have in common in a row is in both.
    """
    common = exp(-log_sum) * row_slope(inner, outer, HAS_SOFTCAP)
    level = -a
    tilt = 0.0
    if HAS_ENTROPY_GRADIENT:
        level = level - b * (entropy - log_sum)
        tilt = -b * common
    return level * common, tilt


@triton.jit
def target_gradient(logp, entropy, a, b, HAS_ENTROPY_GRADIENT: tl.constexpr):
    """d z of the target."""
    d = a * -expm1(logp)  # 1 - p_y
    if HAS_ENTROPY_GRADIENT:
        d -= b * exp(logp) * (tl.where(logp < LOWEST, LOWEST, logp) + entropy)
    return d


@triton.jit
def write_gradient(
    # the tile: (R, 1) pointers, (V,), its first column and where the vocabulary ends, None if not here; (R,)
    row_ptrs,
    out_ptrs,
    bias_ptr,
    start,
    end,
    counts,
    # of the rows: (R, 1)
    m,
    level,
    tilt,
    HAS_ENTROPY_GRADIENT: tl.constexpr,
    # the transform
    inner,
    outer,
    HAS_SOFTCAP: tl.constexpr,
    ROUNDED_TO: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One tile (R, BLOCK_V) of d loss / d (raw projection), as if no column were the target.

    In quarters: a thread then reads and writes four neighbours at a time, and a warp whole sectors, in 16 bits too. All
    are read before the first is written, which the compiler must take for what is read next.
    """
    x0, x1, x2, x3, columns0, columns1, columns2, columns3 = load_step(
        row_ptrs, bias_ptr, start, end, ROUNDED_TO, BLOCK_V // 4
    )
    d0 = gradient(x0, m, level, tilt, HAS_ENTROPY_GRADIENT, inner, outer, HAS_SOFTCAP)
    store_rows(out_ptrs, d0, columns0, end, counts)
    d1 = gradient(x1, m, level, tilt, HAS_ENTROPY_GRADIENT, inner, outer, HAS_SOFTCAP)
    store_rows(out_ptrs, d1, columns1, end, counts)
    d2 = gradient(x2, m, level, tilt, HAS_ENTROPY_GRADIENT, inner, outer, HAS_SOFTCAP)
    store_rows(out_ptrs, d2, columns2, end, counts)
    d3 = gradient(x3, m, level, tilt, HAS_ENTROPY_GRADIENT, inner, outer, HAS_SOFTCAP)
    store_rows(out_ptrs, d3, columns3, end, counts)


@triton.jit
def gradient(x, m, level, tilt, HAS_ENTROPY_GRADIENT: tl.constexpr, inner, outer, HAS_SOFTCAP: tl.constexpr):
    """d loss / dx of x (R, W), which is not the target's."""
    shifted = scaled(x, inner, outer, HAS_SOFTCAP) - m
    d = level
    if HAS_ENTROPY_GRADIENT:
        d = tl.fma(tl.where(shifted < LOWEST, LOWEST, shifted), tilt, level)
    d = d * exp_term(shifted)
    if HAS_SOFTCAP:
        d = d * bend(x, inner)
    return d


@triton.jit
def write_target(out_ptrs, target, mask, d, x, inner, outer, HAS_SOFTCAP: tl.constexpr):
    """Overwrite one column of each row for which `mask` (R,) is set; d = d z, x the target's projection, (R, 1)."""
    store_target(out_ptrs, target, mask, of_raw(d, x, inner, outer, HAS_SOFTCAP))


@triton.jit
def of_raw(d, x, inner, outer, HAS_SOFTCAP: tl.constexpr):
    """d loss / dx from d = d loss / dz, (R, 1)."""
    d = d * row_slope(inner, outer, HAS_SOFTCAP)
    if HAS_SOFTCAP:
        d = d * bend(x, inner)
    return d


@triton.jit
def store_target(out_ptrs, target, mask, d):
    """Overwrite one column of each row for which `mask` (R,) is set."""
    barrier()  # another thread wrote that column
    tl.store(out_ptrs + target[:, None], d.to(out_ptrs.dtype.element_ty), mask=mask[:, None])


@triton.jit
def store_rows(ptrs, x, columns, end, counts):
    """Store x (R, W) in its columns, below `end` if it is not None, of the rows that count; a lone row always does."""
    x = x.to(ptrs.dtype.element_ty)
    if counts.shape[0] > 1:
        mask = tl.broadcast_to(counts[:, None], x.shape)
        if end is not None:
            mask = mask & (columns < end)
        tl.store(ptrs + columns, x, mask=mask)
    elif end is not None:
        tl.store(ptrs + columns, x, mask=columns < end)
    else:
        tl.store(ptrs + columns, x)
