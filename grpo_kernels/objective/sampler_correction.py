"""The importance sampling ratio of the policy to the sampler, from log-probabilities that the loss has anyway.

A sampler such as vLLM has other arithmetic than the trainer, so that it does not sample from exactly the policy. Let d
be a counted token's old log-probability (if absent: the current one, held constant) minus the sampler's, or 0 if the
sampler could not score the token (NaN)::

    token_*      ratio_t = exp(d_t)
    sequence_*   ratio_b = exp(sum of d over the sequence)
    *_truncate   clamped to [clip_min, clip_max]
    *_mask       0 outside of [clip_min, clip_max]

as in TRL 1.16 (``GRPOTrainer._generate_and_score_completions``), which needs a forward of the model for it beforehand.
Truncated importance sampling: https://fengyao.notion.site/off-policy-rl. One mode more is NeMo-RL's and OpenRLHF's
``seq-mask-tis``::

    sequence_mean_mask   ratio_t = exp(d_t); 0 if exp(mean of d over the sequence) is outside of [clip_min, clip_max]
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.base.importance import bounded, scored_difference
from grpo_kernels.batch.tokens import Tokens
from grpo_kernels.objective.config import LossConfig


def check_sampling(
    config: LossConfig, sampling_per_token_logps: Any, importance_sampling_ratio: Any
) -> None:
    """Raise ValueError if the loss is to compute the ratio, but the caller passes it, or no sampling logps."""
    if not config.vllm_importance_sampling_correction:
        return
    if importance_sampling_ratio is not None:
        raise ValueError(
            "importance_sampling_ratio: expected None since vllm_importance_sampling_correction = True makes it, "
            f"got {type(importance_sampling_ratio).__name__}"
        )
    if sampling_per_token_logps is None and config.corrects_sampling:
        raise ValueError(
            "sampling_per_token_logps: expected a tensor since vllm_importance_sampling_correction = True, got None"
        )


def bounded_ratio(config: LossConfig, log_ratio: Tensor) -> Tensor:
    """Return exp(`log_ratio`), of any shape, clamped to the config's bounds or 0 outside of them."""
    low, high = config.vllm_importance_sampling_clip_min, config.vllm_importance_sampling_clip_max
    return bounded(torch.exp(log_ratio), low, high, truncates=config.truncates_sampling_ratio)


def with_sampling_ratio(config: LossConfig, tokens: Tokens, logps: Tensor) -> Tokens:
    """`tokens` with the importance sampling ratio of `logps` (n,) to their sampling log-probabilities."""
    assert tokens.sampling_per_token_logps is not None
    difference, layout = scored_difference(logps, tokens.sampling_per_token_logps), tokens.layout
    if config.vllm_importance_sampling_mode == "sequence_mean_mask":
        means = layout.sequence_sum(difference) / layout.lengths.clamp(min=1)
        inside = (bounded_ratio(config, means) != 0)[layout.sequence]
        return replace(
            tokens, importance_sampling_ratio=torch.where(inside, torch.exp(difference), 0.0)
        )
    if not config.sampling_ratio_is_per_sequence:
        return replace(tokens, importance_sampling_ratio=bounded_ratio(config, difference))
    ratio = bounded_ratio(config, layout.sequence_sum(difference))
    return replace(tokens, importance_sampling_ratio=ratio[layout.sequence], sequence_ratio=ratio)
