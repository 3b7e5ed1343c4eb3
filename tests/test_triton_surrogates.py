"""The jit mirror of the surrogates, its elementary functions, and the fused kernel against the objective."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo_kernels import LossConfig, surrogates
from grpo_kernels.aggregate import token_weights
from grpo_kernels.backends.rows import LogitTransform
from grpo_kernels.batch import read_tokens
from grpo_kernels.objective import PolicyObjective
from tests.row_truth import U, check

pytest.importorskip("triton")

import triton
import triton.language as tl

from grpo_kernels.backends.triton_rows import TritonRows, mathfn
from grpo_kernels.backends.triton_rows.surrogates import ESTIMATORS, SURROGATES
from tests.row_cases import DEVICE

INF, NAN = math.inf, math.nan
LOG_RATIOS = (-INF, -200, -80, -3, -0.5, -0.25, -0.1, -1e-4, 0.0, 1e-6, 0.1, 0.17, 0.25, 0.5, 3, 20, 87, 88.5)
ADVANTAGES = (-2.5, -1.0, -1e-3, -0.0, 0.0, 1e-3, 0.7, 3.0)


@triton.jit
def elementwise_kernel(x_ptr, out_ptr, n, F: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, F(tl.load(x_ptr + i, mask=i < n, other=0.0)), mask=i < n)


@triton.jit
def surrogate_kernel(
    log_ratio_ptr, advantage_ptr, logp_ptr, out_ptr, n, clip_low, clip_high, delta, tau_pos, tau_neg,
    SURROGATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    loss, d_log_ratio, d_logp = SURROGATE(
        tl.load(log_ratio_ptr + i, mask=i < n, other=0.0), tl.load(advantage_ptr + i, mask=i < n, other=0.0),
        tl.load(logp_ptr + i, mask=i < n, other=0.0), clip_low, clip_high, delta, tau_pos, tau_neg,
    )  # fmt: skip
    tl.store(out_ptr + i, loss, mask=i < n)
    tl.store(out_ptr + n + i, d_log_ratio, mask=i < n)
    tl.store(out_ptr + 2 * n + i, d_logp, mask=i < n)


@triton.jit
def estimator_kernel(logp_ptr, ref_ptr, out_ptr, n, ESTIMATOR: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    kl, d_kl = ESTIMATOR(tl.load(logp_ptr + i, mask=i < n, other=0.0), tl.load(ref_ptr + i, mask=i < n, other=0.0))
    tl.store(out_ptr + i, kl, mask=i < n)
    tl.store(out_ptr + n + i, d_kl, mask=i < n)


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
        "tanh_slope": [0.0, 0.0, NAN],
    }
    for name, want in wants.items():
        got = torch.empty_like(ends)
        elementwise_kernel[(1,)](ends, got, 3, F=getattr(mathfn, name), BLOCK=4)
        np.testing.assert_array_equal(got.cpu().numpy(), want, err_msg=name)
    x = torch.linspace(-40, 40, 4001, device=DEVICE)
    slope = torch.empty_like(x)
    elementwise_kernel[(1,)](x, slope, 4001, F=mathfn.tanh_slope, BLOCK=4096)
    want = 1 / torch.cosh(x.double()).square()
    check("tanh_slope", slope, want, (8 + 8 * x.abs()) * U * want)


def grid(special: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Log-ratios, advantages and log-probabilities in all combinations."""
    ratios = [*LOG_RATIOS, 200, INF, NAN] if special else list(LOG_RATIOS)
    logps = (-3.0, 0.0, -INF) if special else (-3.0, -0.2)
    found = torch.cartesian_prod(*(torch.tensor(x) for x in (ratios, ADVANTAGES, logps))).to(DEVICE)
    return tuple(x.contiguous() for x in found.unbind(1))  # type: ignore[return-value]


def config_of(clip_low: float = 0.8, clip_high: float = 1.28, delta: float | None = None, cispo: bool = False) -> Any:
    """As `LossConfig`; the bounds are those of the ratio, which for cispo is how its `clip_high` is meant."""
    high = clip_high if cispo else clip_high - 1
    return SimpleNamespace(
        epsilon=1 - clip_low, clip_high=high, delta=delta, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05
    )


def run(name: str, log_ratio: Tensor, advantages: Tensor, logps: Tensor, config: Any) -> Tensor:
    """The jit surrogate: (3, n)."""
    n = log_ratio.numel()
    out = torch.empty(3, n, device=DEVICE)
    surrogate_kernel[(1,)](
        log_ratio, advantages, logps, out, n, 1 - config.epsilon, config.clip_high + (0.0 if name == "cispo" else 1.0),
        INF if config.delta is None else config.delta, config.sapo_temperature_pos, config.sapo_temperature_neg,
        SURROGATE=SURROGATES[name], BLOCK=triton.next_power_of_2(n),
    )  # fmt: skip
    return out


