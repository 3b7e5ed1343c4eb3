"""The C++ mirror of the surrogates and KL estimators, tried through the fused kernel on float64 rows of two logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import surrogates
from grpo_kernels.backends.cpp_rows import CppRows
from grpo_kernels.backends.rows import RowStats
from grpo_kernels.token_loss import TokenLoss
from tests.row_cases import PLAIN, make_loss, rows, same
from tests.row_truth import check, loss_terms
from tests.surrogate_suite import (
    CONFIGS,
    INF,
    NAN,
    PAIRS,
    FusedSuite,
    differentiated,
    estimates,
    estimates_differentiated,
    grid,
    mirrored,
)

pytestmark = pytest.mark.usefixtures("cpp_library")

CPP = CppRows()
U = 2.0**-53
FLOAT64 = torch.float64


class TestCpp(FusedSuite):
    kernels = CPP
    device = "cpu"


def fused(logps: Tensor, config: Any = CONFIGS["usual"], **changes: Any) -> RowStats:
    """The terms of a loss, whose log-probabilities (n,) are, but for their rounding, `logps`."""
    n = len(logps)
    # p = 1 / (1 + e^z)
    raw = torch.stack([torch.zeros(n, dtype=FLOAT64), logps.double().neg().expm1().log()], 1)
    options = {
        "surrogate": "constant",
        "kl": None,
        "corrects_kl": False,
        "advantages": torch.zeros(n, dtype=FLOAT64),
        "weights": torch.ones(n, dtype=FLOAT64),
        "old": None,
        "ref": None,
        "gate": None,
        "clip_low": 1 - config.epsilon,
        "clip_high": config.clip_high + (changes.get("surrogate") != "cispo"),
        "delta": INF if config.delta is None else config.delta,
        "tau_pos": config.sapo_temperature_pos,
        "tau_neg": config.sapo_temperature_neg,
        "beta": 0.0 if changes.get("kl") is None else 1.0,
        "b": 0.0,
    }
    return CPP.fused(raw, torch.zeros(n, dtype=torch.int64), PLAIN, TokenLoss(**options | changes), None)


def run(name: str, log_ratio: Tensor, advantages: Tensor, logps: Tensor, config: Any) -> tuple[Tensor, list[Tensor]]:
    """Loss and derivative (2, n) of a surrogate; and log-ratios, advantages, log-probabilities as they came out."""
    logps = fused(logps).logps
    old = torch.where(logps.isinf(), 0.0, logps) - log_ratio.double()
    found = fused(logps, config, surrogate=name, advantages=advantages.double(), old=old)
    assert same(found.extras["log_ratio"], found.logps - old)
    got = torch.stack([found.extras["loss"], found.extras["a"]])
    return got, [found.extras["log_ratio"], advantages.double(), found.logps]


def total(loss_and_slopes: Tensor) -> Tensor:
    """The loss, and its derivative in logp where R = logp - old: (2, n)."""
    return torch.stack([loss_and_slopes[0], loss_and_slopes[1] + loss_and_slopes[2]])


def steepness(name: str, log_ratio: Tensor) -> Tensor:
    """How much more than themselves the ratio's error changes the numbers."""
    ratio = log_ratio.exp()
    return 1 + torch.where((ratio < 1e3) & (name == "sapo"), ratio, 0.0)


@pytest.mark.parametrize(("name", "key"), PAIRS)
def test_surrogates_are_those_of_the_torch_module(name: str, key: str) -> None:
    """In every branch, at ties, at exact bounds, and where the ratio overflows, is 0 or NaN."""
    got, inputs = run(name, *grid(special=True, device="cpu"), CONFIGS[key])
    want = total(mirrored(name, CONFIGS[key], *inputs))
    assert torch.equal(got.isnan(), want.isnan())
    number = ~got.isnan()
    bound = 8 * U * want.abs() * steepness(name, inputs[0])
    check(f"{name} {key}", got[number], want[number], bound[number])
    assert (got[:, (inputs[1] == 0) & ~inputs[0].isnan()] == 0).all()


