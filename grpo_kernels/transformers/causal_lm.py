"""Losses and log-probabilities of transformers' causal language models, in one forward.

The functions accept text and vision-language models, wrapped or not, and never store all logits.
`transformers.head` describes how the forward runs.

Not supported: encoder-decoder models, several heads (codebooks), quantized heads,
``nn.DataParallel``, and models used by two threads at once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from inspect import signature
from typing import Any, Literal, get_args, overload

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.utils import ModelOutput, TransformersKwargs

from grpo_kernels.base import BatchLayout, DivergenceName, LogitsDtype, OnMissingSet, ZeroAdvantage
from grpo_kernels.base.checks import (
    check_choice,
    check_not_swapped,
    check_number,
    check_shape,
    check_tensor,
    did_you_mean,
    hints_names,
    warn_once,
)
from grpo_kernels.base.modes import draws_random
from grpo_kernels.body.layout import takes
from grpo_kernels.body.trunk import unwrapped
from grpo_kernels.engine.plan import Run, check_run
from grpo_kernels.head import Head
from grpo_kernels.head_module import read_reference, without_adapter
from grpo_kernels.kept_ids import KeptIds
from grpo_kernels.loss import GRPOLoss, LossInputKeywords, policy_expectation
from grpo_kernels.objective.config import LossConfig, preset_hint
from grpo_kernels.patching import replaced
from grpo_kernels.results import LossOutput, Scores
from grpo_kernels.scores import linear_divergence, linear_logps
from grpo_kernels.transformers import head as heads
from grpo_kernels.transformers.head import RESULTS, HeadCall, Results

# Arguments of `grpo_loss` that `causal_lm_loss` does not accept, and what to do instead
_INSTEAD = {
    "completion_ids": "they are the last columns of input_ids",
    "hidden": "the model makes them",
    "head": "it is the model's",
    "cu_seqlens": "pass packed rows with position_ids, as the model takes them",
    **{x: f"set it on the loss, GRPOLoss({x}=...)" for x in ("config", "objective", "run")},
}
# Arguments of `grpo_loss` that `causal_lm_loss` passes on to it
_LOSS_INPUTS = LossInputKeywords.__annotations__.keys() - {"reference", *_INSTEAD}
_OF_EXPECTATION = _LOSS_INPUTS & signature(policy_expectation).parameters.keys()
# Names that every forward with **kwargs accepts: transformers documents them, or its decorators of
# a forward read them. num_items_in_batch belongs to the loss: a model reads it only with labels.
_DOCUMENTED = {"use_cache", "return_dict", "cache_position", *TransformersKwargs.__annotations__}
_DOCUMENTED -= {"num_items_in_batch"}


@hints_names
def causal_lm_loss(
    model: nn.Module,
    loss_fn: GRPOLoss,
    input_ids: Tensor,  # (B, L)
    attention_mask: Tensor | None,  # (B, L)
    completion_mask: Tensor,  # (B, T)
    advantages: Tensor,  # (B,) or (B, T)
    *,
    reference: nn.Module | None = None,
    router_aux_loss_coef: float | None = None,
    zero_advantage: ZeroAdvantage = "score",
    layout: BatchLayout = "tree",
    logits_dtype: LogitsDtype = "float32",
    **inputs: Any,
) -> LossOutput:
    """Compute the loss of a transformers model on a batch, without storing the logits.

    ::

        out = causal_lm_loss(
            model, GRPOLoss(presets.DAPO), input_ids, attention_mask, completion_mask,
            advantages, old_per_token_logps=old_logps,
        )
        out.loss.backward()

    The call skips tokens that the loss does not need, and the results stay exact; see
    docs/skipped-work.md. With dropout in train mode, sequences that begin alike share the dropout
    masks of their common prefix, unless `layout` is ``"trim"`` or ``"padded"``; the call warns. The
    metrics ``sequences/gradient``, ``tokens/computed`` and ``tokens/gradient`` show how much was
    computed.

    Args:
        model: a causal language model of transformers, which PEFT, DDP, FSDP2 or accelerate may
            wrap.
        loss_fn: the loss. The call also applies the model's own soft-cap and logit scale.
        input_ids, attention_mask: (B, L), prompt and completion, as in `causal_lm_logps`.
        completion_mask: (B, T) for the last T columns of `input_ids`, nonzero where a token counts,
            as in `causal_lm_logps`.
        advantages: (B,), one per sequence, or (B, T), one per token.
        reference: the reference model, for ``kl_estimator="full"``. It runs first, without
            gradient. It must meet the conditions for a teacher in `causal_lm_divergence`, and its
            vocabulary must be as large as the policy's. Other estimators read
            ``ref_per_token_logps`` instead.
        router_aux_loss_coef: weight of the load-balancing loss of a mixture of experts. The call
            adds this loss if the model computes it (``output_router_logits=True`` in its config or
            here). None: the config's weight.
        zero_advantage: what to do with sequences without a gradient. These are fully masked
            sequences and, if the loss has no KL term and no entropy bonus, sequences with advantage
            0. ``"score"``: run them without an autograd graph, for the metrics; ``"skip"``: do not
            run them, and leave them out of the metrics; ``"train"``: run them like all others. With
            a custom loss (`objective`), all sequences train.
        layout: arrangement of the batch below the head. ``"tree"``: each distinct prefix runs once,
            including a prompt that several completions share, and padding does not run. ``"trim"``:
            one row per sequence, without the columns of padding on the left and right.
            ``"padded"``: the batch as you pass it. If a layout is not exact for a model, a warning
            names the reason and the call uses the next layout in this list.
        logits_dtype: as in `grpo_kernels.Head`.
        inputs: other arguments of `grpo_loss` (old_per_token_logps (B, T), num_items_in_batch, ...)
            and of the model's forward (pixel_values, position_ids, ...). The library tells them
            apart by name.

    Returns:
        `LossOutput`; its `loss` has gradients for all trainable parameters of the model.

    Raises:
        TypeError, ValueError, RuntimeError: as `causal_lm_logps` and `grpo_loss`.
    """
    _check_loss_fn(loss_fn)
    check_tensor("advantages", advantages)
    for name in _INSTEAD.keys() & inputs:
        raise ValueError(f"{name}: expected none here, got one: {_INSTEAD[name]}")
    check_choice("zero_advantage", zero_advantage, get_args(ZeroAdvantage))
    if router_aux_loss_coef is not None:
        check_number("router_aux_loss_coef", router_aux_loss_coef)
    loss_inputs = {name: inputs.pop(name) for name in _LOSS_INPUTS & inputs.keys()}
    config = loss_fn.config
    unread = {"ref_per_token_logps" if config.kl_estimator == "full" else "reference"}
    _check_names(model, inputs, causal_lm_loss, _LOSS_INPUTS, unread)
    of_models = {"attention_mask": attention_mask, **inputs}
    batch = Batch(input_ids, completion_mask, of_models, layout, logits_dtype)
    if reference is not None:
        if config.kl_estimator != "full":
            raise ValueError(
                f"reference: expected None with kl_estimator = {config.kl_estimator!r}, which does "
                "not read it, got one; pass ref_per_token_logps, from causal_lm_logps"
            )
        _check_second("reference", reference, model)
        _check_names(reference, inputs, causal_lm_loss, _LOSS_INPUTS)
    elif config.needs_reference_head:
        raise ValueError(
            "reference: expected the reference model, since kl_estimator = 'full' and beta = "
            f"{config.beta}, got None"
        )
    _warn_of_prompts(attention_mask, completion_mask)
    _warn_of_packed(config, inputs.get("position_ids"), attention_mask, advantages)
    live = None if zero_advantage == "train" else _live(loss_fn, batch, advantages, loss_inputs)
    if zero_advantage == "skip" and live is not None:
        check_skip(config)
        has_items = loss_inputs.get("num_items_in_batch") is not None
        if config.definition.loss_over(num_items=has_items) == "tokens":
            raise ValueError(
                "zero_advantage: expected 'score' or 'train' for a mean over the tokens of all "
                f"sequences, as in {config.loss_type!r}, got 'skip'; or use "
                "loss_type='dapo' with num_items_in_batch=completion_mask.sum()"
            )
        counted = batch.completion_mask * live.to(batch.completion_mask.device)[:, None]
        batch = replace(batch, completion_mask=counted)
    if reference is not None and config.needs_reference_head:
        loss_inputs["reference"] = _states_and_head("reference", reference, batch)
    done: list[LossOutput] = []

    def score(head: Head, states: Tensor, ids: Tensor, mask: Tensor) -> Results:
        given = {name: _moved(x, states) for name, x in loss_inputs.items()}
        loss = copy.copy(loss_fn)
        loss.run = heads.gathering(head, loss_fn.run)
        whole = heads.read(head, states)
        done[:] = [loss(states, whole, ids, mask, _moved(advantages, states), **given)]
        return {"loss": done[0].loss}

    results, output, counts = run_scored(model, batch, score, live)
    loss, aux_loss = results["loss"], getattr(output, "aux_loss", None)
    if aux_loss is not None:
        if router_aux_loss_coef is None:
            of_text = heads.causal_lm(model).config.get_text_config(decoder=True)
            router_aux_loss_coef = of_text.router_aux_loss_coef
        loss = loss + router_aux_loss_coef * aux_loss.to(loss.device)
    elif router_aux_loss_coef:
        warn_once(
            "router_aux_loss_coef: not used, since the model returned no aux_loss; for a mixture "
            "of experts, pass output_router_logits=True"
        )
    pairs = {k: (loss.new_tensor(n), loss.new_tensor(total)) for k, (n, total) in counts.items()}
    metrics = done[0].metrics
    return replace(done[0], loss=loss, metrics=metrics.with_pairs({**metrics.pairs, **pairs}))


def _live(
    loss_fn: GRPOLoss, batch: Batch, advantages: Tensor, loss_inputs: dict[str, Any]
) -> Tensor | None:
    """(B,) bool, the sequences that may get a gradient; None if unknown or not needed."""
    is_known = loss_fn.objective is None and type(loss_fn).forward is GRPOLoss.forward
    if not is_known or not torch.is_grad_enabled():
        return None
    mask = batch.completion_mask
    given = {name: _moved(x, mask) for name, x in loss_inputs.items() if name in _OF_EXPECTATION}
    given |= {"completion_mask": mask, "advantages": _moved(advantages, mask)}
    expected = policy_expectation(loss_fn.config, **given)
    return None if expected.live is None else expected.live.any(dim=1)


# fmt: off
@overload
def causal_lm_logps(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None, completion_mask: Tensor, *,
    loss_fn: GRPOLoss | None = ..., temperature: float | None = ...,
    logits_dtype: LogitsDtype = ..., kept_ids: Tensor | KeptIds | None = ...,
    on_missing_set: OnMissingSet = ..., entropy: bool = ..., layout: BatchLayout = ...,
    run: Run | None = ..., return_output: Literal[False] = ..., **model_inputs: Any,
) -> Scores: ...
@overload
def causal_lm_logps(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None, completion_mask: Tensor, *,
    loss_fn: GRPOLoss | None = ..., temperature: float | None = ...,
    logits_dtype: LogitsDtype = ..., kept_ids: Tensor | KeptIds | None = ...,
    on_missing_set: OnMissingSet = ..., entropy: bool = ..., layout: BatchLayout = ...,
    run: Run | None = ..., return_output: Literal[True], **model_inputs: Any,
) -> tuple[Scores, ModelOutput]: ...
# fmt: on


@hints_names
def causal_lm_logps(
    model: nn.Module,
    input_ids: Tensor,  # (B, L)
    attention_mask: Tensor | None,  # (B, L)
    completion_mask: Tensor,  # (B, T)
    *,
    loss_fn: GRPOLoss | None = None,
    temperature: float | None = None,
    logits_dtype: LogitsDtype = "float32",
    kept_ids: Tensor | KeptIds | None = None,  # (B, T, K)
    on_missing_set: OnMissingSet = "error",
    entropy: bool = True,
    layout: BatchLayout = "tree",
    run: Run | None = None,
    return_output: bool = False,
    **model_inputs: Any,
) -> Scores | tuple[Scores, ModelOutput]:
    """Compute the log-probability and entropy of each completion token, with gradients.

    ::

        with torch.no_grad():
            scores = causal_lm_logps(
                model, input_ids, attention_mask, completion_mask, loss_fn=loss_fn
            )
        old_logps = scores.logps  # (B, T), at the loss's temperature

    The head projects only counted tokens, and the full logits are never stored.

    Args:
        model: a causal language model of transformers, which PEFT, DDP, FSDP2 or accelerate may
            wrap.
        input_ids: (B, L), prompt and completion.
        attention_mask: (B, L), or None if no padding comes before a counted token. With None, the
            call warns if it finds such padding, that is, ids equal to the config's
            ``pad_token_id``.
        completion_mask: (B, T) for the last T <= L columns of `input_ids`, nonzero where a token
            counts. If all completions start in the same column, as in TRL, T is the number of
            columns from there on; otherwise pass T = L. Column t - 1 predicts the token in column
            t, so column 0 of `input_ids` never counts.
        loss_fn: the loss that will use the log-probabilities; the call applies its temperature.
        temperature: divisor of the logits; None: the temperature of `loss_fn`, or 1 without one.
        logits_dtype: as in `grpo_kernels.Head`.
        kept_ids, on_missing_set: as in `linear_logps`: the ids that a truncating sampler kept,
            for the columns of `completion_mask`.
        entropy: False skips the entropies.
        layout: arrangement of the batch below the head, as in `causal_lm_loss`.
        run: as in `linear_logps`.
        return_output: True to return the model's output, too, for example for the ``aux_loss`` of a
            mixture of experts.
        model_inputs: other arguments of the model's forward: pixel_values, position_ids, ...
            ``use_cache`` defaults to False. You can pass any argument that the forward of the
            model, a wrapper or the body accepts, or that transformers documents for all models. If
            you pass no position_ids, the library counts them from an `attention_mask` (B, L), as
            the model's `generate` does; models that compute their own positions (RoBERTa, Qwen-VL)
            keep doing so.

    Returns:
        `Scores` with `logps` (B, T) and, unless `entropy` is False, `entropies` (B, T): fp32 (fp64
        for an fp64 model), 0 where the mask is 0. With `return_output`, the call returns a pair:
        these scores, and the model's output in its own class, complete except that `logits` is
        None.

    Raises:
        TypeError: the model's head is not one linear layer, or an argument has the wrong type or an
            unknown name. The error is raised before the model runs.
        ValueError: an invalid argument; or the model changes its logits in any way other than a
            scale, a soft-cap or the removal of the last ids.
        RuntimeError: the model's forward does not call its head exactly once.
    """
    _check_names(model, model_inputs, causal_lm_logps)
    check_run(run)
    if loss_fn is not None:
        _check_loss_fn(loss_fn)
        if temperature is not None:
            raise ValueError(
                "temperature: expected None beside loss_fn, whose temperature is used, got "
                f"{temperature}"
            )
        temperature = loss_fn.config.temperature
    divisor = 1.0 if temperature is None else temperature
    inputs = {"attention_mask": attention_mask, **model_inputs}
    batch = Batch(input_ids, completion_mask, inputs, layout, logits_dtype)
    if not torch.is_grad_enabled() and draws_random(model):
        warn_once(
            "model: it is in train mode and has dropout or noise, so these log-probabilities are "
            "random; call model.eval() before you score old or reference log-probabilities"
        )

    def score(head: Head, states: Tensor, ids: Tensor, mask: Tensor) -> Results:
        return linear_logps(
            states,
            heads.read(head, states),
            ids,
            completion_mask=mask,
            temperature=divisor,
            entropy=entropy,
            kept_ids=_moved(kept_ids, states),
            on_missing_set=on_missing_set,
            run=heads.gathering(head, run),
        ).given

    results, output, _ = run_scored(model, batch, score)
    return (Scores(**results), output) if return_output else Scores(**results)


@hints_names
def causal_lm_divergence(
    student: nn.Module,
    teacher: nn.Module,
    input_ids: Tensor,  # (B, L)
    attention_mask: Tensor | None,  # (B, L)
    completion_mask: Tensor,  # (B, T)
    *,
    divergence: DivergenceName = "reverse_kl",
    beta: float | None = None,
    temperature: float = 1.0,
    logits_dtype: LogitsDtype = "float32",
    entropy: bool = True,
    layout: BatchLayout = "tree",
    run: Run | None = None,
    **model_inputs: Any,
) -> Scores:
    """Compute the divergence of two models over the whole vocabulary, at each completion token.

    The divergence is differentiable in the student, and neither model stores its logits.

    ::

        scores = causal_lm_divergence(student, teacher, input_ids, attention_mask, completion_mask)
        loss = scores.divergence.sum() / completion_mask.sum()
        loss.backward()

    The teacher runs first, without gradient and in its current mode; the call warns if dropout is
    on. The call keeps the teacher's hidden states at the completion tokens. Both models get the
    same inputs, so they must use the same token ids. The sizes of their vocabularies may differ
    (see `linear_divergence`).

    Args:
        student, teacher: causal language models of transformers, as in `causal_lm_logps`, on
            one device. The teacher's head must have no adapter.
        input_ids, attention_mask, completion_mask, logits_dtype, entropy, layout: as in
            `causal_lm_logps`.
        divergence, beta, temperature, run: as in `linear_divergence`.
        model_inputs: other arguments of both models' forwards.

    Returns:
        `Scores` with `divergence` and the student's `logps`, (B, T) each; unless `entropy` is
        False, also `entropies` (B, T). All are fp32 (fp64 for fp64 models), 0 where masked.

    Raises:
        TypeError, ValueError, RuntimeError: as `causal_lm_logps` and `linear_divergence`.
    """
    check_run(run)
    inputs = {"attention_mask": attention_mask, **model_inputs}
    batch = Batch(input_ids, completion_mask, inputs, layout, logits_dtype)
    _check_head("student", student)
    _check_second("teacher", teacher, student)
    for model in (student, teacher):
        _check_names(model, model_inputs, causal_lm_divergence)
    trains = [any(x.requires_grad for x in model.parameters()) for model in (student, teacher)]
    if torch.is_grad_enabled() and trains == [False, True]:
        warn_once(
            "student, teacher: only the teacher's parameters train; are they swapped? Else call "
            "teacher.requires_grad_(False)"
        )
    # The teacher runs before the student, because both may have the same module as their head.
    reference = _states_and_head("teacher", teacher, batch)

    def score(head: Head, states: Tensor, ids: Tensor, mask: Tensor) -> Results:
        return linear_divergence(
            states,
            heads.read(head, states),
            reference,
            completion_mask=mask,
            divergence=divergence,
            beta=beta,
            temperature=temperature,
            entropy=entropy,
            completion_ids=ids,
            run=heads.gathering(head, run),
        ).given

    return Scores(**run_scored(student, batch, score)[0])


@dataclass(frozen=True, eq=False)
class Batch:
    """What the models of a call get, and which ids count."""

    input_ids: Tensor  # (B, L)
    completion_mask: Tensor  # (B, T)
    inputs: dict[str, Any]  # of the models, besides the ids; without those that are None
    layout: BatchLayout
    logits_dtype: LogitsDtype

    def __post_init__(self) -> None:
        inputs = {name: x for name, x in self.inputs.items() if x is not None}
        object.__setattr__(self, "inputs", inputs)
        check_tensor("input_ids", self.input_ids)
        check_tensor("completion_mask", self.completion_mask)
        if self.input_ids.is_floating_point() or self.input_ids.dtype == torch.bool:
            raise TypeError(f"input_ids: expected integer ids, got {self.input_ids.dtype}")
        if self.input_ids.dim() != 2:
            raise ValueError(f"input_ids: expected shape (B, L), got {tuple(self.input_ids.shape)}")
        (sequences, length), shape = self.input_ids.shape, tuple(self.completion_mask.shape)
        if len(shape) != 2 or shape[0] != sequences or not 0 < shape[1] <= length:
            raise ValueError(
                f"completion_mask: expected shape (B, T) with B = {sequences} and 0 < T <= "
                f"{length}, got {shape}"
            )
        check_choice("layout", self.layout, get_args(BatchLayout))
        if "labels" in inputs:
            raise ValueError(
                "labels: expected none, since there are no logits to compare with; got labels"
            )
        attended, positions = inputs.get("attention_mask"), inputs.get("position_ids")
        # only the model reads 4-dimensional masks and dicts of masks
        if attended is not None and not isinstance(attended, dict):
            check_tensor("attention_mask", attended)
            if attended.dim() != 4:
                check_shape("attention_mask", attended, ("(B, L)", (sequences, length)))
                check_not_swapped("input_ids", self.input_ids, "attention_mask", attended)
        if isinstance(positions, Tensor) and positions.dim() < 3:  # (3, B, L) for images
            shapes: Any = ("(B, L)", (sequences, length)), ("(1, L)", (1, length))
            check_shape("position_ids", positions, *shapes)

    def check_ids(self, base: Any) -> None:
        """Raise ValueError if an attended id is outside the vocabulary of `base`, the causal model.

        The check is skipped if it would have to wait for a device. It is also skipped if there are
        further inputs, such as images, since these have their own ids.
        """
        ids, attended = self.input_ids, self.inputs.get("attention_mask")
        others = self.inputs.keys() - {"attention_mask", "position_ids"}
        if others or base.config.is_encoder_decoder or ids.device.type != "cpu":
            return
        if isinstance(attended, Tensor) and attended.shape == ids.shape:
            ids = ids[attended.to(ids.device) != 0]
        embedding = getattr(base.get_input_embeddings(), "weight", None)
        # under ZeRO-3 the weight is empty, under FSDP1 a flat part of it
        rows = embedding.shape[0] if isinstance(embedding, Tensor) and embedding.dim() == 2 else 0
        wrong = ids[(ids < 0) | (ids >= rows)] if rows else ids[ids < 0]
        if len(wrong):
            raise ValueError(
                f"input_ids: expected ids in [0, {rows or 'V'}), got {wrong[0].item()}; to leave "
                "out tokens, set completion_mask to 0"
            )

    def aligned(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(states (B, T, H), ids (B, T), mask (B, T)); the states predict the ids."""
        (sequences, length), count = self.input_ids.shape, self.completion_mask.shape[1]
        least, shape = min(count + 1, length), tuple(hidden.shape)
        if len(shape) != 3 or shape[0] != sequences or shape[1] < least:
            raise RuntimeError(
                f"model: expected hidden states of {sequences} sequences and at least {least} "
                f"positions at its head, got {shape}; is logits_to_keep too small?"
            )
        ids = self.input_ids[:, -count:].to(hidden.device)
        mask = self.completion_mask.to(hidden.device)
        if shape[1] > count:
            return hidden[:, -count - 1 : -1], ids, mask
        # nothing predicts the first token
        mask = torch.cat([torch.zeros_like(mask[:, :1]), mask[:, 1:]], dim=1)
        return hidden.roll(1, dims=1), ids, mask


