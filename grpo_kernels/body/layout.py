"""Layouts: the tokens of a padded batch (B, L) that one forward of the trunk computes::

    tree    each distinct prefix of the rows once, in one row (1, n)
    trim    the rows without the columns of padding on both sides, (b, w)
    padded  the rows as they are, (b, L)

**The tree.** Sorted rows are the leaves of a prefix tree in depth-first order. Tokens beyond the
longest common prefix with the previous row are new, and only these are computed. The new tokens of
a row form a *segment*. Its path runs from the root to the segment's last token, so the path is the
row itself. Shared prefixes include prompts, system prompts, turns of a conversation and equal
completions. Rows that share nothing are packed one after another.

Tensors of a layout are on the CPU. Indices are int64.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from grpo_kernels.base.tensors import counted_first
from grpo_kernels.body.paths import (
    ENDS,
    LONGEST,
    NotAlongPaths,
    Paths,
    Segments,
    follow_paths,
    is_flash,
)

_RETURNED = ("output_hidden_states", "output_attentions", "output_router_logits")


@dataclass(frozen=True)
class Way:
    """A layout, and how to call the trunk's forward so that it is exact.

    `positions` says which position ids the model gets: "column", each cell's column in the padded
    batch, which the model would count itself; "depth", the number of tokens before the cell; None,
    those of the caller, if any.
    """

    mode: str  # name of the layout
    positions: Literal["column", "depth"] | None = None
    varlen: bool = False  # use `torch.nn.attention.varlen` for a tree if possible
    layers: int | None = None  # number of calls along a tree's paths; None: not known yet
    chunk: int = 0  # tokens that recurrences compute at a time; 0: no recurrences


@dataclass(frozen=True)
class TrunkLayout:
    """Tokens (b, w) that one forward computes, and the cells of (B, L) that get the results."""

    sources: Tensor  # (b, w), the cell that each token is read from
    attended: Tensor  # (b, w) bool, False for padding
    depths: Tensor  # (b, w), number of tokens that a token sees before itself
    cells: Tensor  # (n,), cells that get a result
    tokens: Tensor  # (n,), for each of these cells, an index into the flattened (b, w)
    paths: Paths | None = None  # of a tree; None: each token sees the earlier tokens of its row


@dataclass(frozen=True)
class TrunkInputs:
    """A batch (B, L) on its device; on the CPU, its sequences (S, w) and the cells to be read.

    A sequence is a row, or one of the sequences that are read from packed rows.
    """

    given: dict[str, Tensor]  # (B, L) each: input_ids, position_ids, token_type_ids
    mask: Tensor | None  # (B, L)
    constants: dict[str, Any]
    attended: Tensor  # (S, w) bool, False for padding
    needed: Tensor  # (S, w) bool, cells whose hidden states are read
    values: dict[str, Tensor]  # (S, w) int64 each: copies of `given`
    places: Tensor  # (S, w), indices into the flat (B, L)
    is_packed: bool = False

    @classmethod
    def of(
        cls,
        given: dict[str, Tensor],
        mask: Tensor | None,
        constants: dict[str, Any],
        needed: Tensor,  # (B, L) bool, on the device of the ids
    ) -> TrunkInputs:
        """Make one sequence per row. This synchronizes with the device."""
        ids = given["input_ids"]
        attended = torch.ones_like(ids) if mask is None else mask != 0
        values = [
            x.double().view(torch.int64) if x.is_floating_point() else x for x in given.values()
        ]
        cells = [x.to(torch.int64) for x in (attended, needed, *values)]
        attended, needed, *values = torch.stack(cells).cpu()
        places = _range(ids.numel()).view(ids.shape)
        by_name = dict(zip(given, values, strict=True))
        return cls(given, mask, constants, attended != 0, needed != 0, by_name, places)

    @property
    def spans(self) -> tuple[Tensor, Tensor]:
        """(S,) each: a sequence's first column, and the column after the last one that is read."""
        columns = _range(self.needed.shape[1])
        first = torch.where(self.attended, columns, len(columns)).amin(1)
        return first, torch.where(self.needed, columns + 1, 0).amax(1)

    @property
    def size(self) -> tuple[int, int]:
        """Columns of the longest sequence, up to its last read token; and of the batch."""
        first, end = self.spans
        return int((end - first).amax()), self.needed.shape[1]

    @property
    def is_read(self) -> Tensor:
        """(S,) bool, True for sequences with a needed cell."""
        return self.needed.any(1)

    @property
    def padding_is_read(self) -> bool:
        """True if a needed cell is padding."""
        return bool((self.needed & ~self.attended).any())

    def layout(self, way: Way, chosen: Tensor, *, width: int = 0) -> TrunkLayout:
        """Lay out sequences `chosen` (S,) bool as `way` says. At least one of them is read.

        Rows have at least `width` columns. If recurrences compute `way.chunk` tokens at a time, a
        branch of the tree must save at least half a chunk.
        """
        length = self.needed.shape[1]
        numbers = (chosen & self.is_read).nonzero()
        first, end = (x[numbers] for x in self.spans)
        if way.mode == "padded":
            first, end = torch.zeros_like(first), torch.full_like(end, length)
        columns = first + _range(int((end - first).amax()))
        computed = columns < end
        cells = numbers * length + columns.clamp(max=length - 1)
        attended = self.attended.reshape(-1)[cells] & computed
        places = self.places.reshape(-1)[cells]
        if way.mode != "tree":
            return by_rows(places, computed, attended, width=width)
        values = [x.reshape(-1)[cells] for x in self.values.values()]
        values += [columns] if way.positions == "column" else []
        features, least = torch.stack(values, dim=-1), max(1, way.chunk // 2)
        return tree(places, attended, features, least=least)


def read_inputs(
    trunk: nn.Module,
    given: dict[str, Any],
    needed: Tensor,  # (B, L) bool
) -> TrunkInputs | str:
    """Read the arguments `given` by name, or say why the trunk cannot compute them in parts.

    `needed` marks the cells that are read.
    """
    given = {name: x for name, x in given.items() if x is not None}
    config: Any = trunk.config
    for name in _RETURNED:  # the decoder of a vision-language model reads its own config
        if given.get(name, any(getattr(x, name, False) for x in (config, text_config(trunk)))):
            return f"{name} is returned for the padded batch, so the padded forward runs"
    if given.get("return_dict", getattr(config, "return_dict", True)) is False:
        return "return_dict: expected outputs with names"
    ids, mask = given.get("input_ids"), given.pop("attention_mask", None)
    if not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.numel():
        return "the inputs are not input_ids (B, L)"
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != ids.shape):
        return "attention_mask is not (B, L)"
    ends: list[Tensor] = []  # ends of the sequences in packed rows, as indices of flat cells
    if mask is None and "position_ids" in given:
        ends = [given.pop(name) for name in ENDS if name in given]
        given = {name: x for name, x in given.items() if name not in LONGEST}
    of_tokens = {
        name: x for name, x in given.items() if isinstance(x, Tensor) and x.shape == ids.shape
    }
    constants = {name: x for name, x in given.items() if name not in of_tokens}
    for name, x in constants.items():
        if not isinstance(x, bool | int | float | str):
            return f"{name} is not a value per token, so the padded forward runs"
    if constants.pop("use_cache", False):
        return "use_cache: expected False, since a cache would cover only a part"
    if needed.shape != ids.shape:
        return "its forward is called with a part of the batch, which runs as given"
    inputs = TrunkInputs.of(of_tokens, mask, constants, needed.to(ids.device))
    is_padded = mask is not None or "position_ids" not in of_tokens
    return inputs if is_padded else _apart(inputs, ends, is_flash(attention_of(trunk)))


