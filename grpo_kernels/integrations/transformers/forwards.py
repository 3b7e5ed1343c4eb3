"""One forward of a trunk on chosen cells of a padded batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from grpo_kernels.integrations.transformers.layout import Layout, Span

_RETURNED = ("output_hidden_states", "output_attentions", "output_router_logits")


@dataclass(frozen=True)
class TrunkInputs:
    """Inputs of a trunk's forward that can be computed in parts: ids, mask, other per-token tensors, and constants."""

    ids: Tensor  # (B, L)
    mask: Tensor | None  # (B, L)
    per_token: dict[str, Tensor]  # (B, L) each: position_ids, token_type_ids
    constants: dict[str, Any]

    @classmethod
    def of(cls, trunk: nn.Module, given: dict[str, Any]) -> TrunkInputs | str:
        """The inputs `given` by name, or a str: the reason why they cannot be computed in parts."""
        given = {name: x for name, x in given.items() if x is not None}
        config: Any = trunk.config
        for name in _RETURNED:
            if given.get(name, getattr(config, name, False)):
                return f"{name} is returned for the padded batch, so the padded forward runs"
        if given.get("return_dict", getattr(config, "return_dict", True)) is False:
            return "return_dict: expected outputs with names"
        ids, mask = given.pop("input_ids", None), given.pop("attention_mask", None)
        if not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.numel():
            return "the inputs are not input_ids (B, L)"
        if mask is not None and (not isinstance(mask, Tensor) or mask.shape != ids.shape):
            return "attention_mask is not (B, L)"
        per_token = {name: x for name, x in given.items() if isinstance(x, Tensor) and x.shape == ids.shape}
        constants = {name: x for name, x in given.items() if name not in per_token}
        for name, x in constants.items():
            if not isinstance(x, bool | int | float | str):
                return f"{name} is not a value per token, so the padded forward runs"
        if constants.pop("use_cache", False):
            return "use_cache: expected False, a cache would be that of a part"
        return cls(ids, mask, per_token, constants)

    def wider(self, columns: int) -> TrunkInputs:
        """Return these inputs with `columns` more of padding on the right, (B, L + columns)."""
        found = {name: nn.functional.pad(x, (0, columns)) for name, x in self.per_token.items()}
        mask = torch.ones_like(self.ids) if self.mask is None else self.mask
        ids, mask = (nn.functional.pad(x, (0, columns)) for x in (self.ids, mask))
        return TrunkInputs(ids, mask, found, self.constants)

    def spans(self, needed: Tensor, *, with_prompts: bool) -> tuple[list[Span], bool]:
        """Return the parts of the sequences that have to be computed, and True if all of them are plain.

        Plain means: no padding within, positions 0, 1, 2, ..., no other per-token input. Waits for the device.

        Args:
            needed: (B, L) bool, cells whose hidden states are read. Cells after a sequence's last needed one are
                left out, as are sequences without any.
            with_prompts: True to compare prompts.
        """
        length = self.ids.shape[1]
        columns = torch.arange(length, device=self.ids.device)
        real = torch.ones_like(needed) if self.mask is None else self.mask != 0
        first = torch.where(real, columns, length).amin(1)
        scored = torch.where(needed, columns, length).amin(1)
        end = torch.where(needed, columns + 1, 0).amax(1)
        outside = (needed & ~real).any(1)  # padding that predicts a token: only the model knows what it attends to
        first, end = first.masked_fill(outside, 0), end.masked_fill(outside, length)
        inside = (columns >= first[:, None]) & (columns < end[:, None])
        plain = ~(inside & ~real).any(1)
        positions = self.per_token.get("position_ids")
        if positions is not None:
            plain &= ~(inside & (positions != columns - first[:, None])).any(1)
        if self.per_token.keys() - {"position_ids"}:
            plain &= False
        found = torch.stack([first, scored, end, plain.long()], dim=1).tolist()
        ids = self.ids.tolist() if with_prompts else None
        spans = []
        for row, (begin, score, stop, _) in enumerate(found):
            if stop > 0:
                spans.append(Span(row, begin, score, stop, None if ids is None else tuple(ids[row][begin:score])))
        return spans, all(is_plain for *_, stop, is_plain in found if stop > 0)


def run_layout(trunk: nn.Module, forward: Callable[..., Any], inputs: TrunkInputs, layout: Layout) -> Any:
    """Return the output of ``forward`` on the cells of `layout`; its hidden states are (b, l, H)."""
    device = inputs.ids.device
    cells = layout.cells.to(device, non_blocking=True)
    named = {"input_ids": inputs.ids, **inputs.per_token}
    found: dict[str, Any] = {name: x.reshape(-1)[cells] for name, x in named.items()}
    if layout.isolated != "no":
        found["position_ids"] = layout.positions.to(device, non_blocking=True)
    if layout.isolated == "no":
        stored = layout.stored.to(device, non_blocking=True)
        if inputs.mask is not None:
            found["attention_mask"] = inputs.mask.reshape(-1)[cells].masked_fill(~stored, 0)
        elif not bool(layout.stored.all()):
            found["attention_mask"] = stored.to(torch.long)
    elif layout.isolated == "mask":
        found["attention_mask"] = _attention(trunk, layout.mask().to(device, non_blocking=True))
    return forward(**found, **inputs.constants, **_without_cache(forward))


def _attention(trunk: nn.Module, mask: Tensor) -> Tensor:
    """Convert `mask` (b, 1, l, l) for the trunk's attention: bool, or for "eager" numbers to add."""
    config: Any = trunk.config
    if config._attn_implementation != "eager":
        return mask
    dtype = next((x.dtype for x in trunk.parameters() if x.is_floating_point()), torch.float32)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


def _without_cache(forward: Callable[..., Any]) -> dict[str, bool]:
    """``use_cache=False`` for a forward that reads it: with a cache, transformers detects no packed sequences."""
    parameters = inspect.signature(forward).parameters.values()
    reads = any(x.name == "use_cache" or x.kind is x.VAR_KEYWORD for x in parameters)
    return {"use_cache": False} if reads else {}
