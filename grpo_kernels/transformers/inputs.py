"""The arguments of a call: options, the batch, names, and the attention mask.

transformers' forwards ignore unknown names in their ``**kwargs``; `check_names` refuses them.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
import transformers.utils
from torch import Tensor, nn
from transformers import GenerationMixin

from grpo_kernels.base.checks import check_shape, check_tensor, did_you_mean, warn_once
from grpo_kernels.base.choices import BatchLayout, ZeroAdvantage, choices
from grpo_kernels.objective.config import LossConfig
from grpo_kernels.transformers.seam import unwrapped

# Names that every forward with **kwargs takes: fields of TransformersKwargs (older releases have
# fewer, or none), and names that transformers' decorators of a forward read. num_items_in_batch is
# the loss's: read only with labels.
_DOCUMENTED = {
    *("position_ids", "is_causal", "use_cache", "return_dict", "cache_position", "seq_idx"),
    *("output_hidden_states", "output_attentions", "output_router_logits"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    *getattr(getattr(transformers.utils, "TransformersKwargs", None), "__annotations__", ()),
} - {"num_items_in_batch"}
_OF_LOSS_CONFIG = {field.name for field in fields(LossConfig)}


@dataclass(frozen=True)
class TrunkOptions:
    """What the trunk computes of a batch; `causal_lm_loss` explains the options."""

    zero_advantage: ZeroAdvantage = "score"
    layout: BatchLayout = "tree"

    def __post_init__(self) -> None:
        for name, allowed in (("zero_advantage", ZeroAdvantage), ("layout", BatchLayout)):
            value, names = getattr(self, name), choices(allowed)
            if value not in names:
                expected = ", ".join(map(repr, names))
                raise ValueError(f"{name}: expected one of {expected}, got {value!r}")


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


@dataclass(frozen=True)
class Batch:
    """The ids of a call and which of them count."""

    input_ids: Tensor  # (B, L)
    completion_mask: Tensor  # (B, T)

    @classmethod
    def of(cls, input_ids: Any, completion_mask: Any) -> Batch:
        check_tensor("input_ids", input_ids)
        check_tensor("completion_mask", completion_mask)
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids: expected shape (B, L), got {tuple(input_ids.shape)}")
        (sequences, length), shape = input_ids.shape, tuple(completion_mask.shape)
        if len(shape) != 2 or shape[0] != sequences or not 0 < shape[1] <= length:
            raise ValueError(
                f"completion_mask: expected shape (B, T) with B = {sequences} and 0 < T <= "
                f"{length}, got {shape}"
            )
        return cls(input_ids, completion_mask)

    def needed(self) -> Tensor:
        """(B, L) bool: the positions whose hidden states predict a token that counts."""
        mask, count = self.completion_mask, self.completion_mask.shape[1]
        found = torch.zeros(self.input_ids.shape, dtype=torch.bool, device=mask.device)
        found[:, -count:] = mask != 0
        return nn.functional.pad(found[:, 1:], (0, 1))

    def aligned(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(states (B, T, H), ids (B, T), mask (B, T)): each id with the states that predict it."""
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
        """A state (H,) of `hidden` (B, L, H) that predicts a token that counts, if any counts."""
        states, _, mask = self.aligned(hidden)
        row, column = divmod(int((mask != 0).reshape(-1).to(torch.uint8).argmax()), mask.shape[1])
        return states[row, column]


def check_names(
    model: nn.Module, given: Collection[str], others: Collection[str], takers: str
) -> None:
    """Raise TypeError if nothing reads one of the names `given` as arguments of the model.

    A name counts if it is a parameter of a forward around the model, of the model or of its body,
    or `_DOCUMENTED`; a field of `LossConfig` does not.

    Args:
        others: names that the caller itself takes, to suggest them.
        takers: the other reader of names, for the message: " or the loss", or "".
    """
    if not given:
        return
    wrappers, base = unwrapped(model)
    known = {name for module in (*wrappers, base) for name in _named_by(module)}
    parameters = inspect.signature(type(base).forward).parameters.values()
    if any(x.kind is x.VAR_KEYWORD for x in parameters):
        known |= _DOCUMENTED.union(_named_by(base.base_model))  # its **kwargs go on to the body
    for name in given:
        expected = f"{name}: expected an input of {type(base).__name__}{takers}, got"
        if name in _OF_LOSS_CONFIG:
            raise TypeError(
                f"{expected} a field of LossConfig: set it on the loss, GRPOLoss({name}=...)"
            )
        if name not in known:
            hint = did_you_mean(name, sorted({*known, *others}))
            raise TypeError(f"{expected} a name that nothing there reads{hint}")


