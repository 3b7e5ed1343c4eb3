"""Which tokens a loss type clips, as its metrics count them: from its ratios and its tokens' log-ratios, (n,) each."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def outside_range(config: Any, ratio: Tensor, token_log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """A ratio below [1 - epsilon, 1 + epsilon_high] with a negative advantage, or above it with a positive one."""
    if config.delta is not None:  # as in TRL, after the upper bound
        ratio = ratio.clamp(max=config.delta)
    below, above = ratio < 1 - config.epsilon, ratio > 1 + config.clip_high
    return below & (advantages < 0), above & (advantages > 0)


def outside_log_range(config: Any, ratio: Tensor, token_log_ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """The same for the log-ratios of the tokens themselves, outside of [-epsilon, epsilon_high]."""
    below, above = token_log_ratio < -config.epsilon, token_log_ratio > config.clip_high
    return below & (advantages < 0), above & (advantages > 0)


def above_cap(config: Any, ratio: Tensor, advantages: Tensor) -> Tensor:
    """A ratio above `epsilon_high` with a positive advantage."""
    return (ratio > config.clip_high) & (advantages > 0)
