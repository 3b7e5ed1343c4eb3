"""The log-ratio that a policy term sees: a token's own, or one per sequence, shared by its tokens."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.batch.tokens import Tokens

LOWEST_LOG_WEIGHT, HIGHEST_LOG_WEIGHT = (
    math.log(1e-8),
    20.0,
)  # VESPO's range of log weights, as in TRL


class LogRatio:
    """R of each token, and the way back from d loss / d R to d loss / d logp."""

    def __init__(
        self,
        tokens: Tokens | None,
        log_ratio: Tensor,
        passes: Tensor | None = None,
        kept: Tensor | None = None,
    ) -> None:
        """Take `log_ratio` (n,) as R; with `tokens`, its mean over the sequence's `kept` tokens, and `passes` (n,) bool
        says which tokens get d R.
        """
        self._tokens, self._passes = tokens, passes
        if tokens is None:
            self.value = log_ratio
            return
        layout = tokens.layout
        counts = layout.lengths if kept is None else layout.sequence_sum(kept.to(log_ratio.dtype))
        self._counts = counts.clamp(min=1).to(log_ratio.dtype)
        self.value = (layout.sequence_sum(log_ratio) / self._counts)[layout.sequence]

    @property
    def is_shared(self) -> bool:
        """True if R is one per sequence."""
        return self._tokens is not None

    def to_logps(self, d_log_ratio: Tensor) -> Tensor:
        """d loss / d logp through R, given d loss / d R, (n,) each."""
        if self._tokens is None:
            return d_log_ratio
        layout = self._tokens.layout
        passed = (layout.sequence_sum(d_log_ratio) / self._counts)[layout.sequence]
        return passed if self._passes is None else torch.where(self._passes, passed, 0.0)


def of_level(config: Any, tokens: Tokens, token_log_ratio: Tensor, kept: Tensor | None) -> LogRatio:
    """Return R by `importance_sampling_level`: each token's own, or its sequence's mean; `kept` is not read."""
    return LogRatio(
        tokens if config.importance_sampling_level == "sequence" else None, token_log_ratio
    )


def clipped_mean(
    config: Any, tokens: Tokens, token_log_ratio: Tensor, kept: Tensor | None
) -> LogRatio:
    """Return GMPO's R: the sequence's mean of `kept` log-ratios, each clipped from above if A > 0, else from below."""
    up, low, high = tokens.advantages > 0, -config.epsilon, config.clip_high
    bounded = torch.where(up, token_log_ratio.clamp(max=high), token_log_ratio.clamp(min=low))
    passes = torch.where(up, token_log_ratio <= high, token_log_ratio >= low)
    if kept is not None:
        passes, bounded = passes & kept, torch.where(kept, bounded, 0.0)
    return LogRatio(tokens, bounded, passes, kept=kept)


def sequence_log_weight(tokens: Tokens, token_log_ratio: Tensor) -> Tensor:
    """(n,) VESPO's log w of a token's sequence: clamped log-ratios and log importance ratios, summed."""
    log_weight = tokens.layout.sequence_sum(
        token_log_ratio.clamp(-HIGHEST_LOG_WEIGHT, HIGHEST_LOG_WEIGHT)
    )
    if tokens.sequence_ratio is not None:
        log_weight = log_weight + tokens.sequence_ratio.log().clamp(
            LOWEST_LOG_WEIGHT, HIGHEST_LOG_WEIGHT
        )
    elif tokens.importance_sampling_ratio is not None:
        log_is = tokens.importance_sampling_ratio.log().clamp(LOWEST_LOG_WEIGHT, HIGHEST_LOG_WEIGHT)
        log_weight = log_weight + tokens.layout.sequence_sum(log_is)
    return log_weight.clamp(LOWEST_LOG_WEIGHT, HIGHEST_LOG_WEIGHT)[tokens.layout.sequence]
