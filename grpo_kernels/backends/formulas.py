"""The policy surrogates and KL estimators, elementwise: the one source of all backends.

torch runs these functions as they stand. Triton compiles them with its own `where`, `exp`, ...
(`backends/triton_rows/mathfn.py`). `csrc/generate.py` translates their text to `csrc/formulas.h`.
Hence they use only the functions imported here, names, arithmetic and comparisons, and numbers are
floats.

A surrogate maps the log-ratio R (some loss types pass another argument instead), the advantage A,
the log-probability and the loss type's constants to ``(loss, d loss / d R, d loss / d logp)``. The
surrogate treats R as independent of logp: the objective knows what R depends on. Derivatives take
only the branch in use, so a ratio that overflows on the other branch leaves 0 behind and not NaN.
An advantage of exactly 0 contributes exactly 0, unless the ratio is NaN.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, clamp, clamp_max, exp, expm1, full_like, minimum, sigmoid, where

Formula = Callable[..., tuple[Tensor, Tensor, Tensor]]
type_as = Tensor.type_as  # of a condition: 1 where it holds, else 0


def clipped(log_ratio, advantage, logp, low, high, delta):
    """``-min(min(r, delta) A, clip(r, low, high) A)`` (PPO, https://arxiv.org/abs/1707.06347).

    At a tie each branch gets half of the gradient, as in torch's min. A ratio exactly on a bound
    still gets gradient.
    """
    ratio = exp(log_ratio)
    free = times_or_zero(clamp_max(ratio, delta), advantage)
    bounded = clamp(ratio, low, high) * advantage
    loss = -minimum(free, bounded)  # of a NaN ratio both are NaN
    # the share of the gradient that goes to `free`
    share = where(free == bounded, 0.5, type_as(free < bounded, ratio))
    inside = (ratio >= low) & (ratio <= high)
    passes = where(ratio <= delta, share, 0.0) + where(inside, 1.0 - share, 0.0)
    return loss, -times_or_zero(ratio, passes * advantage), full_like(loss, 0.0)


def cispo(log_ratio, advantage, logp, cap):
    """``-min(r, cap) A logp``, the ratio a constant (MiniMax-M1, https://arxiv.org/abs/2506.13585)."""
    ratio = exp(log_ratio)
    weight = -clamp_max(ratio, cap) * advantage
    return times_or_zero(logp, weight), full_like(weight, 0.0), weight


def sapo(log_ratio, advantage, logp, tau_pos, tau_neg):
    """``-(4 / tau) sigmoid(tau (r - 1)) A``, tau by the sign of A (SAPO, https://arxiv.org/abs/2511.20347)."""
    ratio = exp(log_ratio)
    tau = where(advantage > 0.0, full_like(ratio, tau_pos), full_like(ratio, tau_neg))
    soft = sigmoid(tau * (ratio - 1.0))
    d_soft = 4.0 * soft * sigmoid(tau * (1.0 - ratio))  # d (4 / tau) soft / d r
    loss = -times_or_zero(4.0 * soft / tau, advantage)
    return loss, -times_or_zero(ratio, d_soft * advantage), full_like(loss, 0.0)


def vespo(log_weight, advantage, logp, k_pos, lambda_pos, k_neg, lambda_neg):
    """``-phi(w) A logp``, phi a constant, w the sequence's (https://arxiv.org/abs/2602.10693)."""
    weight = -phi(log_weight, advantage, k_pos, lambda_pos, k_neg, lambda_neg) * advantage
    return times_or_zero(logp, weight), full_like(weight, 0.0), weight


def phi(log_weight, advantage, k_pos, lambda_pos, k_neg, lambda_neg):
    """``log phi = lambda + k log w - lambda w``, k and lambda by the sign of A."""
    k = where(advantage >= 0.0, full_like(log_weight, k_pos), full_like(log_weight, k_neg))
    rate = where(
        advantage >= 0.0, full_like(log_weight, lambda_pos), full_like(log_weight, lambda_neg)
    )
    return exp(rate + k * log_weight - rate * exp(log_weight))


def unclipped(log_ratio, advantage, logp):
    """``-r A``; of a mean log-ratio that was clipped beforehand GMPO (https://arxiv.org/abs/2507.20673)."""
    loss = -times_or_zero(exp(log_ratio), advantage)
    return loss, loss, full_like(loss, 0.0)


def k1(logp, ref):
    """With d = ref - logp, KL(policy || reference) per token, ``-d`` (http://joschu.net/blog/kl-approx.html).

    An estimator returns kl, the derivative of kl in logp, and that of ``r kl`` divided by r, where
    the ratio r moves with logp: ``kl + kl'``. The last is simplified by hand, since both parts of
    k3 grow as e^d while their sum is only ``-d``.
    """
    d = ref - logp
    return -d, full_like(d, 1.0), 1.0 - d


def k2(logp, ref):
    """``d^2 / 2``"""
    d = ref - logp
    return d * d / 2.0, -d, d * (d / 2.0 - 1.0)


def k3(logp, ref):
    """``e^d - 1 - d``"""
    d = ref - logp
    return expm1(d) - d, -expm1(d), -d


def times_or_zero(x, factor):
    """``x * factor``, where a factor of exactly 0 gives 0, also where x is inf; NaN stays."""
    return where((factor == 0.0) & (x == x), 0.0, x * factor)


HELPERS = (times_or_zero, phi)  # functions that the formulas call; the callee first
SURROGATES: dict[str, Formula] = {f.__name__: f for f in (clipped, cispo, sapo, vespo, unclipped)}
# a weight, which is a constant, times logp: the derivative in the log-ratio is 0
LINEAR = ("cispo", "vespo")
ESTIMATORS: dict[str, Formula] = {f.__name__: f for f in (k1, k2, k3)}