def mirrored(name: str, config: Any, log_ratio: Tensor, advantages: Tensor, logps: Tensor) -> Tensor:
    """What `grpo_kernels.surrogates` gives: (3, n)."""
    more = (logps,) if name == "cispo" else ()
    return torch.stack(getattr(surrogates, name)(config, log_ratio, advantages, *more))


# At R = 0 the ratio is exactly 1, so that it meets these bounds exactly, and both branches tie.
CONFIGS = {
    "usual": config_of(),
    "delta": config_of(delta=1.5),
    "meets low": config_of(clip_low=1.0),
    "meets high": config_of(clip_high=1.0),
    "meets delta": config_of(clip_low=0.5, delta=1.0),
    "delta inside": config_of(delta=1.1),
    "no range": config_of(1.0, 1.0),
    "cispo": config_of(clip_high=5.0, cispo=True),
    "cispo meets": config_of(clip_high=1.0, cispo=True),
}
PAIRS = [("clipped", key) for key in list(CONFIGS)[:7]] + [("cispo", key) for key in ("cispo", "cispo meets")]
PAIRS.append(("sapo", "usual"))


@pytest.mark.parametrize(("name", "key"), PAIRS)
def test_surrogates_are_those_of_the_torch_module(name: str, key: str) -> None:
    """In every branch, at ties, at exact bounds, and where the ratio overflows, is 0 or NaN."""
    config, inputs = CONFIGS[key], grid(special=True)
    got, want = run(name, *inputs, config), mirrored(name, config, *(x.double() for x in inputs))
    single = mirrored(name, config, *inputs)  # infinite where float32 is
    ratio = inputs[0].double().exp()
    steep = 1 + (0 if name != "sapo" else torch.where(ratio < 1e3, ratio, 0.0))
    bound = 16 * U * want.abs() * steep
    assert torch.equal(got.isnan(), single.isnan())
    assert torch.equal(got.isinf(), single.isinf())
    assert torch.equal(got.sign()[got.isinf()], single.sign()[got.isinf()])
    finite = got.isfinite() & want.isfinite()  # e^-200 is 0 in float32, and not times -inf
    check(f"{name} {key}", got[finite], want[finite], bound[finite])
    assert (got[:, (inputs[1] == 0) & ~inputs[0].isnan()] == 0).all()


@pytest.mark.parametrize(("name", "key"), PAIRS)
def test_surrogates_against_autograd(name: str, key: str) -> None:
    """The pair of a loss and its derivatives: the derivatives are those of the loss, written down anew in float64."""
    config, inputs = CONFIGS[key], list(grid())
    usual = inputs[0].abs() < 30
    inputs = [x[usual] for x in inputs]
    log_ratio, advantages, logps = (x.double() for x in inputs)
    log_ratio.requires_grad_()
    logps.requires_grad_()
    ratio = log_ratio.exp()
    low, high = 1 - config.epsilon, 1 + config.clip_high
    if name == "clipped":
        free = ratio if config.delta is None else ratio.clamp(max=config.delta)
        loss = -torch.minimum(free * advantages, ratio.clamp(low, high) * advantages)
    elif name == "cispo":
        loss = -ratio.clamp(max=config.clip_high).detach() * advantages * logps
    else:
        tau = torch.where(advantages > 0, config.sapo_temperature_pos, config.sapo_temperature_neg)
        loss = -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages
    grads = torch.autograd.grad(loss.sum(), [log_ratio, logps], allow_unused=True)
    want = torch.stack([loss.detach(), *(torch.zeros_like(ratio) if g is None else g for g in grads)])
    got = run(name, *inputs, config)
    nonzero = advantages != 0  # at 0 both branches tie, whatever the ratio: a share of nothing
    steep = 1 + (0 if name != "sapo" else torch.where(ratio < 1e3, ratio, 0.0).detach())
    check(f"{name} {key}", got[:, nonzero], want[:, nonzero], (16 * U * want.abs() * steep)[:, nonzero])
    assert (got[:, ~nonzero] == 0).all()