def run_scored(
    model: nn.Module,
    batch: Batch,
    score: Callable[..., Results],
    live: Tensor | None = None,  # (B,) bool, as in `live_trunk`
) -> tuple[Results, ModelOutput, dict[str, tuple[int, int]]]:
    """Run `model` with `score` in its head: (results, output without logits, counts by metric).

    `score` gets the head and what `Batch.aligned` returns.
    """
    base, inputs = heads.causal_lm(model), _with_positions(model, batch.inputs)
    batch.check_ids(base)
    if takes(type(base).forward, "use_cache"):
        inputs = {"use_cache": False, **inputs}
    inputs = {"input_ids": batch.input_ids, **inputs}
    before = batch.input_ids.shape[1] - batch.completion_mask.shape[1]
    # (B, L) bool, positions whose hidden states predict a counted token
    needed = nn.functional.pad(batch.completion_mask != 0, (before - 1, 1))

    def run(call: HeadCall) -> dict[str, Any]:
        # on other devices this synchronizes, so only the first call checks
        if needed.device.type == "cpu" or not call.is_checked:
            _check_attended(batch.input_ids, needed, inputs, base.config)
        model_forward = base.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return call.pack_output(model_forward(*args, **kwargs))

        with replaced(base, "forward", forward):
            returned: dict[str, Any] = model(**inputs)
        if not isinstance(returned, dict) or RESULTS not in returned:
            raise RuntimeError(
                "model: expected a wrapper that calls the model's forward, which is replaced for "
                f"this call, and returns its result, got {type(returned).__name__}. A compiled "
                "model may run the forward it was compiled with; compile its layers instead"
            )
        results: Results = returned[RESULTS]
        for name, (_, dtype) in call.result_specs.items():
            x = results[name]
            if torch.promote_types(x.dtype, dtype) != x.dtype:
                raise ValueError(
                    f"model: expected results of {dtype}, but a wrapper of the model has cast them "
                    f"to {x.dtype}; under FSDP2, leave output_dtype out of MixedPrecisionPolicy"
                )
            results[name] = x.to(dtype)  # undoes accelerate's cast of 16-bit outputs to fp32
        return returned

    def score_aligned(hidden: Tensor, head: Head) -> Results:
        head = replace(head, logits_dtype=batch.logits_dtype)
        return score(head, *batch.aligned(hidden))

    return heads.run_in_head(model, run, score_aligned, inputs, batch.layout, needed, live)


