"""The policy loss on per-token log-probabilities and entropies: the specification of what every
engine computes.

Surrogates (the policy terms of a token's loss) and KL estimators are `formulas` in every backend.
What is around them kernels have by hand: csrc/fused_loss.h in C++, backends/triton_rows/fused.py in
Triton. tests/support/row_suite.py compares each with float64, tests/call/test_differential.py all.

With A the advantage and w the weight by the normalizer (only counted tokens get here)::

    R_t    = logp_t - old_t                        token level
           = mean over the sequence of that        sequence level (some loss types have their own)
    l_t    = keep_t * is_t * surrogate(R_t, A_t) + beta * KL_t [* exp(R_t)]
    loss   = sum_t w_t l_t - entropy_coef * mean entropy of the tokens that the entropy mask keeps

KL_t is an estimate, or the divergence D_t over the vocabulary. keep_t is the product of the
off-policy and the top-entropy mask; is_t is the importance sampling ratio, an input or computed
here. Neither affects the KL term. Neither is a factor in GMPO, whose R is a mean over the tokens
that the entropy mask keeps. In VESPO, is_t is part of the sequence's log-weight, which the
surrogate gets in the place of R_t.

The gradient is two numbers per token, a_t = d loss / d logp_t and b_t = d loss / d entropy_t. If
KL_t is a divergence, from a second head, there is a third, c_t = d loss / d D_t = w_t beta. The
derivative is written out here: ``a_t = sum_s w_s * dl_s/dlogp_t``, where s is t alone, or every
token of its sequence if they share R. Without old logps, the current ones are used, held constant,
so R is 0; a log-probability that is not finite, of a token that the policy cannot have sampled,
then makes the loss NaN.

The formulas come from TRL 1.16's ``GRPOTrainer._compute_loss`` (GMPO: its ``GMPOTrainer``; k1 and
k2 are ours). The importance sampling ratio (`_with_sampling_ratio`) is TRL's too, computed from
log-probabilities that the loss has anyway. With a sampler's K most likely ids, l_t has another
term, outside is_t (`_centering_weights`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels.backends import Coefficients, FusedLoss, RowStats
from grpo_kernels.backends.formulas import ESTIMATORS, SURROGATES, times_or_zero
from grpo_kernels.base.tensors import bounded, is_nonzero, quantile, scored_difference
from grpo_kernels.objective.config import LossConfig
from grpo_kernels.objective.loss_types import LogRatio
from grpo_kernels.tokens import Tokens

LEAST_TAIL = 1e-6
CENTERED_ROWS = 2048  # at a time, in double precision


@dataclass(frozen=True)
class MetricInputs:
    """What the metrics read of a loss, (n,) each; None where the loss has no such term."""

    tokens: Tokens  # with the importance sampling ratio, if the loss computes it
    log_ratio: LogRatio  # R
    token_log_ratio: Tensor
    surrogate_input: Tensor  # R, or in "vespo" another number
    off_policy_mask: Tensor | None = None  # bool: not dropped by the off-policy mask
    kl: Tensor | None = None


class TokenTerms(NamedTuple):
    """What the tokens' log-probabilities contribute, (n,) each: the policy term, or with the KL."""

    per_token: Tensor  # l_t, without the token's weight
    d_logp: Tensor  # a_t, with it
    metric_inputs: MetricInputs


@dataclass(frozen=True)
class Evaluation:
    """A loss and its gradient with respect to the per-token numbers."""

    loss: Tensor  # ()
    coefficients: Coefficients  # (n,) each; None: the loss does not depend on that number
    loss_without_entropy: Tensor  # () the policy and the KL term
    # None for a custom objective that does not read the config's loss
    metric_inputs: MetricInputs | None = None

    @property
    def has_gradient(self) -> Tensor:
        """(n,) bool: the tokens with a non-zero coefficient."""
        nonzero = [is_nonzero(x) for x in self.coefficients if x is not None]
        return functools.reduce(torch.logical_or, nonzero)


