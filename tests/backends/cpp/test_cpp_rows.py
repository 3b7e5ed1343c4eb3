"""The C++ row kernels against float64 within derived bounds, against the torch backend, and against themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from grpo_kernels.backends.cpp_rows import CppRows
from grpo_kernels.backends.interface import Chunk, LogitTransform
from grpo_kernels.backends.torch_rows import TorchRows
from tests.support.cpp_isas import each_isa
from tests.support.row_cases import EXTRAS, FIELDS, PLAIN, assert_same, in_double, make_loss, make_transform, rows, same
from tests.support.row_suite import RowSuite, check_kernels

pytestmark = pytest.mark.usefixtures("cpp_library")

CPU = "cpu"
CPP = CppRows()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# 12 x 24 shapes: of less than a vector, of one, of several and a tail; of less than a tile of sums, one, and two.
NS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33)
VOCABS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 127, 128, 129, 255, 256, 257)
WIDE = (4095, 4096, 4097, 8191, 8192, 8193, 9000)


class TestCpp(RowSuite):
    kernels = CPP
    device = CPU
    vocabs = (50, 300, 4200)


@pytest.mark.parametrize("rounded_to", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n", NS)
def test_every_kernel_on_every_shape(n: int, rounded_to: torch.dtype | None) -> None:
    """Gradients in each dtype."""
    for i, vocab in enumerate(VOCABS):
        check_shape(n, vocab, n + i, rounded_to)


@pytest.mark.parametrize("rounded_to", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("n", [1, 4, 7])
def test_every_kernel_on_wide_rows(n: int, rounded_to: torch.dtype | None) -> None:
    for i, vocab in enumerate(WIDE):
        check_shape(n, vocab, n + i, rounded_to)


def check_shape(n: int, vocab: int, kind: int, rounded_to: torch.dtype | None) -> None:
    raw, ids = rows(n, vocab, CPU)
    check_kernels(CPP, raw, ids, make_transform(n, vocab, kind, rounded_to, CPU), kind, DTYPES[kind % 3])


def outcomes(raw: Tensor, ids: Tensor, transform: LogitTransform, kind: int = 3) -> dict[str, Tensor]:
    """All that the kernels give for `raw` (n, V); gradients in fp32 or fp64, in place and not."""
    wide = raw.double() if raw.dtype == torch.float64 else raw.float()
    generator = torch.Generator().manual_seed(kind)
    a, b = torch.randn(2, len(ids), generator=generator, dtype=wide.dtype)
    stats = CPP.stats(Chunk(raw, ids, transform), entropy=True, extras=EXTRAS)
    with torch.random.fork_rng():
        torch.manual_seed(kind)
        loss = make_loss(stats.logps.nan_to_num(), kind)
    found = {"d": torch.empty_like(wide), "d entropy": torch.empty_like(wide), "in place": raw.clone()}
    CPP.grad(Chunk(raw, ids, transform), stats, a, None, found["d"])
    CPP.grad(Chunk(raw, ids, transform), stats, a, b, found["d entropy"])
    CPP.grad(Chunk(found["in place"], ids, transform), stats, a, b, found["in place"])
    fused = CPP.fused(Chunk(raw, ids, transform), loss, found.setdefault("d fused", torch.empty_like(wide)))
    assert_same(fused, stats, nan=True)
    found |= {field: getattr(stats, field) for field in FIELDS}
    return found | stats.extras | fused.terms


@pytest.mark.parametrize("rounded_to", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_16_bits_are_those_numbers(dtype: torch.dtype, rounded_to: torch.dtype | None) -> None:
    """The results are those of the same numbers in fp32, bit for bit; in place they are rounded."""
    for vocab in (1, 5, 31, 32, 33, 65, 300, 4097):
        for kind in range(4):
            raw, ids = rows(5, vocab, CPU)
            raw, transform = raw.to(dtype), make_transform(5, vocab, kind, rounded_to, CPU)
            got, want = outcomes(raw, ids, transform, kind), outcomes(raw.float(), ids, transform, kind)
            for name, x in want.items():
                assert same(got[name], x.to(dtype) if name == "in place" else x), (vocab, kind, name)


def test_float64_rows() -> None:
    """Computed in float64 throughout: the torch backend's numbers."""
    for vocab in (1, 2, 5, 16, 31, 33, 65, 300, 4097, 9000):
        for kind in range(4):
            raw, ids = rows(5, vocab, CPU)
            raw, transform = raw.double(), in_double(make_transform(5, vocab, kind, None, CPU))
            raw[1] *= 20
            raw[2, : vocab // 2] = -torch.inf
            a, b = torch.randn(2, 5, dtype=torch.float64)
            z, d = raw.clone(), torch.empty_like(raw)
            TorchRows().prepare_(z, transform)
            want = TorchRows().stats(Chunk(z, ids, transform), entropy=True, extras=EXTRAS)
            stats = CPP.stats(Chunk(raw, ids, transform), entropy=True, extras=EXTRAS)
            for name in FIELDS:
                assert_close(getattr(stats, name), getattr(want, name))
            for name in EXTRAS:
                assert_close(stats.extras[name], want.extras[name])
            for coefficient in (None, b):
                z_again = z.clone()
                CPP.grad(Chunk(raw, ids, transform), stats, a, coefficient, d)
                TorchRows().grad(Chunk(z_again, ids, transform), want, a, coefficient, z_again)
                assert_close(d, z_again)


def assert_close(x: Tensor, y: Tensor) -> None:
    torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)