def _apart(inputs: TrunkInputs, ends_given: list[Tensor], flash: bool) -> TrunkInputs | str:
    """Separate the sequences of packed rows, or say why that fails.

    Without a mask, transformers separates sequences where positions do not increase by one. Flash
    attention separates them at zeros, and only in a batch of one row.
    """
    positions = inputs.values["position_ids"]
    begins = pad(positions.diff(dim=1) != 1, (1, 0), value=True).flatten()
    starts, is_read = begins.nonzero().squeeze(1), inputs.needed.flatten()
    ends = torch.cat([starts[1:], torch.tensor([len(begins)], device="cpu")])
    read = (begins.cumsum(0) - 1)[is_read].unique()
    read = read if len(read) else _range(1)
    ours = ends[: read[-1] + 1]  # what comes after them is padding
    for theirs in ends_given:
        found = theirs.reshape(-1)[1:].cpu()
        if found[found <= ours[-1]].tolist() != ours.tolist():
            return "cu_seq_lens do not agree with position_ids, so packed rows run as given"
    if len(starts) == len(positions):
        return inputs
    if positions.flatten()[starts[read]].any():
        return "sequences in a packed row do not begin at position 0, so it runs as given"
    if flash and len(positions) > 1:
        return "flash attention takes one packed row at a time, so several run as given"
    starts, lengths = starts[read], (ends - starts)[read, None]
    columns = _range(int(lengths.amax()))
    inside, places = columns < lengths, (starts[:, None] + columns).clamp(max=len(begins) - 1)
    return replace(
        inputs,
        attended=inside,
        needed=is_read[places] & inside,
        values={name: x.flatten()[places] for name, x in inputs.values.items()},
        places=places,
        is_packed=True,
    )


