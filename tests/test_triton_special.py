"""The Triton row kernels where logits are infinite, no numbers, equal, far apart, capped, or very many."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from grpo_kernels.backends.rows import LogitTransform, RowStats
from grpo_kernels.backends.torch_rows import TorchRows
from tests.row_truth import check, check_stats, gradient, truth

pytest.importorskip("triton")

from grpo_kernels.backends.triton_rows import INTERPRETED, TritonRows
from grpo_kernels.backends.triton_rows.configs import RowConfig
from grpo_kernels.backends.triton_rows.fused import launch_fused
from grpo_kernels.backends.triton_rows.grad import launch_grad
from grpo_kernels.backends.triton_rows.stats import launch_stats
from tests.row_cases import DEVICE, EXTRAS, PLAIN, assert_same, make_loss

TILE = RowConfig(block_n=16, block_v=16, num_warps=1, num_stages=1)
INF, NAN = math.inf, math.nan


def stats_of(raw: Tensor, ids: Tensor, transform: LogitTransform = PLAIN) -> RowStats:
    return launch_stats(raw, ids, transform, TILE, entropy=True, extras=EXTRAS)


def check_row(raw: Tensor, ids: list[int], transform: LogitTransform = PLAIN) -> RowStats:
    """Statistics and gradients of one row (V,) for each of `ids`, and of the same by the fused kernel."""
    rows, index = raw.to(DEVICE).repeat(len(ids), 1), torch.tensor(ids, device=DEVICE)
    at, stats = truth(rows, index, transform), stats_of(rows, index, transform)
    check_stats(stats, at)
    a, b = torch.randn(len(ids), device=DEVICE), torch.randn(len(ids), device=DEVICE)
    for coefficient in (None, b):
        out = torch.empty_like(rows)
        launch_grad(rows, index, stats, a, coefficient, transform, out, TILE, first_id=0)
        check("d raw", out, *gradient(at, index, a, coefficient))
    loss, by_grad = make_loss(stats.logps, 9), torch.empty_like(rows)
    fused = launch_fused(rows, index, transform, loss, out, TILE)
    assert_same(fused, stats)
    launch_grad(rows, index, stats, fused.extras["a"], torch.full_like(a, loss.b), transform, by_grad, TILE, first_id=0)
    assert torch.equal(out.nan_to_num(), by_grad.nan_to_num())
    return stats


@pytest.mark.parametrize("vocab", [3, 16, 17, 50])
@pytest.mark.parametrize("gone", ["first", "some", "all but one", "first block"])
def test_minus_inf_logits(vocab: int, gone: str) -> None:
    """Their probability and gradient are 0, and logp of such a target is -inf."""
    raw = torch.randn(vocab)
    many = {"first": 1, "some": vocab // 2, "all but one": vocab - 1, "first block": min(16, vocab - 1)}[gone]
    raw[:many] = -INF
    stats = check_row(raw, [0, vocab - 1, vocab // 2])
    assert stats.logps[0] == -INF
    if gone == "all but one":
        assert stats.logps[1] == 0.0
        assert (stats.entropies == 0).all()


@pytest.mark.parametrize("margin", [10.0, 20.0, 40.0, 80.0, 100.0, 1e4, 1e30])
def test_nearly_certain_tokens(margin: float) -> None:
    """log p of the certain one, 1 - p and the entropy keep their precision, however small."""
    raw = torch.randn(40)
    raw[7] += margin
    stats = check_row(raw, [7, 0, 39])
    assert stats.extras["is_top1"].tolist() == [True, False, False]
    if margin <= 80:
        assert (stats.entropies > 0).all()
        assert stats.logps[0] < 0


@pytest.mark.parametrize("size", [1e10, 1e30, 1e37])
def test_huge_logits(size: float) -> None:
    raw = torch.tensor([size, -size, 0.0, size, 1.0] * 7)
    check_row(raw, [0, 1, 2, 3])
    check_row(-raw.abs(), [0, 2, 4])


@pytest.mark.parametrize("vocab", [1, 2, 16, 37])
def test_ties(vocab: int) -> None:
    """Equal logits have equal bits, and the lowest id counts as the largest."""
    raw = torch.full((vocab,), 3.25)
    stats = check_row(raw, [0, vocab // 2, vocab - 1])
    assert stats.logps.unique().numel() == 1
    assert stats.extras["is_top1"].tolist() == [True, vocab // 2 == 0, vocab == 1]
    raw = torch.randn(vocab).clamp(max=1.0)
    raw[[vocab // 3, vocab - 1]] = 2.0
    stats = check_row(raw, [vocab // 3, vocab - 1])
    assert stats.logps[0] == stats.logps[1]
    assert stats.extras["is_top1"].tolist() == [True, vocab // 3 == vocab - 1]


def test_rising_and_falling_logits() -> None:
    """A lane that meets a larger logit in every step, or never; the last block has phantom lanes."""
    for slope in (0.5, 5.0, -0.5, -5.0):
        check_row(torch.arange(200) * slope / 16, [0, 100, 199])


def test_softcap_of_huge_logits_and_phantom_lanes() -> None:
    """cap * tanh is a number for the lanes beyond the vocabulary as well, and -inf has a probability."""
    for raw in (torch.randn(5) * 100, torch.tensor([1e30, -1e30, 0.0, INF, -INF]), torch.full((19,), -50.0)):
        for cap in (0.5, 30.0):
            check_row(raw, [0, 1, 2, len(raw) - 1], LogitTransform(scale=2.0, softcap=cap, inv_temperature=0.7))


def test_softcap_is_precise_where_it_does_nothing() -> None:
    check_row(torch.randn(30) * 1e-3, [0, 29], LogitTransform(softcap=50.0))
    check_row(torch.linspace(-3, 3, 50), [0, 25, 49], LogitTransform(softcap=1.0))


@pytest.mark.parametrize("vocab", [1, 5, 40])
def test_rows_without_statistics(vocab: int) -> None:
    """NaN, or nothing but -inf: all NaN, in that row alone."""
    clean, ids = torch.randn(6, vocab, device=DEVICE), torch.zeros(6, dtype=torch.int64, device=DEVICE)
    raw = clean.clone()
    raw[1, vocab // 2] = NAN
    raw[2, vocab - 1] = NAN
    raw[4] = -INF
    lost = torch.tensor([False, True, True, False, True, False], device=DEVICE)
    a = b = torch.ones(6, device=DEVICE)
    stats, want, out = stats_of(raw, ids), stats_of(clean, ids), torch.empty_like(raw)
    fused = launch_fused(raw, ids, PLAIN, make_loss(a, 0), out, TILE)
    for found in (stats, fused):
        for x in (found.logps, found.log_sum, found.entropies):
            assert x is not None
            assert torch.equal(x.isnan(), lost)
    assert torch.equal(stats.max_logit.isnan(), torch.tensor([False, True, True, False, False, False], device=DEVICE))
    index = torch.nonzero(~lost)[:, 0]
    assert_same(stats.rows(index), want.rows(index))
    assert torch.equal(out.isnan().any(1), lost)
    launch_grad(raw, ids, stats, a, b, PLAIN, out, TILE, first_id=0)
    assert torch.equal(out.isnan().any(1), lost)


def test_plus_inf() -> None:
    """Its own log-probability and the entropy are NaN, another's is -inf, as in the torch backend."""
    raw, ids = torch.randn(3, 40, device=DEVICE), torch.tensor([20, 5, 0], device=DEVICE)
    raw[:2, 20] = INF
    got, want = stats_of(raw, ids), TorchRows().stats(raw, ids, PLAIN, entropy=True, extras=EXTRAS)
    assert want.entropies is not None
    assert got.entropies is not None
    assert got.logps[:2].isnan().tolist() == want.logps[:2].isnan().tolist() == [True, False]
    assert got.logps[1] == want.logps[1] == -INF
    assert torch.equal(got.entropies.isnan(), want.entropies.isnan())
    assert not got.logps[2].isnan()


