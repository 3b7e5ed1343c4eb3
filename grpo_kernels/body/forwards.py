"""One forward of a trunk on the tokens of a layout."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from grpo_kernels.body import states
from grpo_kernels.body.attention import NotAlongPaths, Segments, install, is_flash
from grpo_kernels.body.layout import Rows, TrunkLayout

_RETURNED = ("output_hidden_states", "output_attentions", "output_router_logits")
_ENDS, _LONGEST = ("cu_seq_lens_q", "cu_seq_lens_k"), ("max_length_q", "max_length_k")
Positions = Literal["given", "column", "depth", "none"]


@dataclass(frozen=True)
class Way:
    """Arguments by which the trunk's forward computes a layout exactly.

    Attributes:
        positions: the position ids: the caller's; each cell's column in the padded batch, as the
            model itself would count; the number of tokens before the cell; or none.
        varlen: True to take `torch.nn.attention.varlen` for a tree where it serves.
        layers: calls that go along the paths of a tree; None: not known yet.
        chunk: tokens that its recurrences compute at a time; 0: it has none.
    """

    positions: Positions
    varlen: bool = False
    layers: int | None = None
    chunk: int = 0


@dataclass(frozen=True)
class TrunkInputs:
    """Inputs of a trunk's forward that can be computed in parts."""

    ids: Tensor  # (B, L)
    mask: Tensor | None  # (B, L)
    per_token: dict[str, Tensor]  # (B, L) each: position_ids, token_type_ids
    constants: dict[str, Any]
    # cu_seq_lens_q and _k of packed rows: ends of sequences, in the flat cells
    ends: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, trunk: nn.Module, given: dict[str, Any]) -> TrunkInputs | str:
        """The inputs `given` by name, or a str: why they cannot be computed in parts."""
        given = {name: x for name, x in given.items() if x is not None}
        config: Any = trunk.config
        for name in _RETURNED:  # a vision-language model's decoder reads the config of its own
            if given.get(name, any(getattr(x, name, False) for x in (config, text_config(trunk)))):
                return f"{name} is returned for the padded batch, so the padded forward runs"
        if given.get("return_dict", getattr(config, "return_dict", True)) is False:
            return "return_dict: expected outputs with names"
        ids, mask = given.pop("input_ids", None), given.pop("attention_mask", None)
        if not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.numel():
            return "the inputs are not input_ids (B, L)"
        if mask is not None and (not isinstance(mask, Tensor) or mask.shape != ids.shape):
            return "attention_mask is not (B, L)"
        ends: tuple[Tensor, ...] = ()
        if mask is None and "position_ids" in given:
            ends = tuple(given.pop(name) for name in _ENDS if name in given)
            given = {name: x for name, x in given.items() if name not in _LONGEST}
        tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
        per_token = {name: x for name, x in tensors.items() if x.shape == ids.shape}
        constants = {name: x for name, x in given.items() if name not in per_token}
        for name, x in constants.items():
            if not isinstance(x, bool | int | float | str):
                return f"{name} is not a value per token, so the padded forward runs"
        if constants.pop("use_cache", False):
            return "use_cache: expected False, a cache would be that of a part"
        return cls(ids, mask, per_token, constants, ends)

    def wider(self, columns: int) -> TrunkInputs:
        """These inputs with `columns` more of padding on the right, (B, L + columns)."""
        found = {name: nn.functional.pad(x, (0, columns)) for name, x in self.per_token.items()}
        mask = torch.ones_like(self.ids) if self.mask is None else self.mask
        ids, mask = (nn.functional.pad(x, (0, columns)) for x in (self.ids, mask))
        return TrunkInputs(ids, mask, found, self.constants)

    def on_cpu(self, needed: Tensor) -> Cells:
        """What layouts are made of; `needed` (B, L) bool are read. Waits for the device."""
        mask = torch.ones_like(self.ids) if self.mask is None else self.mask != 0
        features = [
            x.double().view(torch.int64) if x.is_floating_point() else x
            for x in self.per_token.values()
        ]
        cells = [x.to(torch.int64) for x in (mask, needed, self.ids, *features)]
        found = torch.stack(cells, dim=-1).cpu()
        names = ("input_ids", *self.per_token)
        values = dict(zip(names, found[..., 2:].unbind(-1), strict=True))
        places = torch.arange(mask.numel(), device="cpu").view(mask.shape)
        return Cells(found[..., 0] != 0, found[..., 1] != 0, values, places)

    def apart(self, trunk: nn.Module, cells: Cells) -> Cells | str:
        """`cells` with a row for each sequence that is read, if rows are packed; or why not.

        Without a mask, transformers tells the sequences of a row by positions that do not go on:
        flash attention by zeros, and in a batch of one row alone.
        """
        positions = cells.values.get("position_ids")
        if self.mask is not None or positions is None:
            return cells
        begins = nn.functional.pad(positions.diff(dim=1) != 1, (1, 0), value=True).flatten()
        starts, is_read = begins.nonzero().squeeze(1), cells.needed.flatten()
        ends = torch.cat([starts[1:], torch.tensor([len(begins)], device="cpu")])
        read = (begins.cumsum(0) - 1)[is_read].unique()
        read = read if len(read) else torch.zeros(1, dtype=torch.int64, device="cpu")
        ours = ends[: read[-1] + 1]  # what comes after them is padding
        for theirs in self.ends:
            found = theirs.reshape(-1)[1:].cpu()
            if found[found <= ours[-1]].tolist() != ours.tolist():
                return "cu_seq_lens do not agree with position_ids, so packed rows run as given"
        if len(starts) == len(positions):
            return cells
        if positions.flatten()[starts[read]].any():
            return "sequences in a packed row begin at another position than 0, so it runs as given"
        if is_flash(attention_of(trunk)) and len(positions) > 1:
            return "flash attention takes one packed row at a time, so several run as given"
        starts, lengths = starts[read], (ends - starts)[read, None]
        columns = torch.arange(int(lengths.amax()), device="cpu")
        places = (starts[:, None] + columns).clamp(max=len(begins) - 1)
        values = {name: x.flatten()[places] for name, x in cells.values.items()}
        inside = columns < lengths
        return Cells(inside, is_read[places] & inside, values, places)