def _with_positions(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """Add ``position_ids`` to `inputs`, counted from the mask (B, L) as `generate` counts them.

    Inputs are unchanged if the caller passed position_ids, if a forward has no such parameter, or
    if the model computes its own positions (three-dimensional ones for images, or from padding
    tokens).
    """
    mask, hook = inputs.get("attention_mask"), "_prepare_position_ids_for_generation"
    if "position_ids" in inputs or not isinstance(mask, Tensor) or mask.dim() != 2:
        return inputs
    wrappers, base = unwrapped(model)
    is_taken = "position_ids" in signature(type(base).forward).parameters
    is_taken = is_taken and all(takes(x.forward, "position_ids") for x in wrappers)
    plain = getattr(GenerationMixin, hook, None)  # None before transformers 5
    is_plain = plain is not None and getattr(type(base), hook, None) is plain
    of_roberta = "create_position_ids_from_input_ids"
    if not is_taken or not is_plain or any(hasattr(x, of_roberta) for x in base.modules()):
        return inputs
    return {**inputs, "position_ids": ((mask != 0).cumsum(1) - 1).masked_fill(mask == 0, 0)}


def _check_attended(
    input_ids: Tensor,  # (B, L)
    needed: Tensor,  # (B, L) bool
    inputs: dict[str, Any],
    config: Any,
) -> None:
    """Check the values of an attention_mask (B, L) in `inputs`. This synchronizes with the device.

    A counted token inside padding is an error. Four cases warn: padding before a counted token is
    attended to (`_warn_of_attended_padding`); the mask has values other than 0 and 1; a sequence's
    first token counts, although nothing of the sequence precedes it; or zeros lie between ones,
    which makes later positions wrong unless the caller passes positions. The token after the last 1
    may count: it is the end token if that is also the padding token.
    """
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2):
        return  # only the model reads it
    first = torch.zeros_like(needed)  # the first token of a sequence, by its position
    if isinstance(positions, Tensor) and positions.shape == needed.shape:
        first = positions.to(needed.device) == 0
    attended = None
    if mask is not None:
        mask = mask.to(needed.device)
        attended = mask != 0
        if bool((attended & (mask != 1)).any()):
            warn_once(
                "attention_mask: it holds values other than 0 and 1, and all but 0 are attended "
                "to. For packed sequences, pass position_ids that begin at 0 in each, and no mask"
            )
    _warn_of_attended_padding(input_ids, needed, config.get_text_config(decoder=True), attended)
    attended = torch.ones_like(needed) if attended is None else attended
    unseen = needed[:, :-1] & ~attended[:, :-1]
    in_padding = (unseen & ~attended[:, 1:]).nonzero()
    if len(in_padding):
        row, column = in_padding[0].tolist()
        raise ValueError(
            "completion_mask: expected 0 where attention_mask is 0, got a token that counts in "
            f"column {column + 1} of sequence {row}, with attention_mask 0 there and before"
        )
    first_after_others = (needed & attended)[:, :-1] & (first & attended)[:, 1:]
    if bool((unseen | first_after_others).any()):
        warn_once(
            "completion_mask: it counts a token whose previous column has attention_mask 0, or "
            "whose position is 0. Nothing predicts the first token of a sequence, so set it to 0"
        )
    begun, goes_on = attended.cumsum(1) > 0, attended.flip(1).cumsum(1).flip(1) > 0
    if "position_ids" not in inputs and bool((begun & goes_on & ~attended).any()):
        warn_once(
            "attention_mask: it has zeros between ones, which a model without position_ids counts "
            "as positions. Pad prompts on the left and completions on the right, or pass "
            "position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)"
        )


