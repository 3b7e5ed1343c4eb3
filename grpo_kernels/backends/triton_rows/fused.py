"""A whole `FusedLoss` of one head in one launch: statistics, loss, and d loss / d (raw logits).

The first pass over a row is the pass of `stats`, with the same bits. If a gradient is wanted, the
second is the pass of `grad`, backwards from the row's end, which the cache may still hold. The loss
in between is that of `objective/policy.py` for tokens that are not coupled: the surrogate and the
KL estimator are compiled from `formulas` (`mathfn`), the rest is written here and, in C++, in
csrc/fused_loss.h. tests/support/row_suite.py compares each kernel with float64, and
tests/call/test_differential.py all three.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.backends import LOSS_STATS, Chunk, FusedLoss, RowStats
from grpo_kernels.backends.triton_rows.device import RowConfig
from grpo_kernels.backends.triton_rows.grad import (
    barrier,
    level_and_tilt,
    store_target,
    target_gradient,
    through_transform,
    write_tile,
)
from grpo_kernels.backends.triton_rows.mathfn import ESTIMATORS, SURROGATES, exp, times_or_zero
from grpo_kernels.backends.triton_rows.reduce import finish, reduce_rows, target_logp
from grpo_kernels.backends.triton_rows.transform import (
    PER_ROW,
    chunk_arguments,
    load_at,
    row_block,
    row_pointers,
    scaled,
)


def launch_fused(
    chunk: Chunk,  # an id outside of [0, V) is invalid: logp, loss and d_logp are NaN
    loss: FusedLoss,
    out: Tensor | None,  # (n, V), may be the chunk's logits
    config: RowConfig,
) -> RowStats:
    """Compute all statistics; write d loss / d (raw logits) to `out` if given."""
    n, new = len(chunk.logits), chunk.logits.new_empty
    stats: dict[str, Any] = {x: new(n) for x in ("logps", "max_logit", "log_sum", "entropies")}
    loss_stats = {name: new(n) for name in loss.stat_names}
    results = stats | dict.fromkeys(LOSS_STATS) | loss_stats
    fused_kernel[(triton.cdiv(n, config.block_n),)](
        **chunk_arguments(chunk),
        # the loss
        advantages_ptr=loss.advantages, d_policy_ptr=loss.d_policy, weights_ptr=loss.weights,
        old_ptr=loss.old, ref_ptr=loss.ref, gate_ptr=loss.gate,
        constants=loss.constants, beta=loss.beta, d_entropy=loss.d_entropy,
        SURROGATE=SURROGATES[loss.surrogate], IS_LINEAR=loss.is_linear,
        ESTIMATOR=ESTIMATORS[loss.kl_estimator], CORRECTS_KL=loss.corrects_kl,
        HAS_ENTROPY_GRADIENT=loss.d_entropy != 0.0,
        # results
        **{f"{name}_ptr": x for name, x in results.items()},
        out_ptr=out, stride_out_n=0 if out is None else out.stride(0),
        **config.arguments(),
    )  # fmt: skip
    return RowStats(**stats, loss_stats=loss_stats)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=PER_ROW)
def fused_kernel(
    # data: (n, V), (n, V), (n,)
    logits_ptr, out_ptr, ids_ptr,
    # tokens: (n,)
    advantages_ptr, d_policy_ptr, weights_ptr, old_ptr, ref_ptr, gate_ptr,
    # results: (n,)
    logps_ptr, max_logit_ptr, log_sum_ptr, entropies_ptr,
    loss_ptr, d_logp_ptr, log_ratio_ptr, kl_ptr,
    # shapes and strides
    n, V, stride_n, stride_out_n,
    # the loss
    constants, beta, d_entropy, SURROGATE: tl.constexpr, IS_LINEAR: tl.constexpr,
    ESTIMATOR: tl.constexpr, CORRECTS_KL: tl.constexpr, HAS_ENTROPY_GRADIENT: tl.constexpr,
    # the transform: (V,), (n,), numbers
    bias_ptr, inv_t_ptr, inner, outer, HAS_SOFTCAP: tl.constexpr, ROUNDED_TO: tl.constexpr,
    # the tile
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """`BLOCK_N` rows, from raw logits to loss and, with `out_ptr`, gradient."""
    rows, is_row = row_block(tl.program_id(0), n, BLOCK_N)
    row_ptrs, inner, outer = row_pointers(
        logits_ptr, stride_n, rows, inv_t_ptr, inner, outer, HAS_SOFTCAP
    )
    source = (row_ptrs, bias_ptr, inner, outer)  # see `row_pointers`
    wanted = (True, False, False, False)  # which sums, see reduce.py
    m, rest, weighted, _squares, _total, _top_id = reduce_rows(
        source, V, HAS_SOFTCAP, ROUNDED_TO, wanted, BLOCK_N, BLOCK_V, NUM_STAGES
    )
    ids = tl.load(ids_ptr + rows)
    is_id = (ids >= 0) & (ids < V)
    x_target = load_at(source, ids, is_id, ROUNDED_TO)
    z_target = tl.reshape(scaled(x_target, source, HAS_SOFTCAP), ids.shape)
    rest, log_sum, entropy = finish(m, rest, weighted)
    logp = tl.where(is_id, target_logp(m, rest, z_target), float("nan"))

    weight = tl.load(weights_ptr + rows)
    if old_ptr is None:  # on-policy
        log_ratio = tl.where(logp == logp, 0.0, logp)
        d_logp = tl.load(d_policy_ptr + rows)
        loss = logp - logp  # NaN without a finite log-probability: nothing else makes it NaN
        if IS_LINEAR:
            loss += times_or_zero(logp, d_logp)
    else:
        log_ratio = logp - tl.load(old_ptr + rows)
        loss, d_log_ratio, d_logp_at_fixed_ratio = SURROGATE(
            log_ratio, tl.load(advantages_ptr + rows), logp, *constants
        )
        if gate_ptr is not None:
            gate = tl.load(gate_ptr + rows)
            loss = times_or_zero(loss, gate)
            d_log_ratio = times_or_zero(d_log_ratio, gate)
            d_logp_at_fixed_ratio = times_or_zero(d_logp_at_fixed_ratio, gate)
        loss = weight * loss
        d_logp = weight * d_log_ratio + weight * d_logp_at_fixed_ratio
    if ref_ptr is not None:
        kl, d_kl, d_corrected = ESTIMATOR(logp, tl.load(ref_ptr + rows))
        if CORRECTS_KL:
            ratio = exp(log_ratio)
            kl = times_or_zero(ratio, kl)
            d_kl = times_or_zero(ratio, d_corrected)
        loss += beta * weight * kl
        d_logp += beta * weight * d_kl
        tl.store(kl_ptr + rows, kl, mask=is_row)
    d_logp = tl.where(logp == logp, d_logp, logp)  # nothing else makes it NaN on-policy
    loss = tl.where(logp == logp, loss, logp)

    tl.store(logps_ptr + rows, logp, mask=is_row)
    tl.store(max_logit_ptr + rows, m, mask=is_row)
    tl.store(log_sum_ptr + rows, log_sum, mask=is_row)
    tl.store(entropies_ptr + rows, entropy, mask=is_row)
    tl.store(loss_ptr + rows, loss, mask=is_row)
    tl.store(d_logp_ptr + rows, d_logp, mask=is_row)
    tl.store(log_ratio_ptr + rows, log_ratio, mask=is_row)
    if out_ptr is not None:
        d_entropies = tl.zeros_like(d_logp) + d_entropy
        level, tilt = level_and_tilt(
            source, log_sum[:, None], entropy[:, None], d_logp[:, None], d_entropies[:, None],
            HAS_ENTROPY_GRADIENT, HAS_SOFTCAP,
        )  # fmt: skip
        out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * stride_out_n
        barrier()  # `out` may be `logits`: all threads must have read before one writes
        whole = V // BLOCK_V * BLOCK_V
        if whole < V:
            write_tile(
                source, out_ptrs, whole, V, is_row, m[:, None], level, tilt,
                HAS_ENTROPY_GRADIENT, HAS_SOFTCAP, ROUNDED_TO, BLOCK_V,
            )  # fmt: skip
        for back in tl.range(BLOCK_V, whole + BLOCK_V, BLOCK_V, num_stages=NUM_STAGES):
            write_tile(
                source, out_ptrs, whole - back, None, is_row, m[:, None], level, tilt,
                HAS_ENTROPY_GRADIENT, HAS_SOFTCAP, ROUNDED_TO, BLOCK_V,
            )  # fmt: skip
        d_target = target_gradient(
            logp[:, None], entropy[:, None], d_logp[:, None], d_entropies[:, None],
            HAS_ENTROPY_GRADIENT,
        )  # fmt: skip
        d_target = through_transform(d_target, x_target, source, HAS_SOFTCAP)
        # overwrites a column that `write_tile` wrote, after a barrier
        store_target(out_ptrs, ids, is_id & is_row, d_target)
