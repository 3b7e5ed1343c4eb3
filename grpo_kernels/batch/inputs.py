"""Per-token inputs of a loss, as the caller passes them, not checked yet."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class LossInputs:
    """The per-token and per-sequence arguments of `grpo_loss`; None where absent."""

    completion_ids: Tensor | None  # (B, T), or packed (N,)
    completion_mask: Tensor | None  # (B, T) or (N,)
    advantages: Tensor  # (B,) or (B, T) or (N,)
    old_per_token_logps: Tensor | None = None  # (B, T) or (N,)
    ref_per_token_logps: Tensor | None = None  # (B, T) or (N,)
    sampling_per_token_logps: Tensor | None = None  # (B, T) or (N,)
    importance_sampling_ratio: Tensor | None = None  # (B, T), (B, 1) or (B,); (N,)
    num_items_in_batch: float | Tensor | None = None
    cu_seqlens: Tensor | None = None  # (B + 1,)

    def with_blank_ids(self, like: Tensor) -> LossInputs:
        """Return these with zeros as ids, for a loss on existing log-probabilities, which reads no ids."""
        return replace(self, completion_ids=torch.zeros_like(like, dtype=torch.long))

    @property
    def logps(self) -> dict[str, Tensor | None]:
        """The log-probabilities of other policies, by name."""
        names = ("old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps")
        return {name: getattr(self, name) for name in names}

    @property
    def numbers(self) -> dict[str, Tensor | None]:
        """The floating arguments per token or sequence, by name."""
        ratio = {"importance_sampling_ratio": self.importance_sampling_ratio}
        return {"advantages": self.advantages, **self.logps, **ratio}
