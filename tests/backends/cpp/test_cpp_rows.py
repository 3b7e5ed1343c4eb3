"""The C++ row kernels against float64 within derived bounds, torch, and themselves; arguments that
would have them read or write elsewhere; surrogates alone, on rows of two logits; random rows.

GRPO_KERNELS_RANDOM_FACTOR multiplies the 200 random cases, in which a step too far is seen; the
seed that a failure shows replays it."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from grpo_kernels.backends import (
    Chunk,
    Coefficients,
    DivergenceStats,
    FusedLoss,
    LogitTransform,
    RowStats,
)
from grpo_kernels.backends.cpp_rows import CppRows
from tests.support.divergence_suite import BETAS, DivergenceSuite
from tests.support.row_cases import (
    EXTRAS,
    PLAIN,
    assert_same,
    full_loss,
    in_double,
    instruction_sets,
    make_loss,
    make_transform,
    rows,
    same,
    statistics,
    tensors_of,
)
from tests.support.row_suite import RowSuite, SpecialSuite, check_kernels
from tests.support.row_truth import U, check, loss_stats
from tests.support.surrogate_suite import EACH, NAN, SurrogateSuite

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("cpp_library")]

CPU = "cpu"
CPP = CppRows()
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ROUNDINGS = (None, torch.bfloat16, torch.float16)
each_pair = pytest.mark.parametrize("beta", [None, *BETAS])  # without a reference, and with one


class TestCpp(RowSuite):
    kernels = CPP
    device = CPU
    vocabs = (50, 300, 4200)


class TestSpecial(SpecialSuite):
    kernels = CPP
    device = CPU
    block = 32
    vocabs = (3, 8, 16, 17, 31, 32, 33, 50, 65, 300)
    infinity_is_nan = True


class TestSpecialDouble(TestSpecial):
    dtype = torch.float64


class TestSpecialWide(TestSpecial):
    """Rows of more than one tile."""

    block = 4096
    vocabs = (4097, 8200)


class TestDivergence(DivergenceSuite):
    device = CPU
    kernels = CPP
    subsets = (*DivergenceSuite.subsets, (0,), (6,))

    def test_fused_is_one_after_the_other(self, beta: float) -> None:
        """The bits of `stats` and `diverge`, the loss, and the gradient of `grad`."""
        # each surrogate with one of `betas`
        for kind in range(self.betas.index(beta), 7, len(self.betas)):
            n, vocab = 5, (self.wide, self.vocabs[kind % len(self.vocabs)])[kind % 2]
            raw, other, ids = self.randn(n, vocab), self.randn(n, vocab), self.ids(n, vocab)
            chunk = self.chunk(raw, other, beta, ids, self.transforms(n, vocab, (kind, kind + 3)))
            want, out = self.stats(chunk), torch.empty_like(chunk.logits)
            loss = full_loss(want.logps, kind)
            assert_same(self.kernels.fused(chunk, loss, None), want)
            found = self.kernels.fused(chunk, loss, out)
            assert_same(found, want)
            assert set(found.loss_stats) == {"loss", "d_logp", "log_ratio", "kl"}
            assert same(found.loss_stats["kl"], want.divergence.value)
            terms = loss_stats(loss, found.logps, found.loss_stats["log_ratio"])
            added = loss.beta * loss.weights.double() * want.divergence.value
            policy, size = terms["loss"]
            check("loss", found.loss_stats["loss"], policy + added, 8 * U * (size + added))
            check(
                "d_logp", found.loss_stats["d_logp"], terms["d_logp"][0], 8 * U * terms["d_logp"][1]
            )
            b, c = torch.full_like(loss.weights, loss.d_entropy), loss.beta * loss.weights
            d = self.grad(chunk, want, found.loss_stats["d_logp"], b if loss.d_entropy else None, c)
            assert torch.equal(out, d)
            self.kernels.fused(chunk, loss, chunk.logits)
            assert torch.equal(chunk.logits, out)


class TestDivergenceDouble(TestDivergence):
    dtype = torch.float64


def chunk_of(
    n: int,
    vocab: int,
    kind: int,
    dtype: torch.dtype,
    beta: float | None,
    rounded_to: torch.dtype | None = None,
) -> Chunk:
    """Rows of transform number `kind`, and if there is a `beta` a reference with another."""
    raw, ids = rows(n, vocab, CPU)
    two = [make_transform(n, vocab, i, rounded_to, CPU) for i in (kind, kind // 4)]
    if dtype == torch.float64:
        two = [in_double(replace(transform, rounded_to=None)) for transform in two]
    other = 3 * torch.randn(n, vocab)
    # infinities, NaN, ties, logits far apart; heads that are equal, near one another and far apart
    if n > 8:
        raw[1, vocab // 2 :], other[1, vocab // 3 :] = -torch.inf, -torch.inf
        raw[2, vocab // 3], raw[3, vocab // 2], other[8, 0] = torch.inf, torch.nan, torch.nan
        raw[4:6] *= torch.tensor([[1e4], [1e-4]])
        raw[6], raw[7, -1] = raw[6].round(), raw[7, -1] + 50
        other[5], other[6] = raw[5], raw[6] + 1e-4 * other[6]
    chunk = Chunk(raw.to(dtype), ids, two[0])
    if beta is None:
        return chunk
    return replace(chunk, reference=Chunk(other.to(dtype), ids, two[1]), jsd_beta=beta)


def outcomes(chunk: Chunk, kind: int = 3) -> dict[str, Tensor]:
    """All that the kernels give for `chunk`; gradients in fp32 or fp64, in place and not."""
    wide = torch.promote_types(chunk.logits.dtype, torch.float32)
    stats, make = statistics(CPP, chunk), make_loss if chunk.reference is None else full_loss
    with torch.random.fork_rng():
        torch.manual_seed(kind)
        a, b, c = torch.randn(3, len(chunk.ids), dtype=wide)
        loss = make(stats.logps.nan_to_num(neginf=-9.0), kind)
    c = None if chunk.reference is None else c
    names = ("d", "d entropy", "d fused")
    found = {"in place": chunk.logits.clone()} | {
        name: torch.empty_like(chunk.logits, dtype=wide) for name in names
    }
    CPP.grad(chunk, stats, Coefficients(a, None, c), found["d"])
    CPP.grad(chunk, stats, Coefficients(a, b, c), found["d entropy"])
    in_place = replace(chunk, logits=found["in place"])
    CPP.grad(in_place, stats, Coefficients(a, b, c), found["in place"])
    fused = CPP.fused(chunk, loss, found["d fused"])
    assert_same(fused, stats, nan=True)
    return found | tensors_of(stats) | fused.loss_stats


def assert_all_same(got: dict[str, Tensor], want: dict[str, Tensor], name: object) -> None:
    assert got.keys() == want.keys()
    for field, x in got.items():
        assert same(x, want[field]), f"{name}: {field}"


@pytest.mark.slow
@each_pair
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_instruction_set_gives_the_same_bits(dtype: torch.dtype, beta: float | None) -> None:
    for kind in range(12) if beta is None else (0, 6, 11):
        for vocab in (1, 7, 33, 100, 4133):
            chunk = chunk_of(9, vocab, kind, dtype, beta, ROUNDINGS[kind % 3])
            want = outcomes(chunk, kind)
            for isa in instruction_sets():
                assert_all_same(outcomes(chunk, kind), want, f"{kind} {vocab} {isa}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "beta"),
    [*((dtype, None) for dtype in DTYPES), *((torch.float32, beta) for beta in BETAS)],
    ids=str,
)
def test_any_number_of_threads_gives_the_same_bits(dtype: torch.dtype, beta: float | None) -> None:
    """Enough logits for each thread to have some."""
    for n, vocab in ((12, 9000), (4, 33_000), (2100, 65)):
        chunk = chunk_of(n, vocab, 3, dtype, beta)
        want = outcomes(chunk)
        for threads in (2, 4):
            torch.set_num_threads(threads)
            assert_all_same(outcomes(chunk), want, f"{threads} threads")
        torch.set_num_threads(1)


N, V = 4, 33
RAW, IDS = rows(N, V, "cpu")
TURNED, SHORT = RAW.T.contiguous().T, torch.zeros(V - 1)
STATS: list[tuple[str, dict[str, Any]]] = [
    (r"ids: expected contiguous \(4,\)", {"ids": IDS[:-1]}),
    ("ids: expected contiguous", {"ids": IDS.repeat_interleave(2)[::2]}),
    (r"expected scalar type \S*Long", {"ids": IDS.int()}),
    ("expected float32, float64, bfloat16 or float16", {"logits": IDS[:, None].repeat(1, V)}),
    ("logits: expected contiguous rows", {"logits": TURNED}),
    (r"bias: expected contiguous \(33,\)", {"bias": SHORT}),
    (r"expected scalar type \S*Float", {"bias": torch.zeros(V).double()}),
    ("inv_temperatures: expected", {"inv_temperature": torch.ones(N + 1, 1)}),
    ("rounded_to: expected a dtype of 16 bits", {"rounded_to": torch.float32}),
]
REFERENCES: list[tuple[str, dict[str, Any]]] = [
    (r"reference_logits: expected \(4, 33\)", {"logits": RAW[:, :-1]}),
    ("reference_logits: expected contiguous rows", {"logits": TURNED}),
    ("reference_logits: float64 goes with float64 alone", {"logits": RAW.double()}),
    ("reference_bias: expected", {"bias": SHORT}),
    ("reference_inv_temperatures: expected", {"inv_temperature": torch.ones(N + 1, 1)}),
    (r"jsd_beta: expected a number in \[0, 1\], got nan", {"beta": float("nan")}),
]


@pytest.mark.parametrize(("message", "given"), STATS, ids=[x[0][:20] for x in STATS])
def test_rows_are_refused(message: str, given: dict[str, Any]) -> None:
    logits, ids, *_ = ({"logits": RAW, "ids": IDS} | given).values()
    transform = {name: x for name, x in given.items() if name not in ("logits", "ids")}
    with pytest.raises(RuntimeError, match=message):
        CPP.stats(Chunk(logits, ids, LogitTransform(**transform)), entropy=False)


def two_heads(logits: Tensor = RAW, beta: float = 0.5, **transform: Any) -> Chunk:
    return Chunk(RAW, IDS, PLAIN, Chunk(logits, IDS, LogitTransform(**transform)), beta)


@pytest.mark.parametrize(("message", "given"), REFERENCES, ids=[x[0][10:30] for x in REFERENCES])
def test_references_are_refused(message: str, given: dict[str, Any]) -> None:
    stats = CPP.stats(Chunk(RAW, IDS, PLAIN), entropy=False)
    with pytest.raises(RuntimeError, match=message):
        CPP.diverge(two_heads(**given), stats, stats)


def test_gradients_and_losses_are_refused() -> None:
    plain, two, out = Chunk(RAW, IDS, PLAIN), two_heads(RAW.flip(0)), torch.empty_like(RAW)
    stats = CPP.stats(plain, entropy=False)
    a, found = stats.logps, CPP.diverge(two, stats, stats)
    full = replace(stats, divergence=DivergenceStats(*found, stats.max_logit, stats.log_sum))
    wrong = torch.empty(N, V + 1), torch.empty(N, V, dtype=torch.float64), torch.empty(V, N).T
    for message, call in (
        *(("out: ", lambda x=x: CPP.grad(plain, stats, Coefficients(a), x)) for x in wrong),
        ("entropies: expected with d_en", lambda: CPP.grad(plain, stats, Coefficients(a, a), out)),
        ("d_logp: expected", lambda: CPP.grad(plain, stats, Coefficients(a[:2]), out)),
        ("reference_logits: expected", lambda: CPP.diverge(plain, full, full)),
        ("sum_k, reference_max.*: e", lambda: CPP.grad(two, stats, Coefficients(a, None, a), out)),
        ("kl: expected", lambda: CPP.fused(plain, full_loss(a, 0), out)),
        ("estimator: expected none with a", lambda: CPP.fused(two, make_loss(a, 1), out)),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=message):
            call()


class TestCppSurrogates(SurrogateSuite):
    kernels = CPP
    device = CPU
    units: ClassVar = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}

    def test_no_log_probability(self) -> None:
        """NaN in loss and derivative, also where neither would need it."""
        logps, old = torch.tensor([NAN, -1.0]), torch.zeros(2)
        for name, constants in EACH:
            terms = self.fused(logps, surrogate=name, constants=constants, old=old).loss_stats
            for x in (terms["loss"], terms["d_logp"]):
                assert x.isnan().tolist() == [True, False]


def test_a_formula_that_the_header_lacks_is_no_other_one() -> None:
    """As after a change of formulas.py without ``python csrc/generate.py``."""
    for changes in ({"surrogate": "novel"}, {"kl_estimator": "k9"}):
        with pytest.raises(RuntimeError, match=r"formulas\.h: expected it to have '(novel|k9)'"):
            TestCppSurrogates().fused(torch.zeros(3), **changes)


FACTOR = int(os.environ.get("GRPO_KERNELS_RANDOM_FACTOR", "1"))
UNTOUCHED = 77.0


@pytest.mark.parametrize("block", range(4 * FACTOR))
def test_random_rows(block: int) -> None:
    for seed in range(block * 50, (block + 1) * 50):
        check_random(seed)


def check_random(seed: int) -> None:
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
    for x in (fused.logps, *stats.extras.values(), *fused.loss_stats.values()):
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
