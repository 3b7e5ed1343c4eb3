"""The one source of surrogates and KL estimators against autograd, and the C++ made of it."""

from __future__ import annotations

import inspect
import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from grpo_kernels import LossConfig
from grpo_kernels.backends import formulas
from grpo_kernels.objective.losses import LOSSES
from tests.support.reference import TERMS, either, filled, vespo
from tests.support.row_truth import check
from tests.support.surrogate_suite import LOSS_OF, Constants, each_surrogate, grid, steepness

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
generated = runpy.run_path(str(ROOT / "csrc" / "generate.py"))["header"]


def test_the_header_is_that_of_the_formulas() -> None:
    """`python csrc/generate.py` writes it."""
    assert (ROOT / "csrc" / "formulas.h").read_text() == generated(inspect.getsource(formulas))


def differentiated(
    name: str, constants: Constants, log_ratio: Tensor, advantages: Tensor, logps: Tensor
) -> Tensor:
    """The loss by the reference in float64, and its derivatives in R and logp: (3, n)."""
    log_ratio, logps = (x.clone().requires_grad_() for x in (log_ratio, logps))
    ratio = log_ratio.exp()
    loss_type, options = LOSS_OF[name, constants]
    o, surrogate, phi = filled(**options), TERMS[loss_type].surrogate, None
    if surrogate is vespo:
        k, rate = (
            either(advantages >= 0, constants[i], constants[i + 2], ratio.dtype) for i in (0, 1)
        )
        phi = (ratio**k * torch.exp(rate * (1 - ratio))).detach()
    loss = -ratio * advantages if surrogate is None else surrogate(o, ratio, advantages, logps, phi)
    grads = torch.autograd.grad(loss.sum(), [log_ratio, logps], allow_unused=True)
    return torch.stack([loss.detach(), *(0 * logps.detach() if g is None else g for g in grads)])


@each_surrogate
def test_derivatives_of_surrogates_are_those_of_the_loss(name: str, constants: Constants) -> None:
    """Written down anew in the reference, and differentiated by autograd."""
    some = grid("cpu")
    inputs = [x[some[0].abs() < 30].double() for x in some]
    got = torch.stack(formulas.SURROGATES[name](*inputs, *constants))
    want = differentiated(name, constants, *inputs)
    bound = 8 * 2.0**-53 * want.abs() * steepness(name, constants, inputs[0])
    if name == "sapo":  # autograd's 1 - sigmoid cancels
        bound[1] += 2.0**-50 * inputs[0].exp() * inputs[1].abs()
    nonzero = inputs[1] != 0  # at 0 both branches tie, whatever the ratio: a share of nothing
    check(name, got[:, nonzero], want[:, nonzero], bound[:, nonzero])
    assert (got[:, ~nonzero] == 0).all()


@pytest.mark.parametrize("name", formulas.ESTIMATORS)
def test_derivatives_of_estimators_are_those_of_kl(name: str) -> None:
    """Of kl, and of r kl over r."""
    d, logps = torch.linspace(-20, 20, 161).double(), torch.full((161,), -0.5).double()
    got = torch.stack(formulas.ESTIMATORS[name](logps, d + logps))
    leaf = logps.clone().requires_grad_()
    gap = d + logps - leaf
    kl = {"k1": -gap, "k2": gap.square() / 2, "k3": torch.exp(gap) - 1 - gap}[name]
    products = kl, kl * (leaf - leaf.detach()).exp()
    slopes = [torch.autograd.grad(x.sum(), leaf, retain_graph=True)[0] for x in products]
    # autograd's sum is of numbers as large as e^d
    check(name, got, torch.stack([kl.detach(), *slopes]), 2.0**-50 * (1 + d.abs() + d.exp()) * 3)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=list(LOSSES))
def test_on_policy_a_gradient_does_not_depend_on_the_log_probability(loss) -> None:
    """One pass takes it at R = 0, before any log-probability is known (`LossType.surrogate`)."""
    constants, n = [float(x) for x in loss.constants(LossConfig(epsilon_high=0.3))], 101
    logps, zeros = -torch.linspace(0, 50, n).double(), torch.zeros(n).double()
    for advantage in (1.7, 0.0, -1.7):
        advantages = torch.full_like(zeros, advantage)
        _, *slopes = formulas.SURROGATES[loss.surrogate](zeros, advantages, logps, *constants)
        for slope in slopes:
            assert torch.equal(slope, slope[:1].expand(n))
    off_policy = torch.full_like(zeros, 0.01)  # within every clip range
    _, in_ratio, _ = formulas.SURROGATES[loss.surrogate](off_policy, -off_policy, logps, *constants)
    assert loss.is_linear == bool((in_ratio == 0).all())


def test_a_number_that_is_no_float_is_refused() -> None:
    """It would be an int in C++, and divide like one."""
    with pytest.raises(AssertionError, match="expected floats only, got 2"):
        generated(inspect.getsource(formulas).replace("d * d / 2.0", "d * d / 2"))
