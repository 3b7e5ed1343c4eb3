"""Divergences of one head's row from another's: the formulas compiled, and their sums over the vocabulary.

The formulas are those of `backends.divergence`, whose text is compiled with what is here in the place of torch's
functions. The offset that makes log p - log q of a difference of logits is taken from the stored statistics, in all
kernels alike: equal rows have terms and k of exactly 0.

What is known of a head travels as one tuple: (row pointers (R, 1), bias pointer, inner, outer), see `transform`. Each
kernel makes it itself: in Triton 3.6 no function can return a tuple that holds None, as the pointer of no bias is.
What a kernel is compiled for travels by itself: Triton makes run-time numbers of flags in a tuple, and none holds a
dtype.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.backends import divergence
from grpo_kernels.backends.interface import Chunk, RowStats
from grpo_kernels.backends.triton_rows.configs import RowConfig
from grpo_kernels.backends.triton_rows.mathfn import exp, exp_term, log1p
from grpo_kernels.backends.triton_rows.reduce import sum_lanes
from grpo_kernels.backends.triton_rows.steps import load_step, logits, row_block
from grpo_kernels.backends.triton_rows.surrogates import clamp_max, compiled, full_like, where
from grpo_kernels.backends.triton_rows.transform import PER_ROW, head_arguments, row_factors

DEGREE = tl.constexpr(divergence.TERMS[torch.float32] - 1)  # of the series
PHI = tl.constexpr(divergence.PHI[: DEGREE.value + 1])
MIXTURE = tl.constexpr(divergence.MIXTURE[: DEGREE.value + 1])


@triton.jit
def phi_series(x):
    """``(e^-x - 1 + x) / x^2`` for small x >= 0."""
    return series(-x, PHI)


@triton.jit
def mixture_series(x):
    """``((1 - x) log(1 - x) + x) / x^2`` for small x >= 0."""
    return series(x, MIXTURE)


@triton.jit
def series(x, coefficients: tl.constexpr):
    """The polynomial with these coefficients, the constant first."""
    total = tl.full(x.shape, coefficients[DEGREE], tl.float32)
    for i in tl.static_range(DEGREE):
        total = tl.fma(x, total, coefficients[DEGREE - 1 - i])
    return total


@triton.jit
def magnitude(x):
    """|x|"""
    return tl.abs(x)


_NAMES: dict[str, Any] = {
    "__name__": divergence.__name__,
    "tl": tl,  # which the interpreter looks for
    "exp": exp_term,  # of numbers <= 0; what is multiplied by it is a term of a sum
    **{f.__name__: f for f in (clamp_max, full_like, log1p, magnitude, mixture_series, phi_series, where)},
    **{name: tl.constexpr(getattr(divergence, name)) for name in ("INF", "FAR", "NEAR", "NEAR_MIXTURE", "ALMOST")},
}
compiled(divergence.powers, _NAMES)
_TERMS = {f: compiled(f, _NAMES) for f in (divergence.forward, divergence.reverse, divergence.mixed)}


def terms_of(beta: float) -> Any:
    """`divergence.terms_of`, compiled."""
    return _TERMS[divergence.terms_of(beta)]


def pair_arguments(chunk: Chunk) -> dict[str, Any]:
    """Kernel arguments that describe a chunk with a teacher, without the ids."""
    teacher = chunk.teacher
    assert teacher is not None
    of_teacher = head_arguments(teacher.logits, teacher.transform).items()
    n, vocab = chunk.logits.shape
    return {
        "n": n,
        "V": vocab,
        **head_arguments(chunk.logits, chunk.transform),
        **{("TEACHER_" if name.isupper() else "teacher_") + name: x for name, x in of_teacher},
        "teacher_beta": teacher.beta,
        "TERMS": terms_of(teacher.beta),
    }


def launch_diverge(chunk: Chunk, stats: RowStats, teacher: RowStats, config: RowConfig) -> tuple[Tensor, Tensor]:
    """Value and slope (n,) of a chunk with a teacher, given both heads' statistics."""
    n, new = len(chunk.logits), chunk.logits.new_empty
    value, slope = new(n), new(n)
    diverge_kernel[(triton.cdiv(n, config.block_n),)](
        **pair_arguments(chunk),
        # statistics
        max_logit_ptr=stats.max_logit,
        log_sum_ptr=stats.log_sum,
        teacher_max_logit_ptr=teacher.max_logit,
        teacher_log_sum_ptr=teacher.log_sum,
        # results
        value_ptr=value,
        slope_ptr=slope,
        **config.for_two_heads(chunk.logits.shape[1]).arguments(),
    )
    return value, slope


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=PER_ROW)
def diverge_kernel(
    # data: (n, V), (n, V)
    logits_ptr,
    teacher_logits_ptr,
    # statistics: (n,)
    max_logit_ptr,
    log_sum_ptr,
    teacher_max_logit_ptr,
    teacher_log_sum_ptr,
    # results: (n,)
    value_ptr,
    slope_ptr,
    # shapes and strides
    n,
    V,
    stride_n,
    teacher_stride_n,
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
    NUM_STAGES: tl.constexpr,
):
    """The divergence of `BLOCK_N` rows, and the sum of their k."""
    rows, counts = row_block(tl.program_id(0), n, BLOCK_N)
    inner, outer = row_factors(inv_t_ptr, rows[:, None], inner, outer, HAS_SOFTCAP)
    student = (logits_ptr + rows.to(tl.int64)[:, None] * stride_n, bias_ptr, inner, outer)
    teacher_inner, teacher_outer = row_factors(
        teacher_inv_t_ptr, rows[:, None], teacher_inner, teacher_outer, TEACHER_HAS_SOFTCAP
    )
    teacher_ptrs = teacher_logits_ptr + rows.to(tl.int64)[:, None] * teacher_stride_n
    teacher = (teacher_ptrs, teacher_bias_ptr, teacher_inner, teacher_outer)
    known = normalisers(
        tl.load(max_logit_ptr + rows)[:, None],
        tl.load(log_sum_ptr + rows)[:, None],
        tl.load(teacher_max_logit_ptr + rows)[:, None],
        tl.load(teacher_log_sum_ptr + rows)[:, None],
    )
    value, slope = diverge_rows(
        student,
        teacher,
        known,
        V,
        teacher_beta,
        TERMS,
        HAS_SOFTCAP,
        ROUNDED_TO,
        TEACHER_HAS_SOFTCAP,
        TEACHER_ROUNDED_TO,
        BLOCK_N,
        BLOCK_V,
        NUM_STAGES,
    )
    tl.store(value_ptr + rows, value, mask=counts)
    tl.store(slope_ptr + rows, slope, mask=counts)


