"""The tests that every backend's row kernels pass: against float64 within derived bounds, torch, and themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from grpo_kernels.backends.interface import Chunk, FusedRowBackend, LogitTransform, RowStats
from grpo_kernels.backends.torch_rows import TorchRows
from grpo_kernels.base.records import take
from tests.support.row_cases import DEVICE, EXTRAS, FIELDS, PLAIN, assert_same, make_loss, make_transform, rows
from tests.support.row_truth import Truth, U, check, check_stats, gradient, loss_terms, truth


def check_kernels(
    kernels: FusedRowBackend,
    raw: Tensor,  # (n, V) fp32
    ids: Tensor,  # (n,)
    transform: LogitTransform,
    kind: int,
    dtype: torch.dtype = torch.float32,  # of the gradients
) -> None:
    """Statistics, gradient and fused loss, number `kind`, of `raw`."""
    at = truth(raw, ids, transform)
    stats = _check_stats_kernel(kernels, raw, ids, transform, at)
    _check_grad_kernel(kernels, raw, ids, transform, at, stats, dtype, has_b=kind % 3 != 0)
    _check_fused_kernel(kernels, raw, ids, transform, at, stats, dtype, kind)


def _check_stats_kernel(
    kernels: FusedRowBackend, raw: Tensor, ids: Tensor, transform: LogitTransform, at: Truth
) -> RowStats:
    stats = kernels.stats(Chunk(raw, ids, transform), entropy=True, extras=EXTRAS)
    check_stats(stats, at)
    z = raw.clone()
    TorchRows().prepare_(z, transform)
    want = TorchRows().stats(Chunk(z, ids, transform), entropy=True, extras=EXTRAS)
    for field in FIELDS:
        check(f"{tuple(raw.shape)}: {field}", getattr(stats, field), getattr(want, field), 2 * at.bound[field])
    assert torch.equal(stats.extras["is_top1"], want.extras["is_top1"]), raw.shape
    return stats


def _check_grad_kernel(
    kernels: FusedRowBackend,
    raw: Tensor,
    ids: Tensor,
    transform: LogitTransform,
    at: Truth,
    stats: RowStats,
    dtype: torch.dtype,
    *,
    has_b: bool,
) -> None:
    name = f"{tuple(raw.shape)}: d raw"
    a, b = torch.randn_like(stats.logps), torch.randn_like(stats.logps) if has_b else None
    out = torch.empty_like(raw, dtype=dtype)
    kernels.grad(Chunk(raw, ids, transform), stats, a, b, out)
    want, bound = gradient(at, ids, a, b)
    check(name, out, want, bound + _rounding(want, dtype))
    z = raw.clone()
    TorchRows().prepare_(z, transform)
    TorchRows().grad(Chunk(z, ids, transform), stats, a, b, z)
    cancelled = 0.0 if transform.softcap is None else 16 * U * (want / at.slope).abs()  # in torch's 1 - tanh^2
    check(f"{name} of torch", out, z, 2 * bound + cancelled + _rounding(want, dtype))


def _check_fused_kernel(
    kernels: FusedRowBackend,
    raw: Tensor,
    ids: Tensor,
    transform: LogitTransform,
    at: Truth,
    stats: RowStats,
    dtype: torch.dtype,
    kind: int,
) -> None:
    name, loss, out = f"{tuple(raw.shape)}", make_loss(stats.logps, kind), torch.empty_like(raw, dtype=dtype)
    fused = kernels.fused(Chunk(raw, ids, transform), loss, out)
    assert_same(fused, stats, name)
    assert set(fused.terms) == set(loss.terms)
    for term, (want, size) in loss_terms(loss, fused.logps, fused.terms["log_ratio"]).items():
        check(f"{name}: {loss.surrogate} {loss.kl} {term}", fused.terms[term], want, 8 * U * size)
    want, bound = gradient(at, ids, fused.terms["d_logp"], torch.full_like(stats.logps, loss.d_entropy))
    check(f"{name}: d raw", out, want, bound + _rounding(want, dtype))


def _rounding(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What one rounding to `dtype` may change."""
    kind = torch.finfo(dtype)
    return kind.eps / 2 * x.abs() + kind.smallest_normal * kind.eps


