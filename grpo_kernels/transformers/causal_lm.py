"""Causal language models of transformers, text and vision-language: log-probabilities and the loss from their inputs.

The model's own forward runs, with its head replaced for the length of the call: the head is handed the hidden states
and, instead of projecting them, scores the completion tokens. That is exact for more architectures than running the
body and reading the head afterwards. Whatever the model does before its head (a multiplier, a dense layer and a norm, a
cast) has been done, and no inner module needs to be known by name. Hooks on the model, its head and its parts run as
ever: FSDP2 (the head in the root's unit or in its own) and DeepSpeed ZeRO-3 gather the weight there, and again for the
backward, so that nothing else has to gather it; DDP, PEFT and accelerate see one call of the model. The
results leave through the outputs of head and model, which is where those engines hook the backward.

One thing remains unknown: what the model does to the logits after its head. The config says so under many names, and
is not trusted. In the first call of a model, its forward is given a few known numbers in place of logits, and one row
of real ones (`grpo_kernels.transformers.head_check`). That costs one row of the head, once, and no forward
of its own: nothing random is drawn, no collective is added. If the config was wrong, the model runs a second time with
the constants that were measured; if no constants fit, the call raises.

Not for: encoder-decoder models, several heads (codebooks), quantised heads, ``nn.DataParallel``, a model that two
threads use at a time.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from grpo_kernels.base.choices import BatchLayout, LogitsDtype, ZeroAdvantage
from grpo_kernels.body.inputs import (
    Batch,
    TrunkOptions,
    check_names,
    check_skip,
    with_positions,
)
from grpo_kernels.call.output import LossOutput
from grpo_kernels.expectation import policy_expectation
from grpo_kernels.head.head import Head
from grpo_kernels.loss import GRPOLoss, grpo_loss
from grpo_kernels.objective.config import LossConfig
from grpo_kernels.objective.normaliser import averaged_over
from grpo_kernels.transformers import head as heads
from grpo_kernels.transformers.call import run_scored
from grpo_kernels.transformers.head import causal_lm, check_loss_fn, moved


def causal_lm_loss(
    model: nn.Module,
    loss_fn: GRPOLoss,
    input_ids: Tensor,  # (B, L)
    attention_mask: Tensor | None,  # (B, L)
    completion_mask: Tensor,  # (B, T)
    advantages: Tensor,  # (B,) or (B, T)
    *,
    router_aux_loss_coef: float | None = None,
    zero_advantage: ZeroAdvantage = "score",
    layout: BatchLayout = "tree",
    logits_dtype: LogitsDtype = "float32",
    **inputs: Any,
) -> LossOutput:
    """Compute `loss_fn` of a model on a batch, in one forward of the model, whose head computes the loss.

    Below the head only what the loss needs is computed, exactly: docs/training-step.md. The metrics
    ``sequences/gradient``, ``tokens/computed`` and ``tokens/gradient`` say how much that was.

    Args:
        model, input_ids, attention_mask, completion_mask: as in `completion_logprobs`.
        loss_fn: the loss. The model's soft-cap and logit scale apply.
        advantages: (B,), one per sequence, or (B, T), one per token.
        router_aux_loss_coef: weight of a mixture of experts' load-balancing loss, which is added where the model
            computes one (``output_router_logits=True`` in its config or here); None: the config's weight.
        zero_advantage: treatment of sequences in which no token has a gradient (advantage 0 without KL term and
            entropy bonus; or masked whole). ``"score"``: they run without graph, for the metrics; ``"skip"``: they do
            not run, and metrics leave them out; ``"train"``: they run like all sequences. With a loss of your own
            (`objective`) all sequences train.
        layout: arrangement of the batch below the head. ``"tree"``: each distinct prefix of the sequences runs once, so
            prompts that several completions share do, and padding does not run; ``"trim"``: sequences side by side,
            without the columns of padding before and after them; ``"padded"``: as given. If a model is not exact in
            one, a warning names the reason, and the next serves.
        logits_dtype: as in `grpo_kernels.Head`.
        inputs: the other arguments of `grpo_loss` (old_per_token_logps (B, T), num_items_in_batch, ...) and of the
            model's forward (pixel_values, position_ids, ...); told apart by name.

    Returns:
        `LossOutput`; its `loss` has gradients for all parameters of the model that train.

    Raises:
        TypeError, ValueError, RuntimeError: as `completion_logprobs` and `grpo_loss`.
    """
    check_loss_fn(loss_fn)
    loss_inputs = {name: inputs.pop(name) for name in [*inputs] if name in _OF_LOSS}
    for name in loss_inputs.keys() - _LOSS_INPUTS:
        raise ValueError(
            f"{name}: expected none here, where the model and loss_fn decide it, got one"
        )
    trunk = TrunkOptions(zero_advantage, layout)
    check_names(model, inputs, _NAMED, " or the loss")
    batch = Batch.of(input_ids, completion_mask)
    live = None if zero_advantage == "train" else _live(loss_fn, batch, advantages, loss_inputs)
    if zero_advantage == "skip" and live is not None:
        _check_skip(loss_fn.config, loss_inputs)
        counted = batch.completion_mask * live.to(batch.completion_mask.device)[:, None]
        batch = replace(batch, completion_mask=counted)
    done: list[LossOutput] = []

    def score(hidden: Tensor, head: Head) -> tuple[Tensor, ...]:
        states, ids, mask = batch.aligned(hidden)
        given = {name: moved(x, states) for name, x in loss_inputs.items()}
        loss = copy.copy(loss_fn)
        loss.run = heads.gathering(head, loss_fn.run)
        whole = replace(heads.read(head, states), logits_dtype=logits_dtype)
        done[:] = [loss(states, whole, ids, mask, moved(advantages, states), **given)]
        return (done[0].loss,)

    model_inputs = with_positions(model, {"attention_mask": attention_mask, **inputs})
    (loss,), output, shares = run_scored(model, batch, score, model_inputs, trunk, live)
    aux_loss = getattr(output, "aux_loss", None)
    if aux_loss is not None:
        if router_aux_loss_coef is None:
            router_aux_loss_coef = (
                causal_lm(model).config.get_text_config(decoder=True).router_aux_loss_coef
            )
        loss = loss + router_aux_loss_coef * aux_loss.to(loss.device)
    pairs = {
        name: (loss.new_tensor(n), loss.new_tensor(total))
        for name, (n, total) in shares.pairs.items()
    }
    return replace(done[0], loss=loss, metrics=done[0].metrics.joined(pairs))


_OF_LOSS = inspect.signature(grpo_loss).parameters.keys() - {"fields"}
_LOSS_INPUTS = {name for name in _OF_LOSS if name.endswith("_per_token_logps")}
_OF_EXPECTATION = _LOSS_INPUTS | {"importance_sampling_ratio", "num_items_in_batch"}
_LOSS_INPUTS = _OF_EXPECTATION | {"kept_ids", "without_set"}
_NAMED = (
    "completion_mask",
    "advantages",
    "router_aux_loss_coef",
    "logits_dtype",
    *_LOSS_INPUTS,
    "zero_advantage",
    "layout",
)


def _live(
    loss_fn: GRPOLoss, batch: Batch, advantages: Tensor, loss_inputs: dict[str, Any]
) -> Tensor | None:
    """(B,) bool: sequences that may get a gradient; None: not known, or no gradient is wanted."""
    is_known = loss_fn.objective is None and type(loss_fn).forward is GRPOLoss.forward
    if not is_known or not torch.is_grad_enabled():
        return None
    mask = batch.completion_mask
    given = {name: moved(x, mask) for name, x in loss_inputs.items() if name in _OF_EXPECTATION}
    expected = policy_expectation(
        loss_fn.config, completion_mask=mask, advantages=moved(advantages, mask), **given
    )
    return None if expected.graded is None else expected.graded.any(dim=1)


def _check_skip(config: LossConfig, loss_inputs: dict[str, Any]) -> None:
    check_skip(config)
    if (
        averaged_over(config, num_items=loss_inputs.get("num_items_in_batch") is not None)
        == "tokens"
    ):
        raise ValueError(
            f"zero_advantage: expected 'score' or 'train' for a mean over the tokens of all sequences, as in "
            f"{config.loss_type!r}, got 'skip'; or pass num_items_in_batch=completion_mask.sum(), with which 'dapo' is "
            "'bnpo' too"
        )