def test_known_losses() -> None:
    """On-policy: the derivative is what `advantages` holds, the loss that times logp, or R, which is 0 or NaN."""
    inputs = grid(special=True)
    out = run("constant", *inputs, CONFIGS["usual"])
    assert torch.equal(out[0].nan_to_num(7.0), inputs[0].nan_to_num(7.0))
    assert (out[1] == 0).all()
    assert torch.equal(out[2], inputs[1])
    out = run("linear", *inputs, CONFIGS["usual"])
    assert torch.equal(out[0], surrogates.times(inputs[2], inputs[1]))
    assert torch.equal(out[2], inputs[1])


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_kl_estimators(name: str) -> None:
    """Against `grpo_kernels.surrogates`, and the derivative against autograd in float64."""
    ds = torch.cat([torch.linspace(-20, 20, 161), torch.tensor([1e-6, -1e-6, 80.0, 200.0, -1e4, -INF, INF, NAN])])
    logps = torch.where(ds.abs() < 1, -0.5, 0.0).to(DEVICE)
    ref = ds.to(DEVICE) + logps
    out = torch.empty(2, ref.numel(), device=DEVICE)
    estimator_kernel[(1,)](logps, ref, out, ref.numel(), ESTIMATOR=ESTIMATORS[name], BLOCK=256)
    config = SimpleNamespace(kl_estimator=name)
    want = torch.stack(surrogates.kl_estimate(config, logps.double(), ref.double()))  # type: ignore[arg-type]
    single = torch.stack(surrogates.kl_estimate(config, logps, ref))  # type: ignore[arg-type]
    assert torch.equal(out.isnan(), single.isnan())
    assert torch.equal(out.isinf(), single.isinf())
    assert torch.equal(out.sign()[out.isinf()], single.sign()[out.isinf()])
    d = (ref - logps).double()
    terms = [torch.expm1(d).abs() + d.abs(), torch.exp(d)] if name == "k3" else [d * d, d]
    size = 8 * U * (1 + d.abs()) * torch.stack(terms)
    finite = out.isfinite()
    check(name, out[finite], want[finite], 4 * U * want.abs()[finite] + size.abs()[finite])
    leaf = logps.double().requires_grad_()
    d = ref.double() - leaf
    loss = {"k1": -d, "k2": d.square() / 2, "k3": torch.exp(d) - 1 - d}[name]
    (slope,) = torch.autograd.grad(loss[finite[0]].sum(), leaf)
    check(f"{name} slope", out[1][finite[0]], slope[finite[0]], (4 * U * slope.abs() + size[1].abs())[finite[0]])


@pytest.mark.parametrize("estimator", [None, "k1", "k2", "k3"])
@pytest.mark.parametrize("off_policy", [False, True], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "luspo", "cispo", "sapo"])
def test_fused_kernel_is_the_objective(loss_type: str, off_policy: bool, estimator: str | None) -> None:
    """The loss, its terms and its derivative, put together by `assemble`, are those of `evaluate`."""
    draw = lambda: torch.randn(2, 5, device=DEVICE) * 0.3 - 2  # noqa: E731
    config = LossConfig(
        loss_type=loss_type,
        beta=0.0 if estimator is None else 0.3,
        kl_estimator=estimator or "k3",
        use_bias_correction_kl=estimator != "k2",
        epsilon_high=1.2 if loss_type == "cispo" else 0.28,
        delta=1.4 if loss_type == "grpo" else None,
        entropy_coef=0.05 if off_policy else 0.0,
    )
    tokens = read_tokens(
        torch.zeros(2, 5, 1, device=DEVICE),
        torch.randint(7, (2, 5), device=DEVICE),
        None,
        torch.tensor([1.5, -0.7], device=DEVICE),
        old_per_token_logps=draw() if off_policy else None,
        ref_per_token_logps=draw(),
        importance_sampling_ratio=torch.rand(2, 5, device=DEVICE) + 0.5,
        dtype=torch.float32,
    )
    made = PolicyObjective(config, tokens, token_weights(config, tokens.layout, None, torch.float32))
    loss = made.token_loss()
    assert loss is not None
    raw = torch.randn(10, 7, device=DEVICE)
    found = TritonRows().fused(raw, tokens.ids, LogitTransform(), loss, None)
    assert found.entropies is not None
    got, want = made.assemble(found.extras, found.entropies), made.evaluate(found.logps, found.entropies)
    for name in ("loss", "a", "policy_loss"):
        x = getattr(want, name)
        check(name, getattr(got, name), x, 64 * U * (1 + x.abs()))
    assert (got.b is None) == (want.b is None)
    if estimator is not None:
        assert got.terms.kl is not None
        check("kl", got.terms.kl, want.terms.kl, 64 * U * (1 + want.terms.kl.abs()))
