"""Layouts: which cells of a padded batch a forward computes, at which cost, and which tokens see each other."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from grpo_kernels.integrations.transformers.layout import Layout, Span, anchor, cut, plan

LENGTH = 12
SPANS = [
    Span(row=0, first=2, scored=4, end=9, prompt=(1, 2)),
    Span(row=1, first=2, scored=4, end=7, prompt=(1, 2)),
    Span(row=3, first=0, scored=4, end=12, prompt=(5, 6, 7, 8)),
]


def cells_of(layouts: list[Layout]) -> list[int]:
    return sorted(int(x) for layout in layouts for x in layout.cells[layout.stored])


def cells_between(spans: list[Span]) -> list[int]:
    return [span.row * LENGTH + column for span in spans for column in range(span.first, span.end)]


@pytest.mark.parametrize(("padding", "shapes"), [
    ("keep", [(3, 12)]),
    ("trim", [(3, 12)]),
    ("split", [(2, 7), (1, 12)]),
    ("free", [(2, 12)]),
])  # fmt: skip
def test_every_needed_cell_is_computed_once(padding: str, shapes: list[tuple[int, int]]) -> None:
    layouts = plan(SPANS, LENGTH, padding=padding, shared=False, graph=True, overhead=4, longest=LENGTH)
    assert [tuple(x.cells.shape) for x in layouts] == shapes
    needed = cells_between(SPANS)
    if padding == "keep":
        needed = [row * LENGTH + column for row in (0, 1, 3) for column in range(LENGTH)]
    assert cells_of(layouts) == needed


def test_a_shared_prompt_is_computed_once() -> None:
    """Each completion has its own copy of the prompt's last token, whose hidden state predicts its first one."""
    (layout,) = plan(SPANS[:2], LENGTH, padding="trim", shared=True, graph=True)
    rows = [layout.cells[0][layout.stored[0]].tolist(), layout.positions[0].tolist()]
    assert rows[0] == [2, 3, 4, 5, 6, 7, 8, 16, 17, 18]
    assert rows[1] == [0, 1, 2, 3, 4, 5, 6, 2, 3, 4]
    sees = layout.mask()[0, 0]
    assert sees[4].nonzero().squeeze(1).tolist() == [0, 1, 2, 3, 4]
    assert sees[8].nonzero().squeeze(1).tolist() == [0, 1, 7, 8], "its prompt and itself, not the other completion"


@pytest.mark.parametrize("shared", [False, True])
def test_strips_keep_their_segments_apart(shared: bool) -> None:
    (layout,) = plan(SPANS, LENGTH, padding="free", shared=shared, graph=True)
    assert layout.cells.shape[0] == 1
    sequences, prompts = layout.cells[0] // LENGTH, {0: 0, 1: 0, 3: 3}
    for query, key in layout.mask()[0, 0].nonzero().tolist():
        one, other = int(sequences[query]), int(sequences[key])
        assert key <= query and prompts[one] == prompts[other]
        in_prompt = int(layout.cells[0, key]) % LENGTH < 4
        assert one == other or (shared and in_prompt)
    if not shared:
        starts = (layout.positions == 0)[0].nonzero().squeeze(1).tolist()
        assert starts == [0, 12, 19]


def cost(parts: list[list[int]], lengths: list[int], overhead: int) -> int:
    return sum(len(part) * max(lengths[i] for i in part) + overhead for part in parts)


def partitions(items: list[int]) -> list[list[list[int]]]:
    if not items:
        return [[]]
    first, *others = items
    found = []
    for size in range(len(others) + 1):
        for chosen in itertools.combinations(others, size):
            left = [x for x in others if x not in chosen]
            found += [[[first, *chosen], *parts] for parts in partitions(left)]
    return found


def test_a_split_costs_the_least_of_all() -> None:
    draw = random.Random(3)
    for _ in range(20):
        lengths = [draw.randrange(1, 40) for _ in range(6)]
        overhead = draw.choice([0, 3, 20, 200])
        parts = cut(lengths, overhead)
        assert sorted(i for part in parts for i in part) == [*range(6)]
        least = min(cost(each, lengths, overhead) for each in partitions([*range(6)]))
        assert cost(parts, lengths, overhead) == least


def test_strips_are_no_longer_than_the_batch() -> None:
    spans = [Span(row, 0, 1, end) for row, end in enumerate((12, 3, 9, 2, 5, 4))]
    (layout,) = plan(spans, LENGTH, padding="free", shared=False, graph=False, longest=LENGTH)
    assert layout.cells.shape == (3, 12), "35 tokens in three strips"
    assert cells_of([layout]) == cells_between(spans)


def test_widths_are_rounded_up_and_anchors_store_nothing() -> None:
    (layout,) = plan(SPANS[:2], LENGTH, padding="trim", shared=False, graph=True, multiple=4)
    assert layout.cells.shape == (2, 8)
    assert cells_of([layout]) == cells_between(SPANS[:2])
    assert layout.tokens == 16
    (capped,) = plan(SPANS[:2], LENGTH, padding="trim", shared=False, graph=True, multiple=64)
    assert capped.cells.shape == (2, LENGTH)
    attached: Tensor = anchor(SPANS[0], LENGTH, True).stored
    assert attached.shape == (1, 2) and not attached.any()
    assert plan([], LENGTH, padding="trim", shared=True, graph=True) == []


def test_masks_of_padding_leave_no_row_empty() -> None:
    """A row of a softmax without a key would be NaN, and spread."""
    (layout,) = plan(SPANS, LENGTH, padding="trim", shared=True, graph=True, multiple=16)
    assert bool(layout.mask().any(dim=-1).all())
    assert torch.equal(layout.mask().any(dim=-1)[:, 0], torch.ones_like(layout.stored))
