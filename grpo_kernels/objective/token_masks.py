"""Masks of the tokens that the policy term acts on. Neither carries gradient, and neither touches the KL term."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels.base.quantile import quantile
from grpo_kernels.batch.tokens import Tokens
from grpo_kernels.objective.config import LossConfig


def keep_high_entropy(config: LossConfig, tokens: Tokens, entropies: Tensor) -> Tensor | None:
    """(n,) bool: the share `top_entropy_quantile` of highest entropy (https://arxiv.org/abs/2506.01939); None: all."""
    if config.top_entropy_quantile == 1.0:
        return None
    if entropies.numel() == 0:
        return torch.zeros_like(entropies, dtype=torch.bool)
    return entropies >= quantile(entropies, 1 - config.top_entropy_quantile)


def keep_on_policy(config: LossConfig, tokens: Tokens, logps: Tensor) -> Tensor | None:
    """(n,) bool: the tokens that the off-policy mask does not drop (https://arxiv.org/abs/2512.02556); None: all."""
    if not config.masks_off_policy:
        return None
    assert config.off_policy_mask_threshold is not None
    sampled = tokens.sampling_per_token_logps
    sampled = tokens.old_per_token_logps if sampled is None else sampled
    if sampled is None:  # the current policy's own tokens
        return (tokens.advantages >= 0) | (config.off_policy_mask_threshold >= 0)
    difference = sampled - logps
    evidence = torch.where(
        torch.isnan(difference), 0.0, difference
    )  # 0 if the sampler could not score it
    mean = tokens.layout.sequence_sum(evidence) / tokens.layout.lengths.clamp(min=1)
    return (tokens.advantages >= 0) | (mean <= config.off_policy_mask_threshold)[
        tokens.layout.sequence
    ]
