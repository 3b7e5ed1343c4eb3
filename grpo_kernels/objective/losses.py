"""The loss types, each declared once: `LOSSES`.

A new loss type is a name in `base.choices`, a record here, a formula in `token_loss.formulas` if none fits (then run
``python csrc/generate.py``), and a field of `LossConfig` and `LossFields` for each parameter that it adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from grpo_kernels.base.choices import LossTypeName
from grpo_kernels.batch.tokens import Tokens
from grpo_kernels.objective.clipping import above_cap, outside_log_range, outside_range
from grpo_kernels.objective.log_ratio import LogRatio, clipped_mean, of_level, sequence_log_weight
from grpo_kernels.token_loss.formulas import phi

# Any object with the fields of `LossConfig`, which itself imports this module.
Config = Any


@dataclass(frozen=True)
class LossType:
    """Definition of a loss type, without the parts that all share: KL term, entropy bonus, masks, engines."""

    name: LossTypeName
    surrogate: str  # a name in `formulas.SURROGATES`
    constants: Callable[[Config], tuple[float, ...]]  # the surrogate's, in its order
    normaliser: Literal[
        "sequence_mean", "token_mean", "num_items", "max_length", "sequence_sum"
    ]  # see `normaliser`
    is_linear: bool = (
        False  # the policy term is a constant times logp, rather than a function of the ratio
    )

    # R of each token: config, tokens, token log-ratios (n,), and the tokens of high entropy -> LogRatio
    log_ratio: Callable[[Config, Tokens, Tensor, Tensor | None], LogRatio] = of_level
    # the surrogate's argument in place of R: tokens, token log-ratios -> (n,)
    argument: Callable[[Tokens, Tensor], Tensor] | None = None
    # how an importance sampling ratio enters: a factor on the policy term, a part of `argument`, or not at all
    importance_ratio: Literal["factor", "argument"] | None = "factor"
    masks: bool = True  # the off-policy and the top-entropy mask are factors on the policy term
    corrects_kl: bool = True  # the KL estimate may be multiplied by the ratio

    # metrics: the tokens that are clipped (below a range, above it), and those that are capped, see `clipping`
    clipped: Callable[[Config, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    capped: Callable[[Config, Tensor, Tensor], Tensor] | None = None
    phi: Callable[..., Tensor] | None = None  # a formula: argument, advantages, constants -> (n,)

    @property
    def takes_level(self) -> bool:
        """True if `importance_sampling_level` decides what R is."""
        return self.log_ratio is of_level

    @property
    def shares_ratio(self) -> bool:
        """True if the tokens of a sequence share one ratio, whatever `importance_sampling_level` is."""
        return not self.takes_level or self.argument is not None


def clip_range(config: Config) -> tuple[float, float, float]:
    """PPO's bounds of the ratio, and the upper bound of the unclipped one."""
    return (
        1 - config.epsilon,
        1 + config.clip_high,
        math.inf if config.delta is None else config.delta,
    )


def vespo_shape(config: Config) -> tuple[float, float, float, float]:
    """(k, lambda) for positive and for negative advantages; lambda is at least 1e-4, as in TRL."""
    positive = config.vespo_k_pos, max(config.vespo_lambda_pos, 1e-4)
    return *positive, config.vespo_k_neg, max(config.vespo_lambda_neg, 1e-4)


LOSSES = {
    loss.name: loss
    for loss in (
        LossType("grpo", "clipped", clip_range, "sequence_mean", clipped=outside_range),
        LossType("bnpo", "clipped", clip_range, "token_mean", clipped=outside_range),
        LossType("dr_grpo", "clipped", clip_range, "max_length", clipped=outside_range),
        LossType("dapo", "clipped", clip_range, "num_items", clipped=outside_range),
        LossType("cispo", "cispo", lambda c: (c.clip_high,), "num_items", is_linear=True, capped=above_cap),
        LossType("sapo", "sapo", lambda c: (c.sapo_temperature_pos, c.sapo_temperature_neg), "sequence_mean"),
        LossType("luspo", "clipped", clip_range, "sequence_sum", clipped=outside_range),
        LossType(
            "vespo", "vespo", vespo_shape, "num_items", is_linear=True,
            argument=sequence_log_weight, importance_ratio="argument", phi=phi,
        ),
        LossType(
            "gmpo", "unclipped", lambda _: (), "sequence_mean",
            log_ratio=clipped_mean, importance_ratio=None, masks=False, corrects_kl=False, clipped=outside_log_range,
        ),
    )
}  # fmt: skip


def loss_of(config: Config) -> LossType:
    """Return the loss type of a config."""
    loss_type = LOSSES.get(config.loss_type)
    if loss_type is None:
        raise NotImplementedError(f"loss_type: no loss is declared as {config.loss_type!r}")
    return loss_type
