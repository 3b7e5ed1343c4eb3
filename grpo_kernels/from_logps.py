"""The loss of a config, or a custom objective, on log-probabilities that come from elsewhere.

`grpo_loss` scores and differentiates in one pass, which saves a product. This is the same loss on log-probabilities
from elsewhere: over kept sets (the ids that a truncating sampler did not cut: `linear_logprob` with `kept_ids`), or by
a model's own head.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from grpo_kernels.base.checks import check_shape, check_tensor
from grpo_kernels.batch.inputs import LossInputs
from grpo_kernels.call.loss import Loss, check_loss, counted_tokens
from grpo_kernels.call.loss_from_logps import loss_from_logps
from grpo_kernels.call.module_head import outside_graphs
from grpo_kernels.call.output import LossOutput
from grpo_kernels.engine.products import accumulator_of
from grpo_kernels.objective.checks import config_with
from grpo_kernels.objective.config import LossConfig
from grpo_kernels.objective.custom import TokenInputs

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from grpo_kernels.objective.keywords import LossFields


@outside_graphs
def policy_loss_from_logps(
    logps: Tensor,  # (B, T), or packed (N,)
    entropies: Tensor,  # (B, T) or (N,)
    completion_mask: Tensor | None,  # (B, T) or (N,)
    advantages: Tensor,  # (B,) or (B, T) or (N,)
    *,
    old_per_token_logps: Tensor | None = None,  # (B, T) or (N,)
    ref_per_token_logps: Tensor | None = None,  # (B, T) or (N,)
    sampling_per_token_logps: Tensor | None = None,  # (B, T) or (N,)
    importance_sampling_ratio: Tensor | None = None,  # (B, T), (B, 1) or (B,); (N,)
    num_items_in_batch: float | Tensor | None = None,
    config: LossConfig | None = None,
    objective: Callable[[TokenInputs], Tensor] | None = None,
    cu_seqlens: Tensor | None = None,  # (B + 1,)
    **fields: Unpack[LossFields],
) -> LossOutput:
    """`grpo_loss` without its projection: the loss that `config` describes, differentiable in `logps` and `entropies`.

    Args:
        logps, entropies: (B, T), or packed (N,), floating, the policy's, with their graph; values at masked positions
            are never read. The loss is computed in fp32 (fp64 if `logps` is fp64).
        the others: as in `grpo_loss`. The config's `temperature` has no effect: it is in `logps` already. Old,
            reference and sampling log-probabilities must be computed like `logps`, over the same kept sets.

    Returns:
        `LossOutput`, its `engine` ``"given"`` and its `backend` ``"torch"``; ``rows/gradient`` is the share of the
        tokens that get a gradient.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it. RuntimeError: differentiated twice.
    """
    inputs = LossInputs(
        None, completion_mask, advantages, old_per_token_logps, ref_per_token_logps, sampling_per_token_logps,
        importance_sampling_ratio, num_items_in_batch, cu_seqlens,
    )  # fmt: skip
    config = config_with(config, fields, _OF_CALL, "policy_loss_from_logps")
    check_loss(inputs, config, objective)
    check_tensor("logps", logps, floating=True)
    if logps.dim() != (2 if inputs.cu_seqlens is None else 1):
        written = "(B, T)" if inputs.cu_seqlens is None else "(N,) with cu_seqlens"
        raise ValueError(f"logps: expected shape {written}, got {tuple(logps.shape)}")
    check_tensor("entropies", entropies, like=logps, floating=True)
    check_shape("entropies", entropies, ("that of logps", tuple(logps.shape)))
    dtype = accumulator_of(logps.dtype)
    tokens = counted_tokens(inputs.with_blank_ids(logps), config, objective, dtype)
    return loss_from_logps(Loss.of(inputs, tokens, config, objective), logps, entropies)


_OF_CALL = [
    name for name in inspect.signature(policy_loss_from_logps).parameters if name != "fields"
]
