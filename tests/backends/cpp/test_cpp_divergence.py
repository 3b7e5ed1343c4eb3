"""The C++ row kernels' divergences from a teacher: in float and double, with every instruction set, on any threads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grpo_kernels.backends.cpp_rows import CppRows
from grpo_kernels.backends.interface import Chunk, LogitTransform, Teacher
from grpo_kernels.backends.torch_rows import TorchRows
from tests.support.cpp_isas import each_isa
from tests.support.divergence_suite import DivergenceSuite, FusedDivergenceSuite, each_beta, full_loss
from tests.support.row_cases import PLAIN, in_double, make_transform, rows, same

pytestmark = pytest.mark.usefixtures("cpp_library")

CPU = "cpu"
CPP = CppRows()
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class TestFloat(FusedDivergenceSuite):
    device = CPU

    def backend(self) -> CppRows:
        return CPP


class TestDouble(TestFloat):
    dtype = torch.float64


class InTorch(DivergenceSuite):
    device = CPU
    dtype = torch.float64

    def backend(self) -> TorchRows:
        return TorchRows()


def outcomes(chunk: Chunk) -> dict[str, Tensor]:
    """All that the kernels give for a chunk with a teacher."""
    wide = torch.float64 if chunk.logits.dtype == torch.float64 else torch.float32
    generator = torch.Generator().manual_seed(5)
    a, b, c = torch.randn(3, len(chunk.ids), generator=generator, dtype=wide)
    stats = TestFloat().stats(chunk)
    assert stats.divergence is not None
    d, d_fused = (torch.empty_like(chunk.logits, dtype=wide) for _ in range(2))
    CPP.grad(chunk, stats, a, b, d, c)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        fused = CPP.fused(chunk, full_loss(stats.logps.nan_to_num(neginf=-9.0), 0), d_fused)
    return {**stats.divergence._asdict(), **fused.terms, "d": d, "d fused": d_fused}


def chunk_of(n: int, vocab: int, beta: float, dtype: torch.dtype, kind: int) -> Chunk:
    """Rows as they come, and in the first of them infinities, NaN, the same and far apart."""
    (raw, ids), (other, _) = rows(n, vocab, CPU), rows(n, vocab, CPU)
    if n > 6:
        raw[1, vocab // 2 :], other[1, vocab // 3 :] = -torch.inf, -torch.inf
        raw[2, vocab // 3], other[3, 0] = torch.inf, torch.nan
        other[4] = raw[4]
        raw[5] *= 1e4
        other[6] = raw[6] + 1e-4 * other[6]
    transform, others = (make_transform(n, vocab, i, None, CPU) for i in (kind, kind // 4))
    if dtype == torch.float64:
        transform, others = in_double(transform), in_double(others)
    return Chunk(raw.to(dtype), ids, transform, teacher=Teacher(other.to(dtype), others, beta))


@each_beta
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_instruction_set_gives_the_same_bits(dtype: torch.dtype, beta: float) -> None:
    for kind, vocab in enumerate((1, 7, 33, 100, 4133)):
        for plain in (True, False):
            chunk = chunk_of(9, vocab, beta, dtype, 0 if plain else kind + 5)
            first, *others = each_isa(lambda some=chunk: outcomes(some))
            for isa, found in others:
                for field, x in found.items():
                    assert same(x, first[1][field]), f"{kind} {vocab} {isa}: {field}"


@each_beta
def test_any_number_of_threads_gives_the_same_bits(beta: float) -> None:
    for n, vocab in ((12, 9000), (2, 70_000), (900, 65)):
        chunk = chunk_of(n, vocab, beta, torch.float32, 3)
        want = outcomes(chunk)
        torch.set_num_threads(4)
        for field, x in outcomes(chunk).items():
            assert same(x, want[field]), field
        torch.set_num_threads(1)


@each_beta
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_of_16_bits_are_those_numbers(dtype: torch.dtype, beta: float) -> None:
    """Of either head, or of both."""
    for vocab in (1, 31, 33, 300):
        chunk = chunk_of(8, vocab, beta, dtype, 3)
        assert chunk.teacher is not None
        wide = replace(chunk.teacher, logits=chunk.teacher.logits.float())
        want = outcomes(replace(chunk, logits=chunk.logits.float(), teacher=wide))
        for some in (chunk, replace(chunk, teacher=wide), replace(chunk, logits=chunk.logits.float())):
            for field, x in outcomes(some).items():
                assert same(x, want[field]), field


@each_beta
def test_float64_rows(beta: float) -> None:
    """Computed in float64 throughout: the torch backend's numbers, however near the teacher."""
    suites = TestDouble(), InTorch()
    for vocab in (1, 16, 33, 300, 4097):
        raw = 3 * torch.randn(6, vocab, dtype=torch.float64)
        sizes = torch.tensor([1e-8, 1e-6, 1e-4, 1e-2, 1.0, 10.0], dtype=torch.float64)[:, None]
        other, ids = raw + sizes * torch.randn_like(raw), torch.randint(vocab, (6,))
        factors = torch.randn(3, 6, dtype=torch.float64)
        two = PLAIN, LogitTransform(scale=0.7) if vocab == 33 else PLAIN
        chunks = [suite.chunk(raw, other, beta, ids, two) for suite in suites]
        found, want = (suite.stats(chunk) for suite, chunk in zip(suites, chunks, strict=True))
        assert found.divergence is not None
        assert want.divergence is not None
        torch.testing.assert_close(found.divergence.value, want.divergence.value, rtol=1e-9, atol=1e-25)
        torch.testing.assert_close(found.divergence.sum_k, want.divergence.sum_k, rtol=1e-9, atol=1e-13)
        got, wanted = (
            suite.grad(chunk, stats, *factors)
            for suite, chunk, stats in zip(suites, chunks, (found, want), strict=True)
        )
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-13)
