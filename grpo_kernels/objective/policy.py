"""The policy loss on per-token log-probabilities and entropies: the specification of what every engine computes.

With A the advantage, m the mask (only counted tokens get here), w the weight of `normaliser`, and the surrogates (the
policy term of a token's loss) and KL estimators of `formulas`::

    R_t    = logp_t - old_t                        token level
           = mean over the sequence of that        sequence level (some loss types have their own R: `losses`)
    l_t    = keep_t * is_t * surrogate(R_t, A_t) + beta * KL_t [* exp(R_t)]    KL_t: an estimate, or the divergence D_t
    loss   = sum_t w_t l_t - entropy_coef * mean of the kept tokens' entropies

keep_t is the off-policy and the top-entropy mask (token_masks.py), is_t the importance sampling ratio, an input or
computed here (sampler_correction.py); neither touches the KL term.
The gradient is two numbers per token, a_t = d loss / d logp_t and b_t = d loss / d entropy_t. If KL_t is a divergence
over the vocabulary, from a second head, there is a third, c_t = d loss / d D_t = w_t beta. The derivative is written
out here: ``a_t = sum_s w_s * dl_s/dlogp_t``, where s is t alone, or every token of its sequence if they share R.
Without old logps the current ones are used, held constant, so that R is 0; but a log-probability that is not finite, of
a token which the policy cannot have sampled, makes the loss NaN.

The formulas are those of TRL 1.16's ``GRPOTrainer._compute_loss`` (GMPO: its ``GMPOTrainer``; k1 and k2 are ours).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from grpo_kernels.batch.tokens import Tokens
from grpo_kernels.objective.config import LossConfig
from grpo_kernels.objective.evaluation import Evaluation, Terms
from grpo_kernels.objective.log_ratio import LogRatio
from grpo_kernels.objective.losses import loss_of
from grpo_kernels.objective.sampler_correction import with_sampling_ratio
from grpo_kernels.objective.token_masks import keep_high_entropy, keep_on_policy
from grpo_kernels.token_loss.formulas import ESTIMATORS, SURROGATES, times
from grpo_kernels.token_loss.record import Coefficients, TokenLoss


class PolicyObjective:
    """The built-in losses.

    `evaluate` computes the loss below and its gradient, as one number per token. The code is for the loss types "grpo",
    "bnpo", "dapo" and "dr_grpo" with the estimator k3 and without the off-policy mask; tensors are (B, T), of all
    tokens, and `advantages` are (B, 1) or (B, T)::

        def plain_loss(config, mask, logps, entropies, advantages, old=None, ref=None, importance_ratio=1.0):
            lengths, sequences = mask.sum(1, keepdim=True).clamp(min=1), len(mask)
            old = logps.detach() if old is None else old
            log_ratio = torch.where(mask, logps - old, 0.0)
            if config.importance_sampling_level == "sequence":
                log_ratio = (log_ratio.sum(1, keepdim=True) / lengths).expand_as(mask)
            ratio = log_ratio.exp()
            free = ratio if config.delta is None else ratio.clamp(max=config.delta)
            bounded = ratio.clamp(1 - config.epsilon, 1 + config.clip_high)
            policy = -torch.min(free * advantages, bounded * advantages) * importance_ratio
            keep = mask & (entropies >= torch.quantile(entropies[mask], 1 - config.top_entropy_quantile))
            per_token = torch.where(keep, policy, 0.0)
            if config.beta != 0:
                kl = torch.exp(ref - logps) - (ref - logps) - 1
                per_token = per_token + config.beta * (kl * ratio if config.use_bias_correction_kl else kl)
            count = {"grpo": lengths * sequences, "dr_grpo": sequences * config.max_completion_length}
            count = count.get(config.loss_type, mask.sum())  # "bnpo", "dapo"
            return (per_token / count)[mask].sum() - config.entropy_coef * entropies[keep].mean()

    `tests/objective/test_plain_loss.py` runs this code and compares.

    Args:
        config: the loss.
        tokens: the tokens that count.
        weights: (n,) their `normaliser.token_weights`.

    Attributes:
        on_policy: True without old log-probabilities: R is 0, the policy term's gradient known unless `lacks_ratio`.
        lacks_ratio: True if the importance sampling ratio must be computed from this call's log-probabilities.
        couples_tokens: True if a token's gradient depends on other tokens' log-probabilities or entropies.
        is_known: True if the whole gradient is known before any log-probability.
        has_entropy_gradient: True if the loss depends on the entropies.
    """

    def __init__(self, config: LossConfig, tokens: Tokens, weights: Tensor) -> None:
        old, sampled = tokens.old_per_token_logps, tokens.sampling_per_token_logps is not None
        self.on_policy = old is None
        self.lacks_ratio = config.corrects_sampling and tokens.importance_sampling_ratio is None
        if self.lacks_ratio and old is not None:  # old and sampling logps are enough for it
            tokens, self.lacks_ratio = with_sampling_ratio(config, tokens, old), False
        self.config, self.tokens, self.weights, self.loss_type = (
            config,
            tokens,
            weights,
            loss_of(config),
        )
        self.couples_tokens = config.couples_tokens(on_policy=self.on_policy, sampled=sampled)
        self.is_known = config.knows_gradient(on_policy=self.on_policy, sampled=sampled)
        self.has_entropy_gradient = config.entropy_coef != 0.0

    @cached_property
    def _at_ratio_one(self) -> Evaluation:
        """The policy term where every ratio is 1: its derivative a depends on no log-probability."""
        only_policy = replace(self.config, beta=0.0, entropy_coef=0.0)
        nothing = torch.zeros_like(self.tokens.advantages)
        return PolicyObjective(only_policy, self.tokens, self.weights).evaluate(nothing, nothing)

    def may_have_grad(self) -> Tensor | None:
        """(n,) bool: False where a = b = 0 is certain before the forward; None: True everywhere."""
        config, tokens = self.config, self.tokens
        if config.beta != 0.0 or self.has_entropy_gradient:
            return None
        if self.is_known:
            return self._at_ratio_one.d_logp != 0
        moves = tokens.advantages != 0
        if tokens.importance_sampling_ratio is not None and config.multiplies_by_importance_ratio:
            moves &= tokens.importance_sampling_ratio != 0
        if (
            config.ratio_is_per_sequence
        ):  # a token whose own term is 0 still gets gradient through the shared ratio
            moves = (
                tokens.layout.sequence_sum(moves.to(tokens.advantages))[tokens.layout.sequence] > 0
            )
        return moves

    def coefficients_of(self, index: Tensor, logps: Tensor, entropies: Tensor) -> Coefficients:
        """Return the coefficients at `index` (m,) from these tokens alone; only if nothing couples tokens."""
        assert not self.couples_tokens
        if self.on_policy and not self.lacks_ratio:
            d_logp = torch.where(torch.isnan(logps), logps, self._at_ratio_one.d_logp[index])
            if self.config.estimates_kl:
                d_logp = (
                    d_logp
                    + self._at(index)._estimated_kl(LogRatio(None, torch.zeros_like(logps)), logps)[
                        1
                    ]
                )
        else:
            d_logp = self._at(index)._per_token(logps, None, None)[1]
        d_entropy = torch.full_like(logps, self._d_entropy) if self.has_entropy_gradient else None
        return Coefficients(d_logp, d_entropy, self._d_divergence(index))

    def _at(self, index: Tensor) -> PolicyObjective:
        """Return the loss of the tokens at `index` alone."""
        return PolicyObjective(self.config, self.tokens.at(index), self.weights[index])

    def _d_divergence(self, index: Tensor | slice = slice(None)) -> Tensor | None:
        """Return d loss / d divergence at `index`, known beforehand."""
        return self.config.beta * self.weights[index] if self.config.needs_reference_head else None

    @property
    def _d_entropy(self) -> float:
        """d loss / d entropy of every token, where no mask chooses among them."""
        return -self.config.entropy_coef / max(1, self.tokens.layout.total)

    def token_loss(self) -> TokenLoss | None:
        """Loss that a row kernel can compute by itself; None if tokens are coupled or lack their ratio."""
        if self.couples_tokens or self.lacks_ratio:
            return None
        config, tokens = self.config, self.tokens
        on_policy_surrogate = "linear" if self.loss_type.is_linear else "constant"
        return TokenLoss(
            surrogate=on_policy_surrogate if self.on_policy else self.loss_type.surrogate,
            constants=() if self.on_policy else self._constants,
            kl=config.kl_estimator if config.beta != 0.0 else None,
            corrects_kl=config.corrects_kl,
            advantages=None if self.on_policy else tokens.advantages,
            d_logps=self._at_ratio_one.d_logp if self.on_policy else None,
            weights=self.weights,
            old=tokens.old_per_token_logps,
            ref=tokens.ref_per_token_logps if config.estimates_kl else None,
            gate=None if self.on_policy else self._gate(None, None),
            beta=float(config.beta),
            d_entropy=self._d_entropy if self.has_entropy_gradient else 0.0,
        )

    def assemble(self, terms: dict[str, Tensor], entropies: Tensor) -> Evaluation:
        """Return the result of `evaluate` from the terms (n,) that a row kernel computed for `token_loss`."""
        policy_loss, at_one = terms["loss"].sum(), Terms()
        if self.on_policy:
            at_one = self._at_ratio_one.terms
            if not self.loss_type.is_linear:
                policy_loss = policy_loss + self._at_ratio_one.policy_loss
        bonus, d_entropy = self._entropy_bonus(entropies, None)
        log_ratio = terms["log_ratio"]
        sampling = self._sampling_terms(None)
        all_terms = Terms(
            log_ratio, log_ratio, terms.get("kl"), at_one.phi, at_one.on_policy_keep, *sampling
        )
        loss = policy_loss if bonus is None else policy_loss - bonus
        return Evaluation(
            loss,
            Coefficients(terms["d_logp"], d_entropy, self._d_divergence()),
            policy_loss,
            all_terms,
        )

    def evaluate(
        self, logps: Tensor, entropies: Tensor, divergences: Tensor | None = None
    ) -> Evaluation:
        """The loss and its gradient at `logps`, `entropies` and, from a second head, `divergences`, (n,) each."""
        keep_entropy = keep_high_entropy(self.config, self.tokens, entropies)
        loss, d_logp, terms = self._per_token(logps, keep_entropy, divergences)
        policy_loss = (self.weights * loss).sum()
        bonus, d_entropy = self._entropy_bonus(entropies, keep_entropy)
        loss = policy_loss if bonus is None else policy_loss - bonus
        return Evaluation(
            loss, Coefficients(d_logp, d_entropy, self._d_divergence()), policy_loss, terms
        )

    def _per_token(
        self, logps: Tensor, keep_entropy: Tensor | None, divergences: Tensor | None
    ) -> tuple[Tensor, Tensor, Terms]:
        """Return l_t and a_t of each token, both without the entropy bonus, and the inputs of the metrics.

        Without `divergences` l_t lacks beta D_t; a_t never includes it.
        """
        config, tokens, weights = self.config, self.tokens, self.weights
        if self.lacks_ratio:
            complete = PolicyObjective(config, with_sampling_ratio(config, tokens, logps), weights)
            return complete._per_token(logps, keep_entropy, divergences)
        old = tokens.old_per_token_logps
        token_log_ratio = (
            torch.where(torch.isnan(logps), logps, 0.0) if old is None else logps - old
        )
        log_ratio = self.loss_type.log_ratio(config, tokens, token_log_ratio, keep_entropy)
        (loss, d_log_ratio, d_logps), phi = self._surrogate(log_ratio.value, token_log_ratio, logps)

        on_policy_keep = keep_on_policy(config, tokens, logps)
        gate = self._gate(on_policy_keep, keep_entropy)
        if gate is not None:
            loss, d_log_ratio, d_logps = (times(x, gate) for x in (loss, d_log_ratio, d_logps))
        if old is None:
            loss = loss + (
                logps - logps
            )  # NaN where logps are not finite; the gradient is left as it is
        a = log_ratio.to_logps(weights * d_log_ratio) + weights * d_logps

        kl = divergences
        if config.estimates_kl:
            kl, kl_a = self._estimated_kl(log_ratio, logps)
            a = a + kl_a
        if kl is not None:
            loss = loss + config.beta * kl
        sampling = self._sampling_terms(logps)
        return loss, a, Terms(log_ratio.value, token_log_ratio, kl, phi, on_policy_keep, *sampling)

    def _surrogate(
        self, log_ratio: Tensor, token_log_ratio: Tensor, logps: Tensor
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
        """Loss, d loss / d R and d loss / d logp by the loss type's formula; and phi, or None if it has none."""
        loss_type, tokens, constants = self.loss_type, self.tokens, self._constants
        x = log_ratio if loss_type.argument is None else loss_type.argument(tokens, token_log_ratio)
        phi = None if loss_type.phi is None else loss_type.phi(x, tokens.advantages, *constants)
        return SURROGATES[loss_type.surrogate](x, tokens.advantages, logps, *constants), phi

    @property
    def _constants(self) -> tuple[float, ...]:
        return tuple(float(x) for x in self.loss_type.constants(self.config))

    def _sampling_terms(self, logps: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """The importance sampling ratio; and old - sampling logps, NaN included, if the ratio was made of them here."""
        tokens = self.tokens
        if not self.config.corrects_sampling:
            return tokens.unexpanded_ratio, None
        old = logps if tokens.old_per_token_logps is None else tokens.old_per_token_logps
        assert old is not None and tokens.sampling_per_token_logps is not None
        return tokens.unexpanded_ratio, old - tokens.sampling_per_token_logps

    def _gate(self, on_policy_keep: Tensor | None, keep_entropy: Tensor | None) -> Tensor | None:
        """(n,) the factor on the policy term: 0 where a mask drops the token, else the importance sampling ratio.

        None where it is 1 everywhere.
        """
        tokens = self.tokens
        gate = (
            tokens.importance_sampling_ratio if self.config.multiplies_by_importance_ratio else None
        )
        for keep in (on_policy_keep, keep_entropy):
            if keep is not None and self.loss_type.masks:
                gate = torch.where(
                    keep, torch.ones_like(tokens.advantages) if gate is None else gate, 0.0
                )
        return gate

    def _estimated_kl(self, log_ratio: LogRatio, logps: Tensor) -> tuple[Tensor, Tensor]:
        """The KL estimate per token, without beta, and its part of a = d loss / d logp, with beta."""
        config, weights = self.config, self.config.beta * self.weights
        assert self.tokens.ref_per_token_logps is not None
        kl, d_kl, d_corrected = ESTIMATORS[config.kl_estimator](
            logps, self.tokens.ref_per_token_logps
        )
        if not config.corrects_kl:
            return kl, weights * d_kl
        ratio = torch.exp(log_ratio.value)
        kl, a = times(ratio, kl), weights * times(ratio, d_corrected)
        if log_ratio.is_shared:  # then the ratio moves with every logp of the sequence
            a = a + (log_ratio.to_logps(weights * kl) - weights * kl)
        return kl, a

    def _entropy_bonus(
        self, entropies: Tensor, keep: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """``entropy_coef`` times the mean entropy of the kept tokens, and d loss / d entropy."""
        if not self.has_entropy_gradient:
            return None, None
        kept = torch.ones_like(entropies) if keep is None else keep.to(entropies.dtype)
        weight = self.config.entropy_coef * kept / kept.sum().clamp(min=1.0)
        return times(entropies, weight).sum(), -weight
