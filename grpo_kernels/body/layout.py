"""Layouts: the tokens that one forward of the trunk computes of a padded batch (B, L)::

    tree    each distinct prefix of the rows once, in one row (1, n)
    trim    the rows without the columns of padding before and after them, (b, w)
    padded  the rows as they are, (b, L)

**The tree.** Sorted, the rows are the leaves of a prefix tree in depth-first order. The longest
common prefix with the row before says which tokens of a row are new, and only these are computed.
The new tokens of a row are a *segment*; its path is the tokens from the root to the segment's last,
which is the row itself. Prompts, system prompts, the turns of a conversation and equal completions
are one case; rows that share nothing are packed one after the other.

All tensors here are on the CPU, indices in int64; nothing depends on a model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Rows:
    """Cells of R sequences that have to be computed."""

    cells: Tensor  # (R, w), indices into the flat (B, L)
    computed: Tensor  # (R, w) bool, False right of a sequence's last cell
    attended: Tensor  # (R, w) bool, False for padding, on the sides and within
    features: Tensor  # (R, w, F) int64, what the trunk reads of a cell: token, position, type


@dataclass(frozen=True)
class Paths:
    """The S segments of a tree in the order of their tokens. A token sees its path up to itself."""

    tokens: Tensor  # (S, k), the tokens of each path, with anything on the right
    lengths: Tensor  # (S,), number of tokens of each path
    new: Tensor  # (S,), number of those, the last ones of the path, that are the segment

    @property
    def contexts(self) -> Tensor:
        """(S,), number of tokens before each segment."""
        return self.lengths - self.new


@dataclass(frozen=True)
class TrunkLayout:
    """Tokens (b, w) that one forward computes, and the cells of (B, L) that get their states."""

    sources: Tensor  # (b, w), the cell that each token is read from
    attended: Tensor  # (b, w) bool, False for padding
    depths: Tensor  # (b, w), number of tokens that a token sees before itself
    cells: Tensor  # (n,), cells that are filled in
    tokens: Tensor  # (n,), index into the flattened (b, w) of each cell's token
    graph: bool  # True if the forward keeps a graph for the backward
    paths: Paths | None = None  # of a tree; None: tokens see the earlier tokens of their row


def tree(rows: Rows, *, graph: bool, multiple: int = 1, least: int = 1) -> TrunkLayout:
    """Each distinct prefix of `rows` once; the width is a multiple of `multiple`.

    A branch saves at least `least` tokens, or rows do not share it.
    """
    left = (~rows.attended).to(torch.uint8).argsort(dim=1, stable=True)  # attended cells first
    lengths = rows.attended.sum(1)
    places = _range(int(lengths.amax()))
    inside, left = places < lengths[:, None], left[:, : len(places)]
    cells = rows.cells.gather(1, left)
    features = rows.features.gather(1, left[..., None].expand(-1, -1, rows.features.shape[2]))
    features = torch.cat([inside[..., None], features * inside[..., None]], dim=-1)
    order = features.flatten(1).unique(dim=0, return_inverse=True)[1].argsort(stable=True)
    features, cells, lengths, inside = features[order], cells[order], lengths[order], inside[order]
    same = (features[1:] == features[:-1]).all(-1) & inside[1:]
    shared = pad(same.to(torch.int64).cumprod(1).sum(1), (1, 0))  # with the row before
    if least > 1:
        shared = torch.tensor(_worth_sharing(shared.tolist(), least), device="cpu")
    new = lengths - shared
    starts = new.cumsum(0) - new
    # The token in column c of a row is that of the last row so far that shares at most c tokens.
    is_new = places >= shared[:, None]
    owners = torch.where(is_new, _range(len(cells))[:, None], 0).cummax(0).values
    tokens = (starts - shared)[owners] + places
    own, is_new = new > 0, is_new & inside
    paths = Paths(tokens[own], lengths[own], new[own])
    sources, depths = cells[is_new], places.expand_as(cells)[is_new]
    filling = -len(sources) % multiple
    if filling:  # a root of its own
        found = pad(paths.tokens, (0, max(0, filling - len(places)), 0, 1))
        found[-1, :filling] = len(sources) + _range(filling)
        lengths, new = (pad(x, (0, 1), value=filling) for x in (paths.lengths, paths.new))
        paths = Paths(found, lengths, new)
        sources = torch.cat([sources, sources[:1].expand(filling)])
        depths = torch.cat([depths, _range(filling)])
    attended = torch.ones_like(sources, dtype=torch.bool)[None]
    return TrunkLayout(
        sources[None], attended, depths[None], cells[inside], tokens[inside], graph, paths
    )


def _worth_sharing(shared: Sequence[int], least: int) -> list[int]:
    """`shared` of each row with the one before, without branches that save less than `least`.

    The branches are the nodes of a tree by their depths. A node saves its depth beyond its parent's
    for every row but one.
    """
    depths, parents, of_rows, path = [0], [0], list[int](), [0]
    for depth in shared:
        below = None
        while depths[path[-1]] > depth:
            below = path.pop()
        if depths[path[-1]] < depth:
            path.append(len(depths))
            depths.append(depth)
            parents.append(path[-2])
            if below is not None:
                parents[below] = path[-1]
        of_rows.append(path[-1])
    saved, found = Counter(of_rows), depths[:]
    for node in sorted(range(len(depths)), key=depths.__getitem__):
        above = found[parents[node]]
        if saved[node] * (depths[node] - above) < least:
            found[node] = above
    return [found[node] for node in of_rows]


def by_rows(rows: Rows, *, graph: bool, multiple: int = 1) -> TrunkLayout:
    """`rows` side by side, padded to a width that is a multiple of `multiple`."""
    filling = -rows.cells.shape[1] % multiple
    of_rows = rows.cells, rows.computed, rows.attended
    sources, computed, attended = (pad(x, (0, filling)) for x in of_rows)
    depths = (attended.cumsum(dim=1) - 1).clamp(min=0)
    tokens = _range(sources.numel()).view_as(sources)[computed]
    return TrunkLayout(sources * computed, attended, depths, sources[computed], tokens, graph)


def anchor(*, graph: bool) -> TrunkLayout:
    """Two tokens that fill no cell: they attach a loss to the model, or keep ranks in step."""
    none, two = _range(0), _range(2)[None]
    return TrunkLayout(
        torch.zeros_like(two), torch.ones_like(two, dtype=torch.bool), two, none, none, graph
    )


def _range(stop: int) -> Tensor:
    return torch.arange(stop, device="cpu")  # whatever the default device is
