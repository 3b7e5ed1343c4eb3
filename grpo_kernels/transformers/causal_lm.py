"""Causal language models of transformers: log-probabilities and the loss from their inputs.

Text and vision-language models, wrapped or not, in one forward without logits: `transformers.call`.
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
from transformers import GenerationMixin
from transformers.utils import ModelOutput

from grpo_kernels.base.checks import did_you_mean
from grpo_kernels.base.choices import (
    BatchLayout,
    DivergenceName,
    LogitsDtype,
    OnMissingSet,
    ZeroAdvantage,
)
from grpo_kernels.body.layout import takes
from grpo_kernels.body.trunk import unwrapped
from grpo_kernels.engine.plan import Run
from grpo_kernels.head import Head
from grpo_kernels.kept_ids import KeptIds
from grpo_kernels.loss import GRPOLoss, grpo_loss, policy_expectation
from grpo_kernels.objective.config import LossConfig
from grpo_kernels.objective.losses import averaged_over
from grpo_kernels.patching import replaced
from grpo_kernels.results import LossOutput, Scores
from grpo_kernels.scores import linear_divergence, linear_logprob
from grpo_kernels.transformers import head as heads
from grpo_kernels.transformers.call import RESULTS, Batch, HeadCall, TrunkOptions, run_scored
from grpo_kernels.transformers.head import HeadCheck

_OF_LOSS = signature(grpo_loss).parameters.keys() - {"fields"}
_LOGPS = {name for name in _OF_LOSS if name.endswith("_per_token_logps")}
_OF_EXPECTATION = _LOGPS | {"importance_sampling_ratio", "num_items_in_batch"}
_LOSS_INPUTS = _OF_EXPECTATION | {
    "kept_ids", "on_missing_set", "sampling_topk_ids", "sampling_topk_logps",
}  # fmt: skip
# Arguments of `grpo_loss` that `causal_lm_loss` does not take
_INSTEAD = {
    "completion_ids": "they are the last columns of input_ids",
    "hidden": "the model makes them",
    "head": "it is the model's",
    "cu_seqlens": "pass packed rows with position_ids, as the model takes them",
    "reference": "only grpo_loss takes it; pass ref_per_token_logps, from completion_logprobs",
    **{x: f"set it on the loss, GRPOLoss({x}=...)" for x in ("config", "objective", "run")},
}
# Names that every forward with **kwargs takes: fields of TransformersKwargs (older releases have
# fewer, or none), and names that transformers' decorators of a forward read. num_items_in_batch is
# the loss's: read only with labels.
_DOCUMENTED = {
    *("position_ids", "is_causal", "use_cache", "return_dict", "cache_position", "seq_idx"),
    *("output_hidden_states", "output_attentions", "output_router_logits"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    *getattr(getattr(transformers.utils, "TransformersKwargs", None), "__annotations__", ()),
} - {"num_items_in_batch"}


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
    """Compute `loss_fn` of a model on a batch, in one forward, whose head computes the loss.

    Below the head only what the loss needs is computed, exactly: docs/training-step.md. The metrics
    ``sequences/gradient``, ``tokens/computed`` and ``tokens/gradient`` say how much that was.

    Args:
        model, input_ids, attention_mask, completion_mask: as in `completion_logprobs`.
        loss_fn: the loss. The model's soft-cap and logit scale apply.
        advantages: (B,), one per sequence, or (B, T), one per token.
        router_aux_loss_coef: weight of a mixture of experts' load-balancing loss, which is added
            where the model computes one (``output_router_logits=True`` in its config or here);
            None: the config's weight.
        zero_advantage: treatment of sequences in which no token has a gradient (advantage 0 without
            KL term and entropy bonus; or masked whole). ``"score"``: they run without graph, for
            the metrics; ``"skip"``: they do not run, and metrics leave them out; ``"train"``: they
            run like all sequences. With a loss of your own (`objective`) all sequences train.
        layout: arrangement of the batch below the head. ``"tree"``: each distinct prefix of the
            sequences runs once, so prompts that several completions share do, and padding does not
            run; ``"trim"``: sequences side by side, without the columns of padding before and after
            them; ``"padded"``: as given. If a model is not exact in one, a warning names the
            reason, and the next serves.
        logits_dtype: as in `grpo_kernels.Head`.
        inputs: the other arguments of `grpo_loss` (old_per_token_logps (B, T), num_items_in_batch,
            ...) and of the model's forward (pixel_values, position_ids, ...); told apart by name.

    Returns:
        `LossOutput`; its `loss` has gradients for all parameters of the model that train.

    Raises:
        TypeError, ValueError, RuntimeError: as `completion_logprobs` and `grpo_loss`.
    """
    _check_loss_fn(loss_fn)
    loss_inputs = {name: inputs.pop(name) for name in [*inputs] if name in _OF_LOSS}
    for name in loss_inputs.keys() - _LOSS_INPUTS:
        raise ValueError(f"{name}: expected none here, got one: {_INSTEAD[name]}")
    if loss_fn.config.needs_reference_head:
        raise ValueError(
            "kl_estimator: expected 'k1', 'k2' or 'k3' here, got 'full', which reads the hidden "
            "states of a reference: call grpo_loss(..., reference=(hidden, head))"
        )
    trunk = TrunkOptions(zero_advantage, layout)
    _check_names(model, inputs, causal_lm_loss, _LOSS_INPUTS)
    batch = Batch(input_ids, completion_mask)
    live = None if zero_advantage == "train" else _live(loss_fn, batch, advantages, loss_inputs)
    if zero_advantage == "skip" and live is not None:
        check_skip(loss_fn.config)
        has_items = loss_inputs.get("num_items_in_batch") is not None
        if averaged_over(loss_fn.config, num_items=has_items) == "tokens":
            raise ValueError(
                "zero_advantage: expected 'score' or 'train' for a mean over the tokens of all "
                f"sequences, as in {loss_fn.config.loss_type!r}, got 'skip'; or pass "
                "num_items_in_batch=completion_mask.sum(), with which 'dapo' is 'bnpo' too"
            )
        counted = batch.completion_mask * live.to(batch.completion_mask.device)[:, None]
        batch = replace(batch, completion_mask=counted)
    done: list[LossOutput] = []

    def score(hidden: Tensor, head: Head) -> tuple[Tensor, ...]:
        states, ids, mask = batch.aligned(hidden)
        given = {name: _moved(x, states) for name, x in loss_inputs.items()}
        loss = copy.copy(loss_fn)
        loss.run = heads.gathering(head, loss_fn.run)
        whole = replace(heads.read(head, states), logits_dtype=logits_dtype)
        done[:] = [loss(states, whole, ids, mask, _moved(advantages, states), **given)]
        return (done[0].loss,)

    model_inputs = _with_positions(model, {"attention_mask": attention_mask, **inputs})
    (loss,), output, shares = run_scored(model, batch, score, model_inputs, trunk.layout, live)
    aux_loss = getattr(output, "aux_loss", None)
    if aux_loss is not None:
        if router_aux_loss_coef is None:
            config = heads.causal_lm(model).config.get_text_config(decoder=True)
            router_aux_loss_coef = config.router_aux_loss_coef
        loss = loss + router_aux_loss_coef * aux_loss.to(loss.device)
    pairs = {
        name: (loss.new_tensor(n), loss.new_tensor(total))
        for name, (n, total) in shares.pairs.items()
    }
    return replace(done[0], loss=loss, metrics=done[0].metrics.joined(pairs))


def _live(
    loss_fn: GRPOLoss, batch: Batch, advantages: Tensor, loss_inputs: dict[str, Any]
) -> Tensor | None:
    """(B,) bool: sequences that may get a gradient; None: not known, or none is wanted."""
    is_known = loss_fn.objective is None and type(loss_fn).forward is GRPOLoss.forward
    if not is_known or not torch.is_grad_enabled():
        return None
    mask = batch.completion_mask
    given = {name: _moved(x, mask) for name, x in loss_inputs.items() if name in _OF_EXPECTATION}
    given |= {"completion_mask": mask, "advantages": _moved(advantages, mask)}
    expected = policy_expectation(loss_fn.config, **given)
    return None if expected.graded is None else expected.graded.any(dim=1)


# fmt: off
@overload
def completion_logprobs(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None, completion_mask: Tensor, *,
    loss_fn: GRPOLoss | None = ..., temperature: float | None = ...,
    logits_dtype: LogitsDtype = ..., kept_ids: Tensor | KeptIds | None = ...,
    on_missing_set: OnMissingSet = ..., entropy: bool = ..., layout: BatchLayout = ...,
    return_output: Literal[False] = ..., **model_inputs: Any,
) -> Scores: ...
@overload
def completion_logprobs(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor | None, completion_mask: Tensor, *,
    loss_fn: GRPOLoss | None = ..., temperature: float | None = ...,
    logits_dtype: LogitsDtype = ..., kept_ids: Tensor | KeptIds | None = ...,
    on_missing_set: OnMissingSet = ..., entropy: bool = ..., layout: BatchLayout = ...,
    return_output: Literal[True], **model_inputs: Any,
) -> tuple[Scores, ModelOutput]: ...
# fmt: on


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
    on_missing_set: OnMissingSet = "error",
    entropy: bool = True,
    layout: BatchLayout = "tree",
    return_output: bool = False,
    **model_inputs: Any,
) -> Scores | tuple[Scores, ModelOutput]:
    """Log-probability of each completion token, and the entropy at its position; differentiable.

    Only tokens that count are projected, and the full logits are never stored.

    Args:
        model: a causal language model of transformers; PEFT, DDP, FSDP2 or accelerate may be around
            it.
        input_ids: (B, L) prompt and completion.
        attention_mask: (B, L), or None if no padding comes before a token that counts. (A warning
            says so if it does.)
        completion_mask: (B, T) for the last T <= L columns of `input_ids`, non-zero where a token
            counts. T may be the longest completion, as in TRL, or L, with completions anywhere. The
            token in column t is predicted from column t - 1, so column 0 of `input_ids` never
            counts.
        loss_fn: the loss that the log-probabilities are for; its temperature applies.
        temperature: divisor of the logits; None: the temperature of `loss_fn`, or 1 without one.
        logits_dtype: as in `grpo_kernels.Head`.
        kept_ids, on_missing_set: as in `linear_logprob`: the ids that a truncating sampler kept, at
            the columns of `completion_mask`.
        entropy: True to compute entropies.
        layout: arrangement of the batch below the head, as in `causal_lm_loss`.
        return_output: True to return the model's own output too, such as a mixture of experts'
            ``aux_loss``.
        model_inputs: all other arguments of the model's forward: pixel_values, position_ids, ...
            ``use_cache`` is False unless given. A name counts as the model's if it is a parameter
            of its forward, of a wrapper's or of the body's, or one that transformers documents for
            all models. Without position_ids they are counted from an `attention_mask` (B, L), as
            the model's `generate` counts them; a model with positions of its own (RoBERTa, Qwen-VL)
            keeps those.

    Returns:
        `Scores` with `logps` (B, T) and, unless `entropy` is False, `entropies` (B, T): fp32 (fp64
        for an fp64 model), 0 where the mask is 0. With `return_output` a pair of them and the
        output of the model's forward, of its own class, with all that it has but logits, which were
        never made (None).

    Raises:
        TypeError: the model's head is not one linear layer, an argument is of the wrong type, or
            has a name that nothing reads; before the model runs.
        ValueError: a wrong argument; or the model changes its logits by more than a scale, a
            soft-cap or a cut.
        RuntimeError: the model's forward does not call its head exactly once.
    """
    trunk = TrunkOptions(layout=layout)
    _check_names(model, model_inputs, completion_logprobs)
    if loss_fn is not None:
        _check_loss_fn(loss_fn)
        if temperature is not None:
            raise ValueError(
                "temperature: expected None beside loss_fn, whose temperature serves, got "
                f"{temperature}"
            )
        temperature = loss_fn.config.temperature
    divisor = 1.0 if temperature is None else temperature
    batch = Batch(input_ids, completion_mask)

    def score(hidden: Tensor, head: Head) -> tuple[Tensor, ...]:
        states, ids, mask = batch.aligned(hidden)
        found = linear_logprob(
            states,
            replace(heads.read(head, states), logits_dtype=logits_dtype),
            ids,
            completion_mask=mask,
            temperature=divisor,
            entropy=entropy,
            kept_ids=_moved(kept_ids, states),
            on_missing_set=on_missing_set,
            run=heads.gathering(head),
        )
        return tuple(found.given.values())

    inputs = _with_positions(model, {"attention_mask": attention_mask, **model_inputs})
    results, output, _ = run_scored(model, batch, score, inputs, trunk.layout)
    scores = Scores.of(logps=results[0], entropies=results[1] if entropy else None)
    return (scores, output) if return_output else scores


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
    """Divergence of two models at each completion token, over the whole vocabulary, differentiable
    in the student; neither model makes logits.

    ::

        scores = causal_lm_divergence(student, teacher, input_ids, attention_mask, completion_mask)
        loss = scores.divergence.sum() / completion_mask.sum()
        loss.backward()

    The teacher runs first, without gradient, in whichever mode it is (call ``teacher.eval()``), and
    leaves its hidden states at the completion tokens. Both models get the same inputs, so that they
    must share the ids; the vocabularies may differ in size (see `linear_divergence`).

    Args:
        student, teacher: causal language models of transformers, as in `completion_logprobs`, on
            one device. The teacher's head has no adapter.
        input_ids, attention_mask, completion_mask, logits_dtype, entropy, layout: as in
            `completion_logprobs`.
        divergence, beta, temperature, run: as in `linear_divergence`.
        model_inputs: other arguments of both models' forwards.

    Returns:
        `Scores` with `divergence` (B, T), `logps` (B, T) of the student and, if asked for,
        `entropies` (B, T): fp32 (fp64 for fp64 models), 0 where the mask is 0.

    Raises:
        TypeError, ValueError, RuntimeError: as `completion_logprobs` and `linear_divergence`.
    """
    trunk, batch = TrunkOptions(layout=layout), Batch(input_ids, completion_mask)
    for name, model in (("student", student), ("teacher", teacher)):
        try:
            heads.known_head(model, {})
        except TypeError as error:
            raise TypeError(f"{name}: {str(error).removeprefix('model: ')}") from None
        _check_names(model, model_inputs, causal_lm_divergence)
    given, dtypes = {"attention_mask": attention_mask, **model_inputs}, list[torch.dtype]()

    def keep(hidden: Tensor, head: Head) -> tuple[Tensor, ...]:
        states, _, _ = batch.aligned(hidden)
        dtypes[:] = [states.dtype]
        return (states.to(torch.promote_types(states.dtype, torch.float32)),)

    with torch.no_grad():
        inputs = _with_positions(teacher, given)
        (teacher_states,), _, _ = run_scored(teacher, batch, keep, inputs, trunk.layout)
    teacher_head = replace(heads.known_head(teacher, inputs)[0], logits_dtype=logits_dtype)

    def score(hidden: Tensor, head: Head) -> tuple[Tensor, ...]:
        states, ids, mask = batch.aligned(hidden)
        found = linear_divergence(
            states,
            replace(heads.read(head, states), logits_dtype=logits_dtype),
            (teacher_states.to(states.device, dtypes[0]), teacher_head),
            completion_mask=mask,
            divergence=divergence,
            beta=beta,
            temperature=temperature,
            entropy=entropy,
            completion_ids=ids,
            run=heads.gathering(head, run),
        )
        return tuple(found.given.values())

    inputs = _with_positions(student, given)
    results, _, _ = run_scored(student, batch, score, inputs, trunk.layout)
    names = ["logps", *(["entropies"] if entropy else []), "divergence"]
    return Scores(**dict(zip(names, results, strict=True)))


def _check_loss_fn(loss_fn: Any) -> None:
    if not isinstance(loss_fn, GRPOLoss):
        hint = "; pass GRPOLoss(config)" if isinstance(loss_fn, LossConfig) else ""
        raise TypeError(f"loss_fn: expected a GRPOLoss, got {type(loss_fn).__name__}{hint}")


def _moved(x: Any, like: Tensor) -> Any:
    """A tensor or kept ids on the device of `like`; anything else as it is."""
    return x.to(like.device) if isinstance(x, Tensor | KeptIds) else x


class HeadInputs:
    """Input of a head in one forward of its model, and the head; both there after `head_inputs`.

    Attributes:
        hidden: (B, L, H), with the graph of the model; position t predicts token t + 1.
        of_model: the head, its `weight` the module, with the constants of its model's logits.
    """

    hidden: Tensor
    of_model: Head

    def head(self, states: Tensor) -> Head:
        """The head with its module's tensors for `states` (..., H), some of the hidden states."""
        return heads.read(self.of_model, states)