def _warn_of_attended_padding(
    input_ids: Tensor, needed: Tensor, config: Any, attended: Tensor | None
) -> None:
    """Warn once of padding before a counted token that is attended to.

    With a mask `attended` (B, L), only padding at the beginning of a row counts.
    """
    pad = getattr(config, "pad_token_id", None)
    if pad is None:
        return
    is_before = needed.flip(1).cumsum(1).flip(1) > 0  # padding on the right does no harm
    padding = (input_ids == pad) & is_before.to(input_ids.device)
    if attended is not None:
        padding = (padding & attended.to(padding.device)).cumprod(1) > 0
    of_text = [getattr(config, name, None) for name in ("eos_token_id", "bos_token_id")]
    if any(pad in (x if isinstance(x, list) else [x]) for x in of_text):
        padding = padding[:, 1:] & padding[:, :-1]  # a single one is an end or beginning of text
    if bool(padding.any()):
        warn_once(
            f"attention_mask: got {'None' if attended is None else 'ones'}, and input_ids with "
            f"padding tokens (pad_token_id = {pad}) before a token that counts, which are attended "
            "to like text. Pass the tokenizer's attention_mask, with a 1 for each token of the "
            "completion"
        )


def _check_head(name: str, model: Any) -> Head:
    """Describe the head of the argument `name`; a TypeError names this argument."""
    try:
        return heads.describe_head(model)
    except TypeError as error:
        raise TypeError(f"{name}: {str(error).removeprefix('model: ')}") from None


