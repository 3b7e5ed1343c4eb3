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
gspo      PPO's with a ratio s: the sequence's in value, the token's in gradient   https://arxiv.org/abs/2507.18071
geo_mean  -A exp(mean of the clipped R), one ratio per sequence                    https://arxiv.org/abs/2507.20673
========= ======================================================================= ============================

None of them uses the entropies or reference logps. The first five look at one token at a time and get the one-pass
engine. Without old log-probabilities they are on-policy: R = 0.

The normaliser is the config's ``loss_type``, where verl has ``loss_agg_mode`` (docs/verl-losses.md has the table). A
mean over sequences divides by B, as verl does with its ``global_batch_size``; where that is not given, verl counts the
sequences that have a counted token. ``geo_mean`` is always a mean over sequences of means over tokens: take "grpo".
An advantage of exactly 0 contributes exactly 0 to the policy term, and a clipped token no gradient, also where a ratio
overflows. Means and shares are over the tokens of the call, as verl's are over those of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import ClassVar

import torch
from torch import Tensor

from grpo_kernels.base.checks import check_number
from grpo_kernels.base.sums import sequence_means
from grpo_kernels.objective.custom import TokenInputs
from grpo_kernels.token_loss.formulas import times

__all__ = ["cispo", "clip_cov", "dppo_kl", "dppo_tv", "dro", "geo_mean", "gpg", "gspo", "kl_cov"]

# Bounds of a field, as `check_number` takes them
AT_LEAST_0, ABOVE_0, ANY_NUMBER = (
    {"lowest": 0.0, "inclusive": True},
    {"lowest": 0.0},
    {"inclusive": True},
)
LARGEST_LOG_RATIO = 20.0  # verl's clamp of R where the ratio is a constant
LARGEST_SEQUENCE_LOG_RATIO = (
    10.0  # verl's upper bound of log s in gspo; beyond it there is no gradient
)


@dataclass(frozen=True)
class NamedLoss:
    """A policy loss without entropies: `loss` times the importance sampling ratio. Checks its numbers."""

    token_level: ClassVar[bool] = False
    uses_entropies: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for x in fields(self):
            if x.type == "float":
                check_number(x.name, getattr(self, x.name), **(x.metadata or AT_LEAST_0))

    def __call__(self, tokens: TokenInputs) -> Tensor:
        loss, ratio = self.loss(tokens), tokens.importance_sampling_ratio
        return loss if ratio is None else times(loss, ratio)

    def loss(self, tokens: TokenInputs) -> Tensor:
        """Each token's loss, shaped like `tokens.logps`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Ranged(NamedLoss):
    """A policy loss with a clip range: the distances of its two ends from the middle, as in verl."""

    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2

    def _clipped(self, log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """PPO's ``-min(e^R A, clip(e^R) A)``, and where it is clipped; a ratio beyond its bound is never used."""
        up = advantages > 0
        bound = torch.where(
            up, torch.full_like(log_ratio, 1 + self.clip_ratio_high), 1 - self.clip_ratio_low
        )
        ratio = torch.exp(log_ratio.detach())
        beyond = torch.where(up, ratio > bound, ratio < bound) & (advantages != 0)
        inside = times_exp(torch.where(beyond, 0.0, log_ratio), advantages)
        return -torch.where(beyond, bound * advantages, inside), beyond


class gpg(NamedLoss):
    """Group policy gradient: ``-A logp``."""

    token_level: ClassVar[bool] = True

    def loss(self, tokens: TokenInputs) -> Tensor:
        return times(tokens.logps, -tokens.advantages)


@dataclass(frozen=True)
class dro(NamedLoss):
    """Direct reward optimisation: ``-A logp + dro_beta / 2 R^2``.

    Args:
        dro_beta: weight of the squared log-ratio, above 0; verl has no default for it either.
    """

    dro_beta: float = field(metadata=ABOVE_0)
    token_level: ClassVar[bool] = True

    def loss(self, tokens: TokenInputs) -> Tensor:
        penalty = 0.5 * self.dro_beta * (tokens.logps - tokens.old_per_token_logps).square()
        return times(tokens.logps, -tokens.advantages) + penalty


class cispo(Ranged):
    """CISPO as verl has it: ``-clip(e^R, 1 - clip_ratio_low, 1 + clip_ratio_high) A logp``, the ratio a constant.

    The loss type "cispo" is TRL's, ``min(e^R, epsilon_high)``: the same with clip_ratio_low=1, clip_ratio_high =
    epsilon_high - 1.
    """

    token_level: ClassVar[bool] = True

    def loss(self, tokens: TokenInputs) -> Tensor:
        ratio = _constant_ratio(tokens).clamp(1 - self.clip_ratio_low, 1 + self.clip_ratio_high)
        return times(tokens.logps, -ratio * tokens.advantages)