def test_ids_that_do_not_exist() -> None:
    """Their log-probability is NaN, all else is the row's; they have no gradient of their own."""
    for vocab in (1, 40, 4097):
        raw = torch.randn(1, vocab).repeat(6, 1)
        ids = torch.tensor([-1, vocab, -(2**62), 2**62, 2**32, 0])
        stats = CPP.stats(Chunk(raw, ids, PLAIN), entropy=True, extras=EXTRAS)
        assert stats.logps.isnan().tolist() == [True] * 5 + [False]
        assert not stats.extras["is_top1"][:5].any()
        for x in (stats.max_logit, stats.log_sum, stats.entropies, stats.extras["mean_logits"]):
            assert x is not None
            assert x.unique().numel() == 1
        a, p = torch.ones(6), torch.softmax(raw, 1)
        wide = torch.full((6, vocab + 2), 77.0)
        out = wide[:, 1:-1]
        for first_id in (0, 1, -vocab):
            CPP.grad(Chunk(raw, ids, PLAIN, first_id), stats, a, None, out)
            elsewhere = torch.tensor([not 0 <= i - first_id < vocab for i in ids.tolist()])
            torch.testing.assert_close(out[elsewhere], -p[elsewhere])
            assert (wide[:, [0, -1]] == 77).all()


def many_outcomes() -> Iterator[tuple[str, Callable[[], dict[str, Tensor]]]]:
    """Rows of every dtype, kind and rounding; some with infinities, NaN, ties and logits far apart."""
    for kind in range(12):
        for dtype in (*DTYPES, torch.float64):
            for vocab in (1, 7, 33, 100, 4133):
                raw, ids = rows(9, vocab, CPU)
                raw[1, vocab // 2 :] = -torch.inf
                raw[2, vocab // 3] = torch.inf
                raw[3, vocab // 2] = torch.nan
                raw[4:6] *= torch.tensor([[1e4], [1e-4]])
                raw[6] = raw[6].round()
                raw[7, -1] += 50
                transform = make_transform(
                    9, vocab, kind, None if dtype == torch.float64 else (None, *DTYPES[1:])[kind % 3]
                )
                transform = in_double(transform) if dtype == torch.float64 else transform
                raw = raw.to(dtype)
                yield f"{kind} {dtype} {vocab}", lambda r=raw, i=ids, t=transform, k=kind: outcomes(r, i, t, k)


def test_every_instruction_set_gives_the_same_bits() -> None:
    for name, run in many_outcomes():
        first, *others = each_isa(run)
        for isa, found in others:
            for field, x in found.items():
                assert same(x, first[1][field]), f"{name} {isa}: {field}"


def test_unknown_instruction_sets_are_refused() -> None:
    before = torch.ops.grpo_kernels_cpp.isa("")
    with pytest.raises(RuntimeError, match="isa: this processor has no 'mmx'"):
        torch.ops.grpo_kernels_cpp.isa("mmx")
    assert torch.ops.grpo_kernels_cpp.isa("") == before


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_any_number_of_threads_gives_the_same_bits(dtype: torch.dtype) -> None:
    """Enough logits for each thread to have some."""
    for n, vocab in ((40, 9000), (3, 200_000), (5000, 65)):
        raw, ids = rows(n, vocab, CPU)
        transform = make_transform(n, vocab, 3, None, CPU)
        transform = in_double(transform) if dtype == torch.float64 else transform
        want = outcomes(raw.to(dtype), ids, transform)
        for threads in (2, 4):
            torch.set_num_threads(threads)
            for field, x in outcomes(raw.to(dtype), ids, transform).items():
                assert same(x, want[field]), f"{threads} threads: {field}"
        torch.set_num_threads(1)
