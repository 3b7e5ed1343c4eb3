"""d loss / d (raw projection) of a chunk that has a teacher, from its statistics.

As `grad` writes it, with ``c (k_j - p_j sum k)`` added to d z_j; sum k is known, and what of the gradient is a row's
number times p_j stays one. The target's column is written last, again.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.backends.interface import Chunk, RowStats
from grpo_kernels.backends.triton_rows.barrier import barrier
from grpo_kernels.backends.triton_rows.configs import RowConfig
from grpo_kernels.backends.triton_rows.divergence import normalisers, pair_arguments, terms
from grpo_kernels.backends.triton_rows.grad import (
    STEPS,
    gradient,
    of_raw,
    row_terms,
    store_rows,
    store_target,
    target_gradient,
)
from grpo_kernels.backends.triton_rows.mathfn import exp
from grpo_kernels.backends.triton_rows.steps import load_at, load_step, row_block
from grpo_kernels.backends.triton_rows.transform import PER_ROW, bend, row_factors, row_slope, scaled


def launch_teacher_grad(
    chunk: Chunk,
    stats: RowStats,
    a: Tensor,  # (n,)
    b: Tensor | None,  # (n,)
    c: Tensor,  # (n,)
    out: Tensor,  # (n, V), may be the chunk's logits
    config: RowConfig,
) -> None:
    """Write d loss / d (raw projection) to `out`."""
    assert stats.divergence is not None
    n, vocab = chunk.logits.shape
    grid = (triton.cdiv(n, config.block_n) * triton.cdiv(vocab, STEPS * config.block_v),)
    teacher_grad_kernel[grid](
        **pair_arguments(chunk),
        ids_ptr=chunk.ids,
        first_id=chunk.first_id,
        # statistics and coefficients
        logps_ptr=stats.logps,
        max_logit_ptr=stats.max_logit,
        log_sum_ptr=stats.log_sum,
        entropies_ptr=None if b is None else stats.entropies,
        teacher_max_logit_ptr=stats.divergence.max_logit,
        teacher_log_sum_ptr=stats.divergence.log_sum,
        slope_ptr=stats.divergence.slope,
        a_ptr=a.contiguous(),  # the gradient of a sum may be one number, expanded
        b_ptr=None if b is None else b.contiguous(),
        c_ptr=c.contiguous(),
        # result
        out_ptr=out,
        stride_out_n=out.stride(0),
        STEPS=STEPS,
        **config.for_two_heads(vocab).arguments(),
    )


@triton.jit(do_not_specialize=["n", "first_id"], do_not_specialize_on_alignment=PER_ROW)
def teacher_grad_kernel(
    # data: (n, V), (n, V), (n, V), (n,)
    logits_ptr,
    teacher_logits_ptr,
    out_ptr,
    ids_ptr,
    # statistics and coefficients: (n,)
    logps_ptr,
    max_logit_ptr,
    log_sum_ptr,
    entropies_ptr,
    teacher_max_logit_ptr,
    teacher_log_sum_ptr,
    slope_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    # shapes and strides
    n,
    V,
    first_id,
    stride_n,
    teacher_stride_n,
    stride_out_n,
    # the divergence
    teacher_beta,
    TERMS: tl.constexpr,
    # the transforms: (V,), (n,), numbers
    bias_ptr,
    inv_t_ptr,
    inner,
    outer,
    teacher_bias_ptr,
    teacher_inv_t_ptr,
    teacher_inner,
    teacher_outer,
    HAS_SOFTCAP: tl.constexpr,
    ROUNDED_TO: tl.constexpr,
    TEACHER_HAS_SOFTCAP: tl.constexpr,
    TEACHER_ROUNDED_TO: tl.constexpr,
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
    student = (logits_ptr + rows.to(tl.int64)[:, None] * stride_n, bias_ptr, inner, outer)
    teacher_inner, teacher_outer = row_factors(
        teacher_inv_t_ptr, rows[:, None], teacher_inner, teacher_outer, TEACHER_HAS_SOFTCAP
    )
    teacher_ptrs = teacher_logits_ptr + rows.to(tl.int64)[:, None] * teacher_stride_n
    teacher = (teacher_ptrs, teacher_bias_ptr, teacher_inner, teacher_outer)
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * stride_out_n

    known = normalisers(
        tl.load(max_logit_ptr + rows)[:, None],
        tl.load(log_sum_ptr + rows)[:, None],
        tl.load(teacher_max_logit_ptr + rows)[:, None],
        tl.load(teacher_log_sum_ptr + rows)[:, None],
    )
    slope = tl.load(slope_ptr + rows)[:, None]
    a = tl.load(a_ptr + rows)[:, None]
    c = tl.load(c_ptr + rows)[:, None]
    entropy = 0.0
    b = 0.0
    if b_ptr is not None:
        entropy = tl.load(entropies_ptr + rows)[:, None]
        b = tl.load(b_ptr + rows)[:, None]
    target = tl.load(ids_ptr + rows) - first_id
    is_here = counts & (target >= first) & (target < last)
    has_target = tl.max(is_here.to(tl.int32), axis=0) > 0
    d_target = tl.zeros((BLOCK_N, 1), tl.float32)
    if has_target:
        logp = tl.load(logps_ptr + rows)[:, None]
        d_target = teacher_target_gradient(
            student, teacher, target, is_here, known, logp, entropy, slope, a, b, c, b_ptr is not None,
            teacher_beta, TERMS, HAS_SOFTCAP, ROUNDED_TO, TEACHER_HAS_SOFTCAP, TEACHER_ROUNDED_TO,
        )  # fmt: skip
        barrier()  # `out` may be `logits`: that is read before anybody writes
    log_sum = tl.load(log_sum_ptr + rows)[:, None]
    coefficients = teacher_row_terms(student, log_sum, entropy, slope, a, b, c, b_ptr is not None, HAS_SOFTCAP)
    whole = tl.minimum(last, V // BLOCK_V * BLOCK_V)
    for start in tl.range(first, whole, BLOCK_V, num_stages=NUM_STAGES):
        write_teacher_gradient(
            student, teacher, out_ptrs, start, None, counts, known, coefficients, b_ptr is not None,
            teacher_beta, TERMS, HAS_SOFTCAP, ROUNDED_TO, TEACHER_HAS_SOFTCAP, TEACHER_ROUNDED_TO, BLOCK_V,
        )  # fmt: skip
    if whole < last:
        write_teacher_gradient(
            student, teacher, out_ptrs, whole, V, counts, known, coefficients, b_ptr is not None,
            teacher_beta, TERMS, HAS_SOFTCAP, ROUNDED_TO, TEACHER_HAS_SOFTCAP, TEACHER_ROUNDED_TO, BLOCK_V,
        )  # fmt: skip
    if has_target:
        store_target(out_ptrs, target, is_here, d_target)


@triton.jit
def load_one(head, ids, mask, ROUNDED_TO: tl.constexpr):
    """A head's projection (R, 1) at one column of each row; 0 where `mask` (R,) is not set."""
    return load_at(head[0], head[1], ids, mask, ROUNDED_TO)