@dataclass(frozen=True)
class dppo_tv(Ranged):
    """DPPO, total variation: ``-min(e^R, clip_ratio_c) A logp``, the ratio a constant, where the policy may still move.

    A token counts if p - p_old is at most `clip_ratio_high` (A > 0) or at least -`clip_ratio_low` (A <= 0); its loss
    and gradient are 0 otherwise.

    Args:
        clip_ratio_low, clip_ratio_high: bounds on the difference of the probabilities, not on the ratio.
        clip_ratio_c: cap on the ratio. 3 is the default of verl's config; the paper advises more (section 5.4).
    """

    clip_ratio_c: float = field(default=3.0, metadata=ABOVE_0)
    token_level: ClassVar[bool] = True

    def loss(self, tokens: TokenInputs) -> Tensor:
        moved = torch.exp(tokens.logps.detach()) - torch.exp(tokens.old_per_token_logps)
        up = tokens.advantages > 0
        return self._kept(
            tokens, torch.where(up, moved <= self.clip_ratio_high, moved >= -self.clip_ratio_low)
        )

    def _kept(self, tokens: TokenInputs, keep: Tensor) -> Tensor:
        weight = -_constant_ratio(tokens).clamp(max=self.clip_ratio_c) * tokens.advantages
        return times(tokens.logps, torch.where(keep, weight, 0.0))


class dppo_kl(dppo_tv):
    """DPPO, KL: as `dppo_tv`, where a token counts if KL((p_old, 1 - p_old) || (p, 1 - p)) is in bounds.

    The bound is `clip_ratio_high` for A > 0, `clip_ratio_low` otherwise, and applies only to a token whose probability
    has moved the way its advantage pushes it. 1 - p is computed without cancellation, plus verl's 1e-8.
    """

    def loss(self, tokens: TokenInputs) -> Tensor:
        logps, old = tokens.logps.detach(), tokens.old_per_token_logps
        p, p_old = torch.exp(logps), torch.exp(old)
        rest, rest_old = (-torch.expm1(x.clamp(max=0.0)) for x in (logps, old))
        kl = times(old - logps, p_old) + rest_old * torch.log((rest_old + 1e-8) / (rest + 1e-8))
        raised = (kl <= self.clip_ratio_high) | (p <= p_old)
        lowered = (kl <= self.clip_ratio_low) | (p >= p_old)
        return self._kept(tokens, torch.where(tokens.advantages > 0, raised, lowered))


@dataclass(frozen=True)
class clip_cov(Ranged):
    """Clip-Cov: PPO's clipped loss, without some of the tokens that would lower the entropy most.

    ``max(int(clip_cov_ratio * counted tokens), 1)`` tokens get a loss of 0. They are drawn at random from the unclipped
    tokens whose covariance (A - mean A) (logp - mean logp), means over the batch, is between `clip_cov_lb` and
    `clip_cov_ub`.

    Args:
        clip_ratio_low, clip_ratio_high: PPO's range, [1 - clip_ratio_low, 1 + clip_ratio_high].
        clip_cov_ratio: above 0.
        generator: for the draw, a ``torch.randperm`` on the CPU as in verl; None: torch's default generator. With a
            `process_group` it must be in the same state on all ranks, or they draw different tokens.
    """

    clip_cov_ratio: float = field(default=0.0002, metadata=ABOVE_0)
    clip_cov_lb: float = field(default=1.0, metadata=ANY_NUMBER)
    clip_cov_ub: float = field(default=5.0, metadata=ANY_NUMBER)
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.generator is not None and getattr(self.generator, "device", None) != torch.device(
            "cpu"
        ):
            raise TypeError(
                f"generator: expected a torch.Generator on the CPU, got {self.generator!r}"
            )

    def loss(self, tokens: TokenInputs) -> Tensor:
        loss, clipped = self._clipped(tokens.logps - tokens.old_per_token_logps, tokens.advantages)
        covariance = _covariance(tokens)
        eligible = (
            (covariance > self.clip_cov_lb)
            & (covariance < self.clip_cov_ub)
            & tokens.mask
            & ~clipped
        )
        places = eligible.flatten().nonzero()[:, 0]
        number = max(int(self.clip_cov_ratio * int(tokens.mask.sum())), 1)
        drawn = torch.randperm(len(places), generator=self.generator)[:number]
        return torch.where(_at_places(places[drawn.to(places.device)], eligible), 0.0, loss)


