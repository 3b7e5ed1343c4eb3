"""The kernels for rows of two heads, at the tiles of a GPU, against float64 within bounds."""

from __future__ import annotations

import pytest
import torch

from grpo_kernels.backends.interface import Coefficients, DivergenceStats
from grpo_kernels.backends.triton_rows.rows import TritonRows
from tests.emulator.launch import Emulation
from tests.support.divergence_suite import DivergenceSuite
from tests.support.row_cases import same
from tests.support.row_truth import U, check, divergence, gradient, truth

TILE = 4096


class Divergences(DivergenceSuite):
    """The suite, of which no test is collected here."""

    kernels = TritonRows()


@pytest.mark.parametrize(
    ("vocab", "kinds", "beta"),
    [
        pytest.param(9001, (0, 0), 1.0, marks=pytest.mark.quick),
        pytest.param(9001, (3, 2), 0.5, marks=pytest.mark.slow),
        (9001, (1, 3), 0.0),
        (TILE, (0, 2), 0.0),
        (33, (3, 3), 0.5),
        (151_936, (1, 0), 1.0),
    ],
)
def test_values_and_gradients(vocab: int, kinds: tuple[int, int], beta: float) -> None:
    """The kernels of two heads; targets in quarters of tiles and in the tail; in place and not."""
    suite = Divergences()
    targets = (0, 1024, 4095, 4096, 8192) if vocab < 10**5 else ()
    ids = torch.tensor(sorted({x for x in targets if x < vocab} | {vocab - 1}))
    n = len(ids)
    raw, other = 3 * torch.randn(2, n, vocab)
    two = suite.transforms(n, vocab, kinds)
    chunk = suite.chunk(raw, other, beta, ids, two)
    student, teacher = truth(raw, ids, two[0]), truth(other, torch.zeros_like(ids), two[1])
    want, stats = divergence(student, teacher, beta), suite.stats(chunk)
    check("value", stats.divergence.value, want.value, want.bound)

    a, b, c = torch.randn(3, n)
    out = suite.grad(chunk, stats, a, b, c)
    of_others, bound = gradient(student, ids, a, b)
    total = of_others + c[:, None] * want.gradient
    bound = bound + c.abs()[:, None] * want.gradient_bound + 4 * U * (of_others.abs() + total.abs())
    check("d raw", out, total, bound)
    suite.kernels.grad(chunk, stats, Coefficients(a, b, c), chunk.logits)
    assert torch.equal(chunk.logits, out)


@pytest.mark.slow
def test_offsets_beyond_32_bits(emulation: Emulation) -> None:
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
    kernels = TritonRows()
