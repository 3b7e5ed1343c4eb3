"""Losses and log-probabilities of transformers' causal language models, in one forward.

The functions accept text and vision-language models, wrapped or not, and never store all logits.
`transformers.head` describes how the forward runs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from inspect import signature
from typing import Any, Literal, overload

import torch
import transformers.utils
from torch import Tensor, nn
from transformers.utils import ModelOutput

from grpo_kernels.base.checks import (
    check_choice,
    check_number,
    check_tensor,
    did_you_mean,
    hints_names,
    warn_once,
)
from grpo_kernels.base.choices import (
    BatchLayout,
    DivergenceName,
    LogitsDtype,
    OnMissingSet,
    ZeroAdvantage,
    choices,
)
from grpo_kernels.base.modes import draws_random
from grpo_kernels.body.trunk import unwrapped
from grpo_kernels.engine.plan import Run, check_run
from grpo_kernels.head import Head
from grpo_kernels.kept_ids import KeptIds
from grpo_kernels.loss import GRPOLoss, LossInputKeywords, policy_expectation
from grpo_kernels.module import whole_reference, without_adapter
from grpo_kernels.objective.config import LossConfig, loss_type_of, preset_hint
from grpo_kernels.patching import replaced
from grpo_kernels.results import LossOutput, Scores
from grpo_kernels.scores import linear_divergence, linear_logps
from grpo_kernels.transformers import head as heads
from grpo_kernels.transformers.batch import Batch, run_scored
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
# Names that every forward with **kwargs accepts: fields of TransformersKwargs (older releases have
# fewer, or none), and names that transformers' decorators of a forward read. num_items_in_batch
# belongs to the loss: the model reads it only with labels.
_DOCUMENTED = {
    *("position_ids", "is_causal", "use_cache", "return_dict", "cache_position", "seq_idx"),
    *("output_hidden_states", "output_attentions", "output_router_logits"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    *getattr(getattr(transformers.utils, "TransformersKwargs", None), "__annotations__", ()),
} - {"num_items_in_batch"}


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
    docs/skipped-work.md. With dropout in train mode, sequences that begin alike share the masks of
    their common prefix, unless `layout` is ``"trim"`` or ``"padded"``; the call warns. The metrics
    ``sequences/gradient``, ``tokens/computed`` and ``tokens/gradient`` show how much was computed.

    Args:
        model, input_ids, attention_mask, completion_mask: as in `completion_logps`.
        loss_fn: the loss. The call also applies the model's own soft-cap and logit scale.
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
        TypeError, ValueError, RuntimeError: as `completion_logps` and `grpo_loss`.
    """
    _check_loss_fn(loss_fn)
    check_tensor("advantages", advantages)
    for name in _INSTEAD.keys() & inputs:
        raise ValueError(f"{name}: expected none here, got one: {_INSTEAD[name]}")
    check_choice("zero_advantage", zero_advantage, choices(ZeroAdvantage))
    if router_aux_loss_coef is not None:
        check_number("router_aux_loss_coef", router_aux_loss_coef)
    loss_inputs = {name: inputs.pop(name) for name in _LOSS_INPUTS & inputs.keys()}
    config = loss_fn.config
    unread = {"ref_per_token_logps" if config.kl_estimator == "full" else "reference"}
    _check_names(model, inputs, causal_lm_loss, _LOSS_INPUTS, unread)
    batch = Batch(input_ids, completion_mask)
    if config.needs_reference_head and reference is None:
        raise ValueError(
            "reference: expected the reference model, since kl_estimator = 'full' and beta = "
            f"{config.beta}, got None"
        )
    if reference is not None and config.kl_estimator != "full":
        raise ValueError(
            f"reference: expected None with kl_estimator = {config.kl_estimator!r}, which does not "
            "read it, got one; pass ref_per_token_logps, from completion_logps"
        )
    if reference is not None:
        _check_second("reference", reference)
        _check_names(reference, inputs, causal_lm_loss, _LOSS_INPUTS)
    _warn_of_prompts(attention_mask, completion_mask)
    live = None if zero_advantage == "train" else _live(loss_fn, batch, advantages, loss_inputs)
    if zero_advantage == "skip" and live is not None:
        check_skip(config)
        has_items = loss_inputs.get("num_items_in_batch") is not None
        if loss_type_of(config).averaged_over(num_items=has_items) == "tokens":
            raise ValueError(
                "zero_advantage: expected 'score' or 'train' for a mean over the tokens of all "
                f"sequences, as in {config.loss_type!r}, got 'skip'; or use "
                "loss_type='dapo' with num_items_in_batch=completion_mask.sum()"
            )
        counted = batch.completion_mask * live.to(batch.completion_mask.device)[:, None]
        batch = replace(batch, completion_mask=counted)
    model_inputs = {"attention_mask": attention_mask, **inputs}
    if reference is not None and config.needs_reference_head:
        second = _states_and_head("reference", reference, batch, model_inputs, layout, logits_dtype)
        loss_inputs["reference"] = second
    done: list[LossOutput] = []

    def score(hidden: Tensor, head: Head) -> Results:
        states, ids, mask = batch.aligned(hidden)
        given = {name: _moved(x, states) for name, x in loss_inputs.items()}
        loss = copy.copy(loss_fn)
        loss.run = heads.gathering(head, loss_fn.run)
        whole = heads.read(head, states, logits_dtype)
        done[:] = [loss(states, whole, ids, mask, _moved(advantages, states), **given)]
        return {"loss": done[0].loss}

    results, output, counts = run_scored(model, batch, score, model_inputs, layout, live)
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
    return replace(done[0], loss=loss, metrics=done[0].metrics.joined(pairs))


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
def completion_logps(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None, completion_mask: Tensor, *,
    loss_fn: GRPOLoss | None = ..., temperature: float | None = ...,
    logits_dtype: LogitsDtype = ..., kept_ids: Tensor | KeptIds | None = ...,
    on_missing_set: OnMissingSet = ..., entropy: bool = ..., layout: BatchLayout = ...,
    run: Run | None = ..., return_output: Literal[False] = ..., **model_inputs: Any,
) -> Scores: ...
@overload
def completion_logps(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None, completion_mask: Tensor, *,
    loss_fn: GRPOLoss | None = ..., temperature: float | None = ...,
    logits_dtype: LogitsDtype = ..., kept_ids: Tensor | KeptIds | None = ...,
    on_missing_set: OnMissingSet = ..., entropy: bool = ..., layout: BatchLayout = ...,
    run: Run | None = ..., return_output: Literal[True], **model_inputs: Any,
) -> tuple[Scores, ModelOutput]: ...
# fmt: on


