"""Layouts: the tokens that one forward of the trunk computes of a padded batch (B, L), in one of three ways::

    tree    each distinct prefix of the rows once, in one row (1, n)
    trim    the rows without the columns of padding before and after them, (b, w)
    padded  the rows as they are, (b, L)

**The tree.** Sorted, the rows are the leaves of a prefix tree in depth-first order. The longest common prefix with the
row before says which tokens of a row are new, and only these are computed. The new tokens of a row are a *segment*; its
path is the tokens from the root to the segment's last, which is the row itself. Prompts, system prompts, the turns of a
conversation and equal completions are one case; rows that share nothing are packed one after the other.

All tensors here are on the CPU, indices in int64; nothing depends on a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Row:
    """Cells of one sequence that have to be computed, in order, as indices into the flattened (B, L).

    Attributes:
        cells: (n,); with padding within the row, the cells of that padding too.
        attended: (n,) bool, False for padding.
        features: (n, F) int64, whatever the trunk reads of a cell: token, position, token type.
    """

    cells: Tensor
    attended: Tensor
    features: Tensor


@dataclass(frozen=True)
class Segment:
    """Tokens ``start`` to ``stop - 1`` of a layout; each sees `path` (k,), which ends with them, up to itself."""

    start: int
    stop: int
    path: Tensor

    @property
    def context(self) -> int:
        """Number of tokens before the segment."""
        return len(self.path) - (self.stop - self.start)


@dataclass(frozen=True)
class TrunkLayout:
    """Tokens (b, w) that one forward computes, and the cells of (B, L) that get their hidden states.

    Attributes:
        sources: (b, w), the cell that each token is read from.
        attended: (b, w) bool, False for padding.
        depths: (b, w), number of tokens that a token sees before itself.
        cells: (n,), cells that are filled in; empty if the forward only attaches a loss to the model.
        tokens: (n,), index into the flattened (b, w) of each cell's token.
        graph: True if the forward keeps a graph for the backward.
        segments: the segments of a tree; None: tokens see the earlier tokens of their row.
    """

    sources: Tensor
    attended: Tensor
    depths: Tensor
    cells: Tensor
    tokens: Tensor
    graph: bool
    segments: tuple[Segment, ...] | None = None


def tree(rows: Sequence[Row], *, graph: bool, multiple: int = 1) -> TrunkLayout:
    """Return the layout that computes each distinct prefix of `rows` once; its width is a multiple of `multiple`."""
    segments, sources, cells, tokens = [], [], [], []
    before, path, count = rows[0].features[:0], _range(0, 0), 0
    seen = [(row.cells[row.attended], row.features[row.attended]) for row in rows]
    for own, features in sorted(seen, key=lambda x: x[1].numpy().tobytes()):
        shared = common_prefix(before, features)
        before, new = features, own[shared:]
        path = torch.cat([path[:shared], _range(count, count + len(new))])
        if len(new):
            segments.append(Segment(count, count + len(new), path))
        sources.append(new)
        cells.append(own)
        tokens.append(path)
        count += len(new)
    filling = -count % multiple
    if filling:
        segments.append(Segment(count, count + filling, _range(count, count + filling)))
        sources.append(sources[0][:1].expand(filling))
    depths = torch.cat([_range(x.context, len(x.path)) for x in segments])
    return TrunkLayout(
        torch.cat(sources)[None],
        torch.ones(1, count + filling, dtype=torch.bool, device="cpu"),
        depths[None],
        torch.cat(cells),
        torch.cat(tokens),
        graph,
        tuple(segments),
    )


def common_prefix(one: Tensor, other: Tensor) -> int:
    """Return how many rows of `one` (n, F) and `other` (m, F) are equal from the first on."""
    length = min(len(one), len(other))
    unequal = (one[:length] != other[:length]).any(dim=1)
    return int(unequal.to(torch.uint8).argmax()) if bool(unequal.any()) else length


def by_rows(rows: Sequence[Row], *, graph: bool, multiple: int = 1) -> TrunkLayout:
    """Return the layout that has `rows` side by side, padded to a width that is a multiple of `multiple`."""
    width = -(-max(len(row.cells) for row in rows) // multiple) * multiple
    sources, attended = torch.zeros(2, len(rows), width, dtype=torch.int64, device="cpu")
    for i, row in enumerate(rows):
        sources[i, : len(row.cells)] = row.cells
        attended[i, : len(row.cells)] = row.attended
    tokens = [_range(i * width, i * width + len(row.cells)) for i, row in enumerate(rows)]
    depths = (attended.cumsum(dim=1) - 1).clamp(min=0)
    cells = torch.cat([row.cells for row in rows])
    return TrunkLayout(sources, attended.bool(), depths, cells, torch.cat(tokens), graph)


def anchor(*, graph: bool) -> TrunkLayout:
    """Return a layout of two tokens that fills no cell: it attaches a loss to the model, or keeps ranks in step."""
    none, two = _range(0, 0), _range(0, 2)[None]
    return TrunkLayout(torch.zeros_like(two), torch.ones_like(two, dtype=torch.bool), two, none, none, graph)


def _range(start: int, stop: int) -> Tensor:
    return torch.arange(start, stop, device="cpu")  # whatever the default device is
