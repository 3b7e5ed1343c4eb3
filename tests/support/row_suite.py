"""The tests that every backend's row kernels pass: against float64 within derived bounds, torch, and themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from grpo_kernels.backends.interface import (
    Chunk,
    FusedRowBackend,
    LogitTransform,
)
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
from tests.support.row_truth import U, check, check_stats, gradient, loss_terms, truth

INF = torch.inf


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
    kernels.grad(chunk, stats, a, b, out)
    d, bound = gradient(at, ids, a, b)
    check(f"{name}: d raw", out, d, bound + _rounding(d, dtype))
    TorchRows().grad(in_torch, stats, a, b, z)
    cancelled = (
        0.0 if transform.softcap is None else 16 * U * (d / at.slope).abs()
    )  # in torch's 1 - tanh^2
    check(f"{name}: d raw of torch", out, z, 2 * bound + cancelled + _rounding(d, dtype))

    loss, out = make_loss(stats.logps, kind), torch.empty_like(out)
    fused = kernels.fused(chunk, loss, out)
    assert_same(fused, stats, name)
    assert set(fused.terms) == set(loss.terms)
    for term, (of_loss, size) in loss_terms(loss, fused.logps, fused.terms["log_ratio"]).items():
        check(
            f"{name}: {loss.surrogate} {loss.kl} {term}", fused.terms[term], of_loss, 8 * U * size
        )
    d, bound = gradient(at, ids, fused.terms["d_logp"], torch.full_like(a, loss.d_entropy))
    check(f"{name}: d raw, fused", out, d, bound + _rounding(d, dtype))


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

    def chunk(self, n: int, vocab: int, kind: int = 0) -> Chunk:
        raw, ids = rows(n, vocab, self.device)
        return Chunk(raw, ids, make_transform(n, vocab, kind, None, self.device))

    def test_bits_of_a_row_are_its_own(self) -> None:
        """Alone, in a batch, permuted, in kernels that are the same, and whatever the loss around it."""
        for vocab in self.vocabs:
            chunk, order = self.chunk(40, vocab, 3), torch.randperm(40, device=self.device)
            whole = statistics(self.kernels, chunk)
            fused = self.kernels.fused(
                chunk, make_loss(whole.logps, 9), torch.empty_like(chunk.logits)
            )
            assert_same(fused, whole)
            for index in (order, *order[:3].split(1)):
                assert_same(
                    statistics(self.kernels, _part(chunk, index)),
                    take(whole, index),
                    f"rows {index}",
                )
            for other in self.likewise:
                assert_same(
                    statistics(other, _part(chunk, order)), take(whole, order), "another kernel"
                )
            for _ in range(3):
                assert_same(statistics(self.kernels, chunk), whole, "again")

    def test_entropy_does_not_depend_on_the_target(self) -> None:
        raw, ids = (
            torch.randn(1, 50, device=self.device).repeat(50, 1),
            torch.arange(50, device=self.device),
        )
        stats = self.kernels.stats(Chunk(raw, ids, PLAIN), entropy=True)
        assert stats.entropies is not None
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
            self.kernels.grad(chunk, want, a, b, d_raw)
            part = _inside(raw, 3)
            apart = replace(chunk, logits=part)
            assert_same(statistics(self.kernels, apart), want)
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                out = _inside(torch.empty_like(raw, dtype=dtype), 5)
                self.kernels.grad(apart, want, a, b, out)
                assert torch.equal(out, d_raw.to(dtype))
                _assert_untouched_around(out, 5)
                assert torch.equal(part, raw)
            self.kernels.grad(apart, want, a, b, part)
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
            self.kernels.grad(chunk, stats, a, b, whole)
            for start, stop in ((0, 1), (1, 40), (40, vocab)):
                part = Chunk(chunk.logits[:, start:stop], chunk.ids, PLAIN, start)
                self.kernels.grad(part, stats, a, b, parts[:, start:stop])
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
