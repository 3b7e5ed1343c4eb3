"""The log-ratio that a policy term sees: a token's own, or one a sequence, shared by its tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels.batch.tokens import Tokens


class LogRatio:
    """R of each token, and the way back from d loss / d R to d loss / d logp."""

    def __init__(
        self, tokens: Tokens | None, log_ratio: Tensor, passes: Tensor | None = None, kept: Tensor | None = None
    ) -> None:
        """`tokens` None: R is the token's own `log_ratio`; else the mean over its sequence's `kept` tokens."""
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
        """Whether R is one a sequence."""
        return self._tokens is not None

    def to_logps(self, d_log_ratio: Tensor) -> Tensor:
        """d loss / d logp through R, given d loss / d R, (n,) each."""
        if self._tokens is None:
            return d_log_ratio
        layout = self._tokens.layout
        passed = (layout.sequence_sum(d_log_ratio) / self._counts)[layout.sequence]
        return passed if self._passes is None else torch.where(self._passes, passed, 0.0)