def test_a_row_without_a_token() -> None:
    """An id of -1: log-probability, loss and gradient are NaN, also where the loss would be known without them."""
    raw, ids = torch.randn(3, 20, device=DEVICE), torch.tensor([4, -1, 19], device=DEVICE)
    for kind in range(5):
        loss, out = make_loss(-torch.ones(3, device=DEVICE), kind), torch.empty_like(raw)
        fused = launch_fused(raw, ids, PLAIN, loss, out, TILE)
        for x in (fused.logps, fused.extras["loss"], fused.extras["a"], out[:, 7]):
            assert x.isnan().tolist() == [False, True, False]
        assert fused.entropies is not None
        assert fused.entropies.isfinite().all()


def test_many_rows() -> None:
    """More than a grid's second and third dimension could count."""
    n = 70_001
    raw, ids = torch.randn(n, 3, device=DEVICE), torch.randint(3, (n,), device=DEVICE)
    config = RowConfig(block_n=1 if not INTERPRETED else 4096, block_v=16, num_warps=1, num_stages=1)
    stats = launch_stats(raw, ids, PLAIN, config, entropy=False, extras=())
    check_stats(stats, truth(raw, ids, PLAIN))


@pytest.mark.gpu
def test_offsets_beyond_32_bits() -> None:
    """More than 2^31 logits, and the gradient of the last rows in place."""
    n, vocab = 16_400, 151_936
    raw = torch.zeros(n, vocab, device=DEVICE)
    raw[-3:] = torch.randn(3, vocab, device=DEVICE) * 3
    ids = torch.randint(vocab, (n,), device=DEVICE)
    stats = TritonRows().stats(raw, ids, PLAIN, entropy=True)
    last, a = raw[-3:].clone(), torch.randn(n, device=DEVICE)
    at = truth(last, ids[-3:], PLAIN)
    check_stats(stats.rows(slice(n - 3, n)), at)
    TritonRows().grad(raw, ids, stats, a, None, PLAIN, raw)
    check("d raw", raw[-3:], *gradient(at, ids[-3:], a[-3:], None))
