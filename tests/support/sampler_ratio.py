"""TRL's correction for a sampler of another engine: its options, and its ratio."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.support.case_builder import Case
from tests.support.run_case import config_of

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "sequence_mean_mask")
PREFIX = "vllm_importance_sampling_"


def trls_ratio(case: Case, old: Tensor) -> Tensor:
    """As TRL 1.16 writes it: (B, T), 1 where masked, or (B, 1); the last mode as OpenRLHF does."""
    assert case.sampling_per_token_logps is not None
    config, mask = config_of(case), (case.completion_mask != 0).to(old.dtype)
    difference = torch.nan_to_num(
        (old - case.sampling_per_token_logps.to(old.dtype)) * mask, nan=0.0
    )
    mode, low, high = (getattr(config, PREFIX + x) for x in ("mode", "clip_min", "clip_max"))
    if mode == "sequence_mean_mask":
        mean = torch.exp(difference.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1))
        return difference.exp() * ((mean >= (low or 0.0)) & (mean <= (high or math.inf)))
    ratio = torch.exp(
        difference.sum(-1, keepdim=True) if mode.startswith("sequence") else difference
    )
    if mode.endswith("truncate"):
        return torch.clamp(ratio, min=low, max=high)
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def given_ratio(case: Case, old: Tensor) -> Case:
    """The same loss, with the ratio made beforehand."""
    return case.but(
        importance_sampling_ratio=trls_ratio(case, old), config={f"{PREFIX}correction": False}
    )
