"""Keyword arguments that one public function hands to another, for type checkers.

``def linear_divergence(..., **options: Unpack[DivergenceKeywords])`` has the options of `linear_divergence_with`, each
with its type. A test compares them with the functions' own names and types.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypedDict

from torch import Tensor

from grpo_kernels.base.choices import (
    BackendName,
    DivergenceName,
    DivergenceOutput,
    EngineName,
    LogitsDtype,
    TopKDivergenceName,
    TopKOutput,
    WithoutSet,
)
from grpo_kernels.batch.kept_ids import KeptIds
from grpo_kernels.call.expected import Expectation, Expected
from grpo_kernels.call.options import Projection
from grpo_kernels.engine.request import Gather
from grpo_kernels.head.lora import LoRA
from grpo_kernels.head.reference import ReferenceHead
from grpo_kernels.objective.custom import TokenInputs
from grpo_kernels.objective.keywords import LossFields

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class ExecutionKeywords(TypedDict, total=False):
    """Options of how a call is computed."""

    engine: EngineName
    backend: BackendName
    workspace_bytes: int | None


class HeadKeywords(TypedDict, total=False):
    """Arguments of a head that every call takes, except its bias."""

    lora: LoRA | None
    process_group: ProcessGroup | None
    vocab_size: int | None


class LogitKeywords(TypedDict, total=False):
    """Options of the logits; a loss has them in its config."""

    temperature: float | Tensor
    final_logit_softcapping: float | None
    logit_scale: float
    logits_dtype: LogitsDtype


class LossModuleKeywords(HeadKeywords, total=False):
    """Keyword arguments of a `GRPOLoss`'s call, except the bias."""

    old_per_token_logps: Tensor | None
    ref_per_token_logps: Tensor | None
    sampling_per_token_logps: Tensor | None
    importance_sampling_ratio: Tensor | None
    num_items_in_batch: float | Tensor | None
    cu_seqlens: Tensor | None
    sequence_group: ProcessGroup | None
    gather: Gather | None
    reference: ReferenceHead | None
    kept_ids: Tensor | KeptIds | None
    without_set: WithoutSet


class LossKeywords(LossModuleKeywords, ExecutionKeywords, LossFields, total=False):
    """Keyword arguments of `grpo_loss`, except `config` and `bias`."""

    objective: Callable[[TokenInputs], Tensor] | None


class LogprobKeywords(HeadKeywords, LogitKeywords, ExecutionKeywords, total=False):
    """Keyword arguments of `linear_logprob`, except `entropy` and `bias`."""

    mask: Tensor | None
    expected: Expected | None
    kept_ids: Tensor | KeptIds | None
    without_set: WithoutSet
    projection: Projection


class KeptSetKeywords(HeadKeywords, LogitKeywords, ExecutionKeywords, total=False):
    """Keyword arguments of `kept_set_logprob`, except `entropy`."""

    bias: Tensor | None
    mask: Tensor | None
    without_set: WithoutSet
    expected: Expected | None
    gather: Gather | None


class DivergenceKeywords(HeadKeywords, LogitKeywords, ExecutionKeywords, total=False):
    """Keyword arguments of `linear_divergence`, except the biases."""

    mask: Tensor | None
    divergence: DivergenceName
    beta: float | None
    teacher_final_logit_softcapping: float | None
    teacher_logit_scale: float
    expected: Tensor | tuple[Tensor, Tensor] | Expectation | None
    gather: Gather | None


class DivergenceWithKeywords(DivergenceKeywords, total=False):
    """Keyword arguments of `linear_divergence_with`, except the biases."""

    outputs: tuple[DivergenceOutput, ...]
    ids: Tensor | None


class TopKKeywords(HeadKeywords, LogitKeywords, ExecutionKeywords, total=False):
    """Keyword arguments of `topk_divergence`, except the bias."""

    mask: Tensor | None
    divergence: TopKDivergenceName
    tail: bool | None
    log_prob_min_clamp: float | None
    loss_max_clamp: float | None
    expected: Tensor | None
    gather: Gather | None


class TopKWithKeywords(TopKKeywords, total=False):
    """Keyword arguments of `topk_divergence_with`, except the bias."""

    outputs: tuple[TopKOutput, ...]
