"""The per-token surrogates and KL estimators as jit functions: the mirror of `grpo_kernels.objective.surrogates`.

A surrogate maps (log-ratio R, advantage A, logp) and the loss's constants to (loss, d loss / d R, d loss / d logp), all
of one shape. Every one takes all constants, so that one can stand for another in a kernel. Branches, ties and what an
overflow leaves behind are those of the torch module.
"""

import triton
import triton.language as tl

from grpo_kernels.backends.triton_rows.mathfn import exp, expm1, sigmoid


@triton.jit
def clipped(log_ratio, advantage, logp, clip_low, clip_high, delta, tau_pos, tau_neg):
    """``-min(min(r, delta) A, clip(r, clip_low, clip_high) A)``; half of the gradient each at a tie, bounds pass it."""
    ratio = exp(log_ratio)
    free = times(tl.where(ratio > delta, delta, ratio), advantage)
    bounded = tl.where(ratio < clip_low, clip_low, ratio)
    bounded = tl.where(bounded > clip_high, clip_high, bounded) * advantage
    loss = -tl.where(free < bounded, free, bounded)  # of a NaN ratio `bounded` is NaN, and is taken
    share = tl.where(free == bounded, 0.5, tl.where(free < bounded, 1.0, 0.0))  # of the gradient, for `free`
    inside = (ratio >= clip_low) & (ratio <= clip_high)
    passes = share * tl.where(ratio <= delta, 1.0, 0.0) + (1.0 - share) * tl.where(inside, 1.0, 0.0)
    return loss, -times(ratio, passes * advantage), tl.zeros_like(loss)


@triton.jit
def cispo(log_ratio, advantage, logp, clip_low, clip_high, delta, tau_pos, tau_neg):
    """``-min(r, clip_high) A logp``, the ratio a constant."""
    ratio = exp(log_ratio)
    weight = -tl.where(ratio > clip_high, clip_high, ratio) * advantage
    return times(logp, weight), tl.zeros_like(weight), weight


@triton.jit
def sapo(log_ratio, advantage, logp, clip_low, clip_high, delta, tau_pos, tau_neg):
    """``-(4 / tau) sigmoid(tau (r - 1)) A``, tau by the sign of A."""
    ratio = exp(log_ratio)
    tau = tl.where(advantage > 0, tau_pos, tau_neg)
    gate = sigmoid(tau * (ratio - 1.0))
    slope = 4.0 * gate * sigmoid(tau * (1.0 - ratio))  # d (4 / tau) gate / d r
    loss = -times(4.0 * gate / tau, advantage)
    return loss, -times(ratio, slope * advantage), tl.zeros_like(loss)


@triton.jit
def constant(log_ratio, advantage, logp, clip_low, clip_high, delta, tau_pos, tau_neg):
    """On-policy, where d loss / d logp is known: `advantage`. So is the loss, which is left out."""
    return tl.zeros_like(logp), tl.zeros_like(logp), advantage


@triton.jit
def linear(log_ratio, advantage, logp, clip_low, clip_high, delta, tau_pos, tau_neg):
    """On-policy, ``d loss / d logp`` times logp."""
    return times(logp, advantage), tl.zeros_like(logp), advantage


@triton.jit
def k1(logp, ref):
    """With d = ref - logp, KL(policy || reference), ``-d``; its derivative in logp; and the sum of the two.

    That is, over r, the derivative of r * kl where the ratio r moves with logp.
    """
    d = ref - logp
    return -d, tl.full(d.shape, 1.0, tl.float32), 1.0 - d


@triton.jit
def k2(logp, ref):
    """``d^2 / 2``"""
    d = ref - logp
    return d * d / 2.0, -d, d * (d / 2.0 - 1.0)


@triton.jit
def k3(logp, ref):
    """``e^d - 1 - d``"""
    d = ref - logp
    return expm1(d) - d, -expm1(d), -d


@triton.jit
def times(x, factor):
    """``x * factor``, where a factor of exactly 0 gives 0 unless x is NaN: 0 * inf is not NaN here."""
    return tl.where((factor == 0.0) & (x == x), 0.0, x * factor)


SURROGATES = {"clipped": clipped, "cispo": cispo, "sapo": sapo, "constant": constant, "linear": linear}
ESTIMATORS = {None: None, "k1": k1, "k2": k2, "k3": k3}