def tree(
    cells: Tensor,  # (R, w), indices into the flat (B, L)
    attended: Tensor,  # (R, w) bool, False for cells left out, on the sides and within
    features: Tensor,  # (R, w, F) int64, what the trunk reads of a cell: token, position, type
    *,
    least: int = 1,
) -> TrunkLayout:
    """Lay out each distinct prefix of R rows once.

    Rows share a branch only if that saves at least `least` tokens.
    """
    left, lengths = counted_first(attended), attended.sum(1)
    places = _range(int(lengths.amax()))
    inside, left = places < lengths[:, None], left[:, : len(places)]
    cells = cells.gather(1, left)
    features = features.gather(1, left[..., None].expand(-1, -1, features.shape[2]))
    features = torch.cat([inside[..., None], features * inside[..., None]], dim=-1)
    order = features.flatten(1).unique(dim=0, return_inverse=True)[1].argsort(stable=True)
    features, cells, lengths, inside = features[order], cells[order], lengths[order], inside[order]
    same = (features[1:] == features[:-1]).all(-1) & inside[1:]
    shared = pad(same.to(torch.int64).cumprod(1).sum(1), (1, 0))  # with the previous row
    if least > 1:
        shared = torch.tensor(_worth_sharing(shared.tolist(), least), device="cpu")
    new = lengths - shared
    starts = new.cumsum(0) - new
    # Column c of a row holds the token of the last row so far that shares at most c tokens.
    is_new = places >= shared[:, None]
    owners = torch.where(is_new, _range(len(cells))[:, None], 0).cummax(0).values
    tokens = (starts - shared)[owners] + places
    own, is_new = new > 0, is_new & inside
    paths = Paths(tokens[own], lengths[own], new[own])
    sources, depths = cells[is_new][None], places.expand_as(cells)[is_new][None]
    attended = torch.ones_like(sources, dtype=torch.bool)
    return TrunkLayout(sources, attended, depths, cells[inside], tokens[inside], paths)


def _worth_sharing(shared: list[int], least: int) -> list[int]:
    """`shared`, the tokens shared with the previous row, without branches that save too little.

    The pairs of neighbors from `begin` to `end` all share at least `depth` tokens. This is a branch
    below one of `above` tokens, and saves the tokens between the two once for each pair that shares
    no more. If these are fewer than `least`, the branch is removed. Deeper branches lie between
    such pairs.
    """
    found, branches = [0] * len(shared), [(0, len(shared), 0)]
    while branches:
        begin, end, above = branches.pop()
        if begin == end:
            continue
        depth = min(shared[begin:end])
        pairs = [i for i in range(begin, end) if shared[i] == depth]
        kept = depth if len(pairs) * (depth - above) >= least else above
        for i in pairs:
            found[i] = kept
            branches.append((begin, i, kept))
            begin = i + 1
        branches.append((begin, end, kept))
    return found