def _check_second(name: str, model: Any, policy: nn.Module) -> None:
    """Require a `model` that can be a constant reference or teacher.

    Warn if it is random, or the `policy` itself.
    """
    without_adapter(_check_head(name, model).weight, f"{name}.head")
    if heads.causal_lm(model) is heads.causal_lm(policy):
        warn_once(
            f"{name}: it is the very model that it is compared with, so they differ by dropout at "
            "most; pass another model, such as a copy from before the training"
        )
    if draws_random(model):
        warn_once(
            f"{name}: it is in train mode and has dropout or noise, so its distributions are "
            f"random; call {name}.eval()"
        )


def _states_and_head(name: str, model: nn.Module, batch: Batch) -> tuple[Tensor, Head]:
    """Run a reference or a teacher: (states (B, T, H) that predict the ids, head)."""
    used: list[Head] = []

    def keep(head: Head, states: Tensor, *_: Tensor) -> Results:
        used[:] = [head]
        return {"states": states}

    with torch.no_grad():
        states = run_scored(model, batch, keep)[0]["states"]
    return read_reference((states, used[0]), used[0], f"{name}.")[:2]


def _check_loss_fn(loss_fn: Any) -> None:
    if not isinstance(loss_fn, GRPOLoss):
        hint = "; pass GRPOLoss(config)" if isinstance(loss_fn, LossConfig) else ""
        hint = preset_hint(loss_fn) if isinstance(loss_fn, str) else hint
        hint = "; pass GRPOLoss(...), an instance" if loss_fn is GRPOLoss else hint
        raise TypeError(f"loss_fn: expected a GRPOLoss, got {type(loss_fn).__name__}{hint}")


