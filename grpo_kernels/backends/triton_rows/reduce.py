"""Row statistics of a chunk of logits, and the reduction that every kernel shares.

One program owns whole rows and reads each once. The width of a tile (`BLOCK_V`) depends on the
vocabulary alone. So the bits of a row depend neither on other rows nor on the row's position.

The reduction leaves out one instance of the largest logit. A running sum (m, rest, weighted) over
scaled logits z stands for::

    m = max z
    rest = sum of e^(z - m) over all z but one instance of m
    weighted = sum of e^(z - m) (z - m)

so that 1 + rest is the whole sum, and log1p(rest) keeps its precision when one token is nearly
certain. Before any logit is read, or after -inf alone: m = -inf, rest = weighted = 0. A NaN makes m
NaN. All kernels use these three names; `grad.level_and_tilt` defines `level` and `tilt`.

A program reads a row in tiles of `BLOCK_V` columns, and a tile in four adjacent quarters, with a
lane for each column of a quarter. Whole tiles have no mask, so that loads are wide and no column is
compared; only the last, partial tile of a row has a mask. `fold` adds four logits to each lane,
with five exponentials. `merge` joins the lanes. `finish` and `target_logp` turn a whole row's sums
into statistics. Nothing depends on how a tile is spread over threads: a sum over lanes is a tree of
single additions, so its bits follow from the tile's width alone, and not from warps, alignment or
Triton's version.

The sums of a row or of a lane form one tuple, `sums`: (m, rest, weighted), the sum of squares, the
sum of z, and the lowest id of the largest z. A second tuple, `wanted`, says which of (weighted,
squares, total, top_id) the kernel computes, each true or false when the kernel is compiled. A sum
that is not wanted is an arbitrary number.
"""

from __future__ import annotations

import triton
import triton.language as tl

from grpo_kernels.backends import Chunk, RowStats, statistic_dtype
from grpo_kernels.backends.triton_rows.device import RowConfig
from grpo_kernels.backends.triton_rows.mathfn import exp, exp_term, log1p, softplus
from grpo_kernels.backends.triton_rows.transform import (
    PER_ROW,
    chunk_arguments,
    load_at,
    load_scaled,
    row_block,
    row_pointers,
    scaled,
)
from grpo_kernels.base import EXTRAS

LOWEST = tl.constexpr(-1e4)  # e^LOWEST is 0, and 0 * LOWEST is 0 (0 * -inf is NaN)


def launch_stats(
    chunk: Chunk, config: RowConfig, *, entropy: bool, extras: tuple[str, ...]
) -> RowStats:
    """Compute the statistics of the rows of `chunk`."""
    # the interpreter ignores arguments that a kernel lacks, and the result would be arbitrary
    if absent := [x for x in EXTRAS if f"{x}_ptr" not in stats_kernel.arg_names]:
        raise ValueError(f"extras: expected statistics of stats_kernel, got {', '.join(absent)}")
    n, new = len(chunk.logits), chunk.logits.new_empty
    logps, max_logit, log_sum = new(n), new(n), new(n)
    entropies = new(n) if entropy else None
    extra_stats = {name: new(n, dtype=statistic_dtype(name, logps.dtype)) for name in extras}
    stats_kernel[(triton.cdiv(n, config.block_n),)](
        **chunk_arguments(chunk),
        logps_ptr=logps, max_logit_ptr=max_logit, log_sum_ptr=log_sum, entropies_ptr=entropies,
        **{f"{name}_ptr": extra_stats.get(name) for name in EXTRAS},
        **config.arguments(),
    )  # fmt: skip
    return RowStats(logps, max_logit, log_sum, entropies, extra_stats)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=PER_ROW)