@contextmanager
def head_inputs(model: nn.Module) -> Iterator[HeadInputs]:
    """Inside, one forward of the model hands over the input of its head, and makes no logits.

    ::

        with head_inputs(model) as found:
            model(input_ids=ids, attention_mask=attention_mask)
        states = found.hidden[:, :-1]
        scores = linear_logprob(states, found.head(states), ids[:, 1:])

    For losses that `completion_logprobs` and `causal_lm_loss` do not have, and for the hidden
    states of a teacher. In the model's output these hidden states (B, L, H) take the place of the
    logits; all else in it is the model's.

    Args:
        model: as in `completion_logprobs`. The head's parameters are read after the forward: if
            FSDP2 or ZeRO-3 has divided them they are not whole there, so that a loss has to be
            computed by `completion_logprobs` or `causal_lm_loss`, which compute within the forward.

    Yields:
        `HeadInputs`, empty until the context has ended.

    Raises:
        TypeError, ValueError: as `completion_logprobs`; the model's logits are checked in its first
            call.
        RuntimeError: the model has not run inside, or has called its head more than once.
    """
    base = heads.causal_lm(model)
    head, facts, is_checked = heads.known_head(model, {})
    check = None if is_checked else HeadCheck(head, lambda hidden: hidden[0, 0])
    found, model_forward, dtypes = HeadInputs(), base.forward, list[torch.dtype]()

    def as_rows(hidden: Tensor, _: Head) -> tuple[Tensor, ...]:
        dtypes[:] = [hidden.dtype]
        # in the precision of the rows of the check, beside which they lie
        return (hidden.to(torch.promote_types(hidden.dtype, torch.float32)),)

    call = HeadCall(head, as_rows, check)

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = model_forward(*args, **kwargs)
        (hidden,) = call.pack_output(output)[RESULTS]
        return type(output)(**{**output, "logits": hidden.to(dtypes[0])})

    def take(module: nn.Module, args: Any, output: Any) -> None:
        found.hidden = output.logits.to(dtypes[0])

    with call.in_head(), replaced(base, "forward", forward):
        # after the hooks of wrappers, such as FSDP2's for the backward
        last = model.register_forward_hook(take)
        try:
            yield found
        finally:
            last.remove()
    if call.results is None:
        raise RuntimeError("head_inputs: expected one forward of the model inside, got none")
    found.of_model = head if check is None else check.verified(base, facts)


