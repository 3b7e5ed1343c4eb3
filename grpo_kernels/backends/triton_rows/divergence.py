"""Divergences of one head's rows from another's: formulas compiled, and their sums.

Triton compiles the text of `backends.divergence`, with the functions below instead of torch's. All
kernels take the offset between z - y and log p - log q from the stored statistics, so that terms
and k of equal rows are exactly 0.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.backends import Chunk, DivergenceStats, RowStats, divergence
from grpo_kernels.backends.triton_rows.device import RowConfig
from grpo_kernels.backends.triton_rows.mathfn import (
    clamp_max,
    compiled,
    exp,
    exp_term,
    full_like,
    log1p,
    where,
)
from grpo_kernels.backends.triton_rows.reduce import sum_lanes
from grpo_kernels.backends.triton_rows.transform import (
    PER_ROW,
    head_arguments,
    load_scaled,
    row_block,
    row_pointers,
    scaled,
)

DEGREE = tl.constexpr(divergence.SERIES_LENGTH[torch.float32] - 1)  # of the series
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
    """The polynomial with these coefficients, in ascending order."""
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
    "tl": tl,  # the interpreter looks it up
    "exp": exp_term,  # precise enough: arguments are <= 0, results are terms of a sum
    **{
        f.__name__: f
        for f in (clamp_max, full_like, log1p, magnitude, mixture_series, phi_series, where)
    },
    **{
        name: tl.constexpr(getattr(divergence, name))
        for name in ("INF", "FAR", "NEAR", "NEAR_MIXTURE", "ALMOST")
    },
}
compiled(divergence.powers, _NAMES)
_TERM_FUNCTIONS = {
    f: compiled(f, _NAMES) for f in (divergence.forward, divergence.reverse, divergence.mixed)
}


def reference_arguments(chunk: Chunk, diverged: DivergenceStats) -> dict[str, Any]:
    """Kernel arguments that describe a chunk's reference and the divergence, except its value."""
    assert chunk.reference is not None
    arguments = head_arguments(chunk.reference.logits, chunk.reference.transform).items()
    return {
        **{("REFERENCE_" if name.isupper() else "reference_") + name: x for name, x in arguments},
        "jsd_beta": chunk.jsd_beta,
        "DIVERGENCE": _TERM_FUNCTIONS[divergence.terms_function(chunk.jsd_beta)],
        "reference_max_logit_ptr": diverged.reference_max_logit,
        "reference_log_sum_ptr": diverged.reference_log_sum,
        "sum_k_ptr": diverged.sum_k,
    }


