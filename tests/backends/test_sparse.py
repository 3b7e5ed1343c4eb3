"""Rows of d logits thinned out: on average what they were, with the variance of the formula, on every backend alike."""

from __future__ import annotations

import importlib.util
import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from grpo_kernels.backends.cpp_rows import CppRows
from grpo_kernels.backends.sparse import (
    BITS,
    Entries,
    SparseRowBackend,
    Thinned,
    TorchSparse,
    draws,
    error_at,
    largest_allowed,
    most_drawn,
    row_keys,
    thresholds,
)

BACKENDS: dict[str, type[SparseRowBackend]] = {"torch": TorchSparse, "cpp": CppRows}
if importlib.util.find_spec("triton") is not None:
    from tests.support.triton_sparse import TritonSparse

    BACKENDS["triton"] = TritonSparse
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
VOCABS, TOLERANCES = (1, 2, 31, 32, 33, 700, 5003), (0.3, 0.03, 1e-3)
AGREEING = [("cpp", dtype, vocab, TOLERANCES) for dtype in DTYPES for vocab in VOCABS]
if "triton" in BACKENDS and torch.cuda.is_available():
    AGREEING += [("triton", dtype, vocab, TOLERANCES) for dtype in DTYPES if dtype != torch.float64 for vocab in VOCABS]
elif "triton" in BACKENDS:  # in the interpreter, which is slow: a tile, two, and two and a part of one
    of_dtype = {torch.float32: (1, 2048, 2500), torch.bfloat16: (2500,), torch.float16: (2500,)}
    AGREEING += [("triton", dtype, vocab, (0.03,)) for dtype, vocabs in of_dtype.items() for vocab in vocabs]
H, SEEDS = 24, 10_000
pytestmark = pytest.mark.usefixtures("cpp_library")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> SparseRowBackend:
    return BACKENDS[request.param]()


def accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def rows(m: int, vocab: int, spread: float, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """d logits (m, V) of a policy gradient: 1[y] - p."""
    g = torch.Generator().manual_seed(seed)
    p = (spread * torch.randn(m, vocab, generator=g, dtype=torch.float64)).softmax(dim=1)
    return (-p).scatter_add(1, p.multinomial(1, generator=g), torch.ones(m, 1, dtype=p.dtype)).to(dtype)


def weight(vocab: int, dtype: torch.dtype = torch.float32) -> Tensor:
    g = torch.Generator().manual_seed(1)
    return torch.randn(vocab, H, generator=g, dtype=torch.float64).to(dtype) * torch.linspace(0.3, 2.0, vocab)[:, None]


def dense(entries: Entries, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The entries as a matrix."""
    row, ids, values = entries.flat()
    return torch.zeros(shape, dtype=dtype).index_put((row, ids.long()), values)


class Result(NamedTuple):
    """Of rows that are thinned out: all that is known of them."""

    top: Tensor
    certain: Entries
    found: Thinned
    error: Tensor  # E |error of d hidden|^2 / top^2
    has_threshold: Tensor

    def matrix(self, g: Tensor) -> Tensor:
        """What stands for the rows, 0 where there is no threshold."""
        both = (x.without(~self.has_threshold) for x in (self.certain, self.found.entries))
        return sum((dense(x, g.shape, self.top.dtype) for x in both), torch.zeros((), dtype=self.top.dtype))


def thin(kernels: SparseRowBackend, g: Tensor, w: Tensor, tolerance: float, keys: Tensor) -> Result:
    """As the engine does: `tolerance` of the length that the certain entries give."""
    top, most = kernels.largest(g), g.shape[1]
    certain = kernels.certain(g, top, most)
    kept = torch.zeros(len(g), w.shape[1], dtype=top.dtype)
    kernels.combine(certain, w, kept)
    errors = kernels.errors(g, w.to(top.dtype).square().sum(dim=1), top)
    k = largest_allowed(errors, tolerance**2 * kept.square().sum(dim=1) / top.square().clamp(min=1e-30))
    k = k.masked_fill(top == 0, 0)
    found = kernels.thin(g, top, k, keys, most)
    return Result(top, certain, found, error_at(errors, k), k > 0)


def test_draws_are_alike_likely_whatever_seed_row_and_column() -> None:
    columns = torch.arange(2000)
    found = draws(row_keys(3, torch.arange(500)), columns)
    assert int(found.min()) >= 0
    assert int(found.max()) < 2**BITS
    for x in (found, draws(row_keys(4, torch.arange(500)), columns) ^ found):  # and independent of another seed's
        counts = torch.bincount(x.flatten() >> (BITS - 10), minlength=1024).double()
        mean = found.numel() / 1024
        assert abs(float(((counts - mean) ** 2 / mean).sum()) - 1023) < 5 * math.sqrt(2 * 1023)
        for bit in range(BITS):
            assert abs(float(((x >> bit) & 1).double().mean()) - 0.5) < 5 * 0.5 / math.sqrt(x.numel())
    u = found.double() / 2**BITS - 0.5
    for shifted in (u[1:] * u[:-1], u[:, 1:] * u[:, :-1], u[1:, 1:] * u[:-1, :-1]):
        assert abs(float(shifted.mean())) < 5 / 12 / math.sqrt(shifted.numel())


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, -1])
def test_keys_of_rows_are_their_own(seed: int) -> None:
    keys = row_keys(seed, torch.arange(100_000))
    assert len(keys.unique()) == 100_000
    assert torch.equal(row_keys(seed, torch.tensor([77_777])), keys[77_777:77_778])


@pytest.mark.parametrize("spread", [1.0, 4.0])
@pytest.mark.parametrize("tolerance", [0.3, 0.03])
@pytest.mark.parametrize("name", ["torch", "cpp"])  # Triton's entries are torch's, bit by bit
def test_the_mean_is_the_exact_gradient_and_the_variance_the_formula(
    name: str, spread: float, tolerance: float
) -> None:
    """Over 10,000 seeds, which are rows here, within 4 standard errors; the variance within 5 %."""
    backend, vocab = BACKENDS[name](), 200
    g, w = rows(1, vocab, spread), weight(vocab)
    many = g.expand(SEEDS, vocab).contiguous()
    found = thin(backend, many, w, tolerance, row_keys(5, torch.arange(SEEDS)))
    assert found.has_threshold.all()
    top, truth = float(g.abs().max()), g[0].double()
    entries = found.matrix(many).double()
    drawn = (entries != 0) & (entries != truth)
    tau = float(entries[drawn].abs().max()) if drawn.any() else 0.0
    deviation = (truth.abs() * (tau - truth.abs())).clamp(min=0.0).sqrt() / math.sqrt(SEEDS)
    error = (entries.mean(dim=0) - truth).abs()
    assert bool((error <= 4.5 * deviation + 5.0 * tau / SEEDS).all())  # of 200 numbers, some of which hardly ever come
    spread = float(deviation.square().sum()) * SEEDS / top**2
    assert float(found.found.spread[0]) == pytest.approx(spread, rel=1e-4, abs=1e-20)
    counts = found.found.entries.counts.double()
    assert float(counts.mean()) == pytest.approx(float(found.found.expected[0]), rel=0.02, abs=5 / math.sqrt(SEEDS))
    of_hidden = (entries - truth) @ w.double()
    mean, deviation = of_hidden.mean(dim=0), of_hidden.std(dim=0) / math.sqrt(SEEDS)
    assert bool((mean.abs() <= 4.0 * deviation + 1e-9 * top).all())
    variance = float(of_hidden.square().sum(dim=1).mean())
    assert variance == pytest.approx(float(found.error[0]) * top**2, rel=0.05, abs=1e-20)
    assert variance <= 1.05 * tolerance**2 * float((truth @ w.double()).square().sum())


@pytest.mark.parametrize(("name", "dtype", "vocab", "tolerances"), AGREEING)
def test_backends_agree(name: str, dtype: torch.dtype, vocab: int, tolerances: tuple[float, ...]) -> None:
    """Entries bit by bit, sums to rounding."""
    w, exact = weight(vocab, accumulator(dtype)), accumulator(dtype)
    for spread in (0.1, 2.0, 8.0):
        g, keys = rows(6, vocab, spread, dtype), row_keys(9, torch.arange(6))
        for tolerance in tolerances:
            ours, theirs = (thin(BACKENDS[name](), g, w, tolerance, keys) for name in ("torch", name))
            assert torch.equal(ours.top, theirs.top)
            assert torch.equal(dense(ours.certain, g.shape, exact), dense(theirs.certain, g.shape, exact))
            assert torch.equal(ours.has_threshold, theirs.has_threshold)
            assert torch.equal(ours.matrix(g), theirs.matrix(g))
            torch.testing.assert_close(ours.error[ours.has_threshold], theirs.error[ours.has_threshold])
            torch.testing.assert_close(ours.found.expected, theirs.found.expected)
            torch.testing.assert_close(ours.found.spread, theirs.found.spread)


def test_a_part_of_the_columns_draws_what_all_of_them_would(backend: SparseRowBackend) -> None:
    g, keys = rows(5, 300, 3.0), row_keys(2, torch.arange(5))
    top, k = backend.largest(g), torch.full((5,), 11)
    every = dense(backend.thin(g, top, k, keys, 300).entries, g.shape, g.dtype)
    parts = [backend.thin(x.contiguous(), top, k, keys, 300, at).entries for at, x in ((0, g[:, :97]), (97, g[:, 97:]))]
    both = [dense(x, shape, g.dtype) for x, shape in zip(parts, ((5, 97), (5, 203)), strict=True)]
    assert torch.equal(torch.cat(both, dim=1), every)
    assert bool((every != 0).any())


def test_a_row_is_its_own(backend: SparseRowBackend) -> None:
    """Whatever rows are computed with it, and wherever it stands among them."""
    g, w, keys = rows(40, 300, 3.0), weight(300), row_keys(2, torch.arange(40))
    every = thin(backend, g, w, 0.05, keys).matrix(g)
    some = torch.tensor([31, 4, 17])
    assert torch.equal(thin(backend, g[some], w, 0.05, keys[some]).matrix(g[some]), every[some])


def test_rows_that_cannot_be_thinned_out_say_so(backend: SparseRowBackend) -> None:
    """Not finite; of a tolerance that no threshold keeps. A row of zeros has no entries, a flat one has all."""
    g = rows(6, 256, 2.0)
    g[0, 7], g[1, 9], g[2], g[3], g[4] = math.nan, math.inf, 0.0, 1e-3, -0.0
    found = thin(backend, g, weight(256), 0.05, row_keys(1, torch.arange(6)))
    assert found.top[:2].isnan().all()
    assert found.certain.counts[[0, 1, 2, 4]].tolist() == [0, 0, 0, 0]
    assert int(found.certain.counts[3]) == 256
    assert found.has_threshold.tolist() == [False, False, False, True, False, True]
    for x in (found.found.entries.counts, found.found.expected, found.found.spread):
        assert not x[~found.has_threshold].any()
    assert not thin(backend, g[5:], weight(256), 1e-9, row_keys(1, torch.arange(1))).has_threshold.any()


def test_more_entries_than_there_is_room_for_are_counted(backend: SparseRowBackend) -> None:
    g = torch.full((3, 50), 0.5)
    assert backend.certain(g, torch.full((3,), 0.5), 8).counts.tolist() == [50, 50, 50]
    top, k = torch.full((3,), 0.5 * 2**10), torch.full((3,), 12)
    found = backend.thin(g, top, k, row_keys(1, torch.arange(3)), 8).entries
    assert found.counts.tolist() == [50, 50, 50]
    for start in found.starts.tolist():  # the first of them
        assert found.ids[start : start + 8].tolist() == list(range(8))


def test_thresholds_are_the_largest_that_are_allowed(backend: SparseRowBackend) -> None:
    g, w = rows(1, 4000, 2.5), weight(4000)
    keys, norms = row_keys(1, torch.arange(1)), w.square().sum(dim=1)
    errors = backend.errors(g, norms, backend.largest(g))
    r = (g / g.abs().max()).abs().double()
    for i, tau in enumerate(thresholds()):
        exact = float((r * (tau - r).clamp(min=0.0) * norms).sum())
        assert float(errors[0, i]) == pytest.approx(exact, rel=1e-5, abs=1e-30)
    taus = []
    for tolerance in (1.0, 0.1, 0.03, 0.01, 3e-3, 1e-3):
        found = thin(backend, g, w, tolerance, keys)
        if not found.has_threshold.all():
            continue
        _, _, values = found.found.entries.flat()
        taus.append(float(values.abs().min() / found.top))
        assert taus[-1] == pytest.approx(2.0 ** round(math.log2(taus[-1])))
    assert taus == sorted(taus, reverse=True)
    assert len(set(taus)) > 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_entries_are_added_up_where_they_belong(backend: SparseRowBackend, dtype: torch.dtype) -> None:
    """Lists of different lengths, some empty, in rooms and in rows of `out` that are out of order."""
    lengths, width = [0, 3, 1, 0, 70, 9], 75
    g = torch.Generator().manual_seed(0)
    counts, most = torch.tensor(lengths), max(lengths) + 5
    ids = torch.randint(40, (len(lengths) * most,), generator=g).int()
    entries = Entries(torch.arange(len(lengths)) * most, counts, ids, torch.randn(len(ids), generator=g))
    source, out = torch.randn(40, width, generator=g).to(dtype), torch.randn(9, width, generator=g)
    expected, targets = out.double(), torch.tensor([8, 2, 5, 0, 3, 1])
    for i, target in enumerate(targets.tolist()):
        some = slice(i * most, i * most + lengths[i])
        expected[target] += entries.values[some].double() @ source[ids[some].long()].double()
    added, plain = out.clone(), torch.zeros(len(lengths), width)
    backend.combine(entries, source, added, targets)
    torch.testing.assert_close(added.double(), expected, rtol=1e-5, atol=1e-5)
    backend.combine(entries, source, plain)
    torch.testing.assert_close(plain.double(), (expected - out.double())[targets], rtol=1e-5, atol=1e-5)
    again = torch.zeros_like(plain)
    backend.combine(entries, source, again)
    assert torch.equal(again, plain)


@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton has no release here")
def test_triton_says_what_it_cannot_read() -> None:
    with pytest.raises(ValueError, match=r"d logits of at most 32 bits for 'triton', got torch\.float64"):
        BACKENDS["triton"]().largest(torch.zeros(2, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="expected d logits with contiguous rows"):
        BACKENDS["triton"]().largest(torch.zeros(3, 2).t())


def test_room_for_the_entries_of_a_row() -> None:
    assert most_drawn(100) >= 100 + 8 * 10