@dataclass(frozen=True)
class Cells:
    """A batch on the CPU: its tokens, those that are read, and the values that the trunk reads.

    The B sequences of packed rows are those that are read, and L is the length of the longest.
    """

    attended: Tensor  # (B, L) bool, False for padding
    needed: Tensor  # (B, L) bool, cells whose hidden states are read
    values: dict[str, Tensor]  # (B, L) int64 each
    places: Tensor  # (B, L), indices into the flat batch

    @property
    def padding_is_read(self) -> bool:
        """True if a needed cell is padding: only the model knows what it attends to."""
        return bool((self.needed & ~self.attended).any())

    @property
    def longest(self) -> int:
        """Most columns of a sequence, from its first token to the last that is read."""
        columns = torch.arange(self.needed.shape[1], device="cpu")
        first = torch.where(self.attended, columns, self.needed.shape[1]).amin(1)
        return int((torch.where(self.needed, columns + 1, 0).amax(1) - first).amax())

    @property
    def has_holes(self) -> bool:
        """True if a sequence has padding within."""
        begun, goes_on = self.attended.cumsum(1) > 0, self.needed.flip(1).cumsum(1).flip(1) > 0
        return bool((begun & goes_on & ~self.attended).any())

    def rows(self, chosen: Tensor, *, padded: bool, by_column: bool) -> Rows | None:
        """What has to be computed of the sequences `chosen` (B,); None if nothing of them is read.

        Args:
            padded: True for all columns, False for those from a sequence's first token to its last
                needed one.
            by_column: True if a cell's column is its position.
        """
        length, is_read = self.needed.shape[1], self.needed.any(1)
        numbers = (chosen & is_read).nonzero()
        if not len(numbers):
            return None
        first, end = torch.zeros_like(numbers), torch.full_like(numbers, length)
        columns = torch.arange(length, device="cpu")
        if not padded:
            first = torch.where(self.attended, columns, length).amin(1)[numbers]
            end = torch.where(self.needed, columns + 1, 0).amax(1)[numbers]
        columns = first + torch.arange(int((end - first).amax()), device="cpu")
        computed = columns < end
        cells = numbers * length + columns.clamp(max=length - 1)
        values = [x.reshape(-1)[cells] for x in self.values.values()]
        values += [columns] if by_column else []
        attended = self.attended.reshape(-1)[cells] & computed
        places = self.places.reshape(-1)[cells]
        return Rows(places, computed, attended, torch.stack(values, dim=-1))


def run_layout(
    trunk: nn.Module,
    forward: Callable[..., Any],
    inputs: TrunkInputs,
    layout: TrunkLayout,
    way: Way,
) -> tuple[Any, Way]:
    """Run `forward` on the tokens of `layout`.

    Returns:
        its output, with hidden states (b, w, H); and `way`, of a tree with what it has counted.
    """
    device = inputs.ids.device
    sources = layout.sources.to(device, non_blocking=True)
    found: dict[str, Any] = {"input_ids": inputs.ids, **inputs.per_token}
    found = {name: x.reshape(-1)[sources] for name, x in found.items()}
    if way.positions == "column":
        found["position_ids"] = sources % inputs.ids.shape[1]
    elif way.positions == "depth":
        found["position_ids"] = layout.depths.to(device, non_blocking=True)
    parameters = inspect.signature(forward).parameters.values()
    if any(x.name == "use_cache" or x.kind is x.VAR_KEYWORD for x in parameters):
        found["use_cache"] = False  # with a cache, transformers detects no packed sequences
    if layout.paths is None:
        if inputs.mask is not None or not bool(layout.attended.all()):
            found["attention_mask"] = layout.attended.to(device, torch.int64, non_blocking=True)
        return forward(**found, **inputs.constants), way
    install(attention_of(trunk), trunk)
    states.install(trunk)
    segments = Segments(layout.paths, varlen=way.varlen)
    # of four dimensions, as transformers then makes none itself; attention refuses any other
    found |= {"segments": segments, "attention_mask": torch.zeros(1, 1, 1, 1, device=device)}
    output = forward(**found, **inputs.constants)
    if way.layers not in (None, segments.consumed):
        raise NotAlongPaths(
            f"{segments.consumed} calls of its layers have gone along the paths of a tree, and "
            f"{way.layers} in its first forward"
        )
    return output, replace(way, layers=segments.consumed, chunk=segments.chunk)


def text_config(trunk: nn.Module) -> Any:
    """The config of the trunk's decoder."""
    config: Any = trunk.config
    return config.get_text_config(decoder=True)


def setting(trunk: nn.Module, name: str) -> Any:
    """The value of `name` in the decoder's config; None where it has none for all layers."""
    try:
        return getattr(text_config(trunk), name, None)
    except RuntimeError:  # Gemma 4 has one for each kind of layer, and then no attribute
        return None


def attention_of(trunk: nn.Module) -> str:
    """Name of the trunk's attention implementation."""
    return str(getattr(text_config(trunk), "_attn_implementation", None))