def launch_diverge(
    chunk: Chunk, stats: RowStats, reference_stats: RowStats, config: RowConfig
) -> tuple[Tensor, Tensor]:
    """Compute the divergence and the sum of k, (n,) each, of a chunk with a reference."""
    (n, vocab), new = chunk.logits.shape, chunk.logits.new_empty
    diverged = DivergenceStats(new(n), new(n), reference_stats.max_logit, reference_stats.log_sum)
    diverge_kernel[(triton.cdiv(n, config.block_n),)](
        n=n,
        V=vocab,
        **head_arguments(chunk.logits, chunk.transform),
        **reference_arguments(chunk, diverged),
        max_logit_ptr=stats.max_logit,
        log_sum_ptr=stats.log_sum,
        value_ptr=diverged.value,
        **config.for_two_heads(vocab).arguments(),
    )
    return diverged.value, diverged.sum_k


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=PER_ROW)
def diverge_kernel(
    # data: (n, V), (n, V)
    logits_ptr, reference_logits_ptr,
    # statistics: (n,)
    max_logit_ptr, log_sum_ptr, reference_max_logit_ptr, reference_log_sum_ptr,
    # results: (n,)
    value_ptr, sum_k_ptr,
    # shapes and strides
    n, V, stride_n, reference_stride_n,
    # the divergence
    jsd_beta, DIVERGENCE: tl.constexpr,
    # the transforms: (V,), (n,), numbers
    bias_ptr, inv_t_ptr, inner, outer,
    reference_bias_ptr, reference_inv_t_ptr, reference_inner, reference_outer,
    HAS_SOFTCAP: tl.constexpr, ROUNDED_TO: tl.constexpr,
    REFERENCE_HAS_SOFTCAP: tl.constexpr, REFERENCE_ROUNDED_TO: tl.constexpr,
    # the tile
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """The divergence of `BLOCK_N` rows and the sum of their k, reading each row from its end.

    Both are NaN if a row of either head has no finite logit, or a NaN.
    """
    rows, is_row = row_block(tl.program_id(0), n, BLOCK_N)
    row_ptrs, inner, outer = row_pointers(
        logits_ptr, stride_n, rows, inv_t_ptr, inner, outer, HAS_SOFTCAP
    )
    source = (row_ptrs, bias_ptr, inner, outer)
    reference_ptrs, reference_inner, reference_outer = row_pointers(
        reference_logits_ptr, reference_stride_n, rows, reference_inv_t_ptr,
        reference_inner, reference_outer, REFERENCE_HAS_SOFTCAP,
    )  # fmt: skip
    reference = (reference_ptrs, reference_bias_ptr, reference_inner, reference_outer)
    norms = normalizers(
        tl.load(max_logit_ptr + rows)[:, None],
        tl.load(log_sum_ptr + rows)[:, None],
        tl.load(reference_max_logit_ptr + rows)[:, None],
        tl.load(reference_log_sum_ptr + rows)[:, None],
    )
    LANES: tl.constexpr = BLOCK_V // 4
    value = tl.zeros((BLOCK_N, LANES), tl.float32)
    sum_k = tl.zeros((BLOCK_N, LANES), tl.float32)
    whole = V // BLOCK_V * BLOCK_V
    if whole < V:
        value, sum_k = diverge_tile(
            value, sum_k, source, reference, norms, whole, V, jsd_beta, DIVERGENCE,
            HAS_SOFTCAP, ROUNDED_TO, REFERENCE_HAS_SOFTCAP, REFERENCE_ROUNDED_TO,
        )  # fmt: skip
    for back in tl.range(BLOCK_V, whole + BLOCK_V, BLOCK_V, num_stages=NUM_STAGES):
        value, sum_k = diverge_tile(
            value, sum_k, source, reference, norms, whole - back, None, jsd_beta, DIVERGENCE,
            HAS_SOFTCAP, ROUNDED_TO, REFERENCE_HAS_SOFTCAP, REFERENCE_ROUNDED_TO,
        )  # fmt: skip
    offset = tl.reshape(norms[4], (BLOCK_N,))
    nan_or_0 = offset - offset
    value = sum_lanes(value) + nan_or_0
    sum_k = sum_lanes(sum_k) + nan_or_0
    tl.store(value_ptr + rows, value, mask=is_row)
    tl.store(sum_k_ptr + rows, sum_k, mask=is_row)


@triton.jit
def normalizers(m, log_sum, reference_m, reference_log_sum):
    """(m, 1 / sum) of both heads and the offset (z - y) - (log p - log q), (R, 1) each."""
    offset = (m - reference_m) + (log_sum - reference_log_sum)
    return m, exp(-log_sum), reference_m, exp(-reference_log_sum), offset


@triton.jit
def diverge_tile(
    value, sum_k, source, reference, norms, start, end, jsd_beta, DIVERGENCE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, ROUNDED_TO: tl.constexpr,
    REFERENCE_HAS_SOFTCAP: tl.constexpr, REFERENCE_ROUNDED_TO: tl.constexpr,
):  # fmt: skip
    """Add four columns to each lane; columns beyond the vocabulary add 0."""
    W: tl.constexpr = value.shape[1]
    z0, z1, z2, z3, _id0, _id1, _id2, _id3 = load_scaled(
        source, start, end, HAS_SOFTCAP, ROUNDED_TO, W
    )
    y0, y1, y2, y3, _id0, _id1, _id2, _id3 = load_scaled(
        reference, start, end, REFERENCE_HAS_SOFTCAP, REFERENCE_ROUNDED_TO, W
    )
    value0, k0 = terms(z0, y0, norms, jsd_beta, DIVERGENCE)
    value1, k1 = terms(z1, y1, norms, jsd_beta, DIVERGENCE)
    value2, k2 = terms(z2, y2, norms, jsd_beta, DIVERGENCE)
    value3, k3 = terms(z3, y3, norms, jsd_beta, DIVERGENCE)
    return value + ((value0 + value1) + (value2 + value3)), sum_k + ((k0 + k1) + (k2 + k3))


@triton.jit
def terms(z, y, norms, jsd_beta, DIVERGENCE: tl.constexpr):
    """The divergence's terms, and k, from logits z and the reference's logits y, (R, W)."""
    m, inv_sum, reference_m, reference_inv_sum, offset = norms
    d = z - y
    d = tl.where(d == d, d - offset, 0.0)  # -inf - -inf: p = q = 0
    ahead = d >= 0.0
    lead = exp_term(tl.where(ahead, z - m, y - reference_m)) * tl.where(
        ahead, inv_sum, reference_inv_sum
    )
    return DIVERGENCE(d, lead, jsd_beta)


@triton.jit
def k_of(
    x, y, source, reference, norms, jsd_beta, DIVERGENCE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, REFERENCE_HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """k from the student's x and the reference's y (`load_biased`), (R, W)."""
    z = scaled(x, source, HAS_SOFTCAP)
    _value, k = terms(z, scaled(y, reference, REFERENCE_HAS_SOFTCAP), norms, jsd_beta, DIVERGENCE)
    return k
