"""Log-probabilities of completions under a causal language model, in one forward of it, without its logits.

How the forward goes: `grpo_kernels.transformers.causal_lm`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, overload

from torch import Tensor, nn
from transformers.utils import ModelOutput

from grpo_kernels.base.choices import BatchLayout, LogitsDtype, WithoutSet
from grpo_kernels.batch.kept_ids import KeptIds
from grpo_kernels.body.inputs import Batch, TrunkOptions, check_names, with_positions
from grpo_kernels.call.output import Scores
from grpo_kernels.head.head import Head
from grpo_kernels.logprob import linear_logprob
from grpo_kernels.loss import GRPOLoss
from grpo_kernels.transformers import head as heads
from grpo_kernels.transformers.call import run_scored
from grpo_kernels.transformers.head import check_loss_fn, moved


@overload
def completion_logprobs(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    completion_mask: Tensor,
    *,
    loss_fn: GRPOLoss | None = ...,
    temperature: float | None = ...,
    logits_dtype: LogitsDtype = ...,
    kept_ids: Tensor | KeptIds | None = ...,
    without_set: WithoutSet = ...,
    entropy: bool = ...,
    layout: BatchLayout = ...,
    return_output: Literal[False] = ...,
    **model_inputs: Any,
) -> Scores: ...


@overload
def completion_logprobs(
    model: nn.Module,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    completion_mask: Tensor,
    *,
    loss_fn: GRPOLoss | None = ...,
    temperature: float | None = ...,
    logits_dtype: LogitsDtype = ...,
    kept_ids: Tensor | KeptIds | None = ...,
    without_set: WithoutSet = ...,
    entropy: bool = ...,
    layout: BatchLayout = ...,
    return_output: Literal[True],
    **model_inputs: Any,
) -> tuple[Scores, ModelOutput]: ...


def completion_logprobs(
    model: nn.Module,
    input_ids: Tensor,  # (B, L)
    attention_mask: Tensor | None,  # (B, L)
    completion_mask: Tensor,  # (B, T)
    *,
    loss_fn: GRPOLoss | None = None,
    temperature: float | None = None,
    logits_dtype: LogitsDtype = "float32",
    kept_ids: Tensor | KeptIds | None = None,  # (B, T, K)
    without_set: WithoutSet = "error",
    entropy: bool = True,
    layout: BatchLayout = "tree",
    return_output: bool = False,
    **model_inputs: Any,
) -> Scores | tuple[Scores, ModelOutput]:
    """Log-probability of each completion token under the model, and the entropy at its position; differentiable.

    Only tokens that count are projected, and the full logits are never stored.

    Args:
        model: a causal language model of transformers; PEFT, DDP, FSDP2 or accelerate may be around it.
        input_ids: (B, L) prompt and completion.
        attention_mask: (B, L), or None if no padding comes before a token that counts. (A warning says so
            if it does.)
        completion_mask: (B, T) for the last T <= L columns of `input_ids`, non-zero where a token counts. T may be the
            longest completion, as in TRL, or L, with completions anywhere. The token in column t is predicted from
            column t - 1, so column 0 of `input_ids` never counts.
        loss_fn: the loss that the log-probabilities are for; its temperature applies.
        temperature: divisor of the logits; None: the temperature of `loss_fn`, or 1 without one.
        logits_dtype: as in `grpo_kernels.Head`.
        kept_ids, without_set: as in `linear_logprob`: the ids that a truncating sampler kept, at the columns of
            `completion_mask`.
        entropy: True to compute entropies.
        layout: arrangement of the batch below the head, as in `causal_lm_loss`.
        return_output: True to return the model's own output too, such as a mixture of experts' ``aux_loss``.
        model_inputs: all other arguments of the model's forward: pixel_values, position_ids, token_type_ids, ...
            ``use_cache`` is False unless given. A name counts as the model's if it is a parameter of its forward, of a
            wrapper's or of the body's, or one that transformers documents for all models. Without
            position_ids they are counted from an `attention_mask` (B, L), as the model's `generate`
            counts them; a model with positions of its own (RoBERTa, Qwen-VL) keeps those.

    Returns:
        `Scores` with `logps` (B, T) and, unless `entropy` is False, `entropies` (B, T): fp32 (fp64 for an fp64 model),
        0 where the mask is 0. With `return_output` a pair of them and the output of the model's forward, of its own
        class, with all that it has but logits, which were never made (None).

    Raises:
        TypeError: the model's head is not one linear layer, an argument is of the wrong type, or has a name that
            nothing reads; before the model runs.
        ValueError: a wrong argument; or the model changes its logits by more than a scale, a soft-cap or a cut.
        RuntimeError: the model's forward does not call its head exactly once.
    """
    trunk = TrunkOptions(layout=layout)
    check_names(model, model_inputs, _OF_SCORING, "")
    batch, divisor = Batch.of(input_ids, completion_mask), temperature
    if loss_fn is not None:
        check_loss_fn(loss_fn)
        if temperature is not None:
            raise ValueError(
                "temperature: expected None beside loss_fn, whose temperature serves, got "
                f"{temperature}"
            )
        divisor = loss_fn.config.temperature

    def score(hidden: Tensor, head: Head) -> tuple[Tensor, ...]:
        states, ids, mask = batch.aligned(hidden)
        found = linear_logprob(
            states,
            replace(heads.read(head, states), logits_dtype=logits_dtype),
            ids,
            mask=mask,
            temperature=1.0 if divisor is None else divisor,
            entropy=entropy,
            kept_ids=moved(kept_ids, states),
            without_set=without_set,
            run=heads.gathering(head),
        )
        return tuple(found.given.values())

    inputs = with_positions(model, {"attention_mask": attention_mask, **model_inputs})
    results, output, _ = run_scored(model, batch, score, inputs, trunk)
    scores = Scores.of(logps=results[0], entropies=results[1] if entropy else None)
    return (scores, output) if return_output else scores


_OF_SCORING = (
    "completion_mask",
    "loss_fn",
    "temperature",
    "logits_dtype",
    "kept_ids",
    "without_set",
    "entropy",
    "return_output",
    "layout",
)
