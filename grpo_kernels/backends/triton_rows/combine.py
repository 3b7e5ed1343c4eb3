"""Statistics of whole rows from the running sums of the parts of a vocabulary."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.backends.interface import RowStats
from grpo_kernels.backends.triton_rows.reduce import finish, merge, target_logp
from grpo_kernels.backends.triton_rows.steps import row_block

BLOCK_N = 4


def launch_combine(
    maxima: Tensor,  # (n, splits): m, rest and t of each part
    rests: Tensor,  # (n, splits)
    ts: Tensor,  # (n, splits)
    target: Tensor,  # (n,) the target's z
    ids: Tensor,  # (n,)
    vocab: int,
    *,
    entropy: bool,
) -> RowStats:
    """The statistics of n rows; the log-probability is NaN where the id is outside of [0, vocab)."""
    n, splits = maxima.shape
    logps, max_logit, log_sum = (maxima.new_empty(n) for _ in range(3))
    entropies = maxima.new_empty(n) if entropy else None
    if n > 0:
        combine_kernel[(triton.cdiv(n, BLOCK_N),)](
            # data
            max_ptr=maxima,
            rest_ptr=rests,
            t_ptr=ts,
            target_ptr=target,
            ids_ptr=ids,
            # results
            logps_ptr=logps,
            max_logit_ptr=max_logit,
            log_sum_ptr=log_sum,
            entropies_ptr=entropies,
            # sizes
            n=n,
            V=vocab,
            splits=splits,
            # the tile
            BLOCK_N=BLOCK_N,
            BLOCK_S=triton.next_power_of_2(splits),
            num_warps=4,
            enable_fp_fusion=False,
        )
    return RowStats(logps, max_logit, log_sum, entropies)


@triton.jit(do_not_specialize=["n", "V", "splits"])
def combine_kernel(
    max_ptr,
    rest_ptr,
    t_ptr,
    target_ptr,
    ids_ptr,
    logps_ptr,
    max_logit_ptr,
    log_sum_ptr,
    entropies_ptr,
    n,
    V,
    splits,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Make the statistics of `BLOCK_N` rows from their parts (n, splits)."""
    rows, is_row = row_block(tl.program_id(0), n, BLOCK_N)
    offs_s = tl.arange(0, BLOCK_S)[None, :]
    at = rows.to(tl.int64)[:, None] * splits + offs_s
    m = tl.load(max_ptr + at, mask=offs_s < splits, other=float("-inf"))
    rest = tl.load(rest_ptr + at, mask=offs_s < splits, other=0.0)
    t = tl.load(t_ptr + at, mask=offs_s < splits, other=0.0)
    m, rest, t, _e, _is_first = merge(m, rest, t)
    rest, log_sum, entropy = finish(m, rest, t)
    ids = tl.load(ids_ptr + rows)
    logp = target_logp(m, rest, tl.load(target_ptr + rows))
    tl.store(logps_ptr + rows, tl.where((ids >= 0) & (ids < V), logp, float("nan")), mask=is_row)
    tl.store(max_logit_ptr + rows, m, mask=is_row)
    tl.store(log_sum_ptr + rows, log_sum, mask=is_row)
    if entropies_ptr is not None:
        tl.store(entropies_ptr + rows, entropy, mask=is_row)
