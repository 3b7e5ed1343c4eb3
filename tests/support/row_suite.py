"""The tests that every backend's row kernels pass: against float64, torch, and themselves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from grpo_kernels.backends import Chunk, Coefficients, FusedRowBackend, LogitTransform, RowStats
from grpo_kernels.backends.torch_rows import TorchRows
from grpo_kernels.base.tensors import take
from tests.support.row_cases import (
    DEVICE,
    FIELDS,
    PLAIN,
    assert_same,
    make_loss,
    make_transform,
    prepared,
    rows,
    statistics,
)
from tests.support.row_truth import U, check, check_stats, gradient, loss_stats, rounding, truth

INF, NAN = math.inf, math.nan


def check_kernels(
    kernels: FusedRowBackend,
    raw: Tensor,  # (n, V) fp32
    ids: Tensor,  # (n,)
    transform: LogitTransform,
    kind: int,
    dtype: torch.dtype = torch.float32,  # of the gradients
) -> None:
    """Statistics, gradient and fused loss, number `kind`, of `raw`."""
    chunk, at, name = Chunk(raw, ids, transform), truth(raw, ids, transform), f"{tuple(raw.shape)}"
    in_torch = prepared(TorchRows(), chunk)
    stats, want = statistics(kernels, chunk), statistics(TorchRows(), in_torch)
    check_stats(stats, at)
    for field in FIELDS:
        check(f"{name}: {field}", getattr(stats, field), getattr(want, field), 2 * at.bound[field])
    assert torch.equal(stats.extras["is_top1"], want.extras["is_top1"]), name

    a, b = torch.randn_like(stats.logps), torch.randn_like(stats.logps) if kind % 3 else None
    out, z = torch.empty_like(raw, dtype=dtype), in_torch.logits
    kernels.grad(chunk, stats, Coefficients(a, b), out)
    d, bound = gradient(at, ids, a, b)
    check(f"{name}: d raw", out, d, bound + rounding(d, dtype))
    TorchRows().grad(in_torch, stats, Coefficients(a, b), z)
    # in torch's 1 - tanh^2
    cancelled = 0.0 if transform.softcap is None else 16 * U * (d / at.slope).abs()
    check(f"{name}: d raw of torch", out, z, 2 * bound + cancelled + rounding(d, dtype))

    loss, out = make_loss(stats.logps, kind), torch.empty_like(out)
    fused = kernels.fused(chunk, loss, out)
    assert_same(fused, stats, name)
    assert set(fused.loss_stats) == set(loss.stat_names)
    terms = loss_stats(loss, fused.logps, fused.loss_stats["log_ratio"])
    for term, (of_loss, size) in terms.items():
        of_term = f"{name}: {loss.surrogate} {loss.kl_estimator} {term}"
        check(of_term, fused.loss_stats[term], of_loss, 8 * U * size)
    d, bound = gradient(at, ids, fused.loss_stats["d_logp"], torch.full_like(a, loss.d_entropy))
    check(f"{name}: d raw, fused", out, d, bound + rounding(d, dtype))


class RowSuite:
    """What a row kernel's results may depend on, and where they are written."""

    kernels: FusedRowBackend
    likewise: Sequence[FusedRowBackend] = ()  # have the same bits
    device = DEVICE
    vocabs: Sequence[int] = (50, 300)

    def chunk(self, n: int, vocab: int, kind: int = 0) -> Chunk:
        raw, ids = rows(n, vocab, self.device)
        return Chunk(raw, ids, make_transform(n, vocab, kind, None, self.device))

    def test_bits_of_a_row_are_its_own(self) -> None:
        """Alone, in a batch, permuted, in like kernels, whatever the loss around it."""
        for vocab in self.vocabs:
            chunk, order = self.chunk(40, vocab, 3), torch.randperm(40, device=self.device)
            whole = statistics(self.kernels, chunk)
            loss, out = make_loss(whole.logps, 9), torch.empty_like(chunk.logits)
            assert_same(self.kernels.fused(chunk, loss, out), whole)
            for index in (order, *order[:3].split(1)):
                found = statistics(self.kernels, _part(chunk, index))
                assert_same(found, take(whole, index), f"rows {index}")
            for other in self.likewise:
                found = statistics(other, _part(chunk, order))
                assert_same(found, take(whole, order), "another kernel")
            for _ in range(3):
                assert_same(statistics(self.kernels, chunk), whole, "again")

    def test_entropy_does_not_depend_on_the_target(self) -> None:
        raw = torch.randn(1, 50, device=self.device).repeat(50, 1)
        ids = torch.arange(50, device=self.device)
        stats = self.kernels.stats(Chunk(raw, ids, PLAIN), entropy=True)
        for x in (stats.entropies, stats.log_sum, stats.max_logit):
            assert x.unique().numel() == 1
        without = self.kernels.stats(Chunk(raw, ids, PLAIN), entropy=False)
        assert without.entropies is None
        assert torch.equal(without.logps, stats.logps)

    def test_rows_may_be_strided_and_gradients_overwrite_logits(self) -> None:
        for vocab in self.vocabs:
            chunk = self.chunk(5, vocab, 3)
            raw, (a, b) = chunk.logits, torch.randn(2, 5, device=self.device)
            want, d_raw = statistics(self.kernels, chunk), torch.empty_like(raw)
            self.kernels.grad(chunk, want, Coefficients(a, b), d_raw)
            part = _inside(raw, 3)
            apart = replace(chunk, logits=part)
            assert_same(statistics(self.kernels, apart), want)
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                out = _inside(torch.empty_like(raw, dtype=dtype), 5)
                self.kernels.grad(apart, want, Coefficients(a, b), out)
                assert torch.equal(out, d_raw.to(dtype))
                _assert_untouched_around(out, 5)
                assert torch.equal(part, raw)
            self.kernels.grad(apart, want, Coefficients(a, b), part)
            assert torch.equal(part, d_raw)
            _assert_untouched_around(part, 3)

            loss, out = make_loss(want.logps, 0), torch.empty_like(raw)
            self.kernels.fused(chunk, loss, out)
            assert torch.equal(self.kernels.fused(chunk, loss, None).logps, want.logps)
            self.kernels.fused(chunk, loss, raw)
            assert torch.equal(raw, out)

    def test_gradient_of_a_part_of_the_vocabulary(self) -> None:
        for vocab in self.vocabs:
            chunk, (a, b) = self.chunk(6, vocab), torch.randn(2, 6, device=self.device)
            stats, whole = statistics(self.kernels, chunk), torch.empty_like(chunk.logits)
            parts = torch.empty_like(whole)
            self.kernels.grad(chunk, stats, Coefficients(a, b), whole)
            for start, stop in ((0, 1), (1, 40), (40, vocab)):
                part = Chunk(chunk.logits[:, start:stop], chunk.ids - start, PLAIN)
                self.kernels.grad(part, stats, Coefficients(a, b), parts[:, start:stop])
            assert torch.equal(parts, whole)


