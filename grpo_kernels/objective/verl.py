"""verl's registered policy losses that `LossConfig` does not have, as objectives of `grpo_loss`.

::

    out = grpo_loss(..., objective=objectives.clip_cov(clip_cov_ratio=0.001), config=LossConfig(loss_type="bnpo"))

Names, parameters and defaults are verl 0.9.1's. With R = logp - old and rho = ``importance_sampling_ratio`` (verl's
``rollout_is_weights``), a token's loss is rho times

========= ======================================================================= ============================
gpg       -A logp                                                                  https://arxiv.org/abs/2504.02546
dro       -A logp + beta / 2 R^2                                                   https://arxiv.org/abs/2405.19107
cispo     -clip(e^R) A logp, the clipped ratio a constant                          https://arxiv.org/abs/2506.13585
dppo_tv   -min(e^R, c) A logp where |p - p_old| is in bounds, the ratio a constant https://arxiv.org/abs/2602.04879
dppo_kl   the same with the KL of (p, 1 - p)                                       https://arxiv.org/abs/2602.04879
clip_cov  PPO's, but 0 for some of the tokens of high covariance                   https://arxiv.org/abs/2505.22617
kl_cov    -e^R A, + coef |R| for the tokens of highest covariance                  https://arxiv.org/abs/2505.22617
gspo      PPO's, the ratio s a sequence's in value and a token's in gradient       https://arxiv.org/abs/2507.18071
geo_mean  -A exp(mean of the clipped R), one ratio a sequence                      https://arxiv.org/abs/2507.20673
========= ======================================================================= ============================

None of them uses the entropies or reference logps. The first five look at one token at a time and get the one-pass
engine. What they do with an old policy that is not given is what they do on-policy: R = 0.

The normaliser is the config's ``loss_type``, where verl has ``loss_agg_mode``:

======================= ==========================================================================
token-mean              "bnpo", or "dapo" with num_items_in_batch = batch_num_tokens / dp_size
token-sum               "dapo" with num_items_in_batch=1
seq-mean-token-sum      "luspo"
seq-mean-token-mean     "grpo"
seq-mean-token-sum-norm "dr_grpo" with max_completion_length = loss_scale_factor (verl's default: T)
======================= ==========================================================================

The last three divide by B, as verl does with its ``global_batch_size``; where that is not given, verl counts the
sequences that have a counted token. ``geo_mean`` is always a mean over sequences of means over tokens: take "grpo".
An advantage of exactly 0 contributes exactly 0 to the policy term, and a clipped token no gradient, also where a ratio
overflows. Means and shares of the tokens are over the call's, as verl's are over a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from grpo_kernels.base.checks import check_number
from grpo_kernels.objective.custom import TokenInputs
from grpo_kernels.token_loss.formulas import times

__all__ = ["cispo", "clip_cov", "dppo_kl", "dppo_tv", "dro", "geo_mean", "gpg", "gspo", "kl_cov"]

LARGEST_LOG_RATIO = 20.0  # verl's clamp of R where the ratio is a constant
LARGEST_SEQUENCE_LOG_RATIO = 10.0  # and of mean R in gspo, beyond which there is no gradient


class _Objective:
    """A policy loss without entropies; its fields, checked."""

    token_level: ClassVar[bool] = False
    uses_entropies: ClassVar[bool] = False
    positive: ClassVar[tuple[str, ...]] = ()  # fields that must be above 0
    any_number: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name in self.any_number:
                check_number(name, value)
            elif name != "generator":
                check_number(name, value, 0.0, name not in self.positive)


@dataclass(frozen=True)
class gpg(_Objective):
    """Group policy gradient: ``-A logp``."""

    token_level: ClassVar[bool] = True

    def __call__(self, tokens: TokenInputs) -> Tensor:
        return _corrected(times(tokens.logps, -tokens.advantages), tokens)


@dataclass(frozen=True)
class dro(_Objective):
    """Direct reward optimisation: ``-A logp + dro_beta / 2 R^2``.

    Args:
        dro_beta: weight of the squared log-ratio, above 0; verl has no default for it either.
    """

    dro_beta: float
    token_level: ClassVar[bool] = True
    positive: ClassVar[tuple[str, ...]] = ("dro_beta",)

    def __call__(self, tokens: TokenInputs) -> Tensor:
        penalty = 0.5 * self.dro_beta * (tokens.logps - tokens.old_per_token_logps).square()
        return _corrected(times(tokens.logps, -tokens.advantages) + penalty, tokens)


@dataclass(frozen=True)
class cispo(_Objective):
    """CISPO as verl has it: ``-clip(e^R, 1 - clip_ratio_low, 1 + clip_ratio_high) A logp``, the ratio a constant.

    The loss type "cispo" is TRL's, ``min(e^R, epsilon_high)``: the same with clip_ratio_low=1, clip_ratio_high =
    epsilon_high - 1.
    """

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    token_level: ClassVar[bool] = True

    def __call__(self, tokens: TokenInputs) -> Tensor:
        ratio = _constant_ratio(tokens).clamp(1 - self.clip_ratio_low, 1 + self.clip_ratio_high)
        return _corrected(times(tokens.logps, -ratio * tokens.advantages), tokens)


@dataclass(frozen=True)
class dppo_tv(_Objective):
    """DPPO, total variation: ``-min(e^R, clip_ratio_c) A logp``, the ratio a constant, where the policy may still move.

    A token counts if p - p_old is at most `clip_ratio_high` (A > 0) or at least -`clip_ratio_low` (A <= 0); its loss
    and gradient are 0 otherwise.

    Args:
        clip_ratio_low, clip_ratio_high: bounds on the difference of the probabilities, not on the ratio.
        clip_ratio_c: cap on the ratio. 3 is what a run of verl gets from its config; the 20 that its function falls
            back on is never reached there, though the paper advises a high cap (section 5.4).
    """

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    token_level: ClassVar[bool] = True
    positive: ClassVar[tuple[str, ...]] = ("clip_ratio_c",)

    def __call__(self, tokens: TokenInputs) -> Tensor:
        moved = torch.exp(tokens.logps.detach()) - torch.exp(tokens.old_per_token_logps)
        up = tokens.advantages > 0
        return self._kept(tokens, torch.where(up, moved <= self.clip_ratio_high, moved >= -self.clip_ratio_low))

    def _kept(self, tokens: TokenInputs, keep: Tensor) -> Tensor:
        weight = -_constant_ratio(tokens).clamp(max=self.clip_ratio_c) * tokens.advantages
        return _corrected(times(tokens.logps, torch.where(keep, weight, 0.0)), tokens)


@dataclass(frozen=True)
class dppo_kl(dppo_tv):
    """DPPO, KL: as `dppo_tv`, where a token counts if KL((p_old, 1 - p_old) || (p, 1 - p)) is in bounds.

    The bound is `clip_ratio_high` for A > 0, `clip_ratio_low` otherwise, and holds only for a token whose probability
    has moved the way its advantage pushes it. 1 - p is taken without cancellation, plus verl's 1e-8.
    """

    def __call__(self, tokens: TokenInputs) -> Tensor:
        logps, old = tokens.logps.detach(), tokens.old_per_token_logps
        p, p_old = torch.exp(logps), torch.exp(old)
        rest, rest_old = (-torch.expm1(x.clamp(max=0.0)) for x in (logps, old))
        kl = times(old - logps, p_old) + rest_old * torch.log((rest_old + 1e-8) / (rest + 1e-8))
        raised = (kl <= self.clip_ratio_high) | (p <= p_old)
        lowered = (kl <= self.clip_ratio_low) | (p >= p_old)
        return self._kept(tokens, torch.where(tokens.advantages > 0, raised, lowered))


@dataclass(frozen=True)
class clip_cov(_Objective):
    """Clip-Cov: PPO's clipped loss, without some of the tokens that would lower the entropy most.

    Of the unclipped tokens whose covariance (A - mean A) (logp - mean logp), means over the batch, lies between
    `clip_cov_lb` and `clip_cov_ub`, ``max(int(clip_cov_ratio * counted tokens), 1)`` drawn at random get a loss of 0.

    Args:
        clip_ratio_low, clip_ratio_high: PPO's range, [1 - clip_ratio_low, 1 + clip_ratio_high].
        clip_cov_ratio: above 0.
        generator: for the draw, a ``torch.randperm`` on the CPU as in verl; None: torch's default one. With a
            `process_group` it has to be in the same state on all ranks, which would draw different tokens else.
    """

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_cov_ratio: float = 0.0002
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    generator: torch.Generator | None = None
    positive: ClassVar[tuple[str, ...]] = ("clip_cov_ratio",)
    any_number: ClassVar[tuple[str, ...]] = ("clip_cov_lb", "clip_cov_ub")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.generator is not None and getattr(self.generator, "device", None) != torch.device("cpu"):
            raise TypeError(f"generator: expected a torch.Generator on the CPU, got {self.generator!r}")

    def __call__(self, tokens: TokenInputs) -> Tensor:
        log_ratio = tokens.logps - tokens.old_per_token_logps
        loss, clipped = _clipped(log_ratio, tokens.advantages, 1 - self.clip_ratio_low, 1 + self.clip_ratio_high)
        covariance = _covariance(tokens)
        eligible = (covariance > self.clip_cov_lb) & (covariance < self.clip_cov_ub) & tokens.mask & ~clipped
        places = eligible.flatten().nonzero()[:, 0]
        number = max(int(self.clip_cov_ratio * int(tokens.mask.sum())), 1)
        drawn = torch.randperm(len(places), generator=self.generator)[:number]
        dropped = torch.zeros_like(eligible).flatten()
        dropped[places[drawn.to(places.device)]] = True
        return _corrected(torch.where(dropped.view_as(loss), 0.0, loss), tokens)


@dataclass(frozen=True)
class kl_cov(_Objective):
    """KL-Cov: ``-e^R A``, plus ``ppo_kl_coef |R|`` for the tokens of highest covariance, as in `clip_cov`.

    Those are ``max(1, int(kl_cov_ratio * counted tokens))``.

    Args:
        kl_cov_ratio: above 0, at most 1.
        ppo_kl_coef: weight of the penalty.
    """

    kl_cov_ratio: float = 0.0002
    ppo_kl_coef: float = 0.1
    positive: ClassVar[tuple[str, ...]] = ("kl_cov_ratio",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl_cov_ratio > 1:
            raise ValueError(f"kl_cov_ratio: expected a number in (0, 1], got {self.kl_cov_ratio!r}")

    def __call__(self, tokens: TokenInputs) -> Tensor:
        log_ratio = tokens.logps - tokens.old_per_token_logps
        loss = -_times_exp(log_ratio, tokens.advantages)
        places = tokens.mask.flatten().nonzero()[:, 0]
        number = min(max(1, int(len(places) * self.kl_cov_ratio)), len(places))
        highest = places[_covariance(tokens).flatten()[places].topk(number).indices]
        penalised = torch.zeros_like(tokens.mask).flatten()
        penalised[highest] = True
        penalty = torch.where(penalised.view_as(loss), self.ppo_kl_coef * log_ratio.abs(), 0.0)
        return _corrected(loss + penalty, tokens)


@dataclass(frozen=True)
class gspo(_Objective):
    """GSPO-token: PPO's clipped loss of ``s = exp(sg[mean R] + logp - sg[logp])``, sg a constant, at most e^10.

    Advantages and importance sampling ratios may be one per token. Where both are one per sequence its gradient is that
    of ``importance_sampling_level="sequence"``, which also has metrics of the ratio and can be compiled: prefer that
    then.
    """

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2

    def __call__(self, tokens: TokenInputs) -> Tensor:
        own = tokens.logps - tokens.logps.detach()
        mean = _sequence_mean(tokens.logps.detach() - tokens.old_per_token_logps, tokens.mask)
        log_ratio = _at_most(LARGEST_SEQUENCE_LOG_RATIO, own + mean)
        loss, _ = _clipped(log_ratio, tokens.advantages, 1 - self.clip_ratio_low, 1 + self.clip_ratio_high)
        return _corrected(loss, tokens)


@dataclass(frozen=True)
class geo_mean(_Objective):
    """GMPO with an importance sampling ratio: ``-A exp(mean of the clipped R)``, clipped one-sidedly by the sign of A.

    The range is in log space, [-clip_ratio_low, clip_ratio_high], and the factor on a sequence is the geometric mean of
    its tokens' importance sampling ratios. Without those it is ``loss_type="gmpo"``, which also has metrics of the
    ratio and can be compiled: prefer that then.
    """

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2

    def __call__(self, tokens: TokenInputs) -> Tensor:
        log_ratio, up = tokens.logps - tokens.old_per_token_logps, tokens.advantages > 0
        bounded = torch.where(up, _at_most(self.clip_ratio_high, log_ratio), -_at_most(self.clip_ratio_low, -log_ratio))
        exponent = _sequence_mean(torch.where(tokens.advantages == 0, 0.0, bounded), tokens.mask)
        if tokens.importance_sampling_ratio is not None:
            log_weight = torch.log(tokens.importance_sampling_ratio + 1e-10)  # verl's: a ratio may be 0
            exponent = exponent + _sequence_mean(log_weight, tokens.mask)
        return -_times_exp(exponent.expand_as(log_ratio), tokens.advantages)


def _constant_ratio(tokens: TokenInputs) -> Tensor:
    """e^R, without gradient."""
    log_ratio = tokens.logps.detach() - tokens.old_per_token_logps
    return torch.exp(log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))


def _times_exp(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """``e^log_ratio A``, where an advantage of 0 gives 0 and no gradient, whatever the ratio (but NaN)."""
    nothing = (advantages == 0) & ~torch.isnan(log_ratio)
    return torch.exp(torch.where(nothing, 0.0, log_ratio)) * advantages


def _clipped(log_ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """PPO's ``-min(e^R A, clip(e^R, low, high) A)``, and where it is the bound; the ratio beyond it is never used."""
    bound = torch.where(advantages > 0, torch.full_like(log_ratio, high), torch.full_like(log_ratio, low))
    ratio = torch.exp(log_ratio.detach())
    beyond = torch.where(advantages > 0, ratio > bound, ratio < bound) & (advantages != 0)
    inside = _times_exp(torch.where(beyond, 0.0, log_ratio), advantages)
    return -torch.where(beyond, bound * advantages, inside), beyond


def _at_most(bound: float, x: Tensor) -> Tensor:
    """`x`, or the bound where it is larger. Where both are equal the gradient passes, in any release of torch."""
    return torch.where(x > bound, bound, x)


def _covariance(tokens: TokenInputs) -> Tensor:
    """(A - mean A) (logp - mean logp) of every counted token, without gradient."""
    count = tokens.mask.sum().clamp(min=1)

    def centred(x: Tensor) -> Tensor:
        return x - torch.where(tokens.mask, x, 0.0).sum() / count

    return centred(tokens.advantages) * centred(tokens.logps.detach())


def _sequence_mean(x: Tensor, mask: Tensor) -> Tensor:
    """(B, T) -> (B, 1): the mean over each row's counted tokens."""
    return torch.where(mask, x, 0.0).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)


def _corrected(loss: Tensor, tokens: TokenInputs) -> Tensor:
    """Times the importance sampling ratio, if there is one."""
    ratio = tokens.importance_sampling_ratio
    return loss if ratio is None else times(loss, ratio)
