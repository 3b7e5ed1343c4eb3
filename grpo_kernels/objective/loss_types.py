"""The loss types, each declared once in `LOSSES`, and their parts.

The parts are log-ratios, clipping and normalizers. CONTRIBUTING.md says how to add a loss type.

Every normalizer is one weight per token: ``loss = sum(weight * per_token_loss)``. With m the mask,
n_b the counted tokens of sequence b (at least 1), B the number of sequences:

============= ===============================================
sequence_mean m / (n_b B)
token_mean    m / sum m
max_length    m / (B max_completion_length)
num_items     m / num_items_in_batch (absent: m / sum m)
sequence_sum  m / B
============= ===============================================
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from grpo_kernels.backends.formulas import LINEAR, phi
from grpo_kernels.base import LossTypeName
from grpo_kernels.tokens import Layout, Tokens

if TYPE_CHECKING:
    from grpo_kernels.objective.config import LossConfig

_LOWEST_LOG_WEIGHT, _HIGHEST_LOG_WEIGHT = math.log(1e-8), 20.0  # VESPO's range, as in TRL


class LogRatio:
    """The log-ratio R of a policy term, and the map from d loss / d R to d loss / d logp."""

    def __init__(
        self,
        log_ratio: Tensor,
        layout: Layout | None = None,
        passes: Tensor | None = None,
        entropy_mask: Tensor | None = None,
    ) -> None:
        """Take `log_ratio` (n,) as R or, with the tokens' `layout`, its mean over each sequence.

        `passes` (n,) bool marks the tokens that get d R. The mean is over the tokens in
        `entropy_mask` (n,) bool; None: over all.
        """
        self._layout, self._passes = layout, passes
        self.is_shared = layout is not None  # one per sequence
        if layout is not None:
            counts = layout.lengths
            if entropy_mask is not None:
                counts = layout.sequence_sum(entropy_mask.to(log_ratio.dtype))
            self._counts = counts.clamp(min=1).to(log_ratio.dtype)
        self.value = self._mean(log_ratio)

    def _mean(self, x: Tensor) -> Tensor:
        if self._layout is None:
            return x
        return (self._layout.sequence_sum(x) / self._counts)[self._layout.sequence]

    def to_logps(self, d_log_ratio: Tensor) -> Tensor:
        """d loss / d logp through R, given d loss / d R, (n,) each.

        A logp of a sequence with n_b tokens has 1 / n_b of the sum of its tokens' d loss / d R:
        the same mean as in the forward.
        """
        passed = self._mean(d_log_ratio)
        return passed if self._passes is None else torch.where(self._passes, passed, 0.0)


def clipped_mean(
    tokens: Tokens,
    token_log_ratio: Tensor,
    entropy_mask: Tensor | None,
    config: LossConfig,
) -> LogRatio:
    """GMPO's R: the mean of the sequence's log-ratios in `entropy_mask`, each clipped first.

    A log-ratio is clipped from above if A > 0, else from below.
    """
    up, low, high = tokens.advantages > 0, -config.epsilon, config.clip_high
    bounded = torch.where(up, token_log_ratio.clamp(max=high), token_log_ratio.clamp(min=low))
    passes = torch.where(up, token_log_ratio <= high, token_log_ratio >= low)
    if entropy_mask is not None:
        passes, bounded = passes & entropy_mask, torch.where(entropy_mask, bounded, 0.0)
    return LogRatio(bounded, tokens.layout, passes, entropy_mask)


def sequence_log_weight(tokens: Tokens, token_log_ratio: Tensor, config: LossConfig) -> Tensor:
    """(n,) VESPO's log w of each token's sequence.

    It is the sum of clamped log-ratios and clamped log sampling ratios.
    """
    low, high = _LOWEST_LOG_WEIGHT, _HIGHEST_LOG_WEIGHT
    log_weight = tokens.layout.sequence_sum(token_log_ratio.clamp(-high, high))
    if tokens.sampling_ratio_per_sequence is not None:
        log_weight = log_weight + tokens.sampling_ratio_per_sequence.log().clamp(low, high)
    elif tokens.importance_sampling_ratio is not None:
        log_is = tokens.importance_sampling_ratio.log().clamp(low, high)
        log_weight = log_weight + tokens.layout.sequence_sum(log_is)
    return log_weight.clamp(low, high)[tokens.layout.sequence]


# Tokens that a loss type clips, (n,) bool each, by the name of the metric that counts them


def outside_range(
    ratio: Tensor, token_log_ratio: Tensor, advantages: Tensor, config: LossConfig
) -> dict[str, Tensor]:
    """Ratio < 1 - epsilon and A < 0; ratio > 1 + epsilon_high and A > 0."""
    if config.delta is not None:  # as in TRL, after the upper bound
        ratio = ratio.clamp(max=config.delta)
    return _clip_ratios(ratio < 1 - config.epsilon, ratio > 1 + config.clip_high, advantages)


def outside_log_range(
    ratio: Tensor, token_log_ratio: Tensor, advantages: Tensor, config: LossConfig
) -> dict[str, Tensor]:
    """Log-ratio < -epsilon and A < 0; log-ratio > epsilon_high and A > 0."""
    below, above = token_log_ratio < -config.epsilon, token_log_ratio > config.clip_high
    return _clip_ratios(below, above, advantages)


def _clip_ratios(below: Tensor, above: Tensor, advantages: Tensor) -> dict[str, Tensor]:
    low, high = below & (advantages < 0), above & (advantages > 0)
    return {
        "clip_ratio/low_mean": low,
        "clip_ratio/high_mean": high,
        "clip_ratio/region_mean": low | high,
    }


@dataclass(frozen=True)
class LossType:
    """Definition of a loss type, without the parts that all types share.

    Those parts are the KL term, the entropy bonus, the masks and the engines. Each function gets
    the `LossConfig` as its last argument.
    """

    name: LossTypeName
    # a name in `formulas.SURROGATES`: a function of the log-ratio, or one of `formulas.LINEAR`. So
    # its derivative at R = 0, on-policy, does not depend on logp.
    surrogate: str
    # fields of `LossConfig` that shape the policy term, all of them; "epsilon_high" includes
    # "epsilon" where the former is None
    reads: tuple[str, ...]
    normalizer: Literal["sequence_mean", "token_mean", "num_items", "max_length", "sequence_sum"]
    # the surrogate's constants, in its order: config
    constants: Callable[[LossConfig], tuple[float, ...]]
    # R of a sequence, whatever `importance_sampling_level` says: tokens, token log-ratios (n,),
    # entropy mask (n,) or None, config
    log_ratio: Callable[[Tokens, Tensor, Tensor | None, LossConfig], LogRatio] | None = None
    # what the surrogate gets (n,) in place of R, with the importance sampling ratio in it: tokens,
    # token log-ratios, config
    surrogate_input: Callable[[Tokens, Tensor, LossConfig], Tensor] | None = None
    # True if the masks and, without `surrogate_input`, the importance sampling ratio multiply the
    # policy term
    has_gate: bool = True

    # metrics of the tokens that are clipped, by name, (n,) bool each: ratios, token log-ratios,
    # advantages, config
    clipped_tokens: Callable[..., dict[str, Tensor]] = lambda *_: {}
    # more metrics by name, (n,) each: what the surrogate gets, advantages, config
    more_metrics: Callable[[Tensor, Tensor, LossConfig], dict[str, Tensor]] = lambda *_: {}

    @property
    def is_linear(self) -> bool:
        """True if the policy term is a constant times logp."""
        return self.surrogate in LINEAR

    def token_weights(
        self,
        tokens: Tokens,
        num_items_in_batch: float | Tensor | None,  # a number or tensor (); below 1 counts as 1
        config: LossConfig,
    ) -> Tensor:
        """Compute each token's weight (n,) by the normalizer."""
        layout, dtype = tokens.layout, tokens.dtype
        batch, device = max(layout.batch, 1), layout.positions.device

        def one_over(x: float) -> Tensor:  # rounded once, like the quotient of two `dtype` numbers
            return torch.full((layout.positions.shape[0],), 1 / x, dtype=dtype, device=device)

        if self.normalizer == "sequence_mean":
            return one_over(1) / (layout.lengths.to(dtype)[layout.sequence] * batch)
        if self.normalizer == "max_length":
            return one_over(batch * cast(int, config.max_completion_length))
        if self.normalizer == "sequence_sum":
            return one_over(batch)
        if self.normalizer == "token_mean" or num_items_in_batch is None:
            return one_over(max(layout.total, 1))
        if isinstance(num_items_in_batch, Tensor) and num_items_in_batch.device.type != "cpu":
            items = num_items_in_batch.detach().reshape(()).to(device, dtype)
            return one_over(1) / items.clamp(min=1.0)
        # a number on the CPU is read: copying it to the device would wait for the device
        return one_over(max(float(num_items_in_batch), 1.0))

    def loss_over(self, *, num_items: bool) -> str:
        """What a call's policy loss is a mean over: "sequences", "tokens", or "nothing".

        "nothing" means that the losses of a batch's calls add up. `num_items` is True if
        ``num_items_in_batch`` was given.
        """
        if self.normalizer == "num_items" and num_items:
            return "nothing"
        return "tokens" if self.normalizer in ("num_items", "token_mean") else "sequences"


