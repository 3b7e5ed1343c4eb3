"""d loss / d (raw projection) of a chunk of logits from its statistics, element by element."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.backends.rows import LogitTransform, RowStats
from grpo_kernels.backends.triton_rows.configs import RowConfig
from grpo_kernels.backends.triton_rows.mathfn import exp, exp_term, expm1
from grpo_kernels.backends.triton_rows.reduce import LOWEST
from grpo_kernels.backends.triton_rows.stats import row_block
from grpo_kernels.backends.triton_rows.transform import PER_ROW, arguments, load_projection, row_factors, scaled, slope


def launch_grad(
    logits: Tensor,  # (n, V)
    ids: Tensor,  # (n,)
    stats: RowStats,
    a: Tensor,  # (n,)
    b: Tensor | None,  # (n,)
    transform: LogitTransform,
    out: Tensor,  # (n, V), may be `logits`
    config: RowConfig,
    *,
    first_id: int,
) -> None:
    """Write d loss / d (raw projection) to `out`."""
    n, vocab = logits.shape
    grid = (triton.cdiv(n, config.block_n) * triton.cdiv(vocab, config.block_v),)
    grad_kernel[grid](
        # data
        logits_ptr=logits,
        out_ptr=out,
        ids_ptr=ids,
        # statistics and coefficients
        logps_ptr=stats.logps,
        max_logit_ptr=stats.max_logit,
        log_sum_ptr=stats.log_sum,
        entropies_ptr=None if b is None else stats.entropies,
        a_ptr=a.contiguous(),  # the gradient of a sum may be one number, expanded
        b_ptr=None if b is None else b.contiguous(),
        # shapes and strides
        n=n,
        V=vocab,
        first_id=first_id,
        stride_n=logits.stride(0),
        stride_out_n=out.stride(0),
        # the transform
        **arguments(transform),
        # the tile
        BLOCK_N=config.block_n,
        BLOCK_V=config.block_v,
        num_warps=config.num_warps,
        enable_fp_fusion=False,
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
):
    """One tile of the gradient; without `b_ptr` the entropy has no part in it."""
    tiles_v = tl.cdiv(V, BLOCK_V)
    rows, counts = row_block(tl.program_id(0) // tiles_v, n, BLOCK_N)
    columns = (tl.program_id(0) % tiles_v) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    inner, outer = row_factors(inv_t_ptr, rows[:, None], inner, outer, HAS_SOFTCAP)
    entropy = 0.0
    b = 0.0
    if b_ptr is not None:
        entropy = tl.load(entropies_ptr + rows)
        b = tl.load(b_ptr + rows)
    a = tl.load(a_ptr + rows)
    inv_sum, offset, at_target = row_terms(
        tl.load(logps_ptr + rows), tl.load(log_sum_ptr + rows), entropy, a, b, b_ptr is not None
    )
    write_gradient(
        logits_ptr + rows.to(tl.int64)[:, None] * stride_n + columns,
        out_ptr + rows.to(tl.int64)[:, None] * stride_out_n + columns,
        bias_ptr, columns, (columns < V) & counts[:, None],
        tl.load(ids_ptr + rows) - first_id, tl.load(max_logit_ptr + rows), inv_sum, offset, at_target, a, b,
        b_ptr is not None, inner, outer, HAS_SOFTCAP, ROUNDED_TO,
    )  # fmt: skip


@triton.jit
def row_terms(logp, log_sum, entropy, a, b, HAS_ENTROPY_GRADIENT: tl.constexpr):
    """What `write_gradient` needs of each row: 1 / sum_j e_j, entropy - log sum_j e_j, and d z of the target."""
    at_target = a * -expm1(logp)  # 1 - p_y
    offset = log_sum
    if HAS_ENTROPY_GRADIENT:
        offset = entropy - log_sum
        at_target -= b * exp(logp) * (tl.where(logp < LOWEST, LOWEST, logp) + entropy)
    return exp(-log_sum), offset, at_target


@triton.jit
def write_gradient(
    # the tile: (R, W) pointers, (V,), (1, W) ids, (R, W)
    x_ptrs,
    out_ptrs,
    bias_ptr,
    columns,
    mask,
    # of the rows: (R,)
    target,
    m,
    inv_sum,
    offset,
    at_target,
    a,
    b,
    HAS_ENTROPY_GRADIENT: tl.constexpr,
    # the transform
    inner,
    outer,
    HAS_SOFTCAP: tl.constexpr,
    ROUNDED_TO: tl.constexpr,
):
    """One tile (R, W), with numbers of the rows (R,): d z_j = a (1[j = y] - p_j) - b p_j (log p_j + entropy).

    This times d z / d x is written. log p_j + entropy = (z_j - m) + offset.
    """
    x = load_projection(x_ptrs, bias_ptr, columns, mask, ROUNDED_TO)
    shifted = scaled(x, inner, outer, HAS_SOFTCAP) - m[:, None]
    d = -a[:, None]
    if HAS_ENTROPY_GRADIENT:
        d = d - b[:, None] * (tl.where(shifted < LOWEST, LOWEST, shifted) + offset[:, None])
    d = d * (exp_term(shifted) * inv_sum[:, None])
    d = tl.where(columns == target[:, None], at_target[:, None], d)
    d = d * slope(x, inner, outer, HAS_SOFTCAP)
    tl.store(out_ptrs, d.to(out_ptrs.dtype.element_ty), mask=mask)
