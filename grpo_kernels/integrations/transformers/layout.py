"""Layouts: the cells of a padded batch (B, L) that one forward of the trunk computes, and their arrangement in it.

A `Span` is the part of one sequence that has to be computed; a strip is a row of a forward, made of one span or
several; a `Layout` is the strips of one forward, padded to the longest. `plan` turns spans into layouts::

    trim   one forward, as wide as its longest sequence
    split  sequences sorted by length, cut into forwards of least cost: rows x columns, plus `overhead` tokens each
    free   sequences one after the other, in strips of at most `longest` tokens
    share  each prompt once, before its completions: [prompt[:-1] | prompt[-1], c1 | prompt[-1], c2 | ...]

All tensors here are on the CPU, indices in int64; nothing depends on a model.

A strip is a tensor (4, n) that has for each of its tokens the cell (an index into the flattened (B, L)), the position
within the sequence, the segment, and the other segment that the token sees: the prompt, for a token of a completion. A
token sees the earlier tokens of these two segments.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_POSITION, _SEGMENT = 1, 2  # rows of a strip


@dataclass(frozen=True)
class Span:
    """Columns ``first`` to ``end - 1`` of sequence ``row``; the head reads ``scored`` to ``end - 1``."""

    row: int
    first: int
    scored: int  # column of the prompt's last token
    end: int
    prompt: Hashable = None  # equal for spans with the same tokens before `scored`

    @property
    def length(self) -> int:
        return self.end - self.first


@dataclass(frozen=True)
class Layout:
    """Cells that one forward of the trunk computes, (b, l) each; ``stored`` is False for padding.

    ``isolated`` says what keeps the segments of a strip apart: nothing (a strip has one segment, and the model
    counts columns by itself), the position ids, or a mask.
    """

    cells: Tensor
    stored: Tensor
    graph: bool
    isolated: str  # "no", "positions", "mask"
    positions: Tensor
    segments: Tensor
    sees: Tensor

    @property
    def tokens(self) -> int:
        """Tokens that are computed, padding included."""
        return self.cells.numel()

    def mask(self) -> Tensor:
        """(b, 1, l, l) bool: True where a token sees another."""
        own, other = self.segments[:, :, None], self.sees[:, :, None]
        keys, columns = self.segments[:, None, :], torch.arange(self.cells.shape[1])
        earlier = columns[:, None] >= columns
        return (earlier & ((keys == own) | (keys == other)))[:, None]


def plan(
    spans: Sequence[Span],
    length: int,
    *,
    padding: str,
    shared: bool,
    graph: bool,
    overhead: int = 0,
    longest: int | None = None,
    multiple: int = 1,
) -> list[Layout]:
    """Layouts that compute `spans` of a batch (B, `length`).

    Args:
        padding: "keep", "trim", "split" or "free".
        shared: True to compute each prompt once.
        graph: True if the forwards keep a graph for the backward.
        overhead: cost of one more forward, in tokens ("split").
        longest: most tokens of a strip ("free"); None: no limit.
        multiple: widths are rounded up to a multiple of it, or to `length`.
    """
    if padding == "keep":
        spans = [replace(span, first=0, end=length) for span in spans]
    strips = _shared(spans, length) if shared else [_strip(span, length) for span in spans]
    strips = [strip for strip in strips if strip.shape[1]]
    lengths = [strip.shape[1] for strip in strips]
    if padding == "free":
        strips = [_joined([strips[i] for i in part]) for part in _bins(lengths, longest)]
    isolated = "mask" if shared else "positions" if padding == "free" else "no"
    parts: Iterable[Sequence[int]] = [range(len(strips))] if strips else []
    if padding == "split":
        parts = cut(lengths, overhead)
    found = []
    for part in parts:
        chosen = [strips[i] for i in part]
        widest = max(strip.shape[1] for strip in chosen)
        width = min(-(-widest // multiple) * multiple, max(widest, length))
        found.append(_padded(chosen, width, graph, isolated))
    return found


def anchor(span: Span, length: int, graph: bool) -> Layout:
    """A forward of at most two tokens, none of them stored: it attaches a loss to the model, or keeps ranks in step."""
    strip = _strip(replace(span, end=min(span.end, span.first + 2)), length)
    layout = _padded([strip], strip.shape[1], graph, "no")
    return replace(layout, stored=torch.zeros_like(layout.stored))


def cut(lengths: Sequence[int], overhead: int) -> list[list[int]]:
    """Divide the indices of `lengths` into parts of least cost: size x longest length + `overhead` for each part.

    Sorted by length, the members of a part are consecutive: a dynamic programme over where the last part begins.
    """
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    cost, begin = [0.0], [0]
    for end in range(1, len(order) + 1):
        longest = lengths[order[end - 1]]
        options = [cost[first] + (end - first) * longest + overhead for first in range(end)]
        best = min(range(end), key=options.__getitem__)
        cost.append(options[best])
        begin.append(best)
    parts, end = [], len(order)
    while end > 0:
        parts.append(order[begin[end] : end])
        end = begin[end]
    return parts[::-1]


def _bins(lengths: Sequence[int], longest: int | None) -> list[list[int]]:
    """Pack the indices of `lengths` into bins of at most `longest` tokens: longest first, into the first bin with room.

    A length above `longest` has a bin of its own.
    """
    bins: list[list[int]] = []
    filled: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        into = next((k for k, n in enumerate(filled) if longest is None or n + lengths[i] <= longest), None)
        if into is None:
            bins.append([i])
            filled.append(lengths[i])
        else:
            bins[into].append(i)
            filled[into] += lengths[i]
    return bins


def _strip(span: Span, length: int) -> Tensor:
    """The strip (4, n) of `span` alone, which is segment 0."""
    columns = torch.arange(span.first, span.end)
    zeros = torch.zeros_like(columns)
    return torch.stack([span.row * length + columns, columns - span.first, zeros, zeros])


def _shared(spans: Sequence[Span], length: int) -> list[Tensor]:
    """One strip for each prompt: the prompt without its last token, then every completion with its own copy of it."""
    groups: dict[Hashable, list[Span]] = {}
    for span in spans:
        groups.setdefault(span.prompt, []).append(span)
    strips = []
    for members in groups.values():
        first = members[0]
        parts = [_strip(replace(first, end=first.scored), length)]  # segment 0, which all others see
        for segment, span in enumerate(members, start=1):
            part = _strip(replace(span, first=span.scored), length)
            part[_POSITION] += span.scored - span.first
            part[_SEGMENT] = segment
            parts.append(part)
        strips.append(torch.cat(parts, dim=1))
    return strips


def _joined(strips: Sequence[Tensor]) -> Tensor:
    """`strips` one after the other, each with segments of its own."""
    parts, used = [], 0
    for strip in strips:
        part = strip.clone()
        part[_SEGMENT:] += used
        used = int(part[_SEGMENT].max()) + 1
        parts.append(part)
    return torch.cat(parts, dim=1)


def _padded(strips: Sequence[Tensor], width: int, graph: bool, isolated: str) -> Layout:
    fill = torch.tensor([[-1], [0], [-1], [-1]])
    rows = [torch.cat([strip, fill.expand(4, width - strip.shape[1])], dim=1) for strip in strips]
    cells, positions, segments, sees = torch.stack(rows, dim=1)
    return Layout(cells.clamp(min=0), cells >= 0, graph, isolated, positions, segments, sees)