def by_rows(
    cells: Tensor,  # (R, w), indices into the flat (B, L)
    computed: Tensor,  # (R, w) bool, False right of a row's last cell
    attended: Tensor,  # (R, w) bool, False for padding
    *,
    width: int = 0,
) -> TrunkLayout:
    """Lay out R rows, padded to at least `width` columns."""
    of_rows, filling = (cells, computed, attended), max(0, width - cells.shape[1])
    sources, computed, attended = (pad(x, (0, filling)) for x in of_rows)
    depths = (attended.cumsum(dim=1) - 1).clamp(min=0)
    tokens = _range(sources.numel()).view_as(sources)[computed]
    return TrunkLayout(sources * computed, attended, depths, sources[computed], tokens)


def _range(stop: int) -> Tensor:
    return torch.arange(stop, device="cpu")  # the default device may be another


def run_layout(
    trunk: nn.Module,
    forward: Callable[..., Any],
    inputs: TrunkInputs,
    layout: TrunkLayout,
    way: Way,
) -> tuple[Any, Way]:
    """Run `forward` on the tokens of `layout`.

    Returns:
        the output, with hidden states (b, w, H); and `way`. For a tree, `layers` and `chunk` of the
        returned `way` are filled in.
    """
    ids = inputs.given["input_ids"]
    sources = layout.sources.to(ids.device, non_blocking=True)
    found: dict[str, Any] = {name: x.reshape(-1)[sources] for name, x in inputs.given.items()}
    if way.positions == "column":
        found["position_ids"] = sources % ids.shape[1]
    elif way.positions == "depth":
        found["position_ids"] = layout.depths.to(ids.device, non_blocking=True)
    if takes(forward, "use_cache"):
        found["use_cache"] = False  # with a cache, transformers does not detect packed sequences
    if layout.paths is None:
        if inputs.mask is not None or not bool(layout.attended.all()):
            found["attention_mask"] = layout.attended.to(ids.device, torch.int64, non_blocking=True)
        return forward(**found, **inputs.constants), way
    follow_paths(trunk, attention_of(trunk))
    segments = Segments(layout.paths, varlen=way.varlen)
    # A mask of four dimensions keeps transformers from making one; attention refuses other masks.
    found |= {"segments": segments, "attention_mask": torch.zeros(1, 1, 1, 1, device=ids.device)}
    output = forward(**found, **inputs.constants)
    if way.layers not in (None, segments.consumed):
        raise NotAlongPaths(
            f"{segments.consumed} calls of its layers have gone along the paths of a tree, and "
            f"{way.layers} in its first forward"
        )
    return output, replace(way, layers=segments.consumed, chunk=segments.chunk)


def filled(parts: list[tuple[TrunkLayout, Any]], shape: torch.Size) -> Tensor:
    """Collect the forwards' hidden states in (B, L, H), 0 elsewhere."""
    cells, states = list[Tensor](), list[Tensor]()
    for layout, output in parts:
        hidden = output.last_hidden_state
        cells.append(layout.cells.to(hidden.device, non_blocking=True))
        tokens = layout.tokens.to(hidden.device, non_blocking=True)
        states.append(hidden.flatten(0, 1).index_select(0, tokens))
    blank = states[0].new_zeros(shape.numel(), states[0].shape[-1])
    return blank.index_copy(0, torch.cat(cells), torch.cat(states)).unflatten(0, shape)


def takes(forward: Callable[..., Any], name: str) -> bool:
    """True if `forward` accepts an argument of this name, possibly in ``**kwargs``."""
    parameters = inspect.signature(forward).parameters
    return name in parameters or any(x.kind is x.VAR_KEYWORD for x in parameters.values())


def text_config(trunk: Any) -> Any:
    """The config of the trunk's decoder."""
    return trunk.config.get_text_config(decoder=True)


def setting(trunk: nn.Module, name: str) -> Any:
    """Setting `name` of the decoder's config; None if layers have different values."""
    try:
        return getattr(text_config(trunk), name, None)
    except RuntimeError:  # Gemma 4 has one value per kind of layer, and no attribute
        return None


def attention_of(trunk: nn.Module) -> str:
    """Name of the trunk's attention implementation."""
    return str(setting(trunk, "_attn_implementation"))


def dtype_of(trunk: nn.Module, device: torch.device) -> torch.dtype:
    """Precision of the trunk's matrix products on `device`."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return next(x.dtype for x in trunk.parameters() if x.is_floating_point())
