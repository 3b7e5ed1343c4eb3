"""Layouts: which tokens a forward computes of a padded batch, and which of them each token sees."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from grpo_kernels.body.layout import Rows, TrunkLayout, anchor, by_rows, tree
from tests.support.prefix_trees import LENGTH, rows_of, seen


def assert_is_the_prefix_tree(layout: TrunkLayout, sequences: list[list[int]]) -> None:
    ids = torch.zeros(len(sequences), LENGTH, dtype=torch.int64)
    for i, sequence in enumerate(sequences):
        ids[i, : len(sequence)] = torch.tensor(sequence)
    values = ids.reshape(-1)[layout.sources[0]].tolist()
    prefixes = {tuple(x[:n]) for x in sequences for n in range(1, len(x) + 1)}
    found = seen(layout)
    assert sorted(tuple(values[i] for i in path) for path in found.values()) == sorted(prefixes), (
        "each prefix once"
    )
    assert all(path[-1] == token for token, path in found.items())
    assert layout.depths[0].tolist() == [len(found[i]) - 1 for i in range(len(found))]
    token_of = dict(zip(layout.cells.tolist(), layout.tokens.tolist(), strict=True))
    for i, sequence in enumerate(sequences):
        path = [token_of[i * LENGTH + column] for column in range(len(sequence))]
        assert found[path[-1]] == path, "a row is the path to its last token"


def test_each_distinct_prefix_is_computed_once() -> None:
    draw = random.Random(1)
    for _ in range(30):
        sequences = [
            [draw.randrange(2) for _ in range(draw.randrange(1, LENGTH))]
            for _ in range(draw.randrange(1, 9))
        ]
        assert_is_the_prefix_tree(tree(rows_of(sequences), graph=True), sequences)


@pytest.mark.parametrize(
    ("sequences", "tokens", "segments"),
    [
        (
            [[1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 6, 7]],
            7,
            3,
        ),  # a prompt, and a completion that goes on as another begins
        ([[1, 2, 3], [1, 2, 3]], 3, 1),  # equal
        ([[1, 2, 3], [1, 2]], 3, 2),  # one within the other
        ([[1, 2], [3, 4, 5]], 5, 2),  # two roots
    ],
)
def test_prompts_turns_and_equal_completions_are_one_case(
    sequences: list[list[int]], tokens: int, segments: int
) -> None:
    layout = tree(rows_of(sequences), graph=False)
    assert layout.sources.shape == (1, tokens)
    assert layout.paths is not None and len(layout.paths.lengths) == segments
    assert_is_the_prefix_tree(layout, sequences)


def test_cells_that_differ_in_anything_the_model_reads_are_two_tokens() -> None:
    rows = rows_of([[1, 2, 3], [1, 2, 4]])
    types = torch.tensor([0, 1]).view(2, 1, 1).expand(2, 3, 1)
    rows = Rows(rows.cells, rows.computed, rows.attended, torch.cat([rows.features, types], -1))
    assert tree(rows, graph=True).sources.shape == (1, 6), "such as positions or token types"


def test_padding_within_a_row_is_left_out() -> None:
    rows = rows_of([[1, 2, 3, 4]])
    rows.attended[0, 1] = False
    layout = tree(rows, graph=True)
    assert layout.sources.tolist() == [[0, 2, 3]]
    assert layout.depths.tolist() == [[0, 1, 2]]
    assert layout.cells.tolist() == [0, 2, 3]


def test_tokens_that_fill_up_a_width_are_a_root_of_their_own() -> None:
    layout = tree(rows_of([[1, 2, 3], [1, 2, 4]]), graph=True, multiple=8)
    assert layout.sources.shape == (1, 8)
    found = seen(layout)
    assert [found[i] for i in range(4, 8)] == [[4], [4, 5], [4, 5, 6], [4, 5, 6, 7]]
    assert layout.tokens.tolist() == [0, 1, 2, 0, 1, 3]


def test_rows_side_by_side_are_as_wide_as_the_longest() -> None:
    rows = rows_of([[1, 2, 3], [4], [5, 6]])
    layout = by_rows(rows, graph=True)
    assert layout.attended.tolist() == [[True] * 3, [True, False, False], [True, True, False]]
    assert layout.cells.tolist() == [0, 1, 2, 12, 24, 25]
    assert layout.sources.reshape(-1)[layout.tokens].tolist() == layout.cells.tolist()
    assert by_rows(rows, graph=True, multiple=8).sources.shape == (3, 8)


def test_an_anchor_fills_nothing() -> None:
    layout = anchor(graph=True)
    assert layout.sources.shape == (1, 2) and layout.graph
    assert layout.cells.numel() == layout.tokens.numel() == 0


pytest.importorskip("transformers")
from grpo_kernels.base.tensors import cut  # noqa: E402
from grpo_kernels.body.attention import group  # noqa: E402

pytestmark = pytest.mark.unit


def test_parts_cost_the_least_of_all() -> None:
    draw = random.Random(3)

    def cost(ends: tuple[int, ...], costs: list[int], overhead: int) -> int:
        return sum(
            (b - a) * costs[b - 1] + overhead for a, b in itertools.pairwise((0, *ends, len(costs)))
        )

    for _ in range(20):
        costs = sorted(draw.randrange(1, 40) for _ in range(6))
        overhead = draw.choice([0, 3, 20, 200])
        parts = cut(costs, overhead)
        assert [x for first, end in parts for x in range(first, end)] == [*range(6)]
        every = [ends for n in range(6) for ends in itertools.combinations(range(1, 6), n)]
        found = cost(tuple(end for _, end in parts[:-1]), costs, overhead)
        assert found == min(cost(ends, costs, overhead) for ends in every)


def attended(queries: int, keys: int) -> Tensor:
    """(queries, keys) bool of causal attention in which the last query is the last key."""
    return torch.arange(keys - queries, keys)[:, None] >= torch.arange(keys)


@pytest.mark.parametrize("call_cells", [0.0, 1e9])
def test_calls_see_each_tokens_path(call_cells: float) -> None:
    """Whatever is put together and padded: the query of a token sees its path alone."""
    draw = random.Random(2)
    for _ in range(20):
        prompt = [7] * draw.randrange(1, 8)
        sequences = [
            [*prompt, *(draw.randrange(3) for _ in range(draw.randrange(4)))] for _ in range(5)
        ]
        layout = tree(rows_of(sequences), graph=True)
        assert layout.paths is not None
        groups, places = group(layout.paths, call_cells), {}
        for queries, keys, own in groups:
            mask = attended(queries.shape[1], keys.shape[1])
            for line, column in own.nonzero().tolist():
                token = int(queries[line, column])
                assert token not in places
                places[token] = keys[line][mask[column]].tolist()
        assert places == seen(layout)
        pairs = zip(layout.paths.contexts.tolist(), layout.paths.new.tolist(), strict=True)
        kinds = {context if context > new else 0 for context, new in pairs}
        assert len(groups) == len(kinds) or call_cells == 0.0
