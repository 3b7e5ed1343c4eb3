"""Row statistics of a chunk of logits: log-probability, maximum, log sum, entropy, and what is asked for besides.

One program owns whole rows and reads each once. How many lanes a row has (`BLOCK_V`) depends on the vocabulary alone,
and with that its bits: not on the other rows, nor on the row's place among them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.backends.rows import LogitTransform, RowStats
from grpo_kernels.backends.triton_rows.configs import RowConfig
from grpo_kernels.backends.triton_rows.mathfn import log1p
from grpo_kernels.backends.triton_rows.reduce import (
    finish,
    fold,
    fold_squares,
    merge,
    merge_squares,
    sum_lanes,
    target_logp,
)
from grpo_kernels.backends.triton_rows.transform import PER_ROW, arguments, load_projection, row_factors, scaled


def launch_stats(
    logits: Tensor,  # (n, V)
    ids: Tensor,  # (n,)
    transform: LogitTransform,
    config: RowConfig,
    *,
    entropy: bool,
    extras: tuple[str, ...],
) -> RowStats:
    """The statistics of the rows of `logits`."""
    n, vocab = logits.shape
    stats = new_statistics(logits, entropy=entropy, extras=extras)
    stats_kernel[(triton.cdiv(n, config.block_n),)](
        # data
        logits_ptr=logits,
        ids_ptr=ids,
        # results
        **pointers(stats),
        # shapes and strides
        n=n,
        V=vocab,
        stride_n=logits.stride(0),
        # the transform
        **arguments(transform),
        # the tile
        BLOCK_N=config.block_n,
        BLOCK_V=config.block_v,
        NUM_STAGES=config.num_stages,
        num_warps=config.num_warps,
        enable_fp_fusion=False,
    )
    return stats


def new_statistics(logits: Tensor, *, entropy: bool, extras: tuple[str, ...]) -> RowStats:
    """Memory for the statistics of each row."""
    n = len(logits)
    more = {name: logits.new_empty(n, dtype=torch.bool if name == "is_top1" else None) for name in extras}
    logps, max_logit, log_sum = (logits.new_empty(n) for _ in range(3))
    return RowStats(logps, max_logit, log_sum, logits.new_empty(n) if entropy else None, more)


def pointers(stats: RowStats) -> dict[str, Tensor | None]:
    """Where `store_statistics` puts them, by the names of a kernel's arguments."""
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
    """Statistics of `BLOCK_N` rows; a pointer that is None is a result nobody wants."""
    rows, counts = row_block(tl.program_id(0), n, BLOCK_N)
    inner, outer = row_factors(inv_t_ptr, rows[:, None], inner, outer, HAS_SOFTCAP)
    row_ptrs = logits_ptr + rows.to(tl.int64)[:, None] * stride_n
    ids = tl.load(ids_ptr + rows)
    m, rest, t, squares, total, top_id = reduce_rows(
        row_ptrs, bias_ptr, V, inner, outer, HAS_SOFTCAP, ROUNDED_TO,
        entropies_ptr is not None, log_sum_sq_probs_ptr is not None, mean_logits_ptr is not None,
        is_top1_ptr is not None, BLOCK_N, BLOCK_V, NUM_STAGES,
    )  # fmt: skip
    x_target = load_at(row_ptrs, bias_ptr, ids, (ids >= 0) & (ids < V), ROUNDED_TO)
    store_statistics(
        rows, counts, ids, V, m, rest, t, squares, total, top_id,
        tl.reshape(scaled(x_target, inner, outer, HAS_SOFTCAP), ids.shape),
        logps_ptr, max_logit_ptr, log_sum_ptr, entropies_ptr, log_sum_sq_probs_ptr, mean_logits_ptr, is_top1_ptr,
    )  # fmt: skip


@triton.jit
def store_statistics(
    rows,
    counts,
    ids,
    V,
    # of whole rows, as `merge_lanes` returned them, and the targets' z: (R,)
    m,
    rest,
    t,
    squares,
    total,
    top_id,
    z_target,
    # results
    logps_ptr,
    max_logit_ptr,
    log_sum_ptr,
    entropies_ptr,
    log_sum_sq_probs_ptr,
    mean_logits_ptr,
    is_top1_ptr,
):
    """Store what is wanted of the rows that count; returns rest as `finish` does, and logp."""
    rest, log_sum, entropy = finish(m, rest, t)
    logp = target_logp(m, rest, z_target)
    tl.store(logps_ptr + rows, logp, mask=counts)
    tl.store(max_logit_ptr + rows, m, mask=counts)
    tl.store(log_sum_ptr + rows, log_sum, mask=counts)
    if entropies_ptr is not None:
        tl.store(entropies_ptr + rows, entropy, mask=counts)
    if log_sum_sq_probs_ptr is not None:
        # sum p^2 = (1 + squares) / (1 + rest)^2
        tl.store(log_sum_sq_probs_ptr + rows, log1p(squares) - 2.0 * log_sum, mask=counts)
    if mean_logits_ptr is not None:
        tl.store(mean_logits_ptr + rows, total / V, mask=counts)
    if is_top1_ptr is not None:
        tl.store(is_top1_ptr + rows, top_id == ids, mask=counts)
    return rest, log_sum, logp


