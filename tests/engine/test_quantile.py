"""Quantiles of more values than torch takes: the same function of the values."""

from __future__ import annotations

import pytest
import torch

from grpo_kernels import grpo_loss, linear_logps
from grpo_kernels.base import tensors

pytestmark = pytest.mark.unit

NAN = torch.nan


@pytest.mark.parametrize("n", [1, 2, 3, 10, 41, 1000])
def test_same_bits_as_torch(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, where torch finds the places as exactly."""
    monkeypatch.setattr(tensors, "MOST", 0)
    x = torch.randn(n, dtype=torch.float64).round(decimals=1)
    holes = torch.where(torch.rand(n) < 0.3, NAN, x)
    for q in (0.0, 0.2, 0.25, 0.5, 0.75, 0.999, 1.0):
        assert torch.equal(tensors.quantile(x, q), torch.quantile(x, q))
        assert tensors.quantile(holes, q).isnan() == holes.isnan().any()
        got = tensors.quantile_of_numbers(holes, q)
        want = torch.nanquantile(holes, q, interpolation="lower")
        assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
    for none in (x[:0], x * NAN):
        assert tensors.quantile_of_numbers(none, 0.5).isnan()


def test_losses_beyond_the_limit_ask_torch_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threshold on entropies, and the scale of an expectation."""
    hidden, weight = (torch.randn(shape, requires_grad=True) for shape in ((4, 7, 8), (11, 8)))
    ids, advantages, expected = torch.randint(11, (4, 7)), torch.randn(4), torch.randn(4, 7)
    monkeypatch.setattr(tensors, "MOST", 0)
    for name in ("quantile", "nanquantile"):
        monkeypatch.setattr(torch, name, None)
    grpo_loss(hidden, weight, ids, None, advantages, top_entropy_quantile=0.3).loss.backward()
    linear_logps(hidden, weight, ids, expected=expected).logps.backward(3 * expected)
