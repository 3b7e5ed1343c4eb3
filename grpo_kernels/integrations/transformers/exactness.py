"""Find out for each model which ways of computing its trunk in parts give the padded forward's numbers.

Modes that the config or the layers rule out are refused by name. Every other mode is tried once for each model, on
three short synthetic sequences, without gradient and with dropout off. The allowed difference is measured too: how much
the padded forward changes by rounding when it gets a few more columns of padding. Modes:

    keep    some sequences of a batch alone, all columns
    trim    without the columns that are padding
    free    several sequences in one strip, kept apart by position ids
    shared  several completions after one prompt, kept apart by a mask
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from grpo_kernels.base.modes import evaluating
from grpo_kernels.integrations.transformers.forwards import TrunkInputs, run_layout
from grpo_kernels.integrations.transformers.layout import Layout, Span, plan

_ROUNDING = 4  # a mode may be off by this many times the measured rounding, or the dtype's eps
_MORE_COLUMNS = 5
_OF_LENGTH = ("dynamic", "longrope")  # kinds of RoPE whose frequencies depend on the longest position of a forward
_SEVERAL_SEGMENTS = ("free", "shared")

# trunk -> {(mode, attention, dtype, positions): reason or None}
_found: weakref.WeakKeyDictionary[nn.Module, dict[Any, str | None]] = weakref.WeakKeyDictionary()


def reason_against(mode: str, trunk: nn.Module, forward: Callable[..., Any], *, positions: bool) -> str | None:
    """Return None if `forward` of `trunk` is exact in `mode`, else the reason why not.

    The first time it runs the model, equally often on every rank. `positions`: True if the caller gives position_ids.
    """
    attention, dtype = getattr(trunk.config, "_attn_implementation", None), _dtype(trunk)
    known = _found.setdefault(trunk, {})
    key = mode, attention, dtype, positions
    if key not in known:
        known[key] = _by_structure(mode, trunk) or _by_trial(mode, trunk, forward, dtype, positions)
    return known[key]


def sliding_window(trunk: nn.Module) -> int | None:
    """Sliding window of the layers of `trunk` in tokens, or None."""
    found = getattr(_text(trunk.config), "sliding_window", None)
    return found if isinstance(found, int) else None


def longest_strip(trunk: nn.Module, length: int) -> int | None:
    """Most tokens of a strip of several sequences, for a batch (B, `length`); None: any number.

    Dense attention costs the square of the strip's length; flash attention goes sequence by sequence.
    """
    return None if "flash" in str(getattr(trunk.config, "_attn_implementation", "")) else length


def _by_structure(mode: str, trunk: nn.Module) -> str | None:
    text, attention = _text(trunk.config), getattr(trunk.config, "_attn_implementation", None)
    kinds = {*_rope_types(getattr(text, "rope_parameters", None))} & {*_OF_LENGTH}
    if mode != "keep" and kinds:
        return f"RoPE of the kind {kinds.pop()!r} depends on the longest position of a forward"
    if mode in _SEVERAL_SEGMENTS and isinstance(getattr(text, "attention_chunk_size", None), int):
        return "attention in chunks of columns"
    if mode in _SEVERAL_SEGMENTS and any(isinstance(x, nn.Conv1d) for x in trunk.modules()):
        return "layers with a state that goes from one sequence to the next"
    if mode == "shared" and attention not in ("sdpa", "eager"):
        return f"attention {attention!r} takes no mask of tokens by tokens"
    return None


def _by_trial(
    mode: str, trunk: nn.Module, forward: Callable[..., Any], dtype: torch.dtype, positions: bool
) -> str | None:
    inputs, needed = _synthetic(trunk, positions)
    spans, _ = inputs.spans(needed, with_prompts=mode == "shared")
    shared, padding = mode == "shared", {"trim": "split", "shared": "trim"}.get(mode, mode)
    parts = [spans] if mode in _SEVERAL_SEGMENTS else [spans[:2], spans[2:]]
    named: dict[str, Any] = {"padding": padding, "shared": shared, "graph": False}
    layouts = [layout for part in parts for layout in plan(part, needed.shape[1], **named)]
    with torch.no_grad(), evaluating(trunk):
        want = _padded(trunk, forward, inputs, needed)
        rounding = _off(_padded(trunk, forward, inputs.wider(_MORE_COLUMNS), needed), want)
        try:
            off = _off(_hidden(trunk, forward, inputs, layouts, needed), want)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
    if off <= max(_ROUNDING * max(rounding, torch.finfo(dtype).eps), 1e-5):
        return None
    return f"hidden states are off by {off:.1g} of their length from the padded forward's"


def _padded(trunk: nn.Module, forward: Callable[..., Any], inputs: TrunkInputs, needed: Tensor) -> Tensor:
    """Hidden states (n, H) of the `needed` cells, from the padded forward of `inputs`."""
    length = inputs.ids.shape[1]
    spans = [Span(row, 0, 0, length) for row in range(len(inputs.ids))]
    layouts = plan(spans, length, padding="keep", shared=False, graph=False)
    more = nn.functional.pad(needed, (0, length - needed.shape[1]))
    return _hidden(trunk, forward, inputs, layouts, more)


def _off(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of `want`."""
    return ((got - want).double().norm() / want.double().norm().clamp(min=1e-30)).item()


