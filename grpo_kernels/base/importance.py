"""Importance sampling ratios of a policy to the sampler of its tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def scored_difference(logps: Tensor, sampling_logps: Tensor) -> Tensor:
    """Return ``logps - sampling_logps``, detached, in their shape; 0 where the sampler could not score (NaN)."""
    return torch.nan_to_num(logps.detach() - sampling_logps, nan=0.0)


def bounded(ratio: Tensor, low: float | None, high: float | None, *, truncates: bool) -> Tensor:
    """Return ratios of any shape, clamped to [`low`, `high`], or else 0 outside of them; None: no bound."""
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    if truncates:
        return ratio.clamp(low, high)
    return torch.where((ratio < low) | (ratio > high), 0.0, ratio)