@dataclass(frozen=True)
class kl_cov(NamedLoss):
    """KL-Cov: ``-e^R A``, plus ``ppo_kl_coef |R|`` for the ``max(1, int(kl_cov_ratio * counted tokens))`` tokens of
    highest covariance, as in `clip_cov`.

    Args:
        kl_cov_ratio: above 0, at most 1.
        ppo_kl_coef: weight of the penalty.
    """

    kl_cov_ratio: float = field(default=0.0002, metadata=ABOVE_0)
    ppo_kl_coef: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl_cov_ratio > 1:
            raise ValueError(
                f"kl_cov_ratio: expected a number in (0, 1], got {self.kl_cov_ratio!r}"
            )

    def loss(self, tokens: TokenInputs) -> Tensor:
        log_ratio = tokens.logps - tokens.old_per_token_logps
        loss = -times_exp(log_ratio, tokens.advantages)
        places = tokens.mask.flatten().nonzero()[:, 0]
        number = min(max(1, int(len(places) * self.kl_cov_ratio)), len(places))
        highest = places[_covariance(tokens).flatten()[places].topk(number).indices]
        return loss + torch.where(
            _at_places(highest, tokens.mask), self.ppo_kl_coef * log_ratio.abs(), 0.0
        )


class gspo(Ranged):
    """GSPO-token: PPO's clipped loss of ``s = exp(sg[mean R] + logp - sg[logp])``, sg a constant, at most e^10.

    Advantages and importance sampling ratios may be one per token. Where both are one per sequence, prefer
    ``importance_sampling_level="sequence"``: the gradient is the same, it has metrics of the ratio and can be compiled.
    """

    def loss(self, tokens: TokenInputs) -> Tensor:
        attached = tokens.logps - tokens.logps.detach()  # 0, with the gradient of logps
        mean = sequence_means(tokens.logps.detach() - tokens.old_per_token_logps, tokens.mask)
        log_ratio = _at_most(LARGEST_SEQUENCE_LOG_RATIO, attached + mean)
        return self._clipped(log_ratio, tokens.advantages)[0]


class geo_mean(Ranged):
    """GMPO with an importance sampling ratio: ``-A exp(mean of the clipped R)``, clipped one-sidedly by the sign of A.

    The range is in log space, [-clip_ratio_low, clip_ratio_high], and the factor on a sequence is the geometric mean of
    its tokens' importance sampling ratios. Without those, prefer ``loss_type="gmpo"``: the same loss, with metrics of
    the ratio, and it can be compiled.
    """

    def __call__(
        self, tokens: TokenInputs
    ) -> Tensor:  # the importance sampling ratios are in the exponent
        log_ratio, up = tokens.logps - tokens.old_per_token_logps, tokens.advantages > 0
        bounded = torch.where(
            up,
            _at_most(self.clip_ratio_high, log_ratio),
            -_at_most(self.clip_ratio_low, -log_ratio),
        )
        exponent = sequence_means(torch.where(tokens.advantages == 0, 0.0, bounded), tokens.mask)
        if tokens.importance_sampling_ratio is not None:
            log_weight = torch.log(
                tokens.importance_sampling_ratio + 1e-10
            )  # verl's: a ratio may be 0
            exponent = exponent + sequence_means(log_weight, tokens.mask)
        return -times_exp(exponent.expand_as(log_ratio), tokens.advantages)


def _constant_ratio(tokens: TokenInputs) -> Tensor:
    """e^R, without gradient."""
    log_ratio = tokens.logps.detach() - tokens.old_per_token_logps
    return torch.exp(log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))


def times_exp(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """``e^log_ratio A``; an advantage of 0 gives 0 and no gradient, whatever the ratio, unless it is NaN."""
    nothing = (advantages == 0) & ~torch.isnan(log_ratio)
    return torch.exp(torch.where(nothing, 0.0, log_ratio)) * advantages


def _at_most(bound: float, x: Tensor) -> Tensor:
    """min(`x`, bound). Where both are equal the gradient passes, in any release of torch."""
    return torch.where(x > bound, bound, x)


def _covariance(tokens: TokenInputs) -> Tensor:
    """(A - mean A) (logp - mean logp) of every counted token, without gradient."""
    count = tokens.mask.sum().clamp(min=1)

    def centred(x: Tensor) -> Tensor:
        return x - torch.where(tokens.mask, x, 0.0).sum() / count

    return centred(tokens.advantages) * centred(tokens.logps.detach())


def _at_places(places: Tensor, like: Tensor) -> Tensor:
    """Return bool, shaped like `like`: True at `places`, indices into the flattened tensor."""
    flags = torch.zeros_like(like).flatten()
    flags[places] = True
    return flags.view_as(like)