def stats_of(logps: Tensor, entropies: Tensor) -> RowStats:
    """The statistics of tokens of which only these numbers, (n,) each, are known."""
    return RowStats(logps, logps, logps, entropies)  # no loss reads the others


class PolicyLoss:
    """The built-in losses.

    `evaluate` computes the loss below and its gradient, the `Coefficients` of each token. The code
    covers the loss types "grpo", "bnpo", "dapo" and "dr_grpo" with the estimator k3 and without the
    off-policy mask; tensors are (B, T), of all tokens, and `advantages` are (B, 1) or (B, T)::

        def plain_loss(
            config, mask, logps, entropies, advantages, old=None, ref=None, sampling_ratio=1.0
        ):
            lengths, sequences = mask.sum(1, keepdim=True).clamp(min=1), len(mask)
            old = logps.detach() if old is None else old
            log_ratio = torch.where(mask, logps - old, 0.0)
            if config.importance_sampling_level == "sequence":
                log_ratio = (log_ratio.sum(1, keepdim=True) / lengths).expand_as(mask)
            ratio = log_ratio.exp()
            free = ratio if config.delta is None else ratio.clamp(max=config.delta)
            bounded = ratio.clamp(1 - config.epsilon, 1 + config.clip_high)
            policy = -torch.min(free * advantages, bounded * advantages) * sampling_ratio
            least = torch.quantile(entropies[mask], 1 - config.top_entropy_quantile)
            keep = mask & (entropies >= least)
            per_token = torch.where(keep, policy, 0.0)
            if config.beta != 0:
                kl = torch.exp(ref - logps) - (ref - logps) - 1
                kl = kl * ratio if config.use_bias_correction_kl else kl
                per_token = per_token + config.beta * kl
            constant = sequences * config.max_completion_length
            count = {"grpo": lengths * sequences, "dr_grpo": constant}
            count = count.get(config.loss_type, mask.sum())  # "bnpo", "dapo"
            return (per_token / count)[mask].sum() - config.entropy_coef * entropies[keep].mean()

    `tests/objective/test_from_logps.py` runs this code and compares.

    Attributes:
        on_policy: True without old log-probabilities: R is 0.
        is_centered: True with a sampler's K most likely ids (score centering).
        lacks_sampling_ratio: True if the importance sampling ratio must be computed from this
            call's log-probabilities.
        is_coupled: False if a token's gradient is known with the token's own numbers, or before.
        has_entropy_gradient: True if the loss depends on the entropies.
        loss_over: see `LossType.loss_over`.
    """

    is_expected = False

    def __init__(
        self,
        config: LossConfig,
        tokens: Tokens,
        token_weights: Tensor,
        loss_over: str = "nothing",
    ) -> None:
        old = tokens.old_per_token_logps
        self.on_policy = old is None
        lacks_ratio = config.corrects_sampling and tokens.importance_sampling_ratio is None
        if lacks_ratio and old is not None:  # old and sampling logps determine it
            tokens, lacks_ratio = _with_sampling_ratio(config, tokens, old), False
        self.lacks_sampling_ratio = lacks_ratio
        self.config, self.tokens, self.token_weights = config, tokens, token_weights
        self.definition, self.loss_over = config.definition, loss_over
        self.is_centered = tokens.sampling_topk_logps is not None
        self.has_entropy_gradient = config.entropy_coef != 0.0

    @cached_property
    def is_coupled(self) -> bool:
        config, has_sampler = self.config, self.tokens.sampling_per_token_logps is not None
        compares = config.masks_off_policy and (has_sampler or not self.on_policy)
        if config.top_entropy_quantile < 1.0 or compares:
            return True
        if not self.on_policy:
            return config.reads_sequence
        # then R is 0: it couples tokens only by the ratio to the sampler, or that before the KL
        of_sequence = config.vllm_importance_sampling_mode.startswith("sequence_")
        corrects_kl = config.corrects_kl and config.importance_sampling_level == "sequence"
        return corrects_kl or (config.corrects_sampling and (of_sequence or config.reads_sequence))

    @property
    def _knows_policy_gradient(self) -> bool:
        """True if the d_logp of the policy term is that of `_at_ratio_one`, unless it is NaN."""
        return self.on_policy and not (self.lacks_sampling_ratio or self.is_coupled)

    @cached_property
    def _at_ratio_one(self) -> TokenTerms:
        """`_policy_term` where every ratio is 1: its d_logp depends on no log-probability."""
        return self._policy_term(torch.zeros_like(self.tokens.advantages), None)

    @property
    def one_coefficient(self) -> bool:
        """True if the loss depends on the tokens' log-probabilities alone."""
        reads_more = self.has_entropy_gradient or self.config.needs_reference_head
        return not (reads_more or self.is_centered)

    @cached_property
    def live(self) -> Tensor | None:
        """(n,) bool: False where both derivatives, a and b, are known to be 0 before the forward.

        None means True everywhere.
        """
        config, tokens = self.config, self.tokens
        if config.beta != 0.0 or self.has_entropy_gradient:
            return None
        if self._knows_policy_gradient and not self.is_centered:
            return self._at_ratio_one.d_logp != 0
        live, gate = tokens.advantages != 0, _gate(config, tokens)
        if gate is not None:
            live &= gate != 0
        if config.reads_sequence:
            # a token whose own term is 0 still gets gradient through the shared ratio
            layout = tokens.layout
            live = layout.sequence_sum(live.to(tokens.advantages))[layout.sequence] > 0
        return live

    def coefficients_at(self, index: Tensor, stats: RowStats) -> Coefficients:
        """Compute the coefficients at `index` (m,) from these tokens' numbers alone.

        Only valid if tokens are not coupled.
        """
        logps, topk_logps = stats.logps, stats.topk_logps
        if self._knows_policy_gradient:
            d_logp = torch.where(torch.isnan(logps), logps, self._at_ratio_one.d_logp[index])
            if self.config.estimates_kl:
                no_log_ratio = LogRatio(torch.zeros_like(logps))
                d_logp = d_logp + self.at(index)._estimated_kl(no_log_ratio, logps)[1]
        else:
            d_logp = self.at(index)._per_token(logps, None, None).d_logp
        d_entropy = torch.full_like(logps, self._d_entropy) if self.has_entropy_gradient else None
        d_topk = None
        if topk_logps is not None:
            d_topk = self.at(index)._centering(topk_logps, logps, None)[1]
        return Coefficients(d_logp, d_entropy, self._d_divergence(index), d_topk)

    def at(self, index: Tensor) -> PolicyLoss:
        """The loss of the tokens at `index` (m,), with the ratios that they have here."""
        tokens, weights = self.tokens.at(index), self.token_weights[index]
        return PolicyLoss(self.config, tokens, weights, self.loss_over)

    def _d_divergence(self, index: Tensor | slice = slice(None)) -> Tensor | None:
        if not self.config.needs_reference_head:
            return None
        return self.config.beta * self.token_weights[index]

    @property
    def _d_entropy(self) -> float:
        """d loss / d entropy of every token, where no mask chooses among them."""
        return -self.config.entropy_coef / max(1, self.tokens.layout.total)

    @property
    def _constants(self) -> tuple[float, ...]:
        return tuple(float(x) for x in self.definition.constants(self.config))

    def fused_loss(self) -> FusedLoss | None:
        """The loss in a row kernel's form; None if tokens are coupled or lack their ratio."""
        if self.is_coupled or self.lacks_sampling_ratio or self.is_centered:
            return None
        config, tokens = self.config, self.tokens
        if self.on_policy:
            policy: dict[str, Any] = {"d_policy": self._at_ratio_one.d_logp}
        else:
            policy = {
                "surrogate": self.definition.surrogate,
                "constants": self._constants,
                "advantages": tokens.advantages,
                "old": tokens.old_per_token_logps,
                "gate": _gate(config, tokens),
            }
        return FusedLoss(
            self.token_weights,
            kl_estimator=config.kl_estimator if config.beta != 0.0 else None,
            corrects_kl=config.corrects_kl,
            ref=tokens.ref_per_token_logps if config.estimates_kl else None,
            beta=float(config.beta),
            d_entropy=self._d_entropy if self.has_entropy_gradient else 0.0,
            is_linear=self.definition.is_linear,
            **policy,
        )

    def evaluate(self, stats: RowStats) -> Evaluation:
        """Compute the loss and its gradient from the statistics of all tokens."""
        config, logps, entropies = self.config, stats.logps, stats.entropies
        fused, entropy_mask, d_topk = stats.loss_stats, None, None
        if fused:  # a row kernel has computed `fused_loss`; no mask depends on entropies
            loss, d_logp, r = fused["loss"].sum(), fused["d_logp"], fused["log_ratio"]
            metric_inputs = MetricInputs(self.tokens, LogRatio(r), r, r, kl=fused.get("kl"))
            if self.on_policy:
                at_one = self._at_ratio_one
                metric_inputs = replace(
                    metric_inputs,
                    surrogate_input=at_one.metric_inputs.surrogate_input,
                    off_policy_mask=at_one.metric_inputs.off_policy_mask,
                )
                if not self.definition.is_linear:
                    loss = loss + (self.token_weights * at_one.per_token).sum()
        else:
            entropy_mask = _entropy_mask(config, entropies)
            divergences = None if stats.divergence is None else stats.divergence.value
            per_token, d_logp, metric_inputs = self._per_token(logps, entropy_mask, divergences)
            if stats.topk_logps is not None:
                centering, d_topk = self._centering(stats.topk_logps, logps, entropy_mask)
                per_token = per_token + centering
            loss = (self.token_weights * per_token).sum()
        loss_without_entropy, d_entropy = loss, None
        if self.has_entropy_gradient:  # the bonus is the mean entropy of the tokens in the mask
            mask = torch.ones_like(entropies) if entropy_mask is None else entropy_mask
            counts = mask.to(entropies.dtype)
            shares = config.entropy_coef * counts / counts.sum().clamp(min=1.0)
            loss, d_entropy = loss - times_or_zero(entropies, shares).sum(), -shares
        coefficients = Coefficients(d_logp, d_entropy, self._d_divergence(), d_topk)
        return Evaluation(loss, coefficients, loss_without_entropy, metric_inputs)

    def per_token_loss(
        self, logps: Tensor, entropies: Tensor, *, token_level: bool
    ) -> tuple[Tensor, MetricInputs]:
        """Compute l_t (n,) without the entropy bonus, and the inputs of the metrics.

        l_t is differentiable once in `logps`.

        Raises:
            ValueError: tokens are coupled, but a `token_level` objective reads their loss.
        """
        if token_level and (self.is_coupled or self.config.reads_sequence):
            raise ValueError(
                "tokens.loss: expected a loss of each token alone in a token_level objective, got "
                f"{self.config}, whose tokens depend on each other: do not declare it token_level"
            )
        if self.config.estimates_kl and self.tokens.ref_per_token_logps is None:
            raise ValueError(
                f"ref_per_token_logps: expected a tensor since beta = {self.config.beta}, got None"
            )
        entropy_mask = _entropy_mask(self.config, entropies.detach())
        loss, _, metric_inputs = self._per_token(logps.detach(), entropy_mask, None)
        return _TokenLosses.apply(logps, loss, self, entropy_mask), metric_inputs

    def _centering(
        self, topk_logps: Tensor, logps: Tensor, entropy_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """A_t sum_K c_v log p_v (n,), and d loss / d log p_v (n, K)."""
        advantages = self.tokens.advantages
        for mask in (_off_policy_mask(self.config, self.tokens, logps), entropy_mask):
            advantages = advantages if mask is None else torch.where(mask, advantages, 0.0)
        sampler_logps: Any = self.tokens.sampling_topk_logps
        value, d_topk = torch.empty_like(advantages), torch.empty_like(sampler_logps)
        for start in range(0, len(advantages), CENTERED_ROWS):
            rows = slice(start, start + CENTERED_ROWS)
            logp = topk_logps[rows].double()
            c = _centering_weights(self.config, logp, sampler_logps[rows].double())
            value[rows], d_topk[rows] = times_or_zero(logp, c).sum(dim=1), c
        weights = (self.token_weights * advantages)[:, None]
        return times_or_zero(value, advantages), times_or_zero(d_topk, weights)

    def _per_token(
        self, logps: Tensor, entropy_mask: Tensor | None, divergences: Tensor | None
    ) -> TokenTerms:
        """The policy term with the KL term, without the entropy bonus.

        Without `divergences` l_t lacks beta D_t; a_t never includes it.
        """
        # where tokens share a ratio, a NaN reaches all tokens of its sequence
        is_alone = not (self.definition.is_linear or self.config.reads_sequence)
        if self._knows_policy_gradient and is_alone:
            loss, d_logp, known = self._at_ratio_one
            is_nan = torch.isnan(logps)
            loss, d_logp = loss + (logps - logps), torch.where(is_nan, logps, d_logp)
            r = torch.where(is_nan, logps, 0.0)
            metric_inputs = MetricInputs(known.tokens, LogRatio(r), r, r, known.off_policy_mask)
        else:
            loss, d_logp, metric_inputs = self._policy_term(logps, entropy_mask)
        kl = divergences
        if self.config.estimates_kl:
            kl, d_logp_of_kl = self._estimated_kl(metric_inputs.log_ratio, logps)
            d_logp = d_logp + d_logp_of_kl
        if kl is not None:
            loss = loss + self.config.beta * kl
            metric_inputs = replace(metric_inputs, kl=kl)
        return TokenTerms(loss, d_logp, metric_inputs)

    def _policy_term(self, logps: Tensor, entropy_mask: Tensor | None) -> TokenTerms:
        """The policy term alone."""
        config, tokens, weights = self.config, self.tokens, self.token_weights
        definition = self.definition
        if self.lacks_sampling_ratio:
            tokens = _with_sampling_ratio(config, tokens, logps)
        old = tokens.old_per_token_logps
        token_log_ratio = (
            torch.where(torch.isnan(logps), logps, 0.0) if old is None else logps - old
        )
        if definition.log_ratio is not None:
            log_ratio = definition.log_ratio(tokens, token_log_ratio, entropy_mask, config)
        else:
            log_ratio = LogRatio(token_log_ratio, tokens.layout if config.shares_ratio else None)
        surrogate_input, advantages = log_ratio.value, tokens.advantages
        if definition.surrogate_input is not None:
            surrogate_input = definition.surrogate_input(tokens, token_log_ratio, config)
        surrogate = SURROGATES[definition.surrogate]
        loss, d_log_ratio, d_logp_at_fixed_ratio = surrogate(
            surrogate_input, advantages, logps, *self._constants
        )

        off_policy_mask = _off_policy_mask(config, tokens, logps)
        gate = _gate(config, tokens, off_policy_mask, entropy_mask)
        if gate is not None:
            loss, d_log_ratio, d_logp_at_fixed_ratio = (
                times_or_zero(x, gate) for x in (loss, d_log_ratio, d_logp_at_fixed_ratio)
            )
        if old is None:
            # NaN if logps are not finite; the gradient stays as it is
            loss = loss + (logps - logps)
        # d loss / d logp: through R, of which GSPO has one per sequence, and besides it
        d_logp = log_ratio.to_logps(weights * d_log_ratio) + weights * d_logp_at_fixed_ratio
        metric_inputs = MetricInputs(
            tokens, log_ratio, token_log_ratio, surrogate_input, off_policy_mask
        )
        return TokenTerms(loss, d_logp, metric_inputs)

    def _estimated_kl(self, log_ratio: LogRatio, logps: Tensor) -> tuple[Tensor, Tensor]:
        """The KL estimate per token, without beta; and its part of d loss / d logp, with beta."""
        config, kl_weights = self.config, self.config.beta * self.token_weights
        ref: Any = self.tokens.ref_per_token_logps
        kl, d_kl, d_corrected = ESTIMATORS[config.kl_estimator](logps, ref)
        if not config.corrects_kl:
            return kl, kl_weights * d_kl
        ratio = torch.exp(log_ratio.value)
        kl, d_logp = times_or_zero(ratio, kl), kl_weights * times_or_zero(ratio, d_corrected)
        if log_ratio.is_shared:  # then the ratio moves with every logp of the sequence
            d_logp = d_logp + (log_ratio.to_logps(kl_weights * kl) - kl_weights * kl)
        return kl, d_logp


class _TokenLosses(torch.autograd.Function):
    """``forward(ctx, logps, loss, policy_loss, entropy_mask)`` -> `loss` (n,), and its gradient.

    The gradient in logps is a_t with the upstream gradient as the weights. It cannot be
    differentiated again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logps: Tensor,
        loss: Tensor,
        policy_loss: PolicyLoss,
        entropy_mask: Tensor | None,
    ) -> Tensor:
        ctx.policy_loss, ctx.entropy_mask = policy_loss, entropy_mask
        ctx.save_for_backward(logps)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "tokens.loss: expected to be differentiated once, got create_graph=True"
            )
        config, tokens = ctx.policy_loss.config, ctx.policy_loss.tokens
        weighted = PolicyLoss(config, tokens, token_weights=upstream)
        d_logps = weighted._per_token(ctx.saved_tensors[0], ctx.entropy_mask, None).d_logp
        return d_logps, None, None, None


# Factors on the policy term, which carry no gradient


def _gate(config: LossConfig, tokens: Tokens, *masks: Tensor | None) -> Tensor | None:
    """The factor (n,) on the policy term; None if it is 1 everywhere.

    It is 0 if one of the `masks` drops the token, else the importance sampling ratio.
    """
    definition = config.definition
    if not definition.has_gate:
        return None
    gate = None if definition.surrogate_input else tokens.importance_sampling_ratio
    for mask in masks:
        if mask is not None:
            gate = torch.ones_like(tokens.advantages) if gate is None else gate
            gate = torch.where(mask, gate, 0.0)
    return gate


def _entropy_mask(config: LossConfig, entropies: Tensor) -> Tensor | None:
    """(n,) bool: the share `top_entropy_quantile` of tokens with the highest entropy; None: all.

    Source: https://arxiv.org/abs/2506.01939
    """
    if config.top_entropy_quantile == 1.0:
        return None
    if entropies.numel() == 0:
        return torch.zeros_like(entropies, dtype=torch.bool)
    return entropies >= quantile(entropies, 1 - config.top_entropy_quantile)


def _off_policy_mask(config: LossConfig, tokens: Tokens, logps: Tensor) -> Tensor | None:
    """(n,) bool: the tokens that the off-policy mask does not drop; None: all.

    Source: https://arxiv.org/abs/2512.02556
    """
    threshold = config.off_policy_mask_threshold
    if threshold is None or not config.masks_off_policy:
        return None
    behavior_logps = tokens.sampling_per_token_logps
    if behavior_logps is None:
        behavior_logps = tokens.old_per_token_logps
    if behavior_logps is None:  # on-policy tokens
        return (tokens.advantages >= 0) | (threshold >= 0)
    difference = behavior_logps - logps
    # 0 if the sampler could not score it
    evidence = torch.where(torch.isnan(difference), 0.0, difference)
    mean = tokens.layout.sequence_sum(evidence) / tokens.layout.lengths.clamp(min=1)
    return (tokens.advantages >= 0) | (mean <= threshold)[tokens.layout.sequence]


def bounded_ratio(config: LossConfig, log_ratio: Tensor) -> Tensor:
    """exp(`log_ratio`), of any shape, clamped to the config's bounds or set to 0 outside them."""
    low, high = config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max
    return bounded(torch.exp(log_ratio), low, high, truncates=config.truncates_sampling_ratio)


def _centering_weights(config: LossConfig, logp: Tensor, logq: Tensor) -> Tensor:
    """c (n, K) of the K ids, from the policy's and the sampler's log-probabilities.

    Score centering (https://arxiv.org/abs/2609.20807) adds ``A_t sum_K sg[c_v] log p_v`` to a
    token's loss. With q_v the sampler's probabilities, and f the rule from the ratio p_v / q_v to
    the importance sampling ratio, or 1 without one::

        c_v = q_v f(p_v / q_v) - rho f(1 / rho) p_v        rho = (1 - sum_K q_v) / (1 - sum_K p_v)

    The other ids count as ones that the sampler draws in proportion to p. Then the expectation of a
    token's policy gradient over the sampler's tokens is 0 whatever A is. As in the paper's appendix
    A.3, numerator and denominator of rho are at least 1e-6. c is 0 where q_v is 0.
    """

    def weight(log_ratio: Tensor) -> Tensor:
        if config.corrects_sampling:
            return bounded_ratio(config, log_ratio)
        return torch.ones_like(log_ratio)

    p, q = torch.where(logq == -torch.inf, 0.0, logp.exp()), logq.exp()
    rho = (1.0 - q.sum(dim=1)).clamp(min=LEAST_TAIL) / (1.0 - p.sum(dim=1)).clamp(min=LEAST_TAIL)
    tail_weight = rho * weight(-rho.log())
    return torch.where(q == 0.0, 0.0, q * weight(logp - logq)) - tail_weight[:, None] * p


def _with_sampling_ratio(config: LossConfig, tokens: Tokens, logps: Tensor) -> Tokens:
    """`tokens` with the importance sampling ratio of `logps` (n,) to the sampler's.

    A sampler such as vLLM computes with other arithmetic than the trainer, so it does not sample
    from exactly the policy. Let d be the difference of a token's log-probabilities, or 0 if the
    sampler could not score the token (NaN)::

        token_*              ratio_t = exp(d_t)
        sequence_*           ratio_b = exp(sum of d over the sequence)
        *_truncate           clamped to [clip_min, clip_max]
        *_mask               0 outside [clip_min, clip_max]
        sequence_mean_mask   ratio_t = exp(d_t); 0 if exp(mean of d over the sequence) is outside
                             [clip_min, clip_max]: NeMo-RL's and OpenRLHF's ``seq-mask-tis``

    Truncated importance sampling: https://fengyao.notion.site/off-policy-rl.
    """
    sampler_logps: Any = tokens.sampling_per_token_logps
    difference, layout = scored_difference(logps, sampler_logps), tokens.layout
    if config.vllm_importance_sampling_mode == "sequence_mean_mask":
        means = layout.sequence_sum(difference) / layout.lengths.clamp(min=1)
        inside = (bounded_ratio(config, means) != 0)[layout.sequence]
        ratio = torch.where(inside, torch.exp(difference), 0.0)
        return replace(tokens, importance_sampling_ratio=ratio)
    if not config.sampling_ratio_is_per_sequence:
        return replace(tokens, importance_sampling_ratio=bounded_ratio(config, difference))
    ratio = bounded_ratio(config, layout.sequence_sum(difference))
    return replace(
        tokens,
        importance_sampling_ratio=ratio[layout.sequence],
        sampling_ratio_per_sequence=ratio,
    )