def _warn_of_prompts(attention_mask: Tensor | None, completion_mask: Tensor) -> None:
    """Warn once if both masks are equal. On a GPU, only the same object counts as equal."""
    same = completion_mask is attention_mask
    if attention_mask is not None and attention_mask.shape == completion_mask.shape and not same:
        on_host = {attention_mask.device.type, completion_mask.device.type} == {"cpu"}
        same = on_host and torch.equal(attention_mask != 0, completion_mask != 0)
    if same:
        warn_once(
            "completion_mask: it equals attention_mask, so the tokens of the prompts train too; "
            "set it to 0 there"
        )


def _warn_of_packed(
    config: LossConfig, positions: Any, attention_mask: Any, advantages: Tensor
) -> None:
    """Warn once if packed rows have one advantage each, or count as one sequence in the loss.

    This reads `positions` (B, L) on a CPU alone.
    """
    if not isinstance(positions, Tensor) or positions.device.type != "cpu" or positions.dim() != 2:
        return
    begins = positions.diff(dim=1) < 0
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 2:
        attended = attention_mask != 0  # padding has any position
        begins = begins & (attended[:, 1:] & attended[:, :-1]).to(begins.device)
    if not bool(begins.any()):
        return
    if advantages.dim() == 1:
        warn_once(
            "advantages: one per row, but position_ids hold several sequences in a row; pass them "
            "per token, (B, T)"
        )
    reads_rows = (
        config.definition.loss_over(num_items=True) == "sequences"
        or config.reads_sequence
        or config.masks_off_policy
        or (config.corrects_sampling and config.vllm_importance_sampling_mode.startswith("seq"))
    )
    if reads_rows:
        warn_once(
            "position_ids: a row holds several sequences, which count as one in this loss, since "
            "it has a mean, a ratio or a mask per sequence. Pass one sequence per row, or use "
            "grpo_loss with cu_seqlens, or a loss by tokens (loss_type='dapo')"
        )


