"""The surrogates and KL estimators in C++, tried through the fused kernel on rows of two logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels.backends.cpp_rows import CppRows
from grpo_kernels.backends.formulas import times
from grpo_kernels.backends.interface import Chunk, FusedLoss, RowStats
from tests.support.row_cases import ON_POLICY, PLAIN, same
from tests.support.surrogate_suite import EACH, INF, NAN, Constants, SurrogateSuite

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("cpp_library")]

CPP = CppRows()
UNITS = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
each_dtype = pytest.mark.parametrize("dtype", UNITS, ids=str)


def fused(logps: Tensor, **changes: Any) -> RowStats:
    """The terms of a loss whose log-probabilities (n,) are `logps` up to rounding."""
    raw = torch.stack([torch.zeros_like(logps), logps.neg().expm1().log()], 1)  # p = 1 / (1 + e^z)
    chunk, nothing = Chunk(raw, torch.zeros(len(raw), dtype=torch.int64), PLAIN), 0 * raw[:, 0]
    loss = FusedLoss(
        surrogate="constant", constants=(), kl=None, corrects_kl=False, weights=nothing + 1.0,
        advantages=None, d_policy=None, old=None, ref=None, gate=None, d_entropy=0.0,
        beta=0.0 if changes.get("kl") is None else 1.0,
    )  # fmt: skip
    slopes = "d_policy" if changes.get("old") is None else "advantages"
    return CPP.fused(chunk, replace(loss, **{slopes: nothing} | changes), None)


class TestCpp(SurrogateSuite):
    device = "cpu"
    units = UNITS
    log_ratios = (-INF, -1.0, 0.0, 0.3, 800.0, NAN)

    def run(self, name: str, constants: Constants, *inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        log_ratio, advantages, logps = inputs
        logps = fused(logps).logps
        old = torch.where(logps.isinf(), 0.0, logps) - log_ratio
        stats = fused(logps, surrogate=name, constants=constants, advantages=advantages, old=old)
        assert same(stats.loss_terms["log_ratio"], stats.logps - old)
        loss_and_slope = torch.stack([stats.loss_terms["loss"], stats.loss_terms["d_logp"]])
        return loss_and_slope, [stats.loss_terms["log_ratio"], advantages, stats.logps]

    def seen(self, terms: Tensor) -> Tensor:
        """The loss, and its derivative in logp where R = logp - old."""
        return torch.stack([terms[0], terms[1] + terms[2]])

    def estimate(self, name: str, corrects: bool, *inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        """With an advantage of 0: the surrogate adds nothing, unless the ratio is NaN."""
        logps, d, log_ratio = inputs
        logps = fused(logps).logps
        clipped = {"surrogate": "clipped", "constants": (0.8, 1.28, INF), "old": logps - log_ratio}
        stats = fused(logps, **clipped, kl=name, ref=d + logps, corrects_kl=corrects)
        got = torch.stack([stats.loss_terms[x] for x in ("kl", "loss", "d_logp")])
        return got, [stats.logps, d + logps, stats.loss_terms["log_ratio"]]


@each_dtype
def test_known_losses(dtype: torch.dtype) -> None:
    """On-policy: the derivative is `d_policy`, the loss that times logp, or left out; or NaN."""
    logps, a = torch.cartesian_prod(
        torch.tensor([-3.0, -0.2, 0.0, -INF]), torch.tensor([-2.0, -0.0, 0.0, 3.0])
    ).T
    logps, a = logps.to(dtype), a.to(dtype).contiguous()
    for name in ON_POLICY:
        found = fused(logps, surrogate=name, d_policy=a, weights=torch.full_like(a, 7.0))
        assert not found.loss_terms["log_ratio"].any()
        loss = times(found.logps, a) if name == "linear" else torch.zeros_like(a)
        assert same(found.loss_terms["loss"], loss + (found.logps - found.logps))
        assert same(found.loss_terms["d_logp"], a)


def test_no_log_probability() -> None:
    """NaN in loss and derivative, also where neither would need it."""
    logps = torch.tensor([NAN, -1.0])
    for name, constants in [*EACH, *((name, ()) for name in ON_POLICY)]:
        old = None if name in ON_POLICY else torch.zeros(2)
        terms = fused(logps, surrogate=name, constants=constants, old=old).loss_terms
        for x in (terms["loss"], terms["d_logp"]):
            assert x.isnan().tolist() == [True, False]


def test_a_formula_that_the_header_lacks_is_no_other_one() -> None:
    """As after a change of formulas.py without ``python csrc/generate.py``."""
    for changes in ({"surrogate": "novel"}, {"kl": "k9"}):
        with pytest.raises(RuntimeError, match=r"formulas\.h: expected it to have '(novel|k9)'"):
            fused(torch.zeros(3), **changes)
