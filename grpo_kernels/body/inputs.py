"""Arguments of a call: its batch, the attention mask, and which names a model takes.

transformers' forwards accept unknown names in their ``**kwargs`` and ignore them; `check_names` refuses them.
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
from grpo_kernels.batch.kept_ids import KeptIds
from grpo_kernels.objective.config import LossConfig
from grpo_kernels.transformers.head import unwrapped

# Names that every forward with **kwargs takes: fields of TransformersKwargs (older releases have fewer, or none), and
# names that transformers' decorators of a forward read. num_items_in_batch is the loss's: read only with labels.
DOCUMENTED = {
    "position_ids",
    "output_hidden_states",
    "output_attentions",
    "output_router_logits",
    "is_causal",
}
DOCUMENTED |= {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
DOCUMENTED |= {"use_cache", "return_dict", "cache_position"}
DOCUMENTED |= {
    *getattr(getattr(transformers.utils, "TransformersKwargs", None), "__annotations__", ())
}
DOCUMENTED -= {"num_items_in_batch"}

_OF_LOSS_CONFIG = {field.name for field in fields(LossConfig)}


@dataclass(frozen=True)
class Batch:
    """The ids of a call and which of them count."""

    input_ids: Tensor  # (B, L)
    completion_mask: Tensor  # (B, T)

    @classmethod
    def of(cls, input_ids: Any, completion_mask: Any) -> Batch:
        """Check the tensors, and return them as a batch."""
        check_tensor("input_ids", input_ids)
        check_tensor("completion_mask", completion_mask)
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids: expected shape (B, L), got {tuple(input_ids.shape)}")
        (sequences, length), shape = input_ids.shape, tuple(completion_mask.shape)
        if len(shape) != 2 or shape[0] != sequences or not 0 < shape[1] <= length:
            raise ValueError(
                f"completion_mask: expected shape (B, T) with B = {sequences} and 0 < T <= {length}, got {shape}"
            )
        return cls(input_ids, completion_mask)

    def needed(self) -> Tensor:
        """(B, L) bool: the positions whose hidden states predict a token that counts."""
        found = torch.zeros(
            self.input_ids.shape, dtype=torch.bool, device=self.completion_mask.device
        )
        count = self.completion_mask.shape[1]
        found[:, -count:] = self.completion_mask != 0
        return nn.functional.pad(found[:, 1:], (0, 1))

    def aligned(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(states (B, T, H), ids (B, T), mask (B, T)): each id with the hidden states that predict it."""
        (sequences, length), count = self.input_ids.shape, self.completion_mask.shape[1]
        if (
            hidden.dim() != 3
            or hidden.shape[0] != sequences
            or hidden.shape[1] < min(count + 1, length)
        ):
            raise RuntimeError(
                f"model: expected hidden states of {sequences} sequences and at least {min(count + 1, length)} "
                f"positions at its head, got {tuple(hidden.shape)}; is logits_to_keep too small?"
            )
        ids, mask = (
            self.input_ids[:, -count:].to(hidden.device),
            self.completion_mask.to(hidden.device),
        )
        if hidden.shape[1] > count:
            return hidden[:, -count - 1 : -1], ids, mask
        mask = torch.cat(
            [torch.zeros_like(mask[:, :1]), mask[:, 1:]], dim=1
        )  # nothing predicts the first token
        return hidden.roll(1, dims=1), ids, mask

    def counted_state(self, hidden: Tensor) -> Tensor:
        """Return a state (H,) of `hidden` (B, L, H) that predicts a token that counts, if any counts."""
        states, _, mask = self.aligned(hidden)
        row, column = divmod(int((mask != 0).reshape(-1).to(torch.uint8).argmax()), mask.shape[1])
        return states[row, column]


def moved(x: Any, like: Tensor) -> Any:
    """Return a tensor or kept ids on the device of `like`; anything else as it is."""
    return x.to(like.device) if isinstance(x, Tensor | KeptIds) else x


def check_names(
    model: nn.Module, given: Collection[str], others: Collection[str], takers: str
) -> None:
    """Raise if nothing reads one of the names `given` as arguments of the model.

    Args:
        others: names that the caller itself takes, to suggest them.
        takers: the other reader of names, for the message: " or the loss", or "" if there is none.

    Raises:
        TypeError: a name that is a parameter of no forward around the model, of the model or of its body, and not
            `DOCUMENTED`; or that is a field of `LossConfig`.
    """
    if not given:
        return
    wrappers, base = unwrapped(model)
    known = {name for module in (*wrappers, base) for name in _named_by(module)}
    if any(
        x.kind is x.VAR_KEYWORD for x in inspect.signature(type(base).forward).parameters.values()
    ):
        known |= DOCUMENTED.union(_named_by(base.base_model))  # its **kwargs go on to the body
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
    yield from getattr(
        module, "special_peft_forward_args", ()
    )  # PEFT takes these out of its **kwargs


def with_positions(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return `inputs` of a forward with ``position_ids``, counted from a mask (B, L) as by `generate`.

    Nothing is added where the caller gives position_ids, where a forward does not take them, and to a
    model with positions of its own: of three dimensions, for images, or counted from padding tokens.
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

    Masks of four dimensions and dicts of them, which transformers makes and takes too, are left to the model.

    Raises:
        TypeError, ValueError: not a tensor, or another shape.
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

    A token that counts within padding is an error. Three cases warn: no mask, though padding tokens come before a token
    that counts; a first token that counts though nothing predicts it, since padding comes before it; and zeros between
    ones, after which positions are off. The token after the last 1 may count: it is the end token if that is the
    padding token too.

    Args:
        attention_mask: as `check_attention_mask` accepts it; only a mask of two dimensions is checked.
        needed: (B, L) bool, the columns whose hidden states predict a token that counts.
        config: the model's.
        has_positions: True if the forward is given position_ids.

    Raises:
        ValueError: a token counts in padding.
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
            "completion_mask: expected 0 where attention_mask is 0, got a token that counts in column "
            f"{column + 1} of sequence {row}, with attention_mask 0 there and before"
        )
    if bool(unseen.any()):
        warn_once(
            "completion_mask: it counts a token whose column before has attention_mask 0: nothing predicts the first "
            "token of a sequence, so give it 0"
        )
    begun, goes_on = attended.cumsum(1) > 0, attended.flip(1).cumsum(1).flip(1) > 0
    if not has_positions and bool((begun & goes_on & ~attended).any()):
        warn_once(
            "attention_mask: it has zeros between ones, and a model without position_ids counts them as positions. Pad "
            "prompts on the left and completions on the right, or pass position_ids = (attention_mask.cumsum(1) - "
            "1).clamp(min=0)"
        )


def _warn_of_attended_padding(input_ids: Tensor, needed: Tensor, config: Any) -> None:
    """Warn, once, if a token that counts attends to padding tokens; those on the right do no harm.

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
            f"attention_mask: got None, and input_ids with padding tokens (pad_token_id = {pad}) before a "
            "token that counts, which attends to them as to text. Pass the tokenizer's attention_mask, with "
            "a 1 for each token of the completion"
        )