@triton.jit
def row_block(block, n, BLOCK_N: tl.constexpr):
    """The rows (BLOCK_N,) of a block, and which count: those past the last repeat it, so that all can be read."""
    rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
    return tl.minimum(rows, n - 1), rows < n


@triton.jit
def reduce_rows(
    row_ptrs,
    bias_ptr,
    V,
    inner,
    outer,
    HAS_SOFTCAP: tl.constexpr,
    ROUNDED_TO: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    WITH_SQUARES: tl.constexpr,
    WITH_TOTAL: tl.constexpr,
    WITH_TOP_ID: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """The running sums of whole rows (`reduce`), and sum of squares, sum of z, lowest id of the largest z; (BLOCK_N,).

    What is not asked for is some number. A step takes four tiles of `BLOCK_V` / 4 columns, one for each logit of `fold`.
    What is left over at the end, less than a step, is the only one with a mask.
    """
    LANES: tl.constexpr = BLOCK_V // 4
    m, rest, t, squares, total, top_id = no_logits(BLOCK_N, LANES)
    whole = V // BLOCK_V * BLOCK_V
    for start in tl.range(0, whole, BLOCK_V, num_stages=NUM_STAGES):
        m, rest, t, squares, total, top_id = reduce_step(
            m, rest, t, squares, total, top_id, row_ptrs, bias_ptr, start, None, inner, outer, HAS_SOFTCAP, ROUNDED_TO,
            WITH_ENTROPY, WITH_SQUARES, WITH_TOTAL, WITH_TOP_ID,
        )  # fmt: skip
    if whole < V:
        m, rest, t, squares, total, top_id = reduce_step(
            m, rest, t, squares, total, top_id, row_ptrs, bias_ptr, whole, V, inner, outer, HAS_SOFTCAP, ROUNDED_TO,
            WITH_ENTROPY, WITH_SQUARES, WITH_TOTAL, WITH_TOP_ID,
        )  # fmt: skip
    return merge_lanes(m, rest, t, squares, total, top_id, V, WITH_SQUARES, WITH_TOTAL, WITH_TOP_ID)


@triton.jit
def no_logits(R: tl.constexpr, LANES: tl.constexpr):
    """The sums (R, LANES) of `reduce_rows` before the first logit."""
    m = tl.full((R, LANES), float("-inf"), tl.float32)
    nothing = tl.zeros((R, LANES), tl.float32)
    return m, nothing, nothing, nothing, nothing, tl.zeros((R, LANES), tl.int32)


@triton.jit
def reduce_step(
    # of each lane: (R, W)
    m,
    rest,
    t,
    squares,
    total,
    top_id,
    # the columns from `start` on, to where the vocabulary ends; `end` is None if it does not end here
    row_ptrs,
    bias_ptr,
    start,
    end,
    inner,
    outer,
    HAS_SOFTCAP: tl.constexpr,
    ROUNDED_TO: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    WITH_SQUARES: tl.constexpr,
    WITH_TOTAL: tl.constexpr,
    WITH_TOP_ID: tl.constexpr,
):
    """Four logits more for every lane."""
    x0, x1, x2, x3, id0, id1, id2, id3 = load_step(row_ptrs, bias_ptr, start, end, ROUNDED_TO, m.shape[1])
    z0 = logits(x0, id0, end, inner, outer, HAS_SOFTCAP)
    z1 = logits(x1, id1, end, inner, outer, HAS_SOFTCAP)
    z2 = logits(x2, id2, end, inner, outer, HAS_SOFTCAP)
    z3 = logits(x3, id3, end, inner, outer, HAS_SOFTCAP)
    return fold_step(
        m, rest, t, squares, total, top_id, z0, z1, z2, z3, id0, id1, id2, id3, end,
        WITH_ENTROPY, WITH_SQUARES, WITH_TOTAL, WITH_TOP_ID,
    )  # fmt: skip


@triton.jit
def fold_step(
    # of each lane: (R, W)
    m,
    rest,
    t,
    squares,
    total,
    top_id,
    # its logits, (R, W), and their columns, (1, W)
    z0,
    z1,
    z2,
    z3,
    id0,
    id1,
    id2,
    id3,
    end,
    WITH_ENTROPY: tl.constexpr,
    WITH_SQUARES: tl.constexpr,
    WITH_TOTAL: tl.constexpr,
    WITH_TOP_ID: tl.constexpr,
):
    """`fold` and what goes with it."""
    if WITH_TOTAL:
        total += (number(z0, id0, end) + number(z1, id1, end)) + (number(z2, id2, end) + number(z3, id3, end))
    if WITH_TOP_ID:
        top_id = first_top(m, top_id, z0, id0, z1, id1, z2, id2, z3, id3)
    m, rest, t_new, keep, e0, e1, e2, e3 = fold(m, rest, t, z0, z1, z2, z3)
    if WITH_ENTROPY:
        t = t_new
    if WITH_SQUARES:
        squares = fold_squares(squares, keep, e0, e1, e2, e3)
    return m, rest, t, squares, total, top_id


@triton.jit
def merge_lanes(
    m, rest, t, squares, total, top_id, V, WITH_SQUARES: tl.constexpr, WITH_TOTAL: tl.constexpr,
    WITH_TOP_ID: tl.constexpr,
):  # fmt: skip
    """From the sums of each lane (R, W) to those of the rows (R,)."""
    lane_m = m
    m, rest, t, e, is_first = merge(m, rest, t)
    squares_all = m
    if WITH_SQUARES:
        squares_all = merge_squares(squares, e, is_first)
    total_all = m
    if WITH_TOTAL:
        total_all = sum_lanes(total)
    top_id_all = tl.full(m.shape, 0, tl.int32)
    if WITH_TOP_ID:
        top_id_all = tl.min(tl.where(lane_m == m[:, None], top_id, V), axis=1)
    return m, rest, t, squares_all, total_all, top_id_all


@triton.jit
def load_step(row_ptrs, bias_ptr, start, end, ROUNDED_TO: tl.constexpr, W: tl.constexpr):
    """Four tiles (R, W) of the projection side by side, the first at the column `start`; the columns (1, W) of each."""
    x0, columns0 = load_x(row_ptrs, bias_ptr, start, end, ROUNDED_TO, W)
    x1, columns1 = load_x(row_ptrs, bias_ptr, start + W, end, ROUNDED_TO, W)
    x2, columns2 = load_x(row_ptrs, bias_ptr, start + 2 * W, end, ROUNDED_TO, W)
    x3, columns3 = load_x(row_ptrs, bias_ptr, start + 3 * W, end, ROUNDED_TO, W)
    return x0, x1, x2, x3, columns0, columns1, columns2, columns3


@triton.jit
def load_x(row_ptrs, bias_ptr, start, end, ROUNDED_TO: tl.constexpr, W: tl.constexpr):
    """The projection (R, W) in the columns from `start` on, 0 from `end` on where there is one; and those columns."""
    columns = start + tl.arange(0, W)[None, :]
    here = None
    if end is not None:
        here = columns < end
    return load_projection(row_ptrs + columns, bias_ptr, columns, here, ROUNDED_TO), columns


@triton.jit
def logits(x, columns, end, inner, outer, HAS_SOFTCAP: tl.constexpr):
    """z of x, -inf beyond the vocabulary."""
    z = scaled(x, inner, outer, HAS_SOFTCAP)
    if end is not None:
        z = tl.where(columns < end, z, float("-inf"))  # after the transform, which would make a number of it
    return z


@triton.jit
def number(z, columns, end):
    """z, but 0 beyond the vocabulary."""
    if end is not None:
        z = tl.where(columns < end, z, 0.0)
    return z


@triton.jit
def first_top(m, top_id, z0, id0, z1, id1, z2, id2, z3, id3):
    """The column of the largest z up to now, the first of equal ones."""
    top_id = tl.where(z0 > m, id0, top_id)
    m = tl.maximum(m, z0)
    top_id = tl.where(z1 > m, id1, top_id)
    m = tl.maximum(m, z1)
    top_id = tl.where(z2 > m, id2, top_id)
    m = tl.maximum(m, z2)
    return tl.where(z3 > m, id3, top_id)


@triton.jit
def load_at(row_ptrs, bias_ptr, ids, mask, ROUNDED_TO: tl.constexpr):
    """The projection (R, 1) at one column of each row, as `load_x` has it; 0 where `mask` (R,) is not set."""
    return load_projection(row_ptrs + ids[:, None], bias_ptr, ids[:, None], mask[:, None], ROUNDED_TO)
