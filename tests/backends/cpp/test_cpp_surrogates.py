"""The surrogates and KL estimators in C++, tried through the fused kernel on rows of two logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels.backends.cpp_rows import CppRows
from grpo_kernels.backends.interface import Chunk, RowStats
from grpo_kernels.token_loss.formulas import ESTIMATORS, times
from grpo_kernels.token_loss.record import TokenLoss
from tests.support.row_cases import ON_POLICY, PLAIN, make_loss, rows, same
from tests.support.row_truth import check, loss_terms
from tests.support.surrogate_suite import (
    EACH,
    INF,
    NAN,
    Constants,
    FusedSuite,
    differentiated,
    each_surrogate,
    estimates,
    estimates_differentiated,
    grid,
    is_nothing,
    mirrored,
    steepness,
)

pytestmark = pytest.mark.usefixtures("cpp_library")

CPP = CppRows()
UNITS = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
each_dtype = pytest.mark.parametrize("dtype", UNITS, ids=str)


class TestCpp(FusedSuite):
    kernels = CPP
    device = "cpu"


def fused(logps: Tensor, **changes: Any) -> RowStats:
    """The terms of a loss, whose log-probabilities (n,) are, but for their rounding, `logps`, in their dtype."""
    raw = torch.stack([torch.zeros_like(logps), logps.neg().expm1().log()], 1)  # p = 1 / (1 + e^z)
    options = {
        "surrogate": "constant",
        "constants": (),
        "kl": None,
        "corrects_kl": False,
        "advantages": None,
        "d_logps": None,
        "weights": torch.ones_like(logps),
        "old": None,
        "ref": None,
        "gate": None,
        "beta": 0.0 if changes.get("kl") is None else 1.0,
        "d_entropy": 0.0,
    }
    options["d_logps" if changes.get("old") is None else "advantages"] = torch.zeros_like(logps)
    return CPP.fused(Chunk(raw, torch.zeros(len(raw), dtype=torch.int64), PLAIN), TokenLoss(**options | changes), None)


def run(
    name: str, constants: Constants, log_ratio: Tensor, advantages: Tensor, logps: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Loss and derivative (2, n) of a surrogate; and log-ratios, advantages, log-probabilities as they came out."""
    logps = fused(logps).logps
    old = torch.where(logps.isinf(), 0.0, logps) - log_ratio
    found = fused(logps, surrogate=name, constants=constants, advantages=advantages, old=old)
    assert same(found.terms["log_ratio"], found.logps - old)
    return torch.stack([found.terms["loss"], found.terms["d_logp"]]), [
        found.terms["log_ratio"],
        advantages,
        found.logps,
    ]


def total(loss_and_slopes: Tensor) -> Tensor:
    """The loss, and its derivative in logp where R = logp - old: (2, n)."""
    return torch.stack([loss_and_slopes[0], loss_and_slopes[1] + loss_and_slopes[2]])


def bound_of(name: str, constants: Constants, want: Tensor, log_ratio: Tensor) -> Tensor:
    """Of a few roundings."""
    return 8 * UNITS[log_ratio.dtype] * want.abs() * steepness(name, constants, log_ratio)


def check_like(name: str, got: Tensor, want: Tensor, bound: Tensor, like: Tensor) -> None:
    """Where `like`, from the same operations in the dtype of `got`, is no number, `got` is that; else near `want`."""
    assert same(got.isnan(), like.isnan()), name
    assert torch.equal(got[like.isinf()], like[like.isinf()]), name
    number = like.isfinite() & want.isfinite()  # a ratio that is 0 in float32 may be more in float64, times -inf
    check(name, got[number], want[number], bound[number])


@each_dtype
@each_surrogate
def test_surrogates_are_those_of_torch(name: str, constants: Constants, dtype: torch.dtype) -> None:
    """In every branch, at ties, at exact bounds, and where the ratio overflows, is 0 or NaN."""
    got, inputs = run(name, constants, *(x.to(dtype) for x in grid(special=True, device="cpu")))
    want = total(mirrored(name, constants, *(x.double() for x in inputs)))
    like = total(mirrored(name, constants, *inputs))
    check_like(name, got, want, bound_of(name, constants, want, inputs[0]), like)
    assert (got[:, is_nothing(name, *inputs[:2])] == 0).all()


@each_surrogate
def test_surrogates_against_autograd(name: str, constants: Constants) -> None:
    """The derivatives are those of the loss, written down anew."""
    usual = [x[grid(device="cpu")[0].abs() < 30].double() for x in grid(device="cpu")]
    got, inputs = run(name, constants, *usual)
    want = total(differentiated(name, constants, *inputs))
    nonzero = inputs[1] != 0  # at 0 both branches tie, whatever the ratio: a share of nothing
    bound = bound_of(name, constants, want, inputs[0])
    if name == "sapo":
        bound[1] += 2.0**-50 * inputs[0].exp() * inputs[1].abs()  # autograd's 1 - sigmoid cancels
    check(name, got[:, nonzero], want[:, nonzero], bound[:, nonzero])
    assert (got[:, ~nonzero] == 0).all()