def _named_by(module: nn.Module) -> Iterator[str]:
    """The named parameters of a module's forward, without its *args and **kwargs."""
    for forward in (type(module).forward, module.forward):  # both: an object's may be a wrapper
        for name, x in inspect.signature(forward).parameters.items():
            if x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY) and name != "self":
                yield name
    yield from getattr(module, "special_peft_forward_args", ())  # PEFT takes them out of **kwargs


def with_positions(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """`inputs` of a forward with ``position_ids``, counted from a mask (B, L) as by `generate`.

    Nothing is added where the caller gives position_ids, where a forward does not take them, and to
    a model with positions of its own: of three dimensions, for images, or counted from padding
    tokens.
    """
    mask, hook = inputs.get("attention_mask"), "_prepare_position_ids_for_generation"
    if inputs.get("position_ids") is not None or not isinstance(mask, Tensor) or mask.dim() != 2:
        return inputs
    wrappers, base = unwrapped(model)
    takes = "position_ids" in inspect.signature(type(base).forward).parameters
    for wrapper in wrappers:
        parameters = inspect.signature(wrapper.forward).parameters
        is_open = any(x.kind is x.VAR_KEYWORD for x in parameters.values())
        takes = takes and (is_open or "position_ids" in parameters)
    plain = getattr(GenerationMixin, hook, None)  # None before transformers 5
    is_plain = plain is not None and getattr(type(base), hook, None) is plain
    of_roberta = "create_position_ids_from_input_ids"
    if not takes or not is_plain or any(hasattr(x, of_roberta) for x in base.modules()):
        return inputs
    return {**inputs, "position_ids": ((mask != 0).cumsum(1) - 1).masked_fill(mask == 0, 0)}


def check_attention_mask(attention_mask: Any, input_ids: Tensor) -> None:
    """Raise unless `attention_mask` is None or has the shape (B, L) of `input_ids`.

    Masks of four dimensions and dicts of them, which transformers takes too, are the model's.
    """
    if attention_mask is None or isinstance(attention_mask, dict):
        return
    check_tensor("attention_mask", attention_mask)
    if attention_mask.dim() != 4:
        check_shape("attention_mask", attention_mask, ("(B, L)", tuple(input_ids.shape)))


def check_attended(
    attention_mask: Any,
    needed: Tensor,  # (B, L) bool
    *,
    input_ids: Tensor,  # (B, L)
    config: Any,
    has_positions: bool,
) -> None:
    """Check the values of an `attention_mask` (B, L). Waits for the device.

    A token that counts within padding is an error. Three cases warn: no mask, though padding comes
    before a token that counts; a first token that counts though only padding comes before it; and
    zeros between ones, after which positions are off unless the forward is given them. The token
    after the last 1 may count: it is the end token if that is the padding token too.
    """
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
            "completion_mask: it counts a token whose column before has attention_mask 0: nothing "
            "predicts the first token of a sequence, so give it 0"
        )
    begun, goes_on = attended.cumsum(1) > 0, attended.flip(1).cumsum(1).flip(1) > 0
    if not has_positions and bool((begun & goes_on & ~attended).any()):
        warn_once(
            "attention_mask: it has zeros between ones, and a model without position_ids counts "
            "them as positions. Pad prompts on the left and completions on the right, or pass "
            "position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)"
        )


def _warn_of_attended_padding(input_ids: Tensor, needed: Tensor, config: Any) -> None:
    """Warn, once, if a token that counts attends to padding; that on the right does no harm.

    A padding token that is an end or begin token too is padding only where two stand side by side.
    """
    pad = getattr(config, "pad_token_id", None)
    if pad is None:
        return
    of_text = [getattr(config, name, None) for name in ("eos_token_id", "bos_token_id")]
    is_before = needed.flip(1).cumsum(1).flip(1) > 0
    padding = (input_ids == pad) & is_before.to(input_ids.device)
    if any(pad in (x if isinstance(x, list) else [x]) for x in of_text):
        padding = padding[:, 1:] & padding[:, :-1]
    if bool(padding.any()):
        warn_once(
            f"attention_mask: got None, and input_ids with padding tokens (pad_token_id = {pad}) "
            "before a token that counts, which attends to them as to text. Pass the tokenizer's "
            "attention_mask, with a 1 for each token of the completion"
        )