def _moved(x: Any, like: Tensor) -> Any:
    """Move a tensor or kept ids to the device of `like`; anything else is unchanged."""
    return x.to(like.device) if isinstance(x, Tensor | KeptIds) else x


def check_skip(config: LossConfig) -> None:
    """Raise ValueError if the gradient of live sequences depends on scores of skipped ones."""
    expected = "zero_advantage: expected 'score' or 'train'"
    if config.top_entropy_quantile < 1.0:
        raise ValueError(
            f"{expected} with top_entropy_quantile, a quantile over all sequences, got 'skip'"
        )
    if config.corrects_sampling:
        raise ValueError(
            f"{expected} if the loss computes the importance sampling ratio, got 'skip'"
        )


def _check_names(
    model: nn.Module,
    given: Collection[str],
    call: Callable[..., Any],
    of_loss: Collection[str] = (),
    unread: Collection[str] = (),
) -> None:
    """Raise TypeError for an argument name in `given` that neither model nor loss reads.

    transformers' forwards silently ignore unknown names in their ``**kwargs``. This check accepts
    the parameters of the forwards of wrappers, model and body, and `_DOCUMENTED`. The error
    suggests similar names: first those of `call` and `of_loss` that are not `unread`, then the
    model's. If there is none, it lists the options of `call`.
    """
    if not given:
        return
    wrappers, base = unwrapped(model)
    is_open = any(
        x.kind is x.VAR_KEYWORD for x in signature(type(base).forward).parameters.values()
    )
    modules = [*wrappers, base, *([base.base_model] if is_open else [])]  # **kwargs go to the body
    known = {*_DOCUMENTED} if is_open else set[str]()
    for module in modules:
        # The object's forward may be a wrapper, so read the class's forward too. PEFT pops the
        # special names from **kwargs.
        known |= _named(type(module).forward) | _named(module.forward)
        known |= {*getattr(module, "special_peft_forward_args", ())}
    reader = type(base).__name__ + (" or the loss" if of_loss else "")
    for name in given:
        if name in {field.name for field in fields(LossConfig)}:
            raise TypeError(
                f"{name}: expected an input of {reader}, got a field of LossConfig: set it on the "
                f"loss, GRPOLoss({name}=...)"
            )
        if name not in known:
            parameters = signature(call).parameters.values()
            own = [x.name for x in parameters if x.kind is x.KEYWORD_ONLY]
            first = [*own, *sorted({*of_loss, *_named(call)} - {*own})]
            hint = did_you_mean(name, [x for x in first if x not in unread], "", sorted(known))
            hint = hint or f"; it has {', '.join(own)}"
            missing = f"not an argument of {call.__name__}, nor an input of {reader}"
            raise TypeError(f"{name}: {missing}{hint}")


def _named(function: Callable[..., Any]) -> set[str]:
    parameters = signature(function).parameters.values()
    named = (x.name for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY))
    return {*named} - {"self"}
