"""Row statistics of a chunk of logits: log-probability, maximum, log sum, entropy, and others if asked for.

One program owns whole rows and reads each once. The number of lanes (`BLOCK_V`) depends on the vocabulary alone. So the
bits of a row depend neither on the other rows nor on the row's place among them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.backends.interface import Chunk, RowStats
from grpo_kernels.backends.triton_rows.configs import RowConfig
from grpo_kernels.backends.triton_rows.mathfn import log1p
from grpo_kernels.backends.triton_rows.reduce import finish, target_logp
from grpo_kernels.backends.triton_rows.steps import load_at, reduce_rows, row_block
from grpo_kernels.backends.triton_rows.transform import PER_ROW, chunk_arguments, head_rows, scaled


def launch_stats(
    chunk: Chunk, config: RowConfig, *, entropy: bool, extras: tuple[str, ...]
) -> RowStats:
    """The statistics of the rows of `chunk`."""
    stats = new_statistics(chunk.logits, entropy=entropy, extras=extras)
    grid = (triton.cdiv(len(chunk.logits), config.block_n),)
    stats_kernel[grid](**chunk_arguments(chunk), **pointers(stats), **config.arguments())
    return stats


def new_statistics(logits: Tensor, *, entropy: bool, extras: tuple[str, ...]) -> RowStats:
    """Memory for the statistics of each row."""
    n = len(logits)
    more = {
        name: logits.new_empty(n, dtype=torch.bool if name == "is_top1" else None)
        for name in extras
    }
    logps, max_logit, log_sum = (logits.new_empty(n) for _ in range(3))
    return RowStats(logps, max_logit, log_sum, logits.new_empty(n) if entropy else None, more)


def pointers(stats: RowStats) -> dict[str, Tensor | None]:
    """Kernel arguments: the pointers that `store_statistics` writes to."""
    return {
        "logps_ptr": stats.logps,
        "max_logit_ptr": stats.max_logit,
        "log_sum_ptr": stats.log_sum,
        "entropies_ptr": stats.entropies,
        "log_sum_sq_probs_ptr": stats.extras.get("log_sum_sq_probs"),
        "mean_logits_ptr": stats.extras.get("mean_logits"),
        "is_top1_ptr": stats.extras.get("is_top1"),
    }


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=PER_ROW)
def stats_kernel(
    # data: (n, V), (n,)
    logits_ptr,
    ids_ptr,
    # results: (n,)
    logps_ptr,
    max_logit_ptr,
    log_sum_ptr,
    entropies_ptr,
    log_sum_sq_probs_ptr,
    mean_logits_ptr,
    is_top1_ptr,
    # shapes and strides
    n,
    V,
    stride_n,
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
    """Statistics of `BLOCK_N` rows; a pointer is None where its result is not wanted."""
    rows, is_row = row_block(tl.program_id(0), n, BLOCK_N)
    row_ptrs, inner, outer = head_rows(
        logits_ptr, stride_n, rows, inv_t_ptr, inner, outer, HAS_SOFTCAP
    )
    head = (row_ptrs, bias_ptr, inner, outer)
    ids = tl.load(ids_ptr + rows)
    results = (
        logps_ptr, max_logit_ptr, log_sum_ptr, entropies_ptr, log_sum_sq_probs_ptr, mean_logits_ptr, is_top1_ptr,
    )  # fmt: skip
    sums = reduce_rows(
        head, V, HAS_SOFTCAP, ROUNDED_TO, sums_for(results), BLOCK_N, BLOCK_V, NUM_STAGES
    )
    x_target = load_at(head, ids, (ids >= 0) & (ids < V), ROUNDED_TO)
    z_target = tl.reshape(scaled(x_target, head, HAS_SOFTCAP), ids.shape)
    store_statistics(rows, is_row, ids, V, sums, z_target, results)


@triton.jit
def sums_for(results):
    """Return `wanted` (see `steps`) for `results`: a pointer is None where its result is not wanted."""
    _logps, _max_logit, _log_sum, entropies, log_sum_sq_probs, mean_logits, is_top1 = results
    return (
        entropies is not None,
        log_sum_sq_probs is not None,
        mean_logits is not None,
        is_top1 is not None,
    )


@triton.jit
def store_statistics(rows, is_row, ids, V, sums, z_target, results):
    """Store the wanted results of the rows that count; return rest and log_sum, as `finish` does, and logp.

    The sums are those of whole rows, as `merge_lanes` returned them, z_target (R,) the targets' z. `results` is a tuple
    of pointers in the order of the kernel's arguments, None where a result is not wanted.
    """
    m, rest, t, squares, total, top_id = sums
    (
        logps_ptr,
        max_logit_ptr,
        log_sum_ptr,
        entropies_ptr,
        log_sum_sq_probs_ptr,
        mean_logits_ptr,
        is_top1_ptr,
    ) = results
    rest, log_sum, entropy = finish(m, rest, t)
    logp = target_logp(m, rest, z_target)
    tl.store(logps_ptr + rows, logp, mask=is_row)
    tl.store(max_logit_ptr + rows, m, mask=is_row)
    tl.store(log_sum_ptr + rows, log_sum, mask=is_row)
    if entropies_ptr is not None:
        tl.store(entropies_ptr + rows, entropy, mask=is_row)
    if log_sum_sq_probs_ptr is not None:
        # sum p^2 = (1 + squares) / (1 + rest)^2
        tl.store(log_sum_sq_probs_ptr + rows, log1p(squares) - 2.0 * log_sum, mask=is_row)
    if mean_logits_ptr is not None:
        tl.store(mean_logits_ptr + rows, total / V, mask=is_row)
    if is_top1_ptr is not None:
        tl.store(is_top1_ptr + rows, (top_id == ids) & (log_sum == log_sum), mask=is_row)
    return rest, log_sum, logp
