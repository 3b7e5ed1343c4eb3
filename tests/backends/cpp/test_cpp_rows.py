"""The C++ row kernels against float64 within derived bounds, torch, and themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grpo_kernels.backends.cpp_rows import CppRows
from grpo_kernels.backends.interface import Chunk, Coefficients, ReferenceLogits
from tests.support.divergence_suite import BETAS, DivergenceSuite
from tests.support.row_cases import (
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
from tests.support.row_suite import RowSuite, SpecialSuite
from tests.support.row_truth import U, check, loss_terms

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
            assert set(found.loss_terms) == {"loss", "d_logp", "log_ratio", "kl"}
            assert same(found.loss_terms["kl"], want.divergence.value)
            terms = loss_terms(loss, found.logps, found.loss_terms["log_ratio"])
            added = loss.beta * loss.weights.double() * want.divergence.value
            policy, size = terms["loss"]
            check("loss", found.loss_terms["loss"], policy + added, 8 * U * (size + added))
            check(
                "d_logp", found.loss_terms["d_logp"], terms["d_logp"][0], 8 * U * terms["d_logp"][1]
            )
            b, c = torch.full_like(loss.weights, loss.d_entropy), loss.beta * loss.weights
            d = self.grad(chunk, want, found.loss_terms["d_logp"], b if loss.d_entropy else None, c)
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
    reference = None if beta is None else ReferenceLogits(other.to(dtype), two[1], beta)
    return Chunk(raw.to(dtype), ids, two[0], reference=reference)


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
    return found | tensors_of(stats) | fused.loss_terms


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


@each_pair
@pytest.mark.parametrize("dtype", DTYPES[1:3], ids=str)
def test_rows_of_16_bits_are_those_numbers(dtype: torch.dtype, beta: float | None) -> None:
    """The results are those of the same numbers in fp32, bit for bit; in place they are rounded."""
    for i, vocab in enumerate((1, 5, 31, 32, 33, 65, 300, 4097)):
        for kind in range(4) if beta is None else (i,):
            chunk = chunk_of(9, vocab, kind, dtype, beta, ROUNDINGS[(i + kind) % 3])
            reference = chunk.reference and replace(
                chunk.reference, logits=chunk.reference.logits.float()
            )
            wide = replace(chunk, logits=chunk.logits.float(), reference=reference)
            want = outcomes(wide, kind)
            of_reference = replace(chunk, reference=reference)
            of_student = replace(wide, reference=chunk.reference)
            for mixed in (chunk, of_reference, of_student):
                in_place = want["in place"].to(mixed.logits.dtype)
                assert_all_same(outcomes(mixed, kind), want | {"in place": in_place}, (vocab, kind))


def test_unknown_instruction_sets_are_refused() -> None:
    before = torch.ops.grpo_kernels_cpp.isa("")
    with pytest.raises(RuntimeError, match="isa: this processor has no 'mmx'"):
        torch.ops.grpo_kernels_cpp.isa("mmx")
    assert torch.ops.grpo_kernels_cpp.isa("") == before
