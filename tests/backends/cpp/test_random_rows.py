"""The C++ row kernels on random rows, on every instruction set, where a step too far is seen.

GRPO_KERNELS_RANDOM_FACTOR multiplies the 200 cases. A failure prints the call that replays it,
`check(seed)`.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grpo_kernels.backends.cpp_rows import CppRows
from grpo_kernels.backends.fused_loss import FusedLoss
from grpo_kernels.backends.interface import Chunk, Coefficients, RowStats
from tests.support.row_cases import (
    EXTRAS,
    FIELDS,
    assert_same,
    in_double,
    instruction_sets,
    make_loss,
    make_transform,
    rows,
    same,
)
from tests.support.row_suite import check_kernels

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("cpp_library")]

BLOCKS, BLOCK_SIZE = 4, 50
FACTOR = int(os.environ.get("GRPO_KERNELS_RANDOM_FACTOR", "1"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
BEYOND = (-1, -100, 2**31, 2**63 - 1, -(2**63))  # ids that do not exist
UNTOUCHED = 77.0


@pytest.mark.parametrize("block", range(BLOCKS * FACTOR))
def test_random_rows(block: int) -> None:
    for seed in range(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE):
        try:
            check(seed)
        except Exception as error:
            error.add_note(f"replay: check({seed})") if hasattr(error, "add_note") else None
            raise


def check(seed: int) -> None:
    """Random rows against float64 and the torch backend (`check_kernels`), by `Everywhere`."""
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
    kernels = Everywhere(dtype, draw)
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


class Everywhere(CppRows):
    """`CppRows` on logits of `dtype`, wherever `draw` puts them, on every instruction set.

    What must not change a row's results is tried along the way: ids that do not exist, in other
    rows; the vocabulary in parts; writing over the logits.
    """

    def __init__(self, dtype: torch.dtype, draw: random.Random) -> None:
        self._dtype, self._draw = dtype, draw

    def stats(self, chunk: Chunk, *, entropy: bool, extras: tuple[str, ...] = ()) -> RowStats:
        bad, odd = self._some_beyond(chunk)
        results = []
        for _ in instruction_sets():
            chunk = replace(chunk, logits=self._placed(chunk.logits, self._dtype, torch.nan))
            found = super().stats(chunk, entropy=entropy, extras=extras)
            spoiled = super().stats(replace(chunk, ids=odd), entropy=entropy, extras=extras)
            assert spoiled.logps[bad].isnan().all()
            assert same(spoiled.logps[~bad], found.logps[~bad])
            for field in FIELDS[1:]:
                assert same(getattr(spoiled, field), getattr(found, field)), field
            results.append(found)
            assert_same(found, results[0])
        return results[0]

    def grad(self, chunk: Chunk, stats: RowStats, coefficients: Coefficients, out: Tensor) -> None:
        logits, ids, transform = chunk.logits, chunk.ids, chunk.transform
        vocab = logits.shape[1]
        cut = self._draw.randint(0, vocab)
        in_place = out.dtype == self._dtype and self._draw.random() < 0.5
        bad, odd = self._some_beyond(chunk)
        is_target = torch.arange(vocab) == ids[:, None]

        def run(targets: Tensor, *parts: slice) -> Tensor:
            x = self._placed(logits, self._dtype, UNTOUCHED)
            to = x if in_place else self._placed(out, out.dtype, UNTOUCHED)
            for part in parts:
                bias = None if transform.bias is None else transform.bias[part]
                cut_out = Chunk(x[:, part], targets, replace(transform, bias=bias), part.start)
                super(Everywhere, self).grad(cut_out, stats, coefficients, to[:, part])
            assert_untouched_around(to)
            return to

        for i, _ in enumerate(instruction_sets()):
            whole = run(ids, slice(0, vocab))
            if i == 0:
                out.copy_(whole)
            assert same(whole.contiguous(), out.contiguous())
            parts = run(ids, slice(0, cut), slice(cut, vocab))
            assert same(parts.contiguous(), out.contiguous()), cut
            if vocab > 1:  # a row without a target is that of another target, where that is not
                other = torch.where(is_target, run((ids + 1) % vocab, slice(0, vocab)), whole)
                want = torch.where(bad[:, None], other, whole)
                assert same(run(odd, slice(0, vocab)).contiguous(), want)
                assert same(run(odd, slice(0, cut), slice(cut, vocab)).contiguous(), want)

    def fused(self, chunk: Chunk, fused_loss: FusedLoss, out: Tensor | None) -> RowStats:
        bad, odd = self._some_beyond(chunk)
        results = []
        for _ in instruction_sets():
            chunk = replace(chunk, logits=self._placed(chunk.logits, self._dtype, torch.nan))
            to = self._placed(out, out.dtype, UNTOUCHED)
            results.append(super().fused(chunk, fused_loss, to))
            assert_untouched_around(to)
            assert_same(results[-1], results[0])
            assert_same(super().fused(chunk, fused_loss, None), results[0])
            if len(results) == 1:
                out.copy_(to)
            assert same(to.contiguous(), out.contiguous())
            spoiled = super().fused(replace(chunk, ids=odd), fused_loss, to)
            for name, term in spoiled.loss_terms.items():
                assert same(term[~bad], results[0].loss_terms[name][~bad]), name
                assert term[bad].isnan().all(), name
            assert same(to[~bad], out[~bad])
            assert to[bad].isnan().all()
        return results[0]

    def _placed(self, x: Tensor, dtype: torch.dtype, around: float) -> Tensor:
        """A copy of `x` (n, V) whose memory ends with its last row; rows may stand apart."""
        n, vocab = x.shape
        left, gap = self._draw.choice(
            ((0, 0), (self._draw.randint(0, 9), self._draw.randint(0, 40)))
        )
        memory = torch.full((left + n * (vocab + gap) - gap if n else 0,), around, dtype=dtype)
        return memory.as_strided((n, vocab), (vocab + gap, 1), left if n else 0).copy_(x)

    def _some_beyond(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Which rows get an id that does not exist (n,), and the ids (n,)."""
        bad = torch.rand(len(chunk.ids)) < 0.4
        return bad, torch.where(bad, self._draw.choice((chunk.logits.shape[1], *BEYOND)), chunk.ids)


def assert_untouched_around(x: Tensor) -> None:
    """Nothing was written between the rows of `x` (n, V), which `_placed` made."""
    memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).clone()
    memory.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(UNTOUCHED)
    assert (memory == UNTOUCHED).all()