@triton.jit
def teacher_row_terms(
    student, log_sum, entropy, slope, a, b, c, HAS_ENTROPY_GRADIENT: tl.constexpr, HAS_SOFTCAP: tl.constexpr
):  # fmt: skip
    """Row terms (R, 1) of `write_teacher_gradient`: d x_j = e^(z_j - m) (level + tilt (z_j - m)) + steep k_j.

    What the divergence takes off, c p_j sum k, is as much of each p_j as a is.
    """
    _row_ptrs, _bias_ptr, inner, outer = student
    level, tilt = row_terms(log_sum, entropy, a + c * slope, b, HAS_ENTROPY_GRADIENT, inner, outer, HAS_SOFTCAP)
    return level, tilt, c * row_slope(inner, outer, HAS_SOFTCAP)


@triton.jit
def write_teacher_gradient(
    student,
    teacher,
    # the tile: (R, 1) pointers, its first column and where the vocabulary ends, None if not here; (R,)
    out_ptrs,
    start,
    end,
    counts,
    # of the rows: as `normalisers` and `teacher_row_terms` returned them
    known,
    coefficients,
    HAS_ENTROPY_GRADIENT: tl.constexpr,
    # the divergence
    beta,
    TERMS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ROUNDED_TO: tl.constexpr,
    TEACHER_HAS_SOFTCAP: tl.constexpr,
    TEACHER_ROUNDED_TO: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One tile (R, BLOCK_V) of d loss / d (raw projection), as if no column were the target: see `write_gradient`."""
    x0, x1, x2, x3, columns0, columns1, columns2, columns3 = load_step(
        student[0], student[1], start, end, ROUNDED_TO, BLOCK_V // 4
    )
    y0, y1, y2, y3, _columns0, _columns1, _columns2, _columns3 = load_step(
        teacher[0], teacher[1], start, end, TEACHER_ROUNDED_TO, BLOCK_V // 4
    )
    d0 = teacher_gradient(
        student, teacher, x0, y0, known, coefficients, HAS_ENTROPY_GRADIENT,
        beta, TERMS, HAS_SOFTCAP, ROUNDED_TO, TEACHER_HAS_SOFTCAP, TEACHER_ROUNDED_TO,
    )  # fmt: skip
    store_rows(out_ptrs, d0, columns0, end, counts)
    d1 = teacher_gradient(
        student, teacher, x1, y1, known, coefficients, HAS_ENTROPY_GRADIENT,
        beta, TERMS, HAS_SOFTCAP, ROUNDED_TO, TEACHER_HAS_SOFTCAP, TEACHER_ROUNDED_TO,
    )  # fmt: skip
    store_rows(out_ptrs, d1, columns1, end, counts)
    d2 = teacher_gradient(
        student, teacher, x2, y2, known, coefficients, HAS_ENTROPY_GRADIENT,
        beta, TERMS, HAS_SOFTCAP, ROUNDED_TO, TEACHER_HAS_SOFTCAP, TEACHER_ROUNDED_TO,
    )  # fmt: skip
    store_rows(out_ptrs, d2, columns2, end, counts)
    d3 = teacher_gradient(
        student, teacher, x3, y3, known, coefficients, HAS_ENTROPY_GRADIENT,
        beta, TERMS, HAS_SOFTCAP, ROUNDED_TO, TEACHER_HAS_SOFTCAP, TEACHER_ROUNDED_TO,
    )  # fmt: skip
    store_rows(out_ptrs, d3, columns3, end, counts)


@triton.jit
def teacher_gradient(
    student, teacher, x, y, known, coefficients, HAS_ENTROPY_GRADIENT: tl.constexpr, beta, TERMS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ROUNDED_TO: tl.constexpr,
    TEACHER_HAS_SOFTCAP: tl.constexpr,
    TEACHER_ROUNDED_TO: tl.constexpr,
):  # fmt: skip
    """d loss / dx of x (R, W), which is not the target's, y being the teacher's projection."""
    _row_ptrs, _bias_ptr, inner, outer = student
    level, tilt, steep = coefficients
    d = gradient(x, known[0], level, tilt, HAS_ENTROPY_GRADIENT, inner, outer, HAS_SOFTCAP)
    more = steep * slope_terms(
        student, teacher, x, y, known, beta, TERMS, HAS_SOFTCAP, ROUNDED_TO, TEACHER_HAS_SOFTCAP, TEACHER_ROUNDED_TO
    )
    if HAS_SOFTCAP:
        more = more * bend(x, inner)
    return d + more


@triton.jit
def slope_terms(
    student,
    teacher,
    x,
    y,
    known,
    beta,
    TERMS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ROUNDED_TO: tl.constexpr,
    TEACHER_HAS_SOFTCAP: tl.constexpr,
    TEACHER_ROUNDED_TO: tl.constexpr,
):
    """k of both heads' projections."""
    z = scaled(x, student[2], student[3], HAS_SOFTCAP)
    _value, k = terms(z, scaled(y, teacher[2], teacher[3], TEACHER_HAS_SOFTCAP), known, beta, TERMS)
    return k


@triton.jit
def teacher_target_gradient(
    student,
    teacher,
    # where: (R,), (R,)
    target,
    mask,
    # statistics, coefficients: (R, 1)
    known,
    logp,
    entropy,
    slope,
    a,
    b,
    c,
    HAS_ENTROPY_GRADIENT: tl.constexpr,
    beta,
    TERMS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ROUNDED_TO: tl.constexpr,
    TEACHER_HAS_SOFTCAP: tl.constexpr,
    TEACHER_ROUNDED_TO: tl.constexpr,
):
    """d loss / dx (R, 1) of the targets' projections, where `mask` is set."""
    x = load_one(student, target, mask, ROUNDED_TO)
    y = load_one(teacher, target, mask, TEACHER_ROUNDED_TO)
    d = target_gradient(logp, entropy, a, b, HAS_ENTROPY_GRADIENT)
    d += c * (
        slope_terms(
            student, teacher, x, y, known, beta, TERMS, HAS_SOFTCAP, ROUNDED_TO, TEACHER_HAS_SOFTCAP, TEACHER_ROUNDED_TO
        )
        - exp(logp) * slope
    )
    return of_raw(d, x, student[2], student[3], HAS_SOFTCAP)
