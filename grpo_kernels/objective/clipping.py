"""Tokens that a loss type clips, as its metrics count them: from its ratios and its tokens' log-ratios, (n,) each."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def outside_range(
    config: Any, ratio: Tensor, token_log_ratio: Tensor, advantages: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (below, above), (n,) bool: ratio < 1 - epsilon and A < 0; ratio > 1 + epsilon_high and A > 0."""
    if config.delta is not None:  # as in TRL, after the upper bound
        ratio = ratio.clamp(max=config.delta)
    below, above = ratio < 1 - config.epsilon, ratio > 1 + config.clip_high
    return below & (advantages < 0), above & (advantages > 0)


def outside_log_range(
    config: Any, ratio: Tensor, token_log_ratio: Tensor, advantages: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (below, above), (n,) bool, likewise of each token's log-ratio and [-epsilon, epsilon_high]."""
    below, above = token_log_ratio < -config.epsilon, token_log_ratio > config.clip_high
    return below & (advantages < 0), above & (advantages > 0)


def above_cap(config: Any, ratio: Tensor, advantages: Tensor) -> Tensor:
    """Return the tokens with ratio > epsilon_high and A > 0, (n,) bool."""
    return (ratio > config.clip_high) & (advantages > 0)