@each_dtype
def test_known_losses(dtype: torch.dtype) -> None:
    """On-policy: the derivative is what `d_logps` holds, the loss that times logp, or left out; or NaN."""
    logps, a = torch.cartesian_prod(torch.tensor([-3.0, -0.2, 0.0, -INF]), torch.tensor([-2.0, -0.0, 0.0, 3.0])).T
    logps, a = logps.to(dtype), a.to(dtype).contiguous()
    for name in ON_POLICY:
        found = fused(logps, surrogate=name, d_logps=a, weights=torch.full_like(a, 7.0))
        assert not found.terms["log_ratio"].any()
        loss = times(found.logps, a) if name == "linear" else torch.zeros_like(a)
        assert same(found.terms["loss"], loss + (found.logps - found.logps))
        assert same(found.terms["d_logp"], a)


def test_no_log_probability() -> None:
    """NaN in loss and derivative, also where neither would need it."""
    for name, constants in [*EACH, *((name, ()) for name in ON_POLICY)]:
        logps = torch.tensor([NAN, -1.0])
        found = fused(logps, surrogate=name, constants=constants, old=None if name in ON_POLICY else torch.zeros(2))
        assert found.terms["loss"].isnan().tolist() == found.terms["d_logp"].isnan().tolist() == [True, False]


@each_dtype
@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_kl_estimators(name: str, corrects: bool, dtype: torch.dtype) -> None:
    """Against torch's, and the derivative against autograd."""
    ds = torch.cat([torch.linspace(-20, 20, 161), torch.tensor([1e-6, -1e-6, 80, 200, 800, -1e4, -INF, INF, NAN])])
    ds, log_ratio = torch.cartesian_prod(ds, torch.tensor([-INF, -1.0, 0.0, 0.3, 800.0, NAN] if corrects else [0.0])).T
    logps = fused(torch.where(ds.abs() < 1, -0.5, 0.0).to(dtype)).logps
    ref, old = ds.to(dtype) + logps, logps - log_ratio.to(dtype)
    # an advantage of 0: the surrogate adds nothing, unless the ratio is NaN
    found = fused(
        logps, surrogate="clipped", constants=(0.8, 1.28, INF), old=old, kl=name, ref=ref, corrects_kl=corrects
    )
    logps, log_ratio = found.logps, found.terms["log_ratio"]

    def wanted(logps: Tensor, ref: Tensor, ratio: Tensor) -> tuple[Tensor, Tensor]:
        """kl; loss and derivative (2, n)."""
        kl, slope, corrected = estimates(name, logps, ref)
        if corrects:
            kl, slope = times(ratio, kl), times(ratio, corrected)
        return kl, torch.where(ratio.isnan(), NAN, torch.stack([kl, slope]))  # the surrogate's own NaN

    got = torch.stack([found.terms["loss"], found.terms["d_logp"]])
    d, ratio = ref.double() - logps.double(), log_ratio.double().exp()
    kl, want = wanted(logps.double(), ref.double(), ratio)
    like = wanted(logps, ref, log_ratio.exp())
    slope_size = d.expm1().abs() if name == "k3" else d.abs() if name == "k2" else torch.ones_like(d)
    if corrects and name == "k3":
        slope_size = d.abs() / (1 + d.abs())  # whatever e^d is
    size = torch.stack([d.expm1().abs() + d.abs() if name == "k3" else kl.abs(), slope_size])
    size = (1 + d.abs()) * size * (ratio if corrects else 1.0)
    bound = 8 * UNITS[dtype] * size
    check_like(name, got, want, bound, like[1])
    check_like(f"{name} kl", found.terms["kl"], kl, bound[0], like[0])
    usual = (d.abs() < 30) & (ratio < 1e30)
    plain = estimates_differentiated(name, logps[usual], ref[usual])
    slope = plain[2] * ratio[usual] if corrects else plain[1]
    rounding = 2.0**-50 * (1 + d[usual].exp()) * ratio[usual]  # of autograd's own sum, of numbers as large as e^d
    check(f"{name} slope", got[1][usual], slope, 2 * bound[1][usual] + rounding)


def test_whole_losses() -> None:
    """Weights, gates, KL terms and surrogates in all combinations."""
    raw, ids = rows(40, 5, "cpu")
    logps = CPP.stats(Chunk(raw.double(), ids, PLAIN), entropy=False).logps
    for kind in range(420):
        loss = make_loss(logps, kind)
        found = CPP.fused(Chunk(raw.double(), ids, PLAIN), loss, None)
        for term, (want, size) in loss_terms(loss, found.logps, found.terms["log_ratio"]).items():
            check(f"{kind} {term}", found.terms[term], want, 8 * UNITS[torch.float64] * size)