@hints_names
def completion_logps(
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
            scores = completion_logps(
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
            counts. If completions end the rows, as in TRL, let T be the length of the longest
            completion. If they are elsewhere, let T be L. Column t - 1 predicts the token in column
            t, so column 0 of `input_ids` never counts.
        loss_fn: the loss that will use the log-probabilities; the call applies its temperature.
        temperature: divisor of the logits; None: the temperature of `loss_fn`, or 1 without one.
        logits_dtype: as in `grpo_kernels.Head`.
        kept_ids, on_missing_set: as in `linear_logps`: the ids that a truncating sampler kept,
            for the columns of `completion_mask`.
        entropy: True to compute entropies, too.
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
    _check_names(model, model_inputs, completion_logps)
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
    batch = Batch(input_ids, completion_mask)

    def score(hidden: Tensor, head: Head) -> Results:
        states, ids, mask = batch.aligned(hidden)
        return linear_logps(
            states,
            heads.read(head, states, logits_dtype),
            ids,
            completion_mask=mask,
            temperature=divisor,
            entropy=entropy,
            kept_ids=_moved(kept_ids, states),
            on_missing_set=on_missing_set,
            run=heads.gathering(head, run),
        ).given

    inputs = {"attention_mask": attention_mask, **model_inputs}
    results, output, _ = run_scored(model, batch, score, inputs, layout)
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
    entropy: bool = False,
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
        student, teacher: causal language models of transformers, as in `completion_logps`, on
            one device. The teacher's head must have no adapter.
        input_ids, attention_mask, completion_mask, logits_dtype, entropy, layout: as in
            `completion_logps`.
        divergence, beta, temperature, run: as in `linear_divergence`.
        model_inputs: other arguments of both models' forwards.

    Returns:
        `Scores` with `divergence` and the student's `logps`, (B, T) each; if `entropy` is True,
        also `entropies` (B, T). All are fp32 (fp64 for fp64 models), and 0 where the mask is 0.

    Raises:
        TypeError, ValueError, RuntimeError: as `completion_logps` and `linear_divergence`.
    """
    check_run(run)
    batch = Batch(input_ids, completion_mask)
    _check_head("student", student)
    _check_second("teacher", teacher)
    for model in (student, teacher):
        _check_names(model, model_inputs, causal_lm_divergence)
    inputs = {"attention_mask": attention_mask, **model_inputs}
    # The teacher runs before the student, because both may have the same module as their head.
    reference = _states_and_head("teacher", teacher, batch, inputs, layout, logits_dtype)

    def score(hidden: Tensor, head: Head) -> Results:
        states, ids, mask = batch.aligned(hidden)
        return linear_divergence(
            states,
            heads.read(head, states, logits_dtype),
            reference,
            completion_mask=mask,
            divergence=divergence,
            beta=beta,
            temperature=temperature,
            entropy=entropy,
            completion_ids=ids,
            run=heads.gathering(head, run),
        ).given

    return Scores(**run_scored(student, batch, score, inputs, layout)[0])


def _check_head(name: str, model: Any) -> Head:
    """Describe the head of the argument `name`; a TypeError names this argument."""
    try:
        return heads.describe_head(model)
    except TypeError as error:
        raise TypeError(f"{name}: {str(error).removeprefix('model: ')}") from None


def _check_second(name: str, model: Any) -> None:
    """Require a `model` that can be a constant reference or teacher; warn if it is random."""
    without_adapter(_check_head(name, model).weight, f"{name}.head")
    if draws_random(model):
        warn_once(
            f"{name}: it is in train mode and has dropout or noise, so its distributions are "
            f"random; call {name}.eval()"
        )


def _states_and_head(
    name: str,
    model: nn.Module,
    batch: Batch,
    inputs: dict[str, Any],
    layout: BatchLayout,
    logits_dtype: LogitsDtype,
) -> tuple[Tensor, Head]:
    """Run a reference or a teacher: (states (B, T, H) that predict the ids, head)."""
    used: list[Head] = []

    def keep(hidden: Tensor, head: Head) -> Results:
        used[:] = [replace(head, logits_dtype=logits_dtype)]
        return {"states": batch.aligned(hidden)[0]}

    with torch.no_grad():
        states = run_scored(model, batch, keep, inputs, layout)[0]["states"]
    found: tuple[Tensor, Head] = whole_reference((states, used[0]), states, used[0], f"{name}.")
    return found


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


def _moved(x: Any, like: Tensor) -> Any:
    """Move a tensor or kept ids to the device of `like`; anything else is unchanged."""
    return x.to(like.device) if isinstance(x, Tensor | KeptIds) else x


class HeadInputs:
    """The head and its input; filled when the block ``with head_inputs(model)`` ends.

    Attributes:
        hidden: (B, L, H), attached to the model's graph; position t predicts token t + 1.
        of_model: a `Head` around the model's own module, with the model's scale, soft-cap and
            vocabulary size.
    """

    hidden: Tensor
    of_model: Head

    def head(self, states: Tensor) -> Head:
        """Return the head for scoring `states` (..., H), a part of `hidden`."""
        return heads.read(self.of_model, states)


@contextmanager
def head_inputs(model: nn.Module) -> Iterator[HeadInputs]:
    """Capture the input of the head from one forward, without computing logits.

    ::

        with head_inputs(model) as found:
            model(input_ids=ids, attention_mask=attention_mask)
        states = found.hidden[:, :-1]
        scores = linear_logps(states, found.head(states), ids[:, 1:])

    Use it for losses that `completion_logps` and `causal_lm_loss` do not cover, or to get a
    teacher's hidden states. In the model's output, `logits` holds the head's input (B, L, H); all
    other fields are unchanged.

    Args:
        model: as in `completion_logps`. The head's parameters are read after the forward. If
            FSDP2 or ZeRO-3 shards the head, its weight is incomplete at that time; use
            `completion_logps` or `causal_lm_loss`, which compute inside the forward.

    Yields:
        `HeadInputs`, empty until the context ends.

    Raises:
        TypeError, ValueError: as in `completion_logps`. The library checks a model's logits the
            first time that it sees the model.
        RuntimeError: the model did not run inside the context, or called its head more than once.
    """
    base = heads.causal_lm(model)
    found, model_forward = HeadInputs(), base.forward
    call = HeadCall(model, lambda hidden, _: {"hidden": hidden})

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = model_forward(*args, **kwargs)
        hidden = call.pack_output(output)[RESULTS]["hidden"]
        return type(output)(**{**output, "logits": hidden})

    def take(module: nn.Module, args: Any, output: Any) -> None:
        _, dtype = call.result_specs["hidden"]
        found.hidden = output.logits.to(dtype)  # undoes accelerate's cast of 16 bits to fp32

    with call.in_head(), replaced(base, "forward", forward):
        # This hook runs after the hooks of wrappers, such as FSDP2's for the backward.
        last = model.register_forward_hook(take)
        try:
            yield found
        finally:
            last.remove()
    if not call.results:
        raise RuntimeError("head_inputs: expected one forward of the model inside, got none")
    call.verify()  # if not, the head gets the measured constants, and the states are right
    found.of_model = call.head


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
    kind = type(base).__name__
    for name in given:
        if name in {field.name for field in fields(LossConfig)}:
            reader = f"{kind} or the loss" if of_loss else kind
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
            of_model = f"{kind} and the loss" if of_loss else kind
            missing = f"{call.__name__} has no such argument, and {of_model} no such input"
            raise TypeError(f"{name}: {missing}{hint}")


def _named(function: Callable[..., Any]) -> set[str]:
    parameters = signature(function).parameters.values()
    named = (x.name for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY))
    return {*named} - {"self"}