def _hidden(
    trunk: nn.Module, forward: Callable[..., Any], inputs: TrunkInputs, layouts: list[Layout], needed: Tensor
) -> Tensor:
    """Hidden states (n, H) of the `needed` cells, all of which `layouts` compute."""
    found: dict[int, Tensor] = {}
    for layout in layouts:
        hidden = run_layout(trunk, forward, inputs, layout).last_hidden_state
        found |= dict(zip(layout.cells[layout.stored].tolist(), hidden[layout.stored.to(hidden.device)], strict=True))
    return torch.stack([found[cell] for cell in needed.reshape(-1).nonzero().squeeze(1).tolist()])


def _synthetic(trunk: nn.Module, positions: bool) -> tuple[TrunkInputs, Tensor]:
    """Three sequences (3, 11) padded on both sides, two of them with the same prompt; and the cells that are read."""
    config: Any = trunk.config
    special = {x for name, x in _numbers(config.to_dict()) if name.endswith(("_token_id", "_token_index"))}
    size = _text(config).vocab_size
    usable = [x for x in range(min(size, 4096)) if x not in special]
    device = next(trunk.parameters()).device
    ids = torch.tensor([[usable[(7 * r + 13 * c + 5) % len(usable)] for c in range(11)] for r in (0, 1, 2)])
    ids[1, :5] = ids[0, :5]
    columns, first, last = torch.arange(11), torch.tensor([[1], [1], [2]]), torch.tensor([[11], [8], [9]])
    mask = (columns >= first) & (columns < last)
    needed = mask & (columns >= 4) & (columns < last - 1)
    per_token = {"position_ids": (columns - first).clamp(min=0).to(device)} if positions else {}
    return TrunkInputs(ids.to(device), mask.long().to(device), per_token, {}), needed.to(device)


def _numbers(fields: dict[str, Any]) -> Iterator[tuple[str, int]]:
    for name, x in fields.items():
        if isinstance(x, dict):
            yield from _numbers(x)
        elif isinstance(x, int) and not isinstance(x, bool):
            yield str(name), x


def _rope_types(parameters: Any) -> Iterator[str]:
    """Kinds of RoPE of a config's ``rope_parameters``, one for all layers or one for each kind of layer."""
    if not isinstance(parameters, dict):
        return
    if isinstance(parameters.get("rope_type"), str):
        yield parameters["rope_type"]
    for x in parameters.values():
        yield from _rope_types(x)


def _text(config: Any) -> Any:
    return config.get_text_config(decoder=True)


def _dtype(trunk: nn.Module) -> torch.dtype:
    """Precision of the trunk's products."""
    found = next(x for x in trunk.parameters() if x.is_floating_point())
    kind = found.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else found.dtype
