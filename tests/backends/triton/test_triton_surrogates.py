"""The surrogates compiled by Triton, their elementary functions, and the fused kernel against the objective."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo_kernels.token_loss import formulas
from grpo_kernels.token_loss.formulas import times
from tests.support.row_truth import U, check

pytest.importorskip("triton")

import triton
import triton.language as tl

from grpo_kernels.backends.triton_rows import mathfn
from grpo_kernels.backends.triton_rows.rows import TritonRows
from grpo_kernels.backends.triton_rows.surrogates import ESTIMATORS, SURROGATES
from tests.support.row_cases import DEVICE
from tests.support.surrogate_suite import (
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


@triton.jit
def elementwise_kernel(x_ptr, out_ptr, n, F: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, F(tl.load(x_ptr + i, mask=i < n, other=0.0)), mask=i < n)


@triton.jit
def surrogate_kernel(
    log_ratio_ptr, advantage_ptr, logp_ptr, out_ptr, n, constants, SURROGATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    loss, d_log_ratio, d_logp = SURROGATE(
        tl.load(log_ratio_ptr + i, mask=i < n, other=0.0), tl.load(advantage_ptr + i, mask=i < n, other=0.0),
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
    x = torch.cat([torch.linspace(max(low, -100.0), min(high, 100.0), 2000), size, -size, torch.zeros(1)])
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


def run(name: str, constants: Constants, log_ratio: Tensor, advantages: Tensor, logps: Tensor) -> Tensor:
    """The compiled surrogate: (3, n)."""
    n = log_ratio.numel()
    out = torch.empty(3, n, device=DEVICE)
    surrogate_kernel[(1,)](
        log_ratio, advantages, logps, out, n, constants, SURROGATE=SURROGATES[name], BLOCK=triton.next_power_of_2(n)
    )
    return out


@each_surrogate
def test_surrogates_are_those_of_torch(name: str, constants: Constants) -> None:
    """In every branch, at ties, at exact bounds, and where the ratio overflows, is 0 or NaN."""
    inputs = grid(special=True)
    got, want = run(name, constants, *inputs), mirrored(name, constants, *(x.double() for x in inputs))
    single = mirrored(name, constants, *inputs)  # infinite where float32 is
    bound = 16 * U * want.abs() * steepness(name, constants, inputs[0])
    assert torch.equal(got.isnan(), single.isnan())
    assert torch.equal(got.isinf(), single.isinf())
    assert torch.equal(got.sign()[got.isinf()], single.sign()[got.isinf()])
    finite = got.isfinite() & want.isfinite()  # e^-200 is 0 in float32, and not times -inf
    check(name, got[finite], want[finite], bound[finite])
    assert (got[:, is_nothing(name, *inputs[:2])] == 0).all()


@each_surrogate
def test_surrogates_against_autograd(name: str, constants: Constants) -> None:
    """The pair of a loss and its derivatives: the derivatives are those of the loss, written down anew in float64."""
    inputs = grid()
    inputs = [x[inputs[0].abs() < 30] for x in inputs]
    want, got = differentiated(name, constants, *inputs), run(name, constants, *inputs)
    nonzero = inputs[1] != 0  # at 0 both branches tie, whatever the ratio: a share of nothing
    bound = 16 * U * want.abs() * steepness(name, constants, inputs[0])
    check(name, got[:, nonzero], want[:, nonzero], bound[:, nonzero])
    assert (got[:, ~nonzero] == 0).all()


def test_known_losses() -> None:
    """On-policy: the derivative is given, the loss that times logp, or left out."""
    inputs = grid(special=True)
    out = run("constant", (), *inputs)
    assert (out[:2] == 0).all()
    assert torch.equal(out[2], inputs[1])
    out = run("linear", (), *inputs)
    assert torch.equal(out[0], times(inputs[2], inputs[1]))
    assert torch.equal(out[2], inputs[1])


@pytest.mark.parametrize("name", formulas.ESTIMATORS)
def test_kl_estimators(name: str) -> None:
    """Against torch's, and the derivative against autograd in float64."""
    ds = torch.cat([torch.linspace(-20, 20, 161), torch.tensor([1e-6, -1e-6, 80.0, 200.0, -1e4, -INF, INF, NAN])])
    logps = torch.where(ds.abs() < 1, -0.5, 0.0).to(DEVICE)
    ref = ds.to(DEVICE) + logps
    out = torch.empty(3, ref.numel(), device=DEVICE)
    estimator_kernel[(1,)](logps, ref, out, ref.numel(), ESTIMATOR=ESTIMATORS[name], BLOCK=256)
    want, single = estimates(name, logps.double(), ref.double()), estimates(name, logps, ref)
    assert torch.equal(out.isnan(), single.isnan())
    assert torch.equal(out.isinf(), single.isinf())
    assert torch.equal(out.sign()[out.isinf()], single.sign()[out.isinf()])
    d = (ref - logps).double()
    terms = [torch.expm1(d).abs() + d.abs(), torch.exp(d)] if name == "k3" else [d * d, d]
    corrected = d / (1 + d.abs()) if name == "k3" else torch.ones_like(d) if name == "k1" else d
    size = 8 * U * (1 + d.abs()) * torch.stack([*terms, corrected])
    finite = out.isfinite()
    check(name, out[finite], want[finite], 4 * U * want.abs()[finite] + size.abs()[finite])
    numbers = finite[0]
    plain, rounding = estimates_differentiated(name, logps[numbers], ref[numbers]), 2.0**-50 * d[numbers].exp()
    for i in (1, 2):  # where autograd's own sum, of numbers as large as e^d, is one
        bound = 4 * U * plain[i].abs() + size[i].abs()[numbers] + rounding
        check(f"{name} slope {i}", out[i][numbers], plain[i], bound)


class TestTriton(FusedSuite):
    kernels = TritonRows()
