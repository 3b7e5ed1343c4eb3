"""Keyword arguments that `GRPOLoss` hands to `grpo_loss`, for type checkers."""

from __future__ import annotations

from typing import TypedDict

from torch import Tensor

from grpo_kernels.base.choices import WithoutSet
from grpo_kernels.batch.kept_ids import KeptIds
from grpo_kernels.head.head import HeadLike


class LossInputKeywords(TypedDict, total=False):
    """Keyword arguments of a `GRPOLoss`'s call."""

    old_per_token_logps: Tensor | None
    ref_per_token_logps: Tensor | None
    reference: tuple[Tensor, HeadLike] | None
    num_items_in_batch: float | Tensor | None
    sampling_per_token_logps: Tensor | None
    importance_sampling_ratio: Tensor | None
    kept_ids: Tensor | KeptIds | None
    without_set: WithoutSet
    cu_seqlens: Tensor | None
