"""The C++ row kernels on random rows, where a step too far is seen. GRPO_KERNELS_RANDOM_FACTOR
multiplies the 200 cases; the seed that a failure shows replays it."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels.backends import Chunk, Coefficients, FusedLoss, RowStats
from grpo_kernels.backends.cpp_rows import CppRows
from tests.support.row_cases import EXTRAS, assert_same, in_double, make_loss, make_transform, rows
from tests.support.row_suite import check_kernels

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("cpp_library")]

FACTOR = int(os.environ.get("GRPO_KERNELS_RANDOM_FACTOR", "1"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
UNTOUCHED = 77.0


@pytest.mark.parametrize("block", range(4 * FACTOR))
def test_random_rows(block: int) -> None:
    for seed in range(block * 50, (block + 1) * 50):
        check(seed)


def check(seed: int) -> None:
    """Random rows against float64 and the torch backend (`check_kernels`), by `Placed`."""
    draw = random.Random(f"rows {seed}")
    torch.manual_seed(seed)
    torch.set_num_threads(draw.choice((1, 1, 2)))
    n, kind, dtype = draw.choice((0, 1, 1, 2, 3, 5, 9)), draw.randrange(420), draw.choice(DTYPES)
    few = draw.randint(1, 70), draw.randint(1, 70)
    vocab = draw.choice((1, *few, draw.randint(71, 600), draw.randint(4000, 8400)))
    roundings = (None, None, torch.bfloat16, torch.float16)
    rounded_to = None if dtype == torch.float64 else draw.choice(roundings)
    transform = make_transform(n, vocab, kind, rounded_to, "cpu")
    raw, ids = rows(n, vocab, "cpu")
    if transform.softcap is None:  # its bounds are for logits that it does not flatten
        raw *= draw.choice((0.003, 0.3, 1.0, 1.0, 10.0, 300.0))
    if draw.random() < 0.2:
        raw = raw.round()  # ties
    if draw.random() < 0.5 and n:
        column = draw.choice((0, 15, 31, 32, 4080, 4095, 4096, vocab - 1)) % vocab
        raw[:, column] = raw.amax() + draw.choice((0, 1, 20))
    if draw.random() < 0.2:
        raw[(torch.rand(n, vocab) < 0.3).scatter(1, ids[:, None], False)] = -torch.inf
    raw = raw.to(dtype).to(torch.float64 if dtype == torch.float64 else torch.float32)
    transform = in_double(transform) if dtype == torch.float64 else transform
    kernels = Placed(dtype, draw)
    of_out = dtype if dtype == torch.float64 else draw.choice(DTYPES[:3])
    if n:
        check_kernels(kernels, raw, ids, transform, kind, of_out)
        return
    chunk, out = Chunk(raw, ids, transform), torch.empty_like(raw)
    stats = kernels.stats(chunk, entropy=True, extras=EXTRAS)
    fused = kernels.fused(chunk, make_loss(stats.logps, kind), out)
    kernels.grad(chunk, stats, Coefficients(stats.logps, stats.logps), out)
    for x in (fused.logps, *stats.extras.values(), *fused.loss_terms.values()):
        assert x.shape == (0,)


class Placed(CppRows):
    """`CppRows` on logits of `dtype`, wherever `draw` puts them; nothing is written around them."""

    def __init__(self, dtype: torch.dtype, draw: random.Random) -> None:
        self._dtype, self._draw = dtype, draw

    def stats(self, chunk: Chunk, **options: Any) -> RowStats:
        logits = self._placed(chunk.logits, self._dtype, torch.nan)
        return super().stats(replace(chunk, logits=logits), **options)

    def grad(self, chunk: Chunk, stats: RowStats, coefficients: Coefficients, out: Tensor) -> None:
        x = self._placed(chunk.logits, self._dtype, UNTOUCHED)
        in_place = out.dtype == self._dtype and self._draw.random() < 0.5
        to = x if in_place else self._placed(out, out.dtype, UNTOUCHED)
        super().grad(replace(chunk, logits=x), stats, coefficients, to)
        assert_untouched_around(to)
        out.copy_(to)

    def fused(self, chunk: Chunk, fused_loss: FusedLoss, out: Tensor | None) -> RowStats:
        chunk = replace(chunk, logits=self._placed(chunk.logits, self._dtype, torch.nan))
        to = self._placed(out, out.dtype, UNTOUCHED)
        found = super().fused(chunk, fused_loss, to)
        assert_untouched_around(to)
        assert_same(super().fused(chunk, fused_loss, None), found)
        out.copy_(to)
        return found

    def _placed(self, x: Tensor, dtype: torch.dtype, around: float) -> Tensor:
        """A copy of `x` (n, V) whose memory ends with its last row; rows may stand apart."""
        n, vocab = x.shape
        left, gap = self._draw.choice(((0, 0), (self._draw.randint(0, 9), 17)))
        memory = torch.full((left + n * (vocab + gap) - gap if n else 0,), around, dtype=dtype)
        return memory.as_strided((n, vocab), (vocab + gap, 1), left if n else 0).copy_(x)


def assert_untouched_around(x: Tensor) -> None:
    """Nothing was written between the rows of `x` (n, V), which `_placed` made."""
    memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).clone()
    memory.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(UNTOUCHED)
    assert (memory == UNTOUCHED).all()
