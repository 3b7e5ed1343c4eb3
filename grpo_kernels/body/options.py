"""Options of the calls: what the trunk computes of a batch (`TrunkOptions`), and what scoring takes from a loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from grpo_kernels.base.choices import BatchLayout, ZeroAdvantage, choices
from grpo_kernels.loss import GRPOLoss
from grpo_kernels.objective.config import LossConfig


@dataclass(frozen=True)
class TrunkOptions:
    """Choice of what the trunk computes of a batch; `causal_lm_loss` explains the options."""

    NAMES: ClassVar[tuple[str, ...]] = ("zero_advantage", "layout")

    zero_advantage: ZeroAdvantage = "score"
    layout: BatchLayout = "tree"

    def __post_init__(self) -> None:
        for name, allowed in (("zero_advantage", ZeroAdvantage), ("layout", BatchLayout)):
            value = getattr(self, name)
            if value not in choices(allowed):
                raise ValueError(
                    f"{name}: expected one of {', '.join(map(repr, choices(allowed)))}, got {value!r}"
                )


def check_skip(config: LossConfig) -> None:
    """Raise unless live sequences have the same gradient if the other sequences are not scored.

    Raises:
        ValueError: the loss reads the entropies or log-probabilities of all sequences.
    """
    expected = "zero_advantage: expected 'score' or 'train'"
    if config.top_entropy_quantile < 1.0:
        raise ValueError(
            f"{expected} with top_entropy_quantile, which is one of all sequences, got 'skip'"
        )
    if config.corrects_sampling:
        raise ValueError(
            f"{expected} where the loss makes the importance sampling ratio, got 'skip'"
        )


def check_loss_fn(loss_fn: Any) -> None:
    """Raise TypeError unless `loss_fn` is a `GRPOLoss`."""
    if not isinstance(loss_fn, GRPOLoss):
        raise TypeError(f"loss_fn: expected a GRPOLoss, got {type(loss_fn).__name__}")


def temperature_of(loss_fn: GRPOLoss | None, temperature: float | None) -> float:
    """Return the temperature of the log-probabilities that the loss has.

    Raises:
        TypeError, ValueError: `loss_fn` is no `GRPOLoss`; or it is given together with a `temperature`.
    """
    if loss_fn is None:
        return 1.0 if temperature is None else temperature
    check_loss_fn(loss_fn)
    if temperature is not None:
        raise ValueError(
            f"temperature: expected None beside loss_fn, whose temperature serves, got {temperature}"
        )
    return loss_fn.config.temperature
