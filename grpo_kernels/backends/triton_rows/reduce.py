"""The row reduction: sums of exponentials over the vocabulary that leave out one instance of the largest.

A running sum (m, rest, t) over logits x stands for::

    m = max x
    rest = sum of e^(x - m) over all x but one instance of m
    t = sum of e^(x - m) (x - m)

so that 1 + rest is the whole sum, and log1p(rest) keeps its precision when one token is nearly certain. Where nothing
was seen yet, or only -inf: m = -inf, rest = t = 0. A NaN makes m NaN. All kernels use these three names; the names of
the gradient, `level` and `tilt`, are those of `grad.row_terms`.

`fold` adds four logits to each of many lanes, with five exponentials. `merge` joins lanes, or parts of a vocabulary,
that lie along an axis. `finish` and `target_logp` turn a whole row's sums into statistics. No step
depends on how a tile is spread over threads: a sum over lanes is a tree of single additions, so its bits follow from
the tile's width alone, and not from warps, alignment or Triton's version.
"""

import triton
import triton.language as tl

from grpo_kernels.backends.triton_rows.mathfn import exp, exp_term, log1p, softplus

LOWEST = tl.constexpr(-1e4)  # e^LOWEST is 0, and 0 * LOWEST is 0, which 0 * -inf is not


@triton.jit
def fold(m, rest, t, x0, x1, x2, x3):
    """The running sums (m, rest, t) with four logits added, all of one shape; an x of -inf changes nothing.

    Each x, and the old m, is a term of the sums unless it is the largest, so one instance of the largest stays out. The
    earlier sums are rescaled once for the four.

    Also return what `fold_squares` needs: the factor on the earlier sums, and the four new terms.
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
    t = tl.fma(keep, tl.fma(d, rest, t), tl.fma(e3, a3, tl.fma(e2, a2, tl.fma(e1, a1, e0 * a0))))
    rest = tl.fma(keep, rest, (e0 + e1) + (e2 + e3))
    return top, rest, t, keep, e0, e1, e2, e3


@triton.jit
def fold_squares(squares, keep, e0, e1, e2, e3):
    """Running sum of e^(2 (x - m)) over the terms of `rest`; the other arguments as `fold` returned them."""
    return tl.fma(keep * keep, squares, tl.fma(e3, e3, tl.fma(e2, e2, tl.fma(e1, e1, e0 * e0))))


@triton.jit
def merge(m, rest, t):
    """Join the running sums along the last axis: (R, W) each -> (R,) each, W a power of 2.

    Also return what `merge_squares` needs: the factors (R, W) on each lane's sums, and the lane whose m is left out.
    """
    W: tl.constexpr = m.shape[1]
    top = tl.max(m, axis=1)
    lane = tl.arange(0, W)[None, :]
    is_first = lane == tl.min(tl.where(m == top[:, None], lane, W), axis=1)[:, None]
    a = _distance(m, top[:, None])
    e = exp_term(a)
    rest_all = sum_lanes(e * (rest + tl.where(is_first, 0.0, 1.0)))
    t_all = sum_lanes(e * (t + a * (rest + 1.0)))
    top = tl.where(tl.max((m != m).to(tl.int32), axis=1) > 0, float("nan"), top)
    return top, rest_all, t_all, e, is_first


@triton.jit
def merge_squares(squares, e, is_first):
    """Join the sums of `fold_squares`: (R, W) -> (R,); `e` and `is_first` as `merge` returned them."""
    return sum_lanes(e * e * (squares + tl.where(is_first, 0.0, 1.0)))


@triton.jit
def sum_lanes(x):
    """Sum over the last axis, (R, W) -> (R,), W a power of 2: of neighbours, then of neighbouring pairs, and so on.

    Neighbours lie in one thread, or in one warp, so that few levels of the tree go through shared memory.
    """
    R: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[1]
    for i in tl.static_range(20):
        if W >> i > 1:
            x = tl.sum(tl.reshape(x, (R, W >> (i + 1), 2)), axis=2)
    return tl.reshape(x, (R,))


@triton.jit
def finish(m, rest, t):
    """Return (rest, log sum_j e^(x_j - m), entropy of softmax(x)) of a whole row.

    All are NaN if m is NaN or -inf. If m is +inf, only the entropy is NaN, since the others' probability is 0.
    """
    odd = m - m  # 0, or NaN
    rest = tl.where(m == float("inf"), rest, rest + odd)
    log_sum = log1p(rest)
    return rest, log_sum, log_sum - (t + odd) / (1.0 + rest)


@triton.jit
def target_logp(m, rest, z):
    """Return log p of a logit z of a whole row, with `rest` as `finish` returned it.

    Its own term is left out of the sum: log p = -log(1 + sum of the others / e^(z - m)).
    """
    others = tl.where(
        z == m, rest, 1.0 + (rest - exp(z - m))
    )  # in the second case >= 1: nothing cancels
    return -softplus(tl.log(others) + (m - z))


@triton.jit
def _low_high(m, x):
    """(the lesser, the larger); if either is NaN, so is the larger."""
    return tl.minimum(m, x), tl.maximum(m, x, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _term(x, m):
    """Return x - m and its exponential, for x <= m; LOWEST and 0 if x - m is below LOWEST, or NaN."""
    a = x - m
    a = tl.where(a > LOWEST, a, LOWEST)
    return a, exp_term(a)


@triton.jit
def _distance(x, m):
    """Return -|x - m|; LOWEST if that is below LOWEST, or NaN, as between -inf and -inf."""
    a = -tl.abs(x - m)
    return tl.where(a > LOWEST, a, LOWEST)
