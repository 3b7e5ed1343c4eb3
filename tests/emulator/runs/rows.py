"""The kernels for rows of one head and of two, at the tiles of a GPU, against float64 within bounds
and the torch backend."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grpo_kernels.backends import Chunk, Coefficients, DivergenceStats
from grpo_kernels.backends.triton_rows.grad import launch_scale
from grpo_kernels.backends.triton_rows.rows import TritonRows
from tests.emulator.launch import Emulation
from tests.support.divergence_suite import DivergenceSuite
from tests.support.row_cases import EXTRAS, make_loss, make_transform, same
from tests.support.row_suite import RowSuite, SpecialSuite, check_kernels

TILE = 4096  # columns of a step on both architectures
# quarters of tiles, their ends, the tail of V 9001
TARGETS = (0, 1023, 1024, 2050, 4095, 4096, 8191, 8192, 9000)
KERNELS = TritonRows()
quick, slow = pytest.mark.quick, pytest.mark.slow


def rows_of(vocab: int, targets: tuple[int, ...] = TARGETS) -> tuple[Tensor, Tensor]:
    """A row for each target below `vocab`, and one for the last id."""
    ids = torch.tensor(sorted({x for x in targets if x < vocab} | {vocab - 1}))
    return 3 * torch.randn(len(ids), vocab), ids


@pytest.mark.parametrize(
    ("vocab", "kind", "dtype"),
    [
        pytest.param(9001, 3, torch.bfloat16, marks=quick),
        pytest.param(9001, 0, torch.float32, marks=slow),
        (9001, 3, torch.float16),
        (4096, 1, torch.bfloat16),
        (12288, 3, torch.bfloat16),
        (4097, 1, torch.float32),
        (1000, 2, torch.float32),
        (33, 3, torch.float32),
        (1, 1, torch.float32),
    ],
)
def test_statistics_gradient_and_loss(vocab: int, kind: int, dtype: torch.dtype) -> None:
    """`stats`, `grad` and `fused`: the transforms of `make_transform` and its losses, in turn."""
    raw, ids = rows_of(vocab)
    transform = make_transform(len(ids), vocab, kind, None if dtype == torch.float32 else dtype)
    check_kernels(KERNELS, raw, ids, transform, kind, dtype)


@pytest.mark.parametrize("kind", [pytest.param(1, marks=quick), 3])
def test_a_large_vocabulary(kind: int) -> None:
    raw, ids = rows_of(151_936, (70_000,))
    transform = make_transform(2, 151_936, kind, None)
    check_kernels(KERNELS, raw, ids, transform, kind, torch.bfloat16)


@pytest.mark.parametrize("kind", range(12))
def test_every_loss(kind: int) -> None:
    raw, ids = rows_of(4133)
    check_kernels(KERNELS, raw, ids, make_transform(len(ids), 4133, 0, None), kind)


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.bfloat16, marks=quick), torch.float16, torch.float32]
)
@pytest.mark.parametrize("n", [7 * 9001, 2 * TILE])
def test_scale(n: int, dtype: torch.dtype) -> None:
    """A gradient times a number, as torch would round it; in fp32 in place."""
    x, factor = torch.randn(n), torch.tensor(0.37)
    out = x.clone() if dtype == torch.float32 else torch.empty(n, dtype=dtype)
    launch_scale(out if dtype == torch.float32 else x, factor, out)
    assert torch.equal(out, (x * factor).to(dtype))


@pytest.mark.parametrize("before", [pytest.param(250_000, marks=quick), 2**20])
def test_offsets_beyond_32_bits(before: int, emulation: Emulation) -> None:
    """So many rows come before those that are there: more than 2^31 logits, and the same bits."""
    raw, ids = rows_of(9001, (5, 6000))
    transform, (a, b) = make_transform(len(ids), 9001, 3, None), torch.randn(2, len(ids))

    def everything() -> list[Tensor]:
        x, y = raw.clone(), raw.clone()
        stats = KERNELS.stats(Chunk(raw, ids, transform), entropy=True, extras=EXTRAS)
        fused = KERNELS.fused(Chunk(x, ids, transform), make_loss(torch.zeros(len(ids)), 9), x)
        KERNELS.grad(Chunk(y, ids, transform), stats, Coefficients(a, b), y)
        return [stats.logps, stats.entropies, fused.loss_stats["loss"], x, y]

    torch.manual_seed(1)
    want = everything()
    torch.manual_seed(1)
    emulation.rows_before = before
    assert before * 9001 >= 2**31
    assert all(map(same, everything(), want))


class TestRows(RowSuite):
    kernels = KERNELS
    vocabs = (4200,)


class TestSpecialRows(SpecialSuite):
    kernels = KERNELS
    block = TILE
    vocabs = (3, TILE, TILE + 1)


class Divergences(DivergenceSuite):
    """The suite, of which no test is collected here."""

    kernels = KERNELS


@pytest.mark.parametrize(
    ("vocab", "kinds", "beta"),
    [
        pytest.param(9001, (0, 0), 1.0, marks=quick),
        pytest.param(9001, (3, 2), 0.5, marks=slow),
        (9001, (1, 3), 0.0),
        (TILE, (0, 2), 0.0),
        (33, (3, 3), 0.5),
        (151_936, (1, 0), 1.0),
    ],
)
def test_divergences(vocab: int, kinds: tuple[int, int], beta: float) -> None:
    """The kernels of two heads: `diverge`, and `grad` of all coefficients."""
    suite = Divergences()
    raw, ids = rows_of(vocab, (0, 1024, 4095, 4096, 8192) if vocab < 10**5 else ())
    suite.ids = lambda *_: ids
    two = suite.transforms(len(ids), vocab, kinds)
    suite.check_rows(raw, 3 * torch.randn_like(raw), beta, two, ("abc",))


@slow
def test_offsets_of_two_heads_beyond_32_bits(emulation: Emulation) -> None:
    """More than 2^31 logits of both heads come before those that are there: the same bits."""
    suite = Divergences()
    raw, other, ids = 3 * torch.randn(2, 9001), 3 * torch.randn(2, 9001), torch.tensor([5000, 9000])

    def everything() -> list[torch.Tensor]:
        chunk = suite.chunk(raw, other, 1.0, ids)
        stats = suite.stats(chunk)
        assert isinstance(stats.divergence, DivergenceStats)
        return [*stats.divergence, suite.grad(chunk, stats, *torch.ones(3, 2))]

    want = everything()
    emulation.rows_before = 250_000
    assert all(map(same, everything(), want))


class TestDivergences(DivergenceSuite):
    """Less than a tile, and a tile and a tail."""

    vocabs = (2, TILE + 1)
    betas = (1.0,)  # the others are above: each compiles a dozen kernels here
    kernels = KERNELS