def stats_kernel(
    # data: (n, V), (n,)
    logits_ptr, ids_ptr,
    # results: (n,)
    logps_ptr, max_logit_ptr, log_sum_ptr, entropies_ptr,
    log_sum_sq_probs_ptr, mean_logits_ptr, is_top1_ptr,
    # shapes and strides
    n, V, stride_n,
    # the transform: (V,), (n,), numbers
    bias_ptr, inv_t_ptr, inner, outer, HAS_SOFTCAP: tl.constexpr, ROUNDED_TO: tl.constexpr,
    # the tile
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Statistics of `BLOCK_N` rows; the pointer of a result that is not wanted is None."""
    rows, is_row = row_block(tl.program_id(0), n, BLOCK_N)
    row_ptrs, inner, outer = row_pointers(
        logits_ptr, stride_n, rows, inv_t_ptr, inner, outer, HAS_SOFTCAP
    )
    source = (row_ptrs, bias_ptr, inner, outer)
    ids = tl.load(ids_ptr + rows)
    wanted = (
        entropies_ptr is not None,
        log_sum_sq_probs_ptr is not None,
        mean_logits_ptr is not None,
        is_top1_ptr is not None,
    )
    m, rest, weighted, squares, total, top_id = reduce_rows(
        source, V, HAS_SOFTCAP, ROUNDED_TO, wanted, BLOCK_N, BLOCK_V, NUM_STAGES
    )
    x_target = load_at(source, ids, (ids >= 0) & (ids < V), ROUNDED_TO)
    z_target = tl.reshape(scaled(x_target, source, HAS_SOFTCAP), ids.shape)
    rest, log_sum, entropy = finish(m, rest, weighted)
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


@triton.jit
def reduce_rows(
    source, V, HAS_SOFTCAP: tl.constexpr, ROUNDED_TO: tl.constexpr, wanted,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """The sums of whole rows, (BLOCK_N,) each."""
    LANES: tl.constexpr = BLOCK_V // 4
    m = tl.full((BLOCK_N, LANES), float("-inf"), tl.float32)
    nothing = tl.zeros((BLOCK_N, LANES), tl.float32)
    sums = m, nothing, nothing, nothing, nothing, tl.zeros((BLOCK_N, LANES), tl.int32)
    whole = V // BLOCK_V * BLOCK_V
    for start in tl.range(0, whole, BLOCK_V, num_stages=NUM_STAGES):
        sums = reduce_tile(sums, source, start, None, HAS_SOFTCAP, ROUNDED_TO, wanted)
    if whole < V:
        sums = reduce_tile(sums, source, whole, V, HAS_SOFTCAP, ROUNDED_TO, wanted)
    return merge(sums, V, wanted)


@triton.jit
def reduce_tile(
    sums, source, start, end, HAS_SOFTCAP: tl.constexpr, ROUNDED_TO: tl.constexpr, wanted
):
    """Load four logits per lane with `load_scaled`, and add them to `sums` (R, W)."""
    m, rest, weighted, squares, total, top_id = sums
    with_entropy, with_squares, with_total, with_top_id = wanted
    z0, z1, z2, z3, id0, id1, id2, id3 = load_scaled(
        source, start, end, HAS_SOFTCAP, ROUNDED_TO, m.shape[1]
    )
    if with_total:
        total += (number(z0, id0, end) + number(z1, id1, end)) + (
            number(z2, id2, end) + number(z3, id3, end)
        )
    if with_top_id:
        top_id = first_top(m, top_id, z0, id0, z1, id1, z2, id2, z3, id3)
    m, rest, new_weighted, keep, e0, e1, e2, e3 = fold(m, rest, weighted, z0, z1, z2, z3)
    if with_entropy:
        weighted = new_weighted
    if with_squares:  # e^(2 (x - m)) over the terms of `rest`
        squares = tl.fma(
            keep * keep, squares, tl.fma(e3, e3, tl.fma(e2, e2, tl.fma(e1, e1, e0 * e0)))
        )
    return m, rest, weighted, squares, total, top_id


@triton.jit
def number(z, columns, end):
    """z, with 0 beyond the vocabulary."""
    if end is not None:
        z = tl.where(columns < end, z, 0.0)
    return z


@triton.jit
def first_top(m, top_id, z0, id0, z1, id1, z2, id2, z3, id3):
    """The column of the largest z so far; among equal ones, the first."""
    top_id = tl.where(z0 > m, id0, top_id)
    m = tl.maximum(m, z0)
    top_id = tl.where(z1 > m, id1, top_id)
    m = tl.maximum(m, z1)
    top_id = tl.where(z2 > m, id2, top_id)
    m = tl.maximum(m, z2)
    return tl.where(z3 > m, id3, top_id)


@triton.jit
def fold(m, rest, weighted, x0, x1, x2, x3):
    """Add four logits to the running sums (m, rest, weighted); an x of -inf changes nothing.

    Each x, and the old m, is a term of the sums unless it is the largest, so one instance of the
    largest stays out. One rescaling of the earlier sums serves all four.

    Also returned, for the sum of squares: the factor on the earlier sums, and the new terms.
    """
    low0, top = _low_high(m, x0)
    low1, top = _low_high(top, x1)
    low2, top = _low_high(top, x2)
    low3, top = _low_high(top, x3)
    d, keep = _term(m, top)
    a0, e0 = _term(low0, top)
    a1, e1 = _term(low1, top)
    a2, e2 = _term(low2, top)
    a3, e3 = _term(low3, top)
    weighted = tl.fma(
        keep, tl.fma(d, rest, weighted), tl.fma(e3, a3, tl.fma(e2, a2, tl.fma(e1, a1, e0 * a0)))
    )
    rest = tl.fma(keep, rest, (e0 + e1) + (e2 + e3))
    return top, rest, weighted, keep, e0, e1, e2, e3


@triton.jit
def merge(sums, V, wanted):
    """Join the sums of the lanes (R, W), W a power of 2, into the sums of the rows (R,)."""
    lane_m, rest, weighted, squares, total, top_id = sums
    _with_entropy, with_squares, with_total, with_top_id = wanted
    W: tl.constexpr = lane_m.shape[1]
    m = tl.max(lane_m, axis=1)
    lane = tl.arange(0, W)[None, :]
    is_first = lane == tl.min(tl.where(lane_m == m[:, None], lane, W), axis=1)[:, None]
    a = -tl.abs(lane_m - m[:, None])
    a = tl.where(a > LOWEST, a, LOWEST)  # replaces NaN too, such as -inf - -inf
    e = exp_term(a)
    rest_all = sum_lanes(e * (rest + tl.where(is_first, 0.0, 1.0)))
    weighted_all = sum_lanes(e * (weighted + a * (rest + 1.0)))
    m = tl.where(tl.max((lane_m != lane_m).to(tl.int32), axis=1) > 0, float("nan"), m)
    squares_all = m
    if with_squares:
        squares_all = sum_lanes(e * e * (squares + tl.where(is_first, 0.0, 1.0)))
    total_all = m
    if with_total:
        total_all = sum_lanes(total)
    top_id_all = tl.full(m.shape, 0, tl.int32)
    if with_top_id:
        top_id_all = tl.min(tl.where(lane_m == m[:, None], top_id, V), axis=1)
    return m, rest_all, weighted_all, squares_all, total_all, top_id_all


@triton.jit
def sum_lanes(x):
    """Sum over the last axis, (R, W) -> (R,), W a power of 2: first neighbors, then pairs, and so
    on.

    Neighbours are in one thread, or in one warp, so that few levels of the tree go through shared
    memory.
    """
    R: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[1]
    for i in tl.static_range(20):
        if W >> i > 1:
            x = tl.sum(tl.reshape(x, (R, W >> (i + 1), 2)), axis=2)
    return tl.reshape(x, (R,))


@triton.jit
def finish(m, rest, weighted):
    """(rest, log sum_j e^(x_j - m), entropy of softmax(x)) of a whole row.

    All are NaN if m is NaN or -inf. If m is +inf, only the entropy is NaN, since all other logits
    have probability 0.
    """
    nan_or_0 = m - m
    rest = tl.where(m == float("inf"), rest, rest + nan_or_0)
    log_sum = log1p(rest)
    return rest, log_sum, log_sum - (weighted + nan_or_0) / (1.0 + rest)


@triton.jit
def target_logp(m, rest, z):
    """log p of a logit z of a whole row, with `rest` as `finish` returned it.

    The sum leaves out the logit's own term: log p = -log(1 + sum of the other terms / e^(z - m)).
    """
    # in the second case the sum is >= 1, so nothing cancels
    others = tl.where(z == m, rest, 1.0 + (rest - exp(z - m)))
    return -softplus(tl.log(others) + (m - z))


@triton.jit
def _low_high(m, x):
    """(the smaller, the larger); the larger is NaN if either is."""
    return tl.minimum(m, x), tl.maximum(m, x, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _term(x, m):
    """x - m and its exponential, for x <= m; LOWEST and 0 if x - m is below LOWEST, or NaN."""
    a = x - m
    a = tl.where(a > LOWEST, a, LOWEST)
    return a, exp_term(a)
