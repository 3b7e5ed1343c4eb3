"""The tests that every row backend's divergences from a reference pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grpo_kernels.backends import Chunk, Coefficients, LogitTransform, RowBackend, RowStats
from grpo_kernels.base.tensors import take
from tests.support.row_cases import (
    DEVICE,
    PLAIN,
    assert_same,
    in_double,
    make_transform,
    prepared,
    same,
    statistics,
)
from tests.support.row_truth import U, check, divergence, gradient, truth

INF, NAN = math.inf, math.nan
BETAS = (0.0, 1.0, 0.5, 0.1, 0.9)  # forward, reverse, and between
Two = tuple[LogitTransform, LogitTransform]  # of the student, of the reference
PLAINS = (PLAIN, PLAIN)


class DivergenceSuite:
    """Rows of `kernels` are of `dtype`, on `device`."""

    kernels: RowBackend
    device = DEVICE
    dtype = torch.float32
    betas: Sequence[float] = BETAS
    vocabs: Sequence[int] = (1, 2, 15, 16, 17, 127, 4097)
    wide = 300  # of the tests that need one size
    # rows that have the same bits in a batch of their own
    subsets: Sequence[Sequence[int]] = ((17, 3, 4),)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Every test that takes one, for each of `betas`."""
        if "beta" in metafunc.fixturenames:
            metafunc.parametrize("beta", self.betas)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def ids(self, n: int, vocab: int) -> Tensor:
        return torch.randint(vocab, (n,), device=self.device)

    def transforms(
        self, n: int, vocab: int, kinds: Sequence[int], rounded_to: torch.dtype | None = None
    ) -> Two:
        """Two of those of `make_transform`; rows of float64 are not rounded."""
        dtype = None if self.dtype == torch.float64 else rounded_to
        first, second = (make_transform(n, vocab, kind, dtype, self.device) for kind in kinds)
        return first, second

    def chunk(
        self, raw: Tensor, other: Tensor, beta: float, ids: Tensor | None = None, two: Two = PLAINS
    ) -> Chunk:
        """Copies of the raw logits of both heads (n, V), prepared."""
        raw, other = raw.to(self.device, self.dtype), other.to(self.device, self.dtype)
        if self.dtype == torch.float64:
            two = in_double(two[0]), in_double(two[1])
        ids = torch.zeros(len(raw), dtype=torch.int64, device=self.device) if ids is None else ids
        pair = Chunk(raw, ids, two[0], Chunk(other, ids, two[1]), beta)
        return prepared(self.kernels, pair)

    def stats(self, chunk: Chunk) -> RowStats:
        return statistics(self.kernels, chunk, ())

    def grad(
        self, chunk: Chunk, stats: RowStats, *factors: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        """The gradient (n, V); the chunk stays."""
        (a, b, c), logits = factors, chunk.logits.clone()
        out = torch.empty_like(logits) if out is None else out
        self.kernels.grad(replace(chunk, logits=logits), stats, Coefficients(a, b, c), out)
        return out

    def gradient_of_divergence(self, chunk: Chunk, stats: RowStats) -> Tensor:
        one = torch.ones_like(stats.logps)
        return self.grad(chunk, stats, 0 * one, None, one)

    def check_rows(
        self,
        raw: Tensor,
        other: Tensor,
        beta: float,
        two: Two = PLAINS,
        used: Sequence[str] = ("abc", "c"),
    ) -> None:
        """Values against float64, and gradients of which the coefficients in `used` are there."""
        ids = self.ids(*raw.shape)
        chunk = self.chunk(raw, other, beta, ids, two)
        student, reference = truth(raw, ids, two[0]), truth(other, torch.zeros_like(ids), two[1])
        want, stats = divergence(student, reference, beta), self.stats(chunk)
        name = f"{tuple(raw.shape)} {beta}"
        check(f"{name}: value", stats.divergence.value, want.value, want.bound)
        a, b, c = self.randn(3, len(ids))
        for names in used:
            of_b = b if "b" in names else None
            factors = a * ("a" in names), of_b, c * ("c" in names)
            of_others, bound = gradient(student, ids, *factors[:2])
            want_all = of_others + factors[2][:, None] * want.gradient
            allowed = bound + factors[2].abs()[:, None] * want.gradient_bound
            if "c" in names:
                allowed += 4 * U * (of_others.abs() + want_all.abs())
            found = self.grad(chunk, stats, *factors)
            check(f"{name}: d raw", found, want_all, allowed)
            over = replace(chunk, logits=chunk.logits.clone())
            self.kernels.grad(over, stats, Coefficients(*factors), over.logits)
            assert same(over.logits, found), f"{name}: in place"

    @pytest.mark.parametrize("rounded_to", [None, torch.bfloat16], ids=str)
    def test_values_and_gradients(self, beta: float, rounded_to: torch.dtype | None) -> None:
        """Of rows of every length; biases, soft-caps and temperatures differ between the heads."""
        for kind, vocab in enumerate(self.vocabs):
            raw, other = (3 * torch.randn(4, vocab, device=self.device) for _ in range(2))
            two = self.transforms(4, vocab, (kind + 3, kind + 2 + kind // 4), rounded_to)
            self.check_rows(raw, other, beta, two, ("c", "ac", "abc", "bc", "ab"))

    def test_however_near_the_reference(self, beta: float) -> None:
        """Divergences from 1e-8 to 10 nats, and their gradients, are precise to 1e-4."""
        sizes = torch.logspace(-4.2, 1.3, 12, device=self.device)[:, None]
        raw = 2 * torch.randn(12, self.wide, device=self.device)
        other = raw + sizes * torch.randn(12, self.wide, device=self.device)
        ids = torch.zeros(12, dtype=torch.int64, device=self.device)
        want = divergence(truth(raw, ids, PLAIN), truth(other, ids, PLAIN), beta)
        chunk = self.chunk(raw, other, beta)
        stats = self.stats(chunk)
        assert want.value.min() < 1e-8
        assert want.value.max() > (10 if beta in (0.0, 1.0) else 0.1)
        check("value", stats.divergence.value, want.value, 1e-4 * want.value.clamp(min=1e-8))
        found, size = self.gradient_of_divergence(chunk, stats).double(), want.gradient.norm(dim=1)
        error = (found - want.gradient).norm(dim=1)
        # far away k and p sum k cancel
        check("gradient", error, torch.zeros_like(size), 1e-4 * size + 1e-6 * want.value)
        self.check_rows(raw, other + 5 * torch.rand(12, 1, device=self.device), beta)

    def test_no_divergence_from_oneself(self, beta: float) -> None:
        """Exactly 0, and so is the gradient, in rows with banned and nearly certain ids too."""
        for vocab in self.vocabs:
            raw = 3 * self.randn(5, vocab)
            raw[1, : vocab // 2] = -INF
            raw[2, -1] += 40.0
            raw[3] *= 1e4
            transforms = [make_transform(5, vocab, kind, None, self.device) for kind in range(4)]
            for transform in transforms:
                chunk = self.chunk(raw, raw, beta, two=(transform, transform))
                stats = self.stats(chunk)
                assert not stats.divergence.value.any()
                assert not stats.divergence.sum_k.any()
                assert not self.gradient_of_divergence(chunk, stats).any()

    @pytest.mark.parametrize(
        ("students", "references", "unmet"),
        [(9, 5, 0.0), (5, 9, 1.0), (9, 9, None), (12, 9, 0.0), (9, 12, 1.0)],
    )
    def test_banned_ids(self, students, references, unmet, beta):
        """Logits of -inf: infinite only where one needs what the other bans; never NaN."""
        raw, other = 2 * self.randn(4, self.wide), 2 * self.randn(4, self.wide)
        raw[:, 5:students], other[:, 5:references] = -INF, -INF
        if beta != unmet:
            self.check_rows(raw, other, beta)
            return
        chunk = self.chunk(raw, other, beta)
        stats = self.stats(chunk)
        assert (stats.divergence.value == INF).all()

    @pytest.mark.parametrize("share", [1e-12, 1.0 - 1e-12])
    def test_a_mixture_with_hardly_anything_of_one_is_finite(self, share: float) -> None:
        raw, other = 30 * self.randn(4, self.wide), 30 * self.randn(4, self.wide)
        raw[0, 5:9], other[1, 5:9] = -INF, -INF
        chunk = self.chunk(raw, other, share)
        stats = self.stats(chunk)
        assert torch.isfinite(stats.divergence.value).all()
        assert torch.isfinite(self.gradient_of_divergence(chunk, stats)).all()

    def test_certain_tokens(self, beta: float) -> None:
        """A token whose probability is 1 in float32: of one head, of both, the same and another."""
        raw, other = self.randn(4, self.wide), self.randn(4, self.wide)
        raw[:3, 7] += 200.0
        other[1:, 7] += 200.0
        other[2] = other[2].roll(1)
        self.check_rows(raw, other, beta)

    def test_no_numbers(self, beta: float) -> None:
        """NaN and inf in either head, or only -inf: all results are NaN, in that row alone."""
        for vocab in (1, self.vocabs[-2], self.wide):
            clean, other_clean = 2 * self.randn(9, vocab), 2 * self.randn(9, vocab)
            raw, other = clean.clone(), other_clean.clone()
            for x, row in ((raw, 1), (other, 4)):
                x[row, vocab // 2], x[row + 1, vocab - 1], x[row + 2] = NAN, INF, -INF
            raw[7], other[7] = -INF, -INF
            lost = torch.tensor([0, 1, 1, 1, 1, 1, 1, 1, 0], device=self.device, dtype=torch.bool)
            chunk = self.chunk(raw, other, beta)
            clean_chunk = self.chunk(clean, other_clean, beta)
            stats, want = self.stats(chunk), self.stats(clean_chunk)
            for x, y in zip(stats.divergence[:2], want.divergence[:2], strict=True):
                assert torch.equal(x.isnan(), lost)
                assert same(x[~lost], y[~lost])
            d = self.gradient_of_divergence(chunk, stats)
            want_d = self.gradient_of_divergence(clean_chunk, want)
            assert torch.equal(d.isnan().any(1), lost)
            assert same(d[~lost], want_d[~lost])

    def test_bits_of_a_row_are_its_own(self, beta: float) -> None:
        """In a batch, permuted, among others, and of fused kernels alone too."""
        for vocab in (self.vocabs[-2], self.wide):
            raw, other = 3 * self.randn(20, vocab), 3 * self.randn(20, vocab)
            ids = self.ids(20, vocab)
            a, b, c = self.randn(3, 20)
            chunk = self.chunk(raw, other, beta, ids)
            stats = self.stats(chunk)
            d = self.grad(chunk, stats, a, b, c)
            for index in (torch.randperm(20), *map(torch.tensor, self.subsets)):
                rows = index.to(self.device)
                part = self.chunk(raw[rows], other[rows], beta, ids[rows])
                found = self.stats(part)
                assert_same(found, take(stats, rows))
                assert same(self.grad(part, found, a[rows], b[rows], c[rows]), d[rows])

    def test_where_gradients_are_written(self, beta: float) -> None:
        """Over the logits, or elsewhere, of 16 bits too; the reference's logits are left alone."""
        n, vocab = 4, self.wide + 1
        raw, other, ids = self.randn(n, vocab), self.randn(n, vocab), self.ids(n, vocab)
        chunk = self.chunk(raw, other, beta, ids, self.transforms(n, vocab, (3, 2)))
        stats, (a, b, c) = self.stats(chunk), self.randn(3, n)
        references, want = chunk.reference.logits.clone(), self.grad(chunk, stats, a, b, c)
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        for dtype in dtypes if self.dtype == torch.float32 else (self.dtype,):
            wide = torch.full((n, vocab + 9), 77.0, dtype=dtype, device=self.device)
            self.grad(chunk, stats, a, b, c, out=wide[:, 3:-6])
            assert torch.equal(wide[:, 3:-6], want.to(dtype))
            assert (wide[:, :3] == 77).all()
            assert (wide[:, -6:] == 77).all()
        self.kernels.grad(chunk, stats, Coefficients(a, b, c), chunk.logits)
        assert torch.equal(chunk.logits, want)
        assert torch.equal(chunk.reference.logits, references)

    def test_parts_of_a_vocabulary(self, beta: float) -> None:
        """Divergences of the columns' parts add up; gradients of parts are those of the whole."""
        raw, other = 3 * self.randn(6, self.wide), 3 * self.randn(6, self.wide)
        ids = self.ids(6, self.wide)
        whole = self.chunk(raw, other, beta, ids)
        stats, (a, b, c) = self.stats(whole), self.randn(3, 6)
        known = stats.divergence
        reference = RowStats(
            known.value, known.reference_max_logit, known.reference_log_sum
        )  # the last two count
        parts = []
        for start, stop in ((0, 1), (1, 100), (100, self.wide)):
            chunk = self.chunk(raw[:, start:stop], other[:, start:stop], beta, ids)
            parts.append(replace(chunk, ids=chunk.ids - start))
        found = [self.kernels.diverge(part, stats, reference) for part in parts]
        for i, want in enumerate(known[:2]):
            total = torch.stack([x[i] for x in found]).sum(0)
            torch.testing.assert_close(total, want, rtol=1e-5, atol=1e-6)
        d = torch.cat([self.grad(part, stats, a, b, c) for part in parts], 1)
        torch.testing.assert_close(d, self.grad(whole, stats, a, b, c), rtol=1e-6, atol=1e-9)