def check_skip(config: LossConfig) -> None:
    """Raise if the gradient of live sequences depends on the scores of the others."""
    expected = "zero_advantage: expected 'score' or 'train'"
    if config.top_entropy_quantile < 1.0:
        raise ValueError(
            f"{expected} with top_entropy_quantile, which is one of all sequences, got 'skip'"
        )
    if config.corrects_sampling:
        raise ValueError(
            f"{expected} where the loss makes the importance sampling ratio, got 'skip'"
        )


def _check_names(
    model: nn.Module,
    given: Collection[str],
    call: Callable[..., Any],
    of_loss: Collection[str] = (),
) -> None:
    """Raise TypeError if nothing reads one of the names `given` as arguments of the model.

    transformers' forwards ignore unknown names in their ``**kwargs``. A name counts if it is a
    parameter of a forward around the model, of the model or of its body, or `_DOCUMENTED`. Those of
    `call` and `of_loss` are suggested.
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
        # both forwards: an object's may be a wrapper; and PEFT takes some names out of its **kwargs
        known |= _named(type(module).forward) | _named(module.forward)
        known |= {*getattr(module, "special_peft_forward_args", ())}
    reader = f"{type(base).__name__} or the loss" if of_loss else type(base).__name__
    for name in given:
        expected = f"{name}: expected an input of {reader}, got"
        if name in {field.name for field in fields(LossConfig)}:
            raise TypeError(
                f"{expected} a field of LossConfig: set it on the loss, GRPOLoss({name}=...)"
            )
        if name not in known:
            hint = did_you_mean(name, sorted({*known, *of_loss, *_named(call)}))
            raise TypeError(f"{expected} a name that nothing there reads{hint}")


def _named(function: Callable[..., Any]) -> set[str]:
    parameters = signature(function).parameters.values()
    named = (x.name for x in parameters if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY))
    return {*named} - {"self"}


def _with_positions(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """`inputs` of a forward with ``position_ids``, counted from a mask (B, L) as by `generate`.

    Nothing is added where the caller gives position_ids, where a forward does not take them, and to
    a model with positions of its own: of three dimensions, for images, or counted from padding
    tokens.
    """
    mask, hook = inputs.get("attention_mask"), "_prepare_position_ids_for_generation"
    if inputs.get("position_ids") is not None or not isinstance(mask, Tensor) or mask.dim() != 2:
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