class RowSuite:
    """What a row kernel's results may depend on, and where they are written."""

    kernels: FusedRowBackend
    likewise: Sequence[FusedRowBackend] = ()  # have the same bits
    device = DEVICE
    vocabs: Sequence[int] = (50, 300)

    def rows(self, n: int, vocab: int) -> tuple[Tensor, Tensor]:
        return rows(n, vocab, self.device)

    def test_bits_of_a_row_are_its_own(self) -> None:
        """Alone, in a batch, permuted, in kernels that are the same, and whatever the loss around it."""
        for vocab in self.vocabs:
            raw, ids = self.rows(40, vocab)
            transform, order = make_transform(40, vocab, 3, None, self.device), torch.randperm(40, device=self.device)
            whole = self.kernels.stats(Chunk(raw, ids, transform), entropy=True, extras=EXTRAS)
            fused = self.kernels.fused(Chunk(raw, ids, transform), make_loss(whole.logps, 9), torch.empty_like(raw))
            assert_same(fused, whole)
            assert_same(_part(self.kernels, raw, ids, transform, order), take(whole, order), "permuted")
            for i in (0, 17, 39):
                alone = torch.tensor([i], device=self.device)
                assert_same(_part(self.kernels, raw, ids, transform, alone), take(whole, alone), "alone")
            for other in self.likewise:
                assert_same(_part(other, raw, ids, transform, order), take(whole, order), "another kernel")
            for _ in range(3):
                assert_same(self.kernels.stats(Chunk(raw, ids, transform), entropy=True, extras=EXTRAS), whole, "again")

    def test_entropy_does_not_depend_on_the_target(self) -> None:
        raw, ids = torch.randn(1, 50, device=self.device).repeat(50, 1), torch.arange(50, device=self.device)
        stats = self.kernels.stats(Chunk(raw, ids, PLAIN), entropy=True)
        assert stats.entropies is not None
        for x in (stats.entropies, stats.log_sum, stats.max_logit):
            assert x.unique().numel() == 1
        without = self.kernels.stats(Chunk(raw, ids, PLAIN), entropy=False)
        assert without.entropies is None
        assert torch.equal(without.logps, stats.logps)

    def test_rows_may_be_strided_and_gradients_overwrite_logits(self) -> None:
        for vocab in self.vocabs:
            n = 5
            raw, ids = self.rows(n, vocab)
            transform, (a, b) = make_transform(n, vocab, 3, None, self.device), torch.randn(2, n, device=self.device)
            want = self.kernels.stats(Chunk(raw, ids, transform), entropy=True, extras=EXTRAS)
            d_raw = torch.empty_like(raw)
            self.kernels.grad(Chunk(raw, ids, transform), want, a, b, d_raw)
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                part, out = _inside(raw, 3), _inside(torch.empty_like(raw, dtype=dtype), 5)
                assert_same(self.kernels.stats(Chunk(part, ids, transform), entropy=True, extras=EXTRAS), want)
                self.kernels.grad(Chunk(part, ids, transform), want, a, b, out)
                assert torch.equal(out, d_raw.to(dtype))
                _assert_untouched_around(out, 5)
                assert torch.equal(part, raw)
            self.kernels.grad(Chunk(part, ids, transform), want, a, b, part)
            assert torch.equal(part, d_raw)
            _assert_untouched_around(part, 3)

            loss, out = make_loss(want.logps, 0), torch.empty_like(raw)
            self.kernels.fused(Chunk(raw, ids, transform), loss, out)
            assert torch.equal(self.kernels.fused(Chunk(raw, ids, transform), loss, None).logps, want.logps)
            self.kernels.fused(Chunk(raw, ids, transform), loss, raw)
            assert torch.equal(raw, out)

    def test_gradient_of_a_part_of_the_vocabulary(self) -> None:
        for vocab in self.vocabs:
            raw, ids = self.rows(6, vocab)
            a, b = torch.randn(2, 6, device=self.device)
            stats = self.kernels.stats(Chunk(raw, ids, PLAIN), entropy=True)
            whole, parts = torch.empty_like(raw), torch.empty_like(raw)
            self.kernels.grad(Chunk(raw, ids, PLAIN), stats, a, b, whole)
            for start, stop in ((0, 1), (1, 40), (40, vocab)):
                out = parts[:, start:stop]
                self.kernels.grad(Chunk(raw[:, start:stop], ids, PLAIN, start), stats, a, b, out)
            assert torch.equal(parts, whole)


def _part(kernels: FusedRowBackend, raw: Tensor, ids: Tensor, transform: LogitTransform, index: Tensor) -> RowStats:
    """The statistics of the rows at `index`, in that order."""
    inv_t = transform.inv_temperature
    assert isinstance(inv_t, Tensor)
    transform = replace(transform, inv_temperature=inv_t[index])
    return kernels.stats(Chunk(raw[index], ids[index], transform), entropy=True, extras=EXTRAS)


def _inside(x: Tensor, left: int) -> Tensor:
    """A copy of `x` (n, V) between columns of 77."""
    wide = torch.full((len(x), left + x.shape[1] + 23), 77.0, dtype=x.dtype, device=x.device)
    wide[:, left : left + x.shape[1]] = x
    return wide[:, left : left + x.shape[1]]


def _assert_untouched_around(x: Tensor, left: int) -> None:
    wide = torch.as_strided(x, (len(x), x.stride(0)), x.stride(), 0)
    assert (wide[:, :left] == 77).all()
    assert (wide[:, left + x.shape[1] :] == 77).all()