def clip_range(config: LossConfig) -> tuple[float, ...]:
    """PPO's bounds of the ratio, and the upper bound of the unclipped one."""
    delta = math.inf if config.delta is None else config.delta
    return 1 - config.epsilon, 1 + config.clip_high, delta


def vespo_shape(config: LossConfig) -> tuple[float, ...]:
    """(k, lambda) for positive and for negative advantages; lambda is at least 1e-4, as in TRL."""
    lambda_pos, lambda_neg = max(config.vespo_lambda_pos, 1e-4), max(config.vespo_lambda_neg, 1e-4)
    return config.vespo_k_pos, lambda_pos, config.vespo_k_neg, lambda_neg


def _clipped(name: LossTypeName, normalizer: Any) -> LossType:
    reads = "epsilon", "epsilon_high", "delta"
    return LossType(name, "clipped", reads, normalizer, clip_range, clipped_tokens=outside_range)


LOSSES = {
    loss.name: loss
    for loss in (
        _clipped("grpo", "sequence_mean"),
        _clipped("bnpo", "token_mean"),
        _clipped("dr_grpo", "max_length"),
        _clipped("dapo", "num_items"),
        LossType(
            "cispo", "cispo", ("epsilon_high",), "num_items", lambda config: (config.clip_high,),
            clipped_tokens=lambda ratio, _, advantages, config: {
                "cispo_clip_ratio": (ratio > config.clip_high) & (advantages > 0)
            },
        ),
        LossType(
            "sapo", "sapo", ("sapo_temperature_pos", "sapo_temperature_neg"), "sequence_mean",
            lambda config: (config.sapo_temperature_pos, config.sapo_temperature_neg),
        ),
        _clipped("luspo", "sequence_sum"),
        LossType(
            "vespo", "vespo",
            ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), "num_items",
            vespo_shape, surrogate_input=sequence_log_weight,
            more_metrics=lambda log_weight, advantages, config: {
                "vespo/phi_seq_mean": phi(log_weight, advantages, *vespo_shape(config))
            },
        ),
        LossType(  # `log_ratio` has the range, and the surrogate no constants
            "gmpo", "unclipped", ("epsilon", "epsilon_high"), "sequence_mean", lambda _: (),
            log_ratio=clipped_mean, has_gate=False, clipped_tokens=outside_log_range,
        ),
    )
}  # fmt: skip
