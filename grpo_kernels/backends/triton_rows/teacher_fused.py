"""A whole `TokenLoss` with the divergence from a teacher as its KL term, in one launch: see `fused`.

Three passes over both rows: the statistics (the student's with the bits of `stats`), the divergence (with the bits of
`diverge`), and the gradient. Each begins where the one before it ended, which the cache may still hold.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.backends.interface import Chunk, DivergenceStats, RowStats
from grpo_kernels.backends.triton_rows.barrier import barrier
from grpo_kernels.backends.triton_rows.configs import RowConfig
from grpo_kernels.backends.triton_rows.divergence import (
    diverge_rows,
    k_of,
    normalisers,
    teacher_arguments,
)
from grpo_kernels.backends.triton_rows.fused import loss_arguments, policy_loss
from grpo_kernels.backends.triton_rows.grad import (
    of_raw,
    row_terms,
    store_target,
    target_gradient,
    write_gradient,
)
from grpo_kernels.backends.triton_rows.mathfn import exp
from grpo_kernels.backends.triton_rows.reduce import finish, target_logp
from grpo_kernels.backends.triton_rows.steps import (
    load_at,
    merge_lanes,
    no_logits,
    reduce_step,
    row_block,
)
from grpo_kernels.backends.triton_rows.transform import (
    PER_ROW,
    chunk_arguments,
    head_rows,
    row_slope,
    scaled,
)
from grpo_kernels.token_loss.record import TokenLoss


def launch_teacher_fused(
    chunk: Chunk,  # an id of -1 is invalid: logp and the loss's terms are NaN, except the divergence
    loss: TokenLoss,
    out: Tensor | None,  # (n, V), may be the chunk's logits
    config: RowConfig,
) -> RowStats:
    """Statistics with the divergence's and the loss's terms; d loss / d (raw projection) goes to `out`."""
    assert loss.kl == "full" and chunk.teacher is not None, loss.kl
    n, new = len(chunk.logits), chunk.logits.new_empty
    logps, max_logit, log_sum, entropies = (new(n) for _ in range(4))
    divergence = DivergenceStats(*(new(n) for _ in range(4)))
    terms = {name: divergence.value if name == "kl" else new(n) for name in loss.terms}
    teacher_fused_kernel[(triton.cdiv(n, config.block_n),)](
        **chunk_arguments(chunk),
        **teacher_arguments(chunk.teacher, divergence),
        **loss_arguments(loss),
        # results
        logps_ptr=logps,
        max_logit_ptr=max_logit,
        log_sum_ptr=log_sum,
        entropies_ptr=entropies,
        value_ptr=divergence.value,
        loss_ptr=terms["loss"],
        d_logp_ptr=terms["d_logp"],
        log_ratio_ptr=terms["log_ratio"],
        out_ptr=out,
        stride_out_n=0 if out is None else out.stride(0),
        **config.for_two_heads(chunk.logits.shape[1]).arguments_with_register_limit(),
    )
    return RowStats(logps, max_logit, log_sum, entropies, terms=terms, divergence=divergence)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=PER_ROW)
def teacher_fused_kernel(
    # data: (n, V), (n, V), (n, V), (n,)
    logits_ptr,
    teacher_logits_ptr,
    out_ptr,
    ids_ptr,
    # tokens: (n,)
    advantages_ptr,
    d_policy_ptr,
    weights_ptr,
    old_ptr,
    gate_ptr,
    # results: (n,)
    logps_ptr,
    max_logit_ptr,
    log_sum_ptr,
    entropies_ptr,
    value_ptr,
    sum_k_ptr,
    teacher_max_logit_ptr,
    teacher_log_sum_ptr,
    loss_ptr,
    d_logp_ptr,
    log_ratio_ptr,
    # shapes and strides
    n,
    V,
    stride_n,
    teacher_stride_n,
    stride_out_n,
    # the loss, and the divergence in it
    constants,
    beta,
    d_entropy,
    jsd_beta,
    SURROGATE: tl.constexpr,
    HAS_ENTROPY_GRADIENT: tl.constexpr,
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
    """`BLOCK_N` rows, from both raw projections to loss and, with `out_ptr`, gradient."""
    rows, is_row = row_block(tl.program_id(0), n, BLOCK_N)
    row_ptrs, inner, outer = head_rows(
        logits_ptr, stride_n, rows, inv_t_ptr, inner, outer, HAS_SOFTCAP
    )
    head = (row_ptrs, bias_ptr, inner, outer)
    teacher_ptrs, teacher_inner, teacher_outer = head_rows(
        teacher_logits_ptr, teacher_stride_n, rows, teacher_inv_t_ptr, teacher_inner, teacher_outer,
        TEACHER_HAS_SOFTCAP,
    )  # fmt: skip
    teacher = (teacher_ptrs, teacher_bias_ptr, teacher_inner, teacher_outer)
    m, rest, t, teacher_m, teacher_rest, teacher_t = reduce_both(
        head, teacher, V, HAS_SOFTCAP, ROUNDED_TO, TEACHER_HAS_SOFTCAP, TEACHER_ROUNDED_TO,
        BLOCK_N, BLOCK_V, NUM_STAGES,
    )  # fmt: skip
    rest, log_sum, entropy = finish(m, rest, t)
    _rest, teacher_log_sum, _entropy = finish(teacher_m, teacher_rest, teacher_t)
    ids = tl.load(ids_ptr + rows)
    x_target = load_at(head, ids, (ids >= 0) & (ids < V), ROUNDED_TO)
    z_target = tl.reshape(scaled(x_target, head, HAS_SOFTCAP), ids.shape)
    logp = tl.where(ids < 0, float("nan"), target_logp(m, rest, z_target))
    # stored before the rows are read again, and the ids loaded anew after it: this takes fewer registers
    tl.store(logps_ptr + rows, logp, mask=is_row)
    tl.store(max_logit_ptr + rows, m, mask=is_row)
    tl.store(log_sum_ptr + rows, log_sum, mask=is_row)
    tl.store(entropies_ptr + rows, entropy, mask=is_row)
    tl.store(teacher_max_logit_ptr + rows, teacher_m, mask=is_row)
    tl.store(teacher_log_sum_ptr + rows, teacher_log_sum, mask=is_row)
    known = normalisers(m[:, None], log_sum[:, None], teacher_m[:, None], teacher_log_sum[:, None])
    value, sum_k = diverge_rows(
        head, teacher, known, V, jsd_beta, TERMS,
        HAS_SOFTCAP, ROUNDED_TO, TEACHER_HAS_SOFTCAP, TEACHER_ROUNDED_TO, BLOCK_N, BLOCK_V, NUM_STAGES,
    )  # fmt: skip

    ids = tl.load(ids_ptr + rows)
    tokens = (advantages_ptr, d_policy_ptr, weights_ptr, old_ptr, gate_ptr)
    loss, d_logp, log_ratio, weight = policy_loss(rows, logp, tokens, constants, SURROGATE)
    d_divergence = beta * weight
    loss = tl.where(ids < 0, float("nan"), loss + d_divergence * value)
    d_logp = tl.where(ids < 0, float("nan"), d_logp)  # on-policy nothing else makes it NaN
    tl.store(value_ptr + rows, value, mask=is_row)
    tl.store(sum_k_ptr + rows, sum_k, mask=is_row)
    tl.store(loss_ptr + rows, loss, mask=is_row)
    tl.store(d_logp_ptr + rows, d_logp, mask=is_row)
    tl.store(log_ratio_ptr + rows, log_ratio, mask=is_row)
    if out_ptr is not None:
        sum_k, d_logp, d_divergence = sum_k[:, None], d_logp[:, None], d_divergence[:, None]
        logp, log_sum, entropy = logp[:, None], log_sum[:, None], entropy[:, None]
        d_entropies = tl.zeros_like(d_logp) + d_entropy
        taken_off = d_logp + d_divergence * sum_k
        level, tilt = row_terms(
            head, log_sum, entropy, taken_off, d_entropies, HAS_ENTROPY_GRADIENT, HAS_SOFTCAP
        )
        pair = (teacher, known, d_divergence * row_slope(head, HAS_SOFTCAP), jsd_beta)
        out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * stride_out_n
        mask = is_row & (ids >= 0) & (ids < V)
        x_target = load_at(head, ids, mask, ROUNDED_TO)
        y_target = load_at(teacher, ids, mask, TEACHER_ROUNDED_TO)
        d_target = target_gradient(logp, entropy, d_logp, d_entropies, HAS_ENTROPY_GRADIENT)
        k = k_of(
            x_target,
            y_target,
            head,
            teacher,
            known,
            jsd_beta,
            TERMS,
            HAS_SOFTCAP,
            TEACHER_HAS_SOFTCAP,
        )
        d_target += d_divergence * (k - exp(logp) * sum_k)
        d_target = of_raw(d_target, x_target, head, HAS_SOFTCAP)
        barrier()  # `out` may be `logits`: all threads have read before one writes
        whole = V // BLOCK_V * BLOCK_V
        for start in tl.range(0, whole, BLOCK_V, num_stages=NUM_STAGES):
            write_gradient(
                head, out_ptrs, start, None, is_row, known[0], level, tilt, HAS_ENTROPY_GRADIENT,
                HAS_SOFTCAP, ROUNDED_TO, BLOCK_V, pair, TERMS, TEACHER_HAS_SOFTCAP, TEACHER_ROUNDED_TO,
            )  # fmt: skip
        if whole < V:
            write_gradient(
                head, out_ptrs, whole, V, is_row, known[0], level, tilt, HAS_ENTROPY_GRADIENT,
                HAS_SOFTCAP, ROUNDED_TO, BLOCK_V, pair, TERMS, TEACHER_HAS_SOFTCAP, TEACHER_ROUNDED_TO,
            )  # fmt: skip
        ids = tl.load(ids_ptr + rows)
        store_target(out_ptrs, ids, is_row & (ids >= 0) & (ids < V), d_target)


@triton.jit
def reduce_both(
    head, teacher, V,
    HAS_SOFTCAP: tl.constexpr, ROUNDED_TO: tl.constexpr,
    TEACHER_HAS_SOFTCAP: tl.constexpr, TEACHER_ROUNDED_TO: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """(m, rest, t) of the student's rows and the teacher's, (BLOCK_N,) each: `reduce_rows` of both at once."""
    wanted = (True, False, False, False)
    wanted_of_teacher = (False, False, False, False)
    sums = no_logits(BLOCK_N, BLOCK_V // 4)
    teacher_sums = no_logits(BLOCK_N, BLOCK_V // 4)
    whole = V // BLOCK_V * BLOCK_V
    for start in tl.range(0, whole, BLOCK_V, num_stages=NUM_STAGES):
        sums = reduce_step(sums, head, start, None, HAS_SOFTCAP, ROUNDED_TO, wanted)
        teacher_sums = reduce_step(
            teacher_sums,
            teacher,
            start,
            None,
            TEACHER_HAS_SOFTCAP,
            TEACHER_ROUNDED_TO,
            wanted_of_teacher,
        )
    if whole < V:
        sums = reduce_step(sums, head, whole, V, HAS_SOFTCAP, ROUNDED_TO, wanted)
        teacher_sums = reduce_step(
            teacher_sums,
            teacher,
            whole,
            V,
            TEACHER_HAS_SOFTCAP,
            TEACHER_ROUNDED_TO,
            wanted_of_teacher,
        )
    m, rest, t, _squares, _total, _top_id = merge_lanes(sums, V, wanted)
    teacher_m, teacher_rest, teacher_t, _squares, _total, _top_id = merge_lanes(
        teacher_sums, V, wanted_of_teacher
    )
    return m, rest, t, teacher_m, teacher_rest, teacher_t
