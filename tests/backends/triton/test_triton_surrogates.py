"""The surrogates compiled by Triton, and the elementary functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo_kernels.backends.formulas import times
from tests.support.row_truth import U, check

pytest.importorskip("triton")

import triton
import triton.language as tl

from grpo_kernels.backends.triton_rows import mathfn
from grpo_kernels.backends.triton_rows.mathfn import ESTIMATORS, SURROGATES
from tests.support.row_cases import DEVICE
from tests.support.surrogate_suite import INF, NAN, Constants, SurrogateSuite, grid

pytestmark = pytest.mark.unit


@triton.jit
def elementwise_kernel(x_ptr, out_ptr, n, F: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, F(tl.load(x_ptr + i, mask=i < n, other=0.0)), mask=i < n)


@triton.jit
def surrogate_kernel(
    log_ratio_ptr, advantage_ptr, logp_ptr, out_ptr, n, constants, SURROGATE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    loss, d_log_ratio, d_logp = SURROGATE(
        tl.load(log_ratio_ptr + i, mask=i < n, other=0.0),
        tl.load(advantage_ptr + i, mask=i < n, other=0.0),
        tl.load(logp_ptr + i, mask=i < n, other=0.0), *constants,
    )  # fmt: skip
    tl.store(out_ptr + i, loss, mask=i < n)
    tl.store(out_ptr + n + i, d_log_ratio, mask=i < n)
    tl.store(out_ptr + 2 * n + i, d_logp, mask=i < n)


@triton.jit
def estimator_kernel(logp_ptr, ref_ptr, out_ptr, n, ESTIMATOR: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    kl, d_kl, d_corrected = ESTIMATOR(
        tl.load(logp_ptr + i, mask=i < n, other=0.0), tl.load(ref_ptr + i, mask=i < n, other=0.0)
    )
    tl.store(out_ptr + i, kl, mask=i < n)
    tl.store(out_ptr + n + i, d_kl, mask=i < n)
    tl.store(out_ptr + 2 * n + i, d_corrected, mask=i < n)


FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], float, float]] = {  # float64, range
    "exp": (torch.exp, -86.0, 88.7),
    "log1p": (torch.log1p, 0.0, 1e30),
    "expm1": (torch.expm1, -100.0, 88.7),
    "softplus": (lambda x: torch.logaddexp(x, torch.zeros_like(x)), -86.0, 1e30),
    "sigmoid": (torch.sigmoid, -86.0, 1e30),
    "tanh": (torch.tanh, -1e30, 1e30),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_elementary_functions(name: str) -> None:
    """Relative error of a few units in the last place, over the whole range and next to 0."""
    truth, low, high = FUNCTIONS[name]
    size = torch.logspace(-30, 30, 1500)
    x = torch.cat(
        [torch.linspace(max(low, -100.0), min(high, 100.0), 2000), size, -size, torch.zeros(1)]
    )
    x = x[(x >= low) & (x <= high)].to(DEVICE)
    got = torch.empty_like(x)
    elementwise_kernel[(1,)](x, got, x.numel(), F=getattr(mathfn, name), BLOCK=8192)
    want = truth(x.double())
    check(name, got, want, 8 * U * want.abs())


def test_elementary_functions_at_the_ends() -> None:
    ends = torch.tensor([INF, -INF, NAN], device=DEVICE)
    wants = {
        "exp": [INF, 0.0, NAN],
        "expm1": [INF, -1.0, NAN],
        "softplus": [INF, 0.0, NAN],
        "sigmoid": [1.0, 0.0, NAN],
        "tanh": [1.0, -1.0, NAN],
        "quarter_tanh_slope": [0.0, 0.0, NAN],
    }
    for name, want in wants.items():
        got = torch.empty_like(ends)
        elementwise_kernel[(1,)](ends, got, 3, F=getattr(mathfn, name), BLOCK=4)
        np.testing.assert_array_equal(got.cpu().numpy(), want, err_msg=name)
    x = torch.linspace(-40, 40, 4001, device=DEVICE)
    slope = torch.empty_like(x)
    elementwise_kernel[(1,)](x, slope, 4001, F=mathfn.quarter_tanh_slope, BLOCK=4096)
    want = 1 / torch.cosh(x.double()).square() / 4
    check("quarter_tanh_slope", slope, want, (8 + 8 * x.abs()) * U * want)


class TestTriton(SurrogateSuite):
    slack = 16

    def run(self, name: str, constants: Constants, *inputs: Tensor) -> tuple[Tensor, Sequence]:
        n = inputs[0].numel()
        out, block = torch.empty(3, n, device=DEVICE), triton.next_power_of_2(n)
        surrogate_kernel[(1,)](*inputs, out, n, constants, SURROGATE=SURROGATES[name], BLOCK=block)
        return out, inputs

    def estimate(self, name: str, corrects: bool, *inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        logps, d, log_ratio = inputs
        ref, out = d + logps, torch.empty(3, d.numel(), device=DEVICE)
        estimator_kernel[(1,)](logps, ref, out, d.numel(), ESTIMATOR=ESTIMATORS[name], BLOCK=256)
        return out[[0, 0, 2 if corrects else 1]], [logps, ref, log_ratio]

    def test_known_losses(self) -> None:
        """On-policy: the derivative is given, the loss that times logp, or left out."""
        log_ratio, d_logps, logps = grid(DEVICE, special=True)
        for name, loss in (
            ("constant", torch.zeros_like(logps)),
            ("linear", times(logps, d_logps)),
        ):
            out, _ = self.run(name, (), log_ratio, d_logps, logps)
            assert torch.equal(out, torch.stack([loss, torch.zeros_like(loss), d_logps]))