@triton.jit
def normalisers(m, log_sum, teacher_m, teacher_log_sum):
    """Return what a row's terms need of both heads' statistics, (R, 1) each; the last is (z - y) - d."""
    offset = (m - teacher_m) + (log_sum - teacher_log_sum)
    return m, exp(-log_sum), teacher_m, exp(-teacher_log_sum), offset


@triton.jit
def diverge_rows(
    student,
    teacher,
    known,  # as `normalisers` returned it
    V,
    beta,
    TERMS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    ROUNDED_TO: tl.constexpr,
    TEACHER_HAS_SOFTCAP: tl.constexpr,
    TEACHER_ROUNDED_TO: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Sums of the divergence's terms and of k, (BLOCK_N,), from the rows' ends to their starts.

    Both are NaN where a row of either head has no finite logit, or a NaN.
    """
    LANES: tl.constexpr = BLOCK_V // 4
    value = tl.zeros((BLOCK_N, LANES), tl.float32)
    slope = tl.zeros((BLOCK_N, LANES), tl.float32)
    whole = V // BLOCK_V * BLOCK_V
    if whole < V:
        value, slope = diverge_step(
            value,
            slope,
            student,
            teacher,
            known,
            whole,
            V,
            beta,
            TERMS,
            HAS_SOFTCAP,
            ROUNDED_TO,
            TEACHER_HAS_SOFTCAP,
            TEACHER_ROUNDED_TO,
        )
    for back in tl.range(BLOCK_V, whole + BLOCK_V, BLOCK_V, num_stages=NUM_STAGES):
        value, slope = diverge_step(
            value,
            slope,
            student,
            teacher,
            known,
            whole - back,
            None,
            beta,
            TERMS,
            HAS_SOFTCAP,
            ROUNDED_TO,
            TEACHER_HAS_SOFTCAP,
            TEACHER_ROUNDED_TO,
        )
    offset = tl.reshape(known[4], (BLOCK_N,))
    odd = offset - offset  # 0, or NaN
    return sum_lanes(value) + odd, sum_lanes(slope) + odd


@triton.jit
def diverge_step(
    value, slope, student, teacher, known, start, end, beta, TERMS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, ROUNDED_TO: tl.constexpr,
    TEACHER_HAS_SOFTCAP: tl.constexpr, TEACHER_ROUNDED_TO: tl.constexpr,
):  # fmt: skip
    """Four columns more for every lane, from `start` on, to where the vocabulary ends; None if it does not end here."""
    z0, z1, z2, z3 = load_logits(student, start, end, HAS_SOFTCAP, ROUNDED_TO, value.shape[1])
    y0, y1, y2, y3 = load_logits(teacher, start, end, TEACHER_HAS_SOFTCAP, TEACHER_ROUNDED_TO, value.shape[1])
    value0, k0 = terms(z0, y0, known, beta, TERMS)
    value1, k1 = terms(z1, y1, known, beta, TERMS)
    value2, k2 = terms(z2, y2, known, beta, TERMS)
    value3, k3 = terms(z3, y3, known, beta, TERMS)
    return value + ((value0 + value1) + (value2 + value3)), slope + ((k0 + k1) + (k2 + k3))


@triton.jit
def load_logits(head, start, end, HAS_SOFTCAP: tl.constexpr, ROUNDED_TO: tl.constexpr, W: tl.constexpr):
    """Four tiles (R, W) of a head's scaled logits side by side, -inf beyond the vocabulary: terms and k are 0 there."""
    row_ptrs, bias_ptr, inner, outer = head
    x0, x1, x2, x3, id0, id1, id2, id3 = load_step(row_ptrs, bias_ptr, start, end, ROUNDED_TO, W)
    z0 = logits(x0, id0, end, inner, outer, HAS_SOFTCAP)
    z1 = logits(x1, id1, end, inner, outer, HAS_SOFTCAP)
    z2 = logits(x2, id2, end, inner, outer, HAS_SOFTCAP)
    z3 = logits(x3, id3, end, inner, outer, HAS_SOFTCAP)
    return z0, z1, z2, z3


@triton.jit
def terms(z, y, known, beta, TERMS: tl.constexpr):
    """The terms of the divergence, and k, of the scaled logits of student and teacher, (R, W)."""
    m, inv_sum, teacher_m, teacher_inv_sum, offset = known
    d = z - y
    d = tl.where(d == d, d - offset, 0.0)  # of -inf and -inf: p = q = 0
    ahead = d >= 0.0
    lead = exp_term(tl.where(ahead, z - m, y - teacher_m)) * tl.where(ahead, inv_sum, teacher_inv_sum)
    return TERMS(d, lead, beta)