def _part(chunk: Chunk, index: Tensor) -> Chunk:
    """The rows at `index`, in that order."""
    inv_t = chunk.transform.inv_temperature
    assert isinstance(inv_t, Tensor)
    transform = replace(chunk.transform, inv_temperature=inv_t[index])
    return Chunk(chunk.logits[index], chunk.ids[index], transform)


def _inside(x: Tensor, left: int) -> Tensor:
    """A copy of `x` (n, V) between columns of 77."""
    wide = torch.full((len(x), left + x.shape[1] + 23), 77.0, dtype=x.dtype, device=x.device)
    wide[:, left : left + x.shape[1]] = x
    return wide[:, left : left + x.shape[1]]


def _assert_untouched_around(x: Tensor, left: int) -> None:
    wide = torch.as_strided(x, (len(x), x.stride(0)), x.stride(), 0)
    assert (wide[:, :left] == 77).all()
    assert (wide[:, left + x.shape[1] :] == 77).all()


class SpecialSuite:
    """Rows whose logits are infinite, no numbers, equal, far apart, or capped."""

    kernels: FusedRowBackend
    device = DEVICE
    dtype = torch.float32  # of the logits
    block = 16  # logits that the kernels take at once
    vocabs: Sequence[int] = (3, 16, 17, 50)
    infinity_is_nan = False  # in `max_logit` of a row of -inf

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=self.dtype)

    def check_row(self, raw: Tensor, ids: list[int], transform: LogitTransform = PLAIN) -> RowStats:
        """Statistics and gradients of one row (V,) for each of `ids`, by the fused kernel too."""
        rows = raw.to(self.device, self.dtype).repeat(len(ids), 1)
        index = torch.tensor(ids, device=self.device)
        chunk, at = Chunk(rows, index, transform), truth(rows, index, transform)
        stats = statistics(self.kernels, chunk)
        check_stats(stats, at)
        a, b = self.randn(2, len(ids))
        out, by_grad = torch.empty_like(rows), torch.empty_like(rows)
        for coefficient in (None, b):
            self.kernels.grad(chunk, stats, Coefficients(a, coefficient), out)
            check("d raw", out, *gradient(at, index, a, coefficient))
        loss = make_loss(stats.logps, 9)
        fused = self.kernels.fused(chunk, loss, out)
        assert_same(fused, stats)
        b = torch.full_like(a, loss.d_entropy)
        self.kernels.grad(chunk, stats, Coefficients(fused.loss_stats["d_logp"], b), by_grad)
        assert torch.equal(out.nan_to_num(), by_grad.nan_to_num())
        return stats

    def test_minus_inf_logits(self) -> None:
        """Their probability and gradient are 0, and logp of such a target is -inf."""
        for vocab in self.vocabs:
            for many in {1, vocab // 2, min(self.block, vocab - 1), vocab - 1}:
                raw = torch.randn(vocab)
                raw[:many] = -INF
                stats = self.check_row(raw, [0, vocab - 1, vocab // 2])
                assert stats.logps[0] == -INF
                if many == vocab - 1:
                    assert stats.logps[1] == 0.0
                    assert (stats.entropies == 0).all()

    @pytest.mark.parametrize("margin", [10.0, 20.0, 40.0, 80.0, 100.0, 1e4, 1e30])
    def test_nearly_certain_tokens(self, margin: float) -> None:
        """log p of the certain one, 1 - p and the entropy keep their precision, however small."""
        raw = torch.randn(40)
        raw[7] += margin
        stats = self.check_row(raw, [7, 0, 39])
        assert stats.extras["is_top1"].tolist() == [True, False, False]
        if margin <= 80:
            assert (stats.entropies > 0).all()
            assert stats.logps[0] < 0

    def test_huge_logits(self) -> None:
        for size in (1e10, 1e30, 1e37):
            raw = torch.tensor([size, -size, 0.0, size, 1.0] * 7)
            self.check_row(raw, [0, 1, 2, 3])
            self.check_row(-raw.abs(), [0, 2, 4])

    def test_ties(self) -> None:
        """Equal logits have equal bits, and the lowest id counts as the largest."""
        for vocab in (1, 2, *self.vocabs):
            stats = self.check_row(torch.full((vocab,), 3.25), [0, vocab // 2, vocab - 1])
            assert stats.logps.unique().numel() == 1
            assert stats.extras["is_top1"].tolist() == [True, vocab // 2 == 0, vocab == 1]
            raw = torch.randn(vocab).clamp(max=1.0)
            raw[[vocab // 3, vocab - 1]] = 2.0
            stats = self.check_row(raw, [vocab // 3, vocab - 1])
            assert stats.logps[0] == stats.logps[1]
            assert stats.extras["is_top1"].tolist() == [True, vocab // 3 == vocab - 1]

    def test_rising_and_falling_logits(self) -> None:
        """A lane that meets a larger logit in every step, or never; phantom lanes at the end."""
        vocab = 12 * self.block + 8
        for slope in (0.5, 5.0, -0.5, -5.0):
            self.check_row(torch.arange(vocab) * slope / self.block, [0, vocab // 2, vocab - 1])

    def test_the_largest_in_any_order(self) -> None:
        """Of four logits that a lane takes at once, and of the next: whichever is the largest."""
        orders = torch.tensor(list(itertools.permutations((0.0, 2.0, 5.0, 30.0))))
        for offset in (-1.0, 20.0):
            raw = torch.cat([orders, orders.flip(0) + offset], 1)
            raw = raw.repeat_interleave(self.block // 4, dim=1)
            raw = (raw + torch.rand_like(raw)).to(self.device, self.dtype)
            ids = torch.randint(raw.shape[1], (len(raw),), device=self.device)
            stats = statistics(self.kernels, Chunk(raw, ids, PLAIN))
            check_stats(stats, truth(raw, ids, PLAIN))
            assert torch.equal(stats.extras["is_top1"], raw.argmax(1) == ids)

    def test_a_target_in_any_tile(self) -> None:
        """At the ends of tiles, in the last one, and beyond what one program writes."""
        vocab, quarter = 4 * self.block + 6, self.block // 4
        bounds = range(0, vocab, 4 * quarter)
        ids = sorted({0, quarter - 1, quarter, vocab - 1, *bounds, *(x - 1 for x in bounds if x)})
        self.check_row(torch.randn(vocab), ids, LogitTransform(softcap=3.0))

    def test_softcap(self) -> None:
        """cap * tanh is a number beyond the vocabulary as well; precise where it does nothing."""
        huge = torch.tensor([1e30, -1e30, 0.0, INF, -INF])
        for raw in (torch.randn(5) * 100, huge, torch.full((19,), -50.0)):
            for cap in (0.5, 30.0):
                transform = LogitTransform(scale=2.0, softcap=cap, inv_temperature=0.7)
                self.check_row(raw, [0, 1, 2, len(raw) - 1], transform)
        self.check_row(torch.randn(30) * 1e-3, [0, 29], LogitTransform(softcap=50.0))
        self.check_row(torch.linspace(-3, 3, 50), [0, 25, 49], LogitTransform(softcap=1.0))

    def test_rows_without_statistics(self) -> None:
        """NaN, or nothing but -inf: all NaN, in that row alone."""
        for vocab in (1, *self.vocabs):
            clean, ids = self.randn(6, vocab), torch.zeros(6, dtype=torch.int64, device=self.device)
            raw = clean.clone()
            raw[1, vocab // 2] = NAN
            raw[2, vocab - 1] = NAN
            raw[4] = -INF
            has_nan = raw.isnan().any(1)
            lost = has_nan | (raw == -INF).all(1)
            a = b = torch.ones_like(clean[:, 0])
            chunk, out = Chunk(raw, ids, PLAIN), torch.empty_like(raw)
            stats = statistics(self.kernels, chunk)
            want = statistics(self.kernels, Chunk(clean, ids, PLAIN))
            fused = self.kernels.fused(chunk, make_loss(a, 0), out)
            for found in (stats, fused):
                for x in (found.logps, found.log_sum, found.entropies):
                    assert torch.equal(x.isnan(), lost)
            assert not stats.extras["is_top1"][lost].any()
            for x in stats.extras.values():
                assert x[has_nan].isnan().all() or x.dtype == torch.bool
            odd = lost if self.infinity_is_nan else has_nan
            assert torch.equal(stats.max_logit.isnan(), odd)
            index = torch.nonzero(~lost)[:, 0]
            assert_same(take(stats, index), take(want, index))
            assert torch.equal(out.isnan().any(1), lost)
            self.kernels.grad(chunk, stats, Coefficients(a, b), out)
            assert torch.equal(out.isnan().any(1), lost)

    @pytest.mark.parametrize("several", [False, True])
    def test_plus_inf(self, several: bool) -> None:
        """Its own log-probability and the entropy are NaN, another's is -inf, as in torch."""
        for vocab in (40, *self.vocabs):
            raw = self.randn(4, max(vocab, 4))
            raw[:3, 1], raw[:3, -1] = INF, INF if several else 0.0
            raw[2, 2] = NAN
            chunk = Chunk(raw, torch.tensor([1, 0, 1, 0], device=self.device), PLAIN)
            got, want = statistics(self.kernels, chunk), statistics(TorchRows(), chunk)
            for x in (got, want):
                assert x.logps.isnan().tolist() == [True, False, True, False]
                assert x.logps[1] == -INF
                assert x.entropies.isnan().tolist() == [True, True, True, False]
            assert got.max_logit[:2].tolist() == [INF, INF]
            for x in (got.log_sum, got.extras["log_sum_sq_probs"]):
                assert x[:2].tolist() == [0.0, 0.0]
                assert x.isnan().tolist() == [False, False, True, False]
            for name, x in got.extras.items():
                assert_close(x[:3], want.extras[name][:3], equal_nan=True, msg=name)
            out = torch.empty_like(raw)
            self.kernels.grad(chunk, got, Coefficients(torch.ones_like(got.logps)), out)
            assert torch.equal(out[:2].isnan(), raw[:2] == INF)
            assert out.isnan().any(1).tolist() == [True, True, True, False]

    def test_a_row_without_a_token(self) -> None:
        """An id outside: log-probability, loss and gradient are NaN, for known losses too."""
        raw = self.randn(6, 20)
        ids = torch.tensor([4, -1, 19, 20, 2**32, -(2**62)], device=self.device)
        for kind in range(5):
            loss, out = make_loss(-torch.ones_like(raw[:, 0]), kind), torch.empty_like(raw)
            fused = self.kernels.fused(Chunk(raw, ids, PLAIN), loss, out)
            for x in (fused.logps, fused.loss_stats["loss"], fused.loss_stats["d_logp"], out[:, 7]):
                assert x.isnan().tolist() == [False, True, False, True, True, True]
            assert fused.entropies.isfinite().all()
