"""The row reduction: sums of exponentials over the vocabulary that leave out one instance of the largest.

A running sum (m, rest, t) over logits x stands for::

    m = max x
    rest = sum of e^(x - m) over all x but one instance of m
    t = sum of e^(x - m) (x - m)

so that 1 + rest is the whole sum, and log1p(rest) keeps its precision when one token is nearly certain. Where nothing
was seen yet, or only -inf: m = -inf, rest = t = 0. A NaN makes m NaN.

`fold` adds one logit to each of many lanes, with one exponential; `merge` joins lanes, or parts of a vocabulary, that
lie along an axis, and `join` two of them; `finish` and `target_logp` make statistics of a whole row's. No step depends
on how a tile is spread over threads: a sum over lanes is a tree of single additions, so its bits follow from the tile's
width alone, and not from warps, alignment or Triton's version.
"""

import triton
import triton.language as tl

from grpo_kernels.backends.triton_rows.mathfn import exp, exp_term, log1p, softplus

LOWEST = tl.constexpr(-1e4)  # e^LOWEST is 0, and 0 * LOWEST is 0, which 0 * -inf is not


@triton.jit
def fold(m, rest, t, x):
    """The running sums (m, rest, t) with x added, all of one shape; an x of -inf changes nothing.

    Also returns what `fold_squares` needs: the factor on what was summed before, and e^-|x - m|.
    """
    a = _distance(x, m)
    e = exp_term(a)
    up = x > m
    keep = tl.where(up, e, 1.0)
    shifted = tl.where(up, rest + 1.0, 1.0)  # how much moves by a: if x is the larger, all that was there, m included
    t = tl.fma(keep, t, e * a * shifted)
    rest = tl.fma(keep, rest, e)
    return tl.maximum(m, x, propagate_nan=tl.PropagateNan.ALL), rest, t, keep, e


@triton.jit
def fold_squares(squares, keep, e):
    """Running sum of e^(2 (x - m)) over what `rest` sums; `keep` and `e` as `fold` returned them."""
    return keep * keep * squares + e * e


@triton.jit
def join(m, rest, t, other_m, other_rest, other_t):
    """The running sums of two sets of logits as that of both, element by element."""
    a = _distance(other_m, m)
    e = exp_term(a)
    up = other_m > m
    low_all = 1.0 + tl.where(up, rest, other_rest)
    t = tl.where(up, other_t, t) + e * (tl.where(up, t, other_t) + a * low_all)
    rest = tl.where(up, other_rest, rest) + e * low_all
    return tl.maximum(m, other_m, propagate_nan=tl.PropagateNan.ALL), rest, t


@triton.jit
def merge(m, rest, t):
    """The running sums along the last axis as one: (R, W) each -> (R,) each, W a power of 2.

    Also returns what `merge_squares` needs: the factors (R, W) on each lane's sums, and whose m it is that is left out.
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
    """Sum over the last axis, (R, W) -> (R,), W a power of 2: lane i is added to lane i + W / 2, and so on."""
    R: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[1]
    for i in tl.static_range(20):
        if W >> i > 1:
            x = tl.sum(tl.reshape(x, (R, 2, W >> (i + 1))), axis=1)
    return tl.reshape(x, (R,))


@triton.jit
def finish(m, rest, t):
    """(rest, log sum_j e^(x_j - m), entropy of softmax(x)) of a whole row.

    All NaN where the largest logit is NaN or -inf; where it is +inf only the entropy: the others' probability is 0.
    """
    odd = m - m  # 0, or NaN
    rest = tl.where(m == float("inf"), rest, rest + odd)
    log_sum = log1p(rest)
    return rest, log_sum, log_sum - (t + odd) / (1.0 + rest)


@triton.jit
def target_logp(m, rest, z):
    """log p of a logit z that is one of a whole row's, `rest` as `finish` returned it.

    Its own term is left out of the sum: log p = -log(1 + sum of the others / e^(z - m)).
    """
    others = tl.where(z == m, rest, 1.0 + (rest - exp(z - m)))  # in the second case >= 1, so nothing cancels
    return -softplus(tl.log(others) + (m - z))


@triton.jit
def _distance(x, m):
    """-|x - m|, LOWEST where it is less, or where it is no number, as between -inf and -inf."""
    a = -tl.abs(x - m)
    return tl.where(a > LOWEST, a, LOWEST)
