"""The per-token surrogates and KL estimators, each one function that returns a loss and its derivatives.

Every policy surrogate maps the log-ratio R (per token, or per sequence spread over its tokens), the advantage A and the
log-probability to ``(loss, d loss / d R, d loss / d logp)``, where R is held apart from logp: what R depends on is the
objective's business. Derivatives take the branch in use only, so that a ratio that overflows on a branch not taken
leaves 0 behind and not NaN. An advantage of exactly 0 contributes exactly 0, unless the ratio is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels.config import LossConfig

Surrogate = tuple[Tensor, Tensor, Tensor]  # loss, d loss / d R, d loss / d logp; all (n,)


def clipped(config: LossConfig, log_ratio: Tensor, advantages: Tensor) -> Surrogate:
    """``-min(min(r, delta) A, clip(r, 1 - epsilon, 1 + epsilon_high) A)`` (PPO, https://arxiv.org/abs/1707.06347).

    At a tie each branch gets half of the gradient, and a bound that is met exactly still passes it, as in torch's min
    and clamp.
    """
    ratio = torch.exp(log_ratio)
    low, high = 1 - config.epsilon, 1 + config.clip_high
    capped = ratio if config.delta is None else ratio.clamp(max=config.delta)
    free, bounded = times(capped, advantages), ratio.clamp(low, high) * advantages
    loss = -torch.where(torch.isnan(ratio), ratio, torch.minimum(free, bounded))
    share = torch.where(free == bounded, 0.5, (free < bounded).to(ratio.dtype))  # of the gradient, for `free`
    passes_free = 1.0 if config.delta is None else (ratio <= config.delta).to(ratio.dtype)
    passes = share * passes_free + (1 - share) * ((ratio >= low) & (ratio <= high)).to(ratio.dtype)
    return loss, -times(ratio, passes * advantages), torch.zeros_like(loss)


def cispo(config: LossConfig, log_ratio: Tensor, advantages: Tensor, logps: Tensor) -> Surrogate:
    """``-min(r, epsilon_high) A logp``, the ratio a constant (MiniMax-M1, https://arxiv.org/abs/2506.13585)."""
    weight = -torch.exp(log_ratio).clamp(max=config.clip_high) * advantages
    return times(logps, weight), torch.zeros_like(weight), weight


def sapo(config: LossConfig, log_ratio: Tensor, advantages: Tensor) -> Surrogate:
    """``-(4 / tau) sigmoid(tau (r - 1)) A``, tau by the sign of A (SAPO, https://arxiv.org/abs/2511.20347)."""
    ratio = torch.exp(log_ratio)
    tau = _by_sign(advantages > 0, config.sapo_temperature_pos, config.sapo_temperature_neg, ratio)
    gate = torch.sigmoid(tau * (ratio - 1))
    slope = 4 * gate * torch.sigmoid(tau * (1 - ratio))  # d (4 / tau) gate / d r
    loss = -times(4 * gate / tau, advantages)
    return loss, -times(ratio, slope * advantages), torch.zeros_like(loss)


def vespo(config: LossConfig, log_weight: Tensor, advantages: Tensor, logps: Tensor) -> tuple[Surrogate, Tensor]:
    """``-phi(w) A logp`` with ``log phi = lambda + k log w - lambda w``, phi a constant (https://arxiv.org/abs/2602.10693).

    `log_weight` is the sequence's log w, spread over its tokens. Returns the surrogate and phi (n,).
    """
    k = _by_sign(advantages >= 0, config.vespo_k_pos, config.vespo_k_neg, log_weight)
    lam = _by_sign(advantages >= 0, config.vespo_lambda_pos, config.vespo_lambda_neg, log_weight).clamp(
        min=1e-4
    )  # as TRL
    log_phi = lam + k * log_weight - lam * torch.exp(log_weight)
    phi = torch.exp(log_phi)
    weight = -phi * advantages
    return (times(logps, weight), torch.zeros_like(weight), weight), phi


def sequence_mean(log_ratio: Tensor, advantages: Tensor) -> Surrogate:
    """``-r A`` with r one ratio a sequence, clipped before it was averaged (GMPO, https://arxiv.org/abs/2507.20673)."""
    loss = -times(torch.exp(log_ratio), advantages)
    return loss, loss, torch.zeros_like(loss)


def kl_estimate(config: LossConfig, logps: Tensor, ref_logps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """KL(policy || reference) a token, ``kl``, and its derivative in logp (http://joschu.net/blog/kl-approx.html).

    The third is the derivative of ``r kl`` over r, where the ratio r moves with logp, ``kl + kl'``: written out, since
    of k3, whose two parts grow as e^d, the sum is but ``-d``.
    """
    d = ref_logps - logps
    if config.kl_estimator == "k1":
        return -d, torch.ones_like(d), 1 - d
    if config.kl_estimator == "k2":
        return d.square() / 2, -d, d * (d / 2 - 1)
    return torch.expm1(d) - d, -torch.expm1(d), -d


def times(x: Tensor, factor: Tensor) -> Tensor:
    """``x * factor``, where a factor of exactly 0 gives 0 unless x is NaN: 0 * inf is not NaN here."""
    return torch.where((factor != 0) | torch.isnan(x), x * factor, 0.0)


def _by_sign(positive: Tensor, yes: float, no: float, like: Tensor) -> Tensor:
    return torch.where(positive, torch.full_like(like, yes), torch.full_like(like, no))
