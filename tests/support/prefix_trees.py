"""Trees of short sequences, and the tokens that each token sees."""

from __future__ import annotations

import torch

from grpo_kernels.body.layout import Rows, TrunkLayout

LENGTH = 12


def rows_of(sequences: list[list[int]]) -> Rows:
    """Each sequence in a line of its own of a batch (B, LENGTH), from the first column on."""
    lengths, width = torch.tensor([[len(x)] for x in sequences]), max(map(len, sequences))
    cells = torch.arange(len(sequences))[:, None] * LENGTH + torch.arange(width)
    ids = torch.tensor([x + [77] * (width - len(x)) for x in sequences])
    inside = torch.arange(width) < lengths
    return Rows(cells, inside, inside.clone(), ids[..., None])


def seen(layout: TrunkLayout) -> dict[int, list[int]]:
    """Token of the layout -> the tokens that it sees, itself the last."""
    assert layout.paths is not None
    found, paths = {}, layout.paths
    for path, length, new in zip(
        paths.tokens.tolist(), paths.lengths.tolist(), paths.new.tolist(), strict=True
    ):
        for end in range(length - new + 1, length + 1):
            found[path[end - 1]] = path[:end]
    return dict(sorted(found.items()))
