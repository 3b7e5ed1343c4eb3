"""The tests that every backend's surrogates pass: they are torch's formulas."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from grpo_kernels import LossConfig
from grpo_kernels.backends import Chunk, FusedLoss, FusedRowBackend, RowStats
from grpo_kernels.backends.formulas import SURROGATES, times_or_zero
from grpo_kernels.objective.loss_types import LOSSES
from tests.support.row_cases import DEVICE, PLAIN, same
from tests.support.row_truth import U, check

INF, NAN = math.inf, math.nan
Constants = tuple[float, ...]
LOG_RATIOS = (
    *(-INF, -200, -80, -3, -0.5, -0.25, -0.1, -1e-4, 0.0),
    *(1e-6, 0.1, 0.17, 0.25, 0.5, 3, 20, 87, 88.5),
)
ADVANTAGES = (-2.5, -1.0, -1e-3, -0.0, 0.0, 1e-3, 0.7, 3.0)


def grid(device: str, special: bool = False) -> list[Tensor]:
    """Log-ratios, advantages and log-probabilities in all combinations."""
    ratios = [*LOG_RATIOS, 200, 800, INF, NAN] if special else list(LOG_RATIOS)
    logps = (-3.0, 0.0, -INF) if special else (-3.0, -0.2)
    parts = (torch.tensor(x, device=device) for x in (ratios, ADVANTAGES, logps))
    return [x.contiguous() for x in torch.cartesian_prod(*parts).unbind(1)]


# Loss type and options. At R = 0 the ratio is exactly 1, so that it meets a bound of 1 exactly, and
# both branches of a minimum tie.
CASES: list[tuple[str, dict[str, float]]] = [
    ("grpo", {"epsilon_high": 0.28}),
    ("grpo", {"epsilon_high": 0.28, "delta": 1.5}),
    ("grpo", {"epsilon": 0.0, "epsilon_high": 0.28}),
    ("grpo", {"epsilon_high": 0.0}),
    ("grpo", {"epsilon": 0.5, "epsilon_high": 0.28, "delta": 1.0}),
    ("grpo", {"epsilon_high": 0.28, "delta": 1.1}),
    ("grpo", {"epsilon": 0.0}),
    ("cispo", {"epsilon_high": 5.0}),
    ("cispo", {"epsilon_high": 1.0}),
    *((name, {}) for name, loss in LOSSES.items() if loss.surrogate not in ("clipped", "cispo")),
]
LOSS_OF = {
    (LOSSES[name].surrogate, LOSSES[name].constants(LossConfig(loss_type=name, **options))): (
        name,
        options,
    )
    for name, options in CASES
}
EACH = [*LOSS_OF]
each_surrogate = pytest.mark.parametrize(("name", "constants"), EACH, ids=str)


def mirrored(name: str, constants: Constants, *inputs: Tensor) -> Tensor:
    """What torch makes of the formula: loss, and its derivative in logp where R = logp - old."""
    loss, d_log_ratio, d_logp = SURROGATES[name](*inputs, *constants)
    return torch.stack([loss, d_log_ratio + d_logp])


def sizes(name: str, constants: Constants, *inputs: Tensor) -> Tensor:
    """The larger of |x| and |dx / dR| (3, n), x what the formula returns: how much a relative error
    of the result or of the ratio changes it, for each unit of that error."""
    log_ratio, *others = (x.double() for x in inputs)
    leaf = log_ratio.clone().requires_grad_()
    found = SURROGATES[name](leaf, *others, *constants)
    slopes = [torch.autograd.grad((x + 0 * leaf).sum(), leaf, retain_graph=True)[0] for x in found]
    steep = torch.stack(slopes).abs().nan_to_num(0.0, 0.0)  # not of a ratio that overflows
    return torch.maximum(torch.stack(found).detach().abs(), steep)


def is_nothing(name: str, log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """(n,) bool: where loss and derivatives have to be 0. An infinite log w makes NaN."""
    return (advantages == 0) & ~log_ratio.isnan() & (log_ratio.isfinite() | (name != "vespo"))


def check_like(name: str, got: Tensor, want: Tensor, bound: Tensor, like: Tensor) -> None:
    """Where `like`, by the same operations, is no number, `got` is that; else near `want`."""
    assert same(got.isnan(), like.isnan()), name
    assert same(got.isinf(), like.isinf()), name
    assert torch.equal(got[like.isinf()], like[like.isinf()]), name
    # a ratio that is 0 in float32 may be more in float64, times -inf
    number = like.isfinite() & want.isfinite()
    check(name, got[number], want[number], bound[number])


class SurrogateSuite:
    """On rows of two logits, by the fused kernel."""

    kernels: FusedRowBackend
    device = DEVICE
    units: ClassVar = {torch.float32: U}  # the dtypes that it computes in
    slack = 8  # roundings of a surrogate

    def fused(self, logps: Tensor, **changes: Any) -> RowStats:
        """The terms of a loss whose log-probabilities (n,) are `logps` up to rounding."""
        other = logps.neg().expm1().log()  # p = 1 / (1 + e^z)
        raw, nothing = torch.stack([torch.zeros_like(logps), other], 1), torch.zeros_like(logps)
        chunk = Chunk(raw, torch.zeros_like(logps, dtype=torch.int64), PLAIN)
        loss = FusedLoss(
            surrogate=None, constants=(), kl_estimator=None, corrects_kl=False, beta=0.0,
            weights=nothing + 1.0, advantages=None, d_policy=None, old=None, ref=None, gate=None,
            d_entropy=0.0,
        )  # fmt: skip
        slopes = "d_policy" if changes.get("old") is None else "advantages"
        return self.kernels.fused(chunk, replace(loss, **{slopes: nothing} | changes), None)

    def test_every_surrogate_is_tried(self) -> None:
        assert {name for name, _ in EACH} == {*SURROGATES}

    @each_surrogate
    def test_surrogates_are_those_of_torch(self, name: str, constants: Constants) -> None:
        """In every branch, at ties, at exact bounds, and where the ratio overflows, is 0 or NaN."""
        for dtype, unit in self.units.items():
            given = (x.to(dtype) for x in grid(self.device, special=True))
            log_ratio, advantages, logps = given
            logps = self.fused(logps).logps
            old = torch.where(logps.isinf(), 0.0, logps) - log_ratio
            options = {"surrogate": name, "constants": constants, "old": old}
            terms = self.fused(logps, advantages=advantages, **options).loss_stats
            assert same(terms["log_ratio"], logps - old)
            got = torch.stack([terms["loss"], terms["d_logp"]])
            inputs = terms["log_ratio"], advantages, logps
            want = mirrored(name, constants, *(x.double() for x in inputs))
            of_loss, *of_slopes = sizes(name, constants, *inputs)
            bound = self.slack * unit * torch.stack([of_loss, sum(of_slopes)])
            check_like(f"{name} {dtype}", got, want, bound, mirrored(name, constants, *inputs))
            assert (got[:, is_nothing(name, *inputs[:2])] == 0).all()

    def test_known_losses(self) -> None:
        """On-policy the derivative is `d_policy`, the loss that times logp, or left out, or NaN."""
        both = torch.tensor([-3.0, -0.2, 0.0, -INF, NAN]), torch.tensor([-2.0, -0.0, 0.0, 3.0])
        for dtype, is_linear in product(self.units, (False, True)):
            logps, a = torch.cartesian_prod(*both).to(self.device, dtype).T.contiguous()
            given = {"is_linear": is_linear, "d_policy": a, "weights": torch.full_like(a, 7.0)}
            found = self.fused(logps, **given)
            assert same(found.loss_stats["log_ratio"], torch.where(logps.isnan(), logps, 0.0))
            loss = times_or_zero(found.logps, a) if is_linear else torch.zeros_like(a)
            assert same(found.loss_stats["loss"], loss + (found.logps - found.logps))
            assert same(found.loss_stats["d_logp"], torch.where(logps.isnan(), logps, a))
