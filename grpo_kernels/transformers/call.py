"""One forward of a transformers model whose head scores tokens instead of projecting them.

The model's own forward runs with its head replaced during the call: the head receives the hidden
states and scores the completion tokens. This is exact for more architectures than running the body
and reading the head afterwards. It includes whatever the model applies before its head (a
multiplier, a dense layer and a norm, a cast), and needs no names of inner modules. Hooks on the
model, its head and its parts run as usual. FSDP2 gathers the weight there, and again for the
backward, whether the head is in the root's unit or in a separate one; so does DeepSpeed ZeRO-3.
DDP, PEFT and accelerate see one call of the model. Results leave through the outputs of head and
model, where these engines hook the backward.

What the model applies to the logits after its head is measured in its first call (`HeadCheck`), at
the cost of one row of the head, without random numbers or collectives. If the config was wrong, the
model runs a second time with the measured constants.

Not supported: encoder-decoder models, several heads (codebooks), quantized heads,
``nn.DataParallel``, and models used by two threads at once.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import GenerationMixin
from transformers.utils import ModelOutput

from grpo_kernels.base.checks import check_choice, check_shape, check_tensor, warn_once
from grpo_kernels.base.choices import BatchLayout, choices
from grpo_kernels.base.distributed import most_of_ranks, rank_groups
from grpo_kernels.base.modes import evaluating, guest
from grpo_kernels.body.layout import takes
from grpo_kernels.body.trunk import live_trunk, ordinary_id, trunk_of, unwrapped
from grpo_kernels.head import Head
from grpo_kernels.module import (
    divided_modules,
    foreign_hooks,
    is_fsdp_unit,
    linear_of,
    within_forwards,
)
from grpo_kernels.patching import Shares, forward_name, replaced
from grpo_kernels.transformers import head as heads
from grpo_kernels.transformers.head import HeadCheck, constants_of

RESULTS, FIELDS = "results", "others"  # keys of the dict that the model returns to its wrappers
# Maximum number of runs per call: a second run may use measured constants, or the whole batch, if
# the output has a scalar.
_MOST_RUNS = 4
Results = dict[str, Tensor]
Score = Callable[[Tensor, Head], Results]  # (the head's input (B, L, H), head) -> results
# models with a scalar output, which may need the whole batch
_models_with_scalars: weakref.WeakSet[nn.Module] = weakref.WeakSet()
# head -> factor by which the model multiplies the body's output before the head
_factors: weakref.WeakKeyDictionary[nn.Module, float] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Batch:
    """The ids of a call, and the mask of those that count."""

    input_ids: Tensor  # (B, L)
    completion_mask: Tensor  # (B, T)

    def __post_init__(self) -> None:
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

    def check_ids(self, base: Any, inputs: Mapping[str, Any]) -> None:
        """Raise ValueError if an attended id is outside the vocabulary of `base`, the causal model.

        The check is skipped if it would have to wait for a device. It is also skipped if `inputs`
        has further entries, such as images, since these have their own ids.
        """
        ids, attended = self.input_ids, inputs.get("attention_mask")
        if inputs.keys() - {"attention_mask", "position_ids"} or base.config.is_encoder_decoder:
            return
        if ids.device.type != "cpu":
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

    def needed(self) -> Tensor:
        """(B, L) bool, positions whose hidden states predict a counted token."""
        before = self.input_ids.shape[1] - self.completion_mask.shape[1]
        return nn.functional.pad(self.completion_mask != 0, (before - 1, 1))

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

    def counted_state(self, hidden: Tensor) -> Tensor:
        """A state (H,) of `hidden` (B, L, H) that predicts a counted token, if there is one."""
        states, _, mask = self.aligned(hidden)
        row, column = divmod(int((mask != 0).reshape(-1).to(torch.uint8).argmax()), mask.shape[1])
        return states[row, column]


def run_scored(
    model: nn.Module,
    batch: Batch,
    score: Score,
    inputs: dict[str, Any],
    layout: BatchLayout,
    live: Tensor | None = None,  # (B,) bool
) -> tuple[Results, ModelOutput, Shares]:
    """Run `model` with `score` in its head: (results, output without logits, shares).

    `inputs` are the model's inputs besides the ids; `layout` and `live` are as in `live_trunk`.
    """
    check_choice("layout", layout, choices(BatchLayout))
    if inputs.get("labels") is not None:
        raise ValueError(
            "labels: expected none, since there are no logits to compare with; got labels"
        )
    inputs = _with_positions(model, {name: x for name, x in inputs.items() if x is not None})
    base, attention_mask = heads.causal_lm(model), inputs.get("attention_mask")
    # transformers also accepts 4-dimensional masks and dicts of masks; only the model reads those
    if attention_mask is not None and not isinstance(attention_mask, dict):
        check_tensor("attention_mask", attention_mask)
        if attention_mask.dim() != 4:
            shape = "(B, L)", tuple(batch.input_ids.shape)
            check_shape("attention_mask", attention_mask, shape)
    batch.check_ids(base, inputs)
    if takes(type(base).forward, "use_cache"):
        inputs.setdefault("use_cache", False)
    inputs, needed = {"input_ids": batch.input_ids, **inputs}, batch.needed()
    is_checked = heads.known_head(model, inputs)[2]
    # on other devices this synchronizes, so only the first call checks
    if needed.device.type == "cpu" or not is_checked:
        _check_attended(batch.input_ids, needed, inputs, base.config)

    def run(call: HeadCall) -> dict[str, Any]:
        model_forward = base.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return call.pack_output(model_forward(*args, **kwargs))

        with call.in_head(), replaced(base, "forward", forward):
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

    return run_in_head(model, run, score, inputs, layout, needed, live, batch.counted_state)


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
    is_taken = "position_ids" in inspect.signature(type(base).forward).parameters
    is_taken = is_taken and all(takes(x.forward, "position_ids") for x in wrappers)
    plain = getattr(GenerationMixin, hook, None)  # None before transformers 5
    is_plain = plain is not None and getattr(type(base), hook, None) is plain
    of_roberta = "create_position_ids_from_input_ids"
    if not is_taken or not is_plain or any(hasattr(x, of_roberta) for x in base.modules()):
        return inputs
    return {**inputs, "position_ids": ((mask != 0).cumsum(1) - 1).masked_fill(mask == 0, 0)}


def run_in_head(
    model: nn.Module,
    run: Callable[[HeadCall], dict[str, Any]],
    score: Score,
    inputs: dict[str, Any],
    layout: BatchLayout,
    needed: Tensor,  # (B, L) bool, cells whose hidden states are read
    live: Tensor | None,  # (B,) bool
    state_of: Callable[[Tensor], Tensor],
) -> tuple[Results, ModelOutput, Shares]:
    """Like `run_scored`, but `run` runs the model on `inputs` inside the call that it gets.

    The first time, the model's logits are checked at the state that `state_of` chooses. If the
    config was wrong, the model runs once more, with the measured constants.
    """
    base = heads.causal_lm(model)
    if "adapter_names" in inputs:  # PEFT expects one per sequence of the padded batch
        layout, live = "padded", None
    head, facts, is_checked = heads.known_head(model, inputs)

    def score_whole(hidden: Tensor, head: Head) -> Results:
        # accelerate makes FSDP2 cast logits to 16 bits, where log-probabilities keep only 8 bits
        unit: Any = next((x for x in base.modules() if is_fsdp_unit(x)), None)
        root = None if unit is None else unit._get_fsdp_state()._state_ctx.iter_forward_root
        if root is not None and root._mp_policy.output_dtype is not None:
            root._mp_policy = replace(root._mp_policy, output_dtype=None)
        return score(hidden, head)

    groups = rank_groups(trunk_of(model))
    for _ in range(_MOST_RUNS):
        is_whole = base in _models_with_scalars
        check = None if is_checked else HeadCheck(head, state_of)
        call = HeadCall(head, score_whole, check)
        runs = ("padded", None) if is_whole else (layout, live)
        with live_trunk(model, *runs, needed) as of_trunk:
            returned = run(call)
        fields: dict[str, Any] = returned[FIELDS]
        has_scalar = any(isinstance(x, Tensor) and x.dim() == 0 for x in pytree.tree_leaves(fields))
        part = of_trunk.computed
        if has_scalar and not is_whole and most_of_ranks(groups, [int(part is not None)])[0]:
            _models_with_scalars.add(base)  # such as an aux_loss, which may need all hidden states
            continue
        used, head = head, head if check is None else check.verified(base, facts)
        if constants_of(head) != constants_of(used):  # equal on all ranks, so all run again
            continue
        if part is not None:
            fields = pytree.tree_map(functools.partial(_nan_but_at, part), fields)
        return returned[RESULTS], call.output_type(**fields), of_trunk.shares()
    raise _differing_constants(head)


def _differing_constants(head: Head) -> ValueError:
    return ValueError(
        "model: expected one scale, soft-cap or cut of the logits, got another in each run: "
        f"{constants_of(head)}"
    )


def _nan_but_at(computed: Tensor, x: Any) -> Any:
    """Set `x`, a tensor (B, L, ...) of an output, to NaN outside the cells `computed` (B, L)."""
    if not isinstance(x, Tensor) or x.shape[:2] != computed.shape or not x.is_floating_point():
        return x
    cells = computed.to(x.device).reshape(*computed.shape, *(1,) * (x.dim() - 2))
    return x.masked_fill(~cells, float("nan"))


def measured_head(base: nn.Module, forward: Callable[..., Any]) -> Head:
    """The head of `base`, with constants that map the body's output to the model's logits.

    It is for callers that run body and head themselves, without the model's own `forward`. On first
    use, `forward` runs on two tokens as a guest. It runs inside the caller's own call of `base`, so
    FSDP2 and ZeRO-3 have gathered what it reads.
    """
    head, facts, is_checked = heads.known_head(base, {})
    # `states` gets the body's output, then the head's input
    linear, states = linear_of(head.weight), list[Tensor]()
    ids = torch.full((1, 2), ordinary_id(base), device=linear.weight.device)

    def keep(hidden: Tensor, _: Head) -> Results:
        states.append(hidden)
        return {"none": hidden.new_zeros(1)}

    def look(*args: Any) -> None:
        output = args[-1]
        states.append(output[0] if isinstance(output, tuple) else output.last_hidden_state)

    if not is_checked or head.weight not in _factors:
        for _ in range(_MOST_RUNS):
            check, used = HeadCheck(head, lambda hidden: hidden[0, -1]), head
            call = HeadCall(head, keep, check)
            with torch.no_grad(), guest(base, ids.device), evaluating(base), call.in_head():
                looking = trunk_of(base).register_forward_hook(look)
                try:
                    call.pack_output(forward(input_ids=ids))
                finally:
                    looking.remove()
            head = check.verified(base, facts)
            if constants_of(head) == constants_of(used):
                break
        else:
            raise _differing_constants(head)
        of_body, made = (x[0, -1].double() for x in states[-2:])
        factor = ((made @ of_body) / (of_body @ of_body)).item()
        factor = 1.0 if abs(factor - 1.0) < 1e-3 else factor
        if (made - factor * of_body).norm() > 1e-2 * made.norm():
            raise ValueError(
                "model: expected a head that reads the output of its body, but "
                f"{type(base).__name__} changes it in between; use causal_lm_loss and "
                "completion_logprobs, which are exact for it"
            )
        _factors[head.weight] = factor
    factor = _factors[head.weight]
    if factor != 1.0 and linear.bias is not None:
        raise ValueError(
            "model: expected a head without bias, since its hidden states are scaled by "
            f"{factor:g}, got one with bias"
        )
    return replace(head, logit_scale=head.logit_scale * factor)


class HeadCall:
    """Replacement for a head during one forward; it returns scores instead of logits.

    Scores are laid out in a (1, R, V) tensor, so that the model can treat them as logits. With a
    `check`, the two rows of the check come first.
    """

    def __init__(self, head: Head, score: Score, check: HeadCheck | None) -> None:
        self.head, self.score, self.check = head, score, check
        self.project: Callable[..., Tensor] = head.weight.forward
        # the head's forward sets these
        self.result_specs: dict[str, tuple[torch.Size, torch.dtype]] = {}  # name -> shape, dtype
        self.output = self.rows = torch.empty(0)  # output (1, R, V); rows (R, V), detached
        self.results: Results = {}
        self.output_type = ModelOutput

    @contextmanager
    def in_head(self) -> Iterator[None]:
        """Replace the head inside the context. Then pass the model's output to `pack_output`."""
        head, name = self.head.weight, forward_name(self.head.weight)
        self.project = getattr(head, name)
        if isinstance(getattr(self.project, "__self__", None), HeadCall):
            raise RuntimeError(
                "model: expected one whose head is not in use, got one inside head_inputs or "
                "another call of it"
            )
        with replaced(head, name, self._head_forward):
            unpacking = head.register_forward_hook(self._unpack)
            try:
                yield
            finally:
                unpacking.remove()

    def _head_forward(self, hidden: Tensor, *others: Any, **named: Any) -> Tensor:
        """Score `hidden` (B, L, H) instead of projecting it; the scores are (1, R, V)."""
        if self.result_specs:
            raise RuntimeError(
                "model: expected a forward that calls its head once, but "
                f"{type(self.head.weight).__name__} is called again"
            )
        if others or named:  # for example PEFT's adapter_names, one adapter per row
            given = ", ".join([*(type(x).__name__ for x in others), *named])
            raise ValueError(
                f"model: expected its head to get only hidden states, got {given} as well"
            )
        if self.check:
            self.check.project(hidden, self.project)

        def compute(hidden: Tensor) -> tuple[Tensor, ...]:
            if self.check:
                self.check.score()
            found = self.score(hidden, self.head)
            self.result_specs = {name: (x.shape, x.dtype) for name, x in found.items()}
            return tuple(found.values())

        # under ZeRO-3, these are the adapters
        inner = [x for x in divided_modules(self.head.weight) if x is not self.head.weight]
        results = within_forwards(inner, compute, hidden)
        flat = torch.cat([x.reshape(-1) for x in results])
        flat = flat.to(torch.promote_types(flat.dtype, torch.float32))  # like the check's rows
        vocab = linear_of(self.head.weight).weight.shape[0]
        rows = nn.functional.pad(flat, (0, -flat.numel() % vocab)).view(-1, vocab)
        if self.check:
            rows = torch.cat([self.check.rows.to(rows.dtype), rows])
        self.rows = rows.detach()
        # a copy: if it were a view, a model that writes into its logits would remove FSDP2's hook
        self.output = rows[None].clone()
        return self.output

    def _unpack(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """Read the results from the head's `output`, after all other hooks."""
        if is_fsdp_unit(module) and output.dtype != self.output.dtype:
            output = self.output  # FSDP2's mixed precision hooks it, and passes on a rounded copy
        hooks = foreign_hooks(module)
        if hooks and not torch.allclose(
            output[0].detach().to(self.rows), self.rows, rtol=0, atol=0, equal_nan=True
        ):
            raise TypeError(
                "model: expected forward hooks on its head that change nothing, got "
                f"{', '.join(hooks)}"
            )
        flat = output[0, 2 if self.check else 0 :].reshape(-1)
        sizes = [shape.numel() for shape, _ in self.result_specs.values()]
        pieces = flat[: sum(sizes)].split(sizes)
        for x, (name, (shape, dtype)) in zip(pieces, self.result_specs.items(), strict=True):
            # a copy, because the model may write into its logits
            self.results[name] = x.view(shape).to(dtype, copy=True)

    def pack_output(self, output: Any) -> Any:
        """Make a dict to return instead of the model's `output`: results, and other fields."""
        if not self.results:
            name = type(self.head.weight).__name__
            raise RuntimeError(
                f"model: expected a forward that calls its head, but {name} was not called"
            )
        logits = getattr(output, "logits", None)
        is_of_rows = isinstance(logits, Tensor) and logits.dim() == 3 and logits.shape[1] > 1
        if not isinstance(output, ModelOutput) or (self.check and not is_of_rows):
            raise ValueError(
                f"model: expected an output with logits (B, T, V), got {type(output).__name__}"
            )
        if self.check:
            self.check.made = output.logits[0, :2].detach()
        self.output_type = type(output)
        others = {name: x for name, x in output.items() if name != "logits"}
        return {RESULTS: self.results, FIELDS: others}


def _check_attended(
    input_ids: Tensor,  # (B, L)
    needed: Tensor,  # (B, L) bool
    inputs: dict[str, Any],
    config: Any,
) -> None:
    """Check the values of an attention_mask (B, L) in `inputs`. This synchronizes with the device.

    A counted token inside padding is an error. Three cases warn: there is no mask, although padding
    comes before a counted token; a sequence's first token counts, although only padding precedes
    it; or zeros lie between ones, which makes later positions wrong unless the caller passes
    positions. The token after the last 1 may count: it is the end token if that is also the padding
    token.
    """
    attention_mask = inputs.get("attention_mask")
    if attention_mask is None:
        _warn_of_attended_padding(input_ids, needed, config.get_text_config(decoder=True))
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        return
    attended = attention_mask.to(needed.device) != 0
    unseen = needed[:, :-1] & ~attended[:, :-1]
    in_padding = (unseen & ~attended[:, 1:]).nonzero()
    if len(in_padding):
        row, column = in_padding[0].tolist()
        raise ValueError(
            "completion_mask: expected 0 where attention_mask is 0, got a token that counts in "
            f"column {column + 1} of sequence {row}, with attention_mask 0 there and before"
        )
    if bool(unseen.any()):
        warn_once(
            "completion_mask: it counts a token whose previous column has attention_mask 0. "
            "Nothing predicts the first token of a sequence, so set it to 0"
        )
    begun, goes_on = attended.cumsum(1) > 0, attended.flip(1).cumsum(1).flip(1) > 0
    if "position_ids" not in inputs and bool((begun & goes_on & ~attended).any()):
        warn_once(
            "attention_mask: it has zeros between ones, which a model without position_ids counts "
            "as positions. Pad prompts on the left and completions on the right, or pass "
            "position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)"
        )


def _warn_of_attended_padding(input_ids: Tensor, needed: Tensor, config: Any) -> None:
    pad = getattr(config, "pad_token_id", None)
    if pad is None:
        return
    is_before = needed.flip(1).cumsum(1).flip(1) > 0  # padding on the right does no harm
    padding = (input_ids == pad) & is_before.to(input_ids.device)
    of_text = [getattr(config, name, None) for name in ("eos_token_id", "bos_token_id")]
    if any(pad in (x if isinstance(x, list) else [x]) for x in of_text):
        padding = padding[:, 1:] & padding[:, :-1]  # a single one is an end or beginning of text
    if bool(padding.any()):
        warn_once(
            f"attention_mask: got None, and input_ids with padding tokens (pad_token_id = {pad}) "
            "before a token that counts, which are attended to like text. Pass the tokenizer's "
            "attention_mask, with a 1 for each token of the completion"
        )
