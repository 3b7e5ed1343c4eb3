"""Losses of trainers other than TRL and verl, as objectives of `grpo_loss`, under the names they have there.

::

    out = grpo_loss(..., sampling_per_token_logps=logps_of_the_sampler, objective=objectives.ipo())

With r = e^R the ratio of the policy to the sampler (mu), R = logp - ``sampling_per_token_logps``, and sg a constant::

    ipo         -A min(r, ratio_max) where |p - mu| <= eps                 prime-rl
    icepop      -A r where ratio_low <= r <= ratio_high                    prime-rl, https://arxiv.org/abs/2510.18855
    kpop        -A r where both KLs of (p, 1 - p), (mu, 1 - mu) are small  https://ringtech.notion.site/kpop
    rollout_is  -sg(r) A logp where r is within the range                  https://arxiv.org/abs/2602.15763

and with the old log-probabilities in the sampler's place::

    topr        -A logp of a good completion, else -sg(min(r, 1)) A logp   https://arxiv.org/abs/2503.14286
    fipo        PPO's, times sg of the tokens' discounted later log-ratios https://arxiv.org/abs/2603.19835

All but `fipo` look at one token at a time and get the one-pass engine; `fipo` takes two passes. A token that the
sampler could not score (NaN) has r = 1. None uses the entropies or the reference. An ``importance_sampling_ratio``
multiplies a token's whole loss, as a weight or a mask. The normaliser is the config's ``loss_type``, by default
"dapo", a mean over all tokens of the batch, as in prime-rl and ms-swift.

`m2po_mask` is a mask of tokens, made before the loss.

IcePop's other form, TIS, MIS and OPSM weigh or mask a loss that `LossConfig` has: `grpo_kernels.presets`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from grpo_kernels.base.checks import check_number, check_shape, check_tensor
from grpo_kernels.base.sums import discounted_sums
from grpo_kernels.objective.custom import TokenInputs
from grpo_kernels.objective.verl_losses import ABOVE_0, NamedLoss, Ranged, times_exp
from grpo_kernels.token_loss.formulas import times

__all__ = ["fipo", "icepop", "ipo", "kpop", "m2po_mask", "rollout_is", "topr"]

KPOP_MARGIN = 1e-6  # prime-rl's: probabilities are held this far from 0 and 1 in the KLs


@dataclass(frozen=True)
class ipo(NamedLoss):
    """IPO (INTELLECT policy optimisation), prime-rl's default loss: a trust region in probability, not in the ratio.

    ``-A min(r, ratio_max)`` where |p - mu| <= eps, 0 elsewhere, plus ``kl_tau R^2`` at every token. The derivative of
    the first term in logp is the term itself, also where r is capped.

    Source: https://github.com/PrimeIntellect-ai/prime-rl/pull/3418, defaults of its #3586. Before, they were 0.1 and
    1e-3.

    Args:
        eps: bound on the difference of the probabilities, whatever the sign of A.
        kl_tau: weight of the squared log-ratio.
        ratio_max: cap on the ratio, above 0.
    """

    eps: float = 0.3
    kl_tau: float = 0.0
    ratio_max: float = field(default=1e4, metadata=ABOVE_0)
    token_level: ClassVar[bool] = True

    def loss(self, tokens: TokenInputs) -> Tensor:
        logps, sampled = tokens.logps.detach(), _sampled(tokens)
        keep = (torch.exp(logps) - torch.exp(sampled)).abs() <= self.eps
        log_ratio, highest = tokens.logps - sampled, math.log(self.ratio_max)
        capped = torch.where(
            log_ratio > highest, highest + tokens.logps - logps, log_ratio
        )  # gradient: the cap
        return _kept(keep, capped, tokens) + _squared(self.kl_tau, log_ratio)


@dataclass(frozen=True)
class icepop(NamedLoss):
    """IcePop as prime-rl has it: ``-A r`` where ratio_low <= r <= ratio_high, 0 elsewhere; the ratio has the gradient.

    Source: https://github.com/PrimeIntellect-ai/prime-rl/pull/3526. IcePop as OpenRLHF and NeMo-RL have it, a weight
    on PPO's loss, is `presets.ICEPOP`.

    Args:
        ratio_low, ratio_high: the range of the ratio, both above 0.
    """

    ratio_low: float = field(default=0.2, metadata=ABOVE_0)
    ratio_high: float = field(default=5.0, metadata=ABOVE_0)
    token_level: ClassVar[bool] = True

    def loss(self, tokens: TokenInputs) -> Tensor:
        log_ratio = tokens.logps - _sampled(tokens)
        keep = (log_ratio >= math.log(self.ratio_low)) & (log_ratio <= math.log(self.ratio_high))
        return _kept(keep, log_ratio, tokens)


@dataclass(frozen=True)
class kpop(NamedLoss):
    """KPop: ``-A r`` where KL((p, 1 - p) || (mu, 1 - mu)) and its reverse are at most `threshold`, 0 elsewhere.

    Plus ``kl_tau R^2`` at every token. In the KLs both probabilities are held within [1e-6, 1 - 1e-6]; the ratio has no
    cap.

    Source: https://github.com/PrimeIntellect-ai/prime-rl/pull/3283.

    Args:
        threshold: the largest KL of a token that counts.
        kl_tau: weight of the squared log-ratio.
    """

    threshold: float = 0.1
    kl_tau: float = 1e-3
    token_level: ClassVar[bool] = True

    def loss(self, tokens: TokenInputs) -> Tensor:
        logps, sampled = tokens.logps.detach(), _sampled(tokens)
        p, mu = (torch.exp(x).clamp(KPOP_MARGIN, 1 - KPOP_MARGIN) for x in (logps, sampled))
        keep = (_binary_kl(p, mu) <= self.threshold) & (_binary_kl(mu, p) <= self.threshold)
        log_ratio = tokens.logps - sampled
        return _kept(keep, log_ratio, tokens) + _squared(self.kl_tau, log_ratio)


@dataclass(frozen=True)
class rollout_is(NamedLoss):
    """GLM-5's loss, SkyRL's ``rollout_is``: ``-r A logp``, r a constant, where r is within the range, 0 elsewhere.

    The range is the open interval (1 - eps_clip_low, 1 + eps_clip_high). No old log-probabilities are needed.

    Source: section 4.1.2 of https://arxiv.org/abs/2602.15763; SkyRL's ``rollout_is_policy_loss``, with its defaults.

    Args:
        eps_clip_low, eps_clip_high: distances of the two ends of the range from 1.
    """

    eps_clip_low: float = 0.2
    eps_clip_high: float = 0.2
    token_level: ClassVar[bool] = True

    def loss(self, tokens: TokenInputs) -> Tensor:
        ratio = torch.exp(tokens.logps.detach() - _sampled(tokens))
        keep = (ratio > 1 - self.eps_clip_low) & (ratio < 1 + self.eps_clip_high)
        return times(tokens.logps, torch.where(keep, -ratio * tokens.advantages, 0.0))


@dataclass(frozen=True)
class topr(NamedLoss):
    """TOPR (tapered off-policy REINFORCE): ``-A logp`` for good completions, ``-min(r, 1) A logp`` for the others.

    r is the token's ratio to the old log-probabilities, a constant.

    Source: equation 8 of https://arxiv.org/abs/2503.14286; ROLL's ``topr``, whose ratio is per token, with its
    defaults.

    Args:
        scores: of the shape of the ids, one per position; a token is of a good completion if its score is above 0. For
            scores (B,): ``scores[:, None].expand_as(ids)``. None: A is the score, as in the paper, where the reward is
            both A and score.
        positive_weight, negative_weight: weights of good completions and of the others.
    """

    scores: Tensor | None = field(default=None, compare=False)
    positive_weight: float = 1.0
    negative_weight: float = 1.0
    token_level: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scores is not None:
            check_tensor("scores", self.scores)

    def loss(self, tokens: TokenInputs) -> Tensor:
        scores = tokens.advantages if self.scores is None else self.scores.flatten()[tokens.index]
        log_ratio = tokens.logps.detach() - tokens.old_per_token_logps
        tapered = self.negative_weight * torch.exp(log_ratio.clamp(max=0.0))
        weight = torch.where(scores > 0, torch.full_like(tapered, self.positive_weight), tapered)
        return times(tokens.logps, -weight * tokens.advantages)


@dataclass(frozen=True)
class fipo(Ranged):
    """FIPO (future-KL influenced policy optimisation): PPO's clipped loss times f, a constant of each token.

    ``f_t = clip(exp(sum over k >= t of gamma^(k - t) R_k), 1 - influence_low, 1 + influence_high)`` over the counted
    tokens of the sequence, distances in positions, gamma = 2^(-1 / decay_rate), R = logp - old. Where A < 0 and the
    token's own ratio is above `safety_threshold`, f is then clipped to [0.8, 1]. It couples tokens: two passes.

    Source: https://arxiv.org/abs/2603.19835; ms-swift's ``loss_type="fipo"``, with its defaults. Its
    ``fipo_clip_high_only`` is influence_low = 0; its ``delta``, off by default, is not here.

    Args:
        clip_ratio_low, clip_ratio_high: PPO's range, [1 - clip_ratio_low, 1 + clip_ratio_high].
        decay_rate: half-life of the discount in tokens, above 0.
        influence_low, influence_high: distances of the two ends of f's range from 1.
        safety_threshold: the largest ratio of a token with A < 0 that f may amplify.
    """

    decay_rate: float = field(default=32.0, metadata=ABOVE_0)
    influence_low: float = 0.0
    influence_high: float = 0.2
    safety_threshold: float = 4.0

    def loss(self, tokens: TokenInputs) -> Tensor:
        log_ratio = tokens.logps - tokens.old_per_token_logps
        moved = torch.where(tokens.mask, log_ratio.detach(), 0.0)
        future = discounted_sums(moved, 2 ** (-1 / self.decay_rate))
        influence = torch.exp(future).clamp(1 - self.influence_low, 1 + self.influence_high)
        unsafe = (tokens.advantages < 0) & (torch.exp(moved) > self.safety_threshold)
        influence = torch.where(unsafe, influence.clamp(0.8, 1.0), influence)
        return self._clipped(log_ratio, tokens.advantages)[0] * influence


def m2po_mask(
    old_per_token_logps: Tensor,
    sampling_per_token_logps: Tensor,
    completion_mask: Tensor,
    threshold: float = 0.04,
) -> Tensor:
    """Return M2PO's mask, bool of the shape of `completion_mask`: the counted tokens without the most stale ones.

    With d = old - sampling, tokens of the largest d^2 are dropped until the mean d^2 of the rest is below `threshold`;
    one is always left. The mean is over the call's tokens. A token that the sampler could not score (NaN) has d = 0.

    Passed as ``completion_mask`` of the loss it leaves the dropped tokens out of the mean, as AReaL does. Passed as
    ``importance_sampling_ratio``, converted to a float, it keeps the mean over all tokens, as in the paper.

    Source: https://arxiv.org/abs/2510.01161; AReaL's ``m2_threshold``, 0.04 in its example.

    Args:
        old_per_token_logps, sampling_per_token_logps, completion_mask: (B, T), or packed (N,).
        threshold: above 0.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it.
    """
    check_number("threshold", threshold, lowest=0.0)
    logps = {
        "old_per_token_logps": old_per_token_logps,
        "sampling_per_token_logps": sampling_per_token_logps,
    }
    check_tensor("completion_mask", completion_mask)
    for name, x in logps.items():
        check_tensor(name, x, like=completion_mask, floating=True)
        check_shape(name, x, ("that of completion_mask", tuple(completion_mask.shape)))
    counts = completion_mask != 0
    wide = torch.promote_types(old_per_token_logps.dtype, torch.float32)
    moved = torch.nan_to_num(old_per_token_logps.to(wide) - sampling_per_token_logps, nan=0.0)[
        counts
    ].square()
    places = moved.argsort(descending=True)
    number = torch.arange(len(moved), 0, -1, device=moved.device)
    rest = (
        moved[places].flip(0).cumsum(0).flip(0) / number
    )  # the mean of a token's and of all smaller d^2
    kept = torch.empty_like(counts[counts])
    kept[places] = (rest < threshold) | (number == 1)
    return counts.masked_scatter(counts, kept)


def _sampled(tokens: TokenInputs) -> Tensor:
    """Return the sampler's log-probabilities; where it has none (NaN), the policy's, held constant."""
    sampled = tokens.sampling_per_token_logps
    return torch.where(torch.isnan(sampled), tokens.logps.detach(), sampled)  # type: ignore[arg-type]


def _kept(keep: Tensor, log_ratio: Tensor, tokens: TokenInputs) -> Tensor:
    """``-A e^log_ratio`` where `keep`; elsewhere 0, without the ratio."""
    return -times_exp(torch.where(keep, log_ratio, 0.0), torch.where(keep, tokens.advantages, 0.0))


def _squared(weight: float, log_ratio: Tensor) -> Tensor | float:
    """``weight R^2``; a weight of 0 gives 0, even for an infinite R."""
    return weight * log_ratio.square() if weight else 0.0


def _binary_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL((p, 1 - p) || (q, 1 - q))."""
    return p * torch.log(p / q) + (1 - p) * torch.log((1 - p) / (1 - q))
