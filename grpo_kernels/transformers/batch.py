"""A batch for a transformers model: check its inputs, and run the model with a score in its head.

Not supported: encoder-decoder models, several heads (codebooks), quantized heads,
``nn.DataParallel``, and models used by two threads at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.utils import ModelOutput

from grpo_kernels.base.checks import check_choice, check_shape, check_tensor, warn_once
from grpo_kernels.base.choices import BatchLayout, choices
from grpo_kernels.body.layout import takes
from grpo_kernels.body.trunk import unwrapped
from grpo_kernels.patching import replaced
from grpo_kernels.transformers.head import (
    RESULTS,
    HeadCall,
    Results,
    Score,
    causal_lm,
    known_head,
    run_in_head,
)


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


def run_scored(
    model: nn.Module,
    batch: Batch,
    score: Score,
    inputs: dict[str, Any],
    layout: BatchLayout,
    live: Tensor | None = None,  # (B,) bool
) -> tuple[Results, ModelOutput, dict[str, tuple[int, int]]]:
    """Run `model` with `score` in its head: (results, output without logits, counts by metric).

    `inputs` are the model's inputs besides the ids; `layout` and `live` are as in `live_trunk`.
    """
    check_choice("layout", layout, choices(BatchLayout))
    if inputs.get("labels") is not None:
        raise ValueError(
            "labels: expected none, since there are no logits to compare with; got labels"
        )
    inputs = _with_positions(model, {name: x for name, x in inputs.items() if x is not None})
    base, attention_mask = causal_lm(model), inputs.get("attention_mask")
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
    is_checked = known_head(model, inputs)[2]
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

    return run_in_head(model, run, score, inputs, layout, needed, live)


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
