"""The one source of surrogates and KL estimators against autograd, and the C++ made of it."""

from __future__ import annotations

import inspect
import re
import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from grpo_kernels import LossConfig
from grpo_kernels.backends import formulas
from grpo_kernels.objective.loss_types import LOSSES
from tests.support.reference import TERMS, either, filled, vespo
from tests.support.row_truth import check
from tests.support.surrogate_suite import LOSS_OF, Constants, each_surrogate, grid, sizes

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
    bound = 8 * 2.0**-53 * sizes(name, constants, *inputs)
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


MISTAKES = {  # in k2: the statement `d = ref - logp`, and what is wrong with it
    "an int, which would divide like one": ("d = (ref - logp) / 2", "2"),
    "a power": ("d = (ref - logp) ** 2.0", "(ref - logp) ** 2.0"),
    "a division that C++ reads as a comment": ("d = ref // logp", "ref // logp"),
    "a chain, which C++ reads from the left": (
        "d = where(0.0 < ref < logp, ref, logp)",
        "0.0 < ref",
    ),
    "a bitwise and that C++ reads as the last": ("d = where(ref & logp > ref, ref, logp)", "ref &"),
    "a function that is not in HELPERS": ("d = k1(logp, ref)", "k1(logp, ref)"),
    "a function that is called before it is in HELPERS": ("d = missing(logp)", "missing(logp)"),
    "a global": ("d = logp - LINEAR", "LINEAR"),
    "a name twice": ("d = ref; d = d - logp", "d = d - logp"),
    "an argument anew": ("ref = ref - logp; d = ref", "ref = ref - logp"),
    "an if": ("if ref > 0.0:\n        d = ref", "if ref > 0.0:"),
    "a conditional": ("d = ref if ref > 0.0 else logp", "ref if ref > 0.0 else logp"),
    "a return before the end": ("return ref, ref", "return (ref, ref)"),
}


@pytest.mark.parametrize(("statement", "got"), MISTAKES.values(), ids=[*MISTAKES])
def test_what_cpp_cannot_say_is_refused(statement: str, got: str) -> None:
    """By an error that names the function and the line, and not by a compiler."""
    source = inspect.getsource(formulas)
    k2 = source.index("def k2")
    line = source[:k2].count("\n") + 3
    found = source[:k2] + source[k2:].replace("d = ref - logp", statement, 1)
    expected = rf"formulas\.py, line {line}, k2: expected .*, got `{re.escape(got)}"
    with pytest.raises(ValueError, match=expected):
        generated(found)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('    """``d^2 / 2``"""\n', "", "a docstring"),
        ("    return d * d / 2.0, -d, d * (d / 2.0 - 1.0)\n", "", "a return at the end"),
    ],
)
def test_a_formula_has_a_docstring_and_a_return(old: str, new: str, expected: str) -> None:
    with pytest.raises(ValueError, match=rf"line \d+, k2: expected {expected}"):
        generated(inspect.getsource(formulas).replace(old, new))