@pytest.mark.parametrize(("name", "key"), PAIRS)
def test_surrogates_against_autograd(name: str, key: str) -> None:
    """The derivatives are those of the loss, written down anew."""
    usual = [x[grid(device="cpu")[0].abs() < 30] for x in grid(device="cpu")]
    got, inputs = run(name, *usual, CONFIGS[key])
    want = total(differentiated(name, CONFIGS[key], *inputs))
    nonzero = inputs[1] != 0  # at 0 both branches tie, whatever the ratio: a share of nothing
    bound = 8 * U * want.abs() * steepness(name, inputs[0])
    if name == "sapo":
        bound[1] += 8 * U * inputs[0].exp() * inputs[1].abs()  # autograd's 1 - sigmoid cancels
    check(f"{name} {key}", got[:, nonzero], want[:, nonzero], bound[:, nonzero])
    assert (got[:, ~nonzero] == 0).all()


def test_known_losses() -> None:
    """On-policy: the derivative is what `advantages` holds, the loss that times logp, or R, which is 0 or NaN."""
    logps, a = torch.cartesian_prod(torch.tensor([-3.0, -0.2, 0.0, -INF]), torch.tensor([-2.0, -0.0, 0.0, 3.0])).T
    a = a.double().contiguous()
    for name in ("constant", "linear"):
        found = fused(logps, surrogate=name, advantages=a, weights=torch.full_like(a, 7.0))
        log_ratio = found.logps - found.logps
        assert same(found.extras["log_ratio"], log_ratio)
        assert same(found.extras["loss"], surrogates.times(found.logps, a) if name == "linear" else log_ratio)
        assert same(found.extras["a"], a)


@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_kl_estimators(name: str, corrects: bool) -> None:
    """Against `grpo_kernels.surrogates`, and the derivative against autograd."""
    ds = torch.cat([torch.linspace(-20, 20, 161), torch.tensor([1e-6, -1e-6, 80, 200, 800, -1e4, -INF, INF, NAN])])
    ds, log_ratio = torch.cartesian_prod(ds, torch.tensor([-INF, -1.0, 0.0, 0.3, 800.0, NAN] if corrects else [0.0])).T
    logps = fused(torch.where(ds.abs() < 1, -0.5, 0.0)).logps
    ref, old = ds + logps, logps - log_ratio
    found = fused(logps, surrogate="clipped", old=old, kl=name, ref=ref, corrects_kl=corrects)
    logps, d, ratio = found.logps, ref - found.logps, found.extras["log_ratio"].exp()
    want, slope = estimates(name, logps, ref), estimates_differentiated(name, logps, ref)[1]
    size = torch.stack([d.expm1().abs() + d.abs(), d.expm1().abs()]) if name == "k3" else want.abs()
    if corrects:  # d (ratio * kl) / d logp = ratio * (kl + d kl / d logp)
        want, slope = surrogates.times(ratio, want), ratio * (slope + want[0])
        want[1] += want[0]
        size = ratio * torch.stack([size[0], size.sum(0)])
    assert same(found.extras["kl"].isnan(), want[0].isnan())
    lost = want.isnan() | ratio.isnan()  # the surrogate's own NaN
    for got, is_lost, x, bound in zip((found.extras["loss"], found.extras["a"]), lost, want, 8 * U * size, strict=True):
        assert torch.equal(got.isnan(), is_lost)
        check(name, got[~is_lost], x[~is_lost], bound[~is_lost])
    usual = (d.abs() < 30) & (ratio < INF)
    check(f"{name} slope", found.extras["a"][usual], slope[usual], (16 * U * (size[1] + ratio))[usual])


def test_whole_losses() -> None:
    """Weights, gates, KL terms and surrogates in all combinations."""
    raw, ids = rows(40, 5, "cpu")
    logps = CPP.stats(raw.double(), ids, PLAIN, entropy=False).logps
    for kind in range(420):
        loss = make_loss(logps, kind)
        found = CPP.fused(raw.double(), ids, PLAIN, loss, None)
        for term, (want, size) in loss_terms(loss, found.logps, found.extras["log_ratio"]).items():
            check(f"{kind} {term}", found.extras[term], want, 8 * U * size)
