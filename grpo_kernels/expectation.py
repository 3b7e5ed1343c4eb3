"""Expected gradient of a policy loss in the log-probabilities, for a trainer that computes its own loss.

With `linear_logprob(..., expected=policy_expectation(...))` such a trainer takes one pass: the gradient is computed
from the same logits as the log-probabilities. The expectation does not have to be right; it only decides how much is
recomputed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels.base.checks import check_tensor
from grpo_kernels.batch.inputs import LossInputs
from grpo_kernels.batch.tokens import read_tokens
from grpo_kernels.call.expected import Expectation
from grpo_kernels.call.loss import Loss, check_loss
from grpo_kernels.objective.checks import check_config
from grpo_kernels.objective.config import LossConfig


def policy_expectation(
    config: LossConfig,
    *,
    completion_mask: Tensor,  # (B, T)
    advantages: Tensor,  # (B,) or (B, T)
    old_per_token_logps: Tensor | None = None,  # (B, T)
    ref_per_token_logps: Tensor | None = None,  # (B, T)
    sampling_per_token_logps: Tensor | None = None,  # (B, T)
    importance_sampling_ratio: Tensor | None = None,  # (B, T), (B, 1) or (B,)
    num_items_in_batch: float | Tensor | None = None,
) -> Expectation:
    """Return the expected gradient for ids of shape (B, T); arguments as in `grpo_loss`.

    With ``kl_estimator="full"`` pass it to `linear_divergence`, whose divergences are the KL term.

    If the trainer computes the importance sampling ratio from the log-probabilities of the call to come, say so in the
    config (``vllm_importance_sampling_correction``) and pass `sampling_per_token_logps`.

    Returns:
        an `Expectation` whose `graded` is (B, T). If a token's gradient depends on other tokens, `coefficients` is
        None: the gradient is not known row by row. `graded` still says which rows cannot have a gradient.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it.
    """
    inputs = LossInputs(
        None, completion_mask, advantages, old_per_token_logps, ref_per_token_logps, sampling_per_token_logps,
        importance_sampling_ratio, num_items_in_batch,
    )  # fmt: skip
    check_config(config)
    check_loss(inputs, config, has_reference=config.needs_reference_head)
    check_tensor("completion_mask", completion_mask)
    if completion_mask.dim() != 2:
        raise ValueError(
            f"completion_mask: expected shape (B, T), got {tuple(completion_mask.shape)}"
        )
    tokens = read_tokens(inputs.with_blank_ids(completion_mask), torch.float32)
    return Loss.of(inputs, tokens, config).expectation()
