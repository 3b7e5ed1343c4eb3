"""Liger's two calls for a Jensen-Shannon divergence: against Liger's own where it runs here, and float64.

By the axes of Liger's own tests: weights of the two parts, temperatures, betas, biases, dtypes, the ignored label.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from grpo_kernels.integrations.liger import LigerFusedLinearJSD, LigerFusedLinearJSDLoss, liger_fused_linear_jsd
from grpo_kernels.integrations.patching import parameters_of
from tests.support.measure import count_flops

N, H, WIDE, V = 37, 8, 12, 61
HALVES = [(1.0, 0.5, 0.5, 0.5), (2.0, 0.0, 1.0, 0.8), (0.5, 1.0, 0.0, 0.2), (1.0, 0.3, 0.9, 0.0), (3.0, 0.5, 0.5, 1.0)]


def tensors(dtype: torch.dtype = torch.float32, *, bias: bool = False, ignored: int = -100) -> dict[str, Any]:
    g = torch.Generator().manual_seed(3)
    labels = torch.randint(V, (N,), generator=g)
    labels[torch.rand(N, generator=g) < 0.3] = ignored
    shapes = {
        "student_input": (N, H),
        "student_weight": (V, H),
        "teacher_input": (N, WIDE),
        "teacher_weight": (V, WIDE),
    }
    if bias:
        shapes |= {"student_bias": (V,), "teacher_bias": (V,)}
    return {"labels": labels, **{name: torch.randn(x, generator=g).to(dtype) for name, x in shapes.items()}}


def parts(given: dict[str, Any], beta: float, temperature: float, ignored: int) -> tuple[Tensor, Tensor]:
    """(divergence, cross entropy), the means of what counts, in float64 by the definition."""
    z, y = (
        given[f"{x}_input"] @ given[f"{x}_weight"].t() + given.get(f"{x}_bias", 0.0) for x in ("student", "teacher")
    )
    counted = given["labels"] != ignored
    p, q = ((x / temperature).log_softmax(-1) for x in (z, y.detach()))
    if 0.0 < beta < 1.0:
        m = ((1 - beta) * p.exp() + beta * q.exp()).log()
        terms = beta * q.exp() * (q - m) + (1 - beta) * p.exp() * (p - m)
    else:
        terms = p.exp() * (p - q) if beta == 1.0 else q.exp() * (q - p)
    picked = z.log_softmax(-1).gather(-1, given["labels"].clamp(min=0)[:, None])[:, 0]
    return (terms.sum(-1) * counted).sum() / counted.sum(), -(picked * counted).sum() / counted.sum()


def call(loss: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Tensor]]:
    """What `loss` returns, and the gradients of three times its loss."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in given.items() if name.startswith("student")}
    others = [given[name] for name in ("teacher_input", "teacher_weight", "labels")]
    biases = [leaves["student_bias"], given["teacher_bias"]] if "student_bias" in leaves else []
    out = loss(leaves["student_input"], leaves["student_weight"], *others, *biases)
    total = out[0] if isinstance(out, tuple) else out
    (3.0 * total).backward()
    return out, {name: x.grad for name, x in leaves.items()}


def wanted(given: dict[str, Any], of: Any) -> tuple[Tensor, dict[str, Tensor]]:
    exact = {name: x if name == "labels" else x.detach().to(torch.float64, copy=True) for name, x in given.items()}
    leaves = {name: x.requires_grad_() for name, x in exact.items() if name.startswith("student")}
    loss = of(exact)
    (3.0 * loss).backward()
    return loss.detach(), {name: x.grad for name, x in leaves.items()}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("ignored", [-100, 42])
@pytest.mark.parametrize(("temperature", "hard", "soft", "beta"), HALVES)
def test_the_loss_with_labels(
    temperature: float, hard: float, soft: float, beta: float, ignored: int, bias: bool
) -> None:
    settings = {"weight_hard_loss": hard, "weight_soft_loss": soft, "beta": beta, "temperature": temperature}
    settings |= {"ignore_index": ignored, "return_soft_hard_loss": True}
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.float64, 1e-12)):
        given = tensors(dtype, bias=bias, ignored=ignored)
        (loss, *both), grads = call(LigerFusedLinearJSDLoss(**settings), given)
        want, want_grads = wanted(given, lambda x: _weighed(parts(x, beta, temperature, ignored), soft, hard))
        assert_close(loss.detach().double(), want, rtol=tolerance, atol=tolerance)
        exact = {name: x if name == "labels" else x.double() for name, x in given.items()}
        for got, x in zip(both, parts(exact, beta, temperature, ignored), strict=True):
            assert_close(got.double(), x, rtol=tolerance, atol=tolerance)
            assert not got.requires_grad
        for name, x in want_grads.items():
            assert_close(grads[name].double(), x, rtol=5 * tolerance, atol=5 * tolerance)
        alone, _ = call(LigerFusedLinearJSDLoss(**{**settings, "return_soft_hard_loss": False}), given)
        assert_close(alone, loss)


def _weighed(of: tuple[Tensor, Tensor], soft: float, hard: float) -> Tensor:
    return soft * of[0] + hard * of[1]


@pytest.mark.parametrize(("temperature", "hard", "soft", "beta"), HALVES)
def test_is_ligers(temperature: float, hard: float, soft: float, beta: float) -> None:
    theirs = pytest.importorskip("liger_kernel.chunked_loss").LigerFusedLinearJSDLoss
    settings = {"weight_hard_loss": hard, "weight_soft_loss": soft, "beta": beta, "temperature": temperature}
    for bias in (False, True):
        given = tensors(bias=bias)
        ours, grads = call(LigerFusedLinearJSDLoss(**settings), given)
        want, want_grads = call(theirs(**settings, compiled=False), given)
        assert_close(ours, want, rtol=1e-5, atol=1e-6)
        for name, x in want_grads.items():
            assert_close(grads[name], x, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize(("temperature", "beta"), [(1.0, 0.5), (2.0, 0.1), (1.0, 0.0), (1.0, 1.0)])
def test_the_divergence_alone(temperature: float, beta: float, labelled: bool) -> None:
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 1e-5), (torch.float64, 1e-12)):
        given = tensors(dtype)
        if not labelled:
            given["labels"] = torch.zeros(N, dtype=torch.long)
        loss = LigerFusedLinearJSD(beta, -100, temperature)
        out, grads = call(loss if labelled else lambda *x, loss=loss: loss(*x[:4], None), given)
        want, want_grads = wanted(given, lambda x: parts(x, beta, temperature, -100)[0])
        assert out.dtype == (dtype if dtype == torch.float64 else torch.float32)
        assert_close(out.detach().double(), want, rtol=tolerance, atol=tolerance)
        for name, x in want_grads.items():
            assert grads[name].dtype == dtype
            rounded = {"rtol": 1e-2, "atol": 2.0**-9 * float(x.abs().max())}  # d logits may be, too
            close = rounded if dtype == torch.bfloat16 else {"rtol": 5e-5, "atol": 5 * tolerance}
            assert_close(grads[name].double(), x, **close)


def test_two_heads_that_nearly_agree() -> None:
    """Where Liger's terms cancel: the divergence is 1e-9 and less."""
    given = tensors(torch.float32)
    given |= {"teacher_weight": given["student_weight"], "teacher_input": given["student_input"] * (1 + 2.0**-14)}
    for beta in (0.0, 0.5, 1.0):
        out, _ = call(LigerFusedLinearJSD(beta), given)
        want, _ = wanted(given, lambda x, beta=beta: parts(x, beta, 1.0, -100)[0])
        assert 1e-11 < float(want) < 1e-7
        assert_close(out.detach().double(), want, rtol=2e-3, atol=0.0)


def test_improbable_ids_stay_finite() -> None:
    weight, other = torch.full((3000, 2), -120.0), torch.full((3000, 4), -121.0)
    weight[0] = other[0] = 0.0
    student, teacher = torch.tensor([[1.0, 0.0]], requires_grad=True), torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    out = LigerFusedLinearJSD()(student, weight, teacher, other)
    out.backward()
    assert float(out.detach()) == pytest.approx(0.0, abs=1e-30)
    assert bool(student.grad.isfinite().all())


def test_no_position_that_counts_gives_nothing() -> None:
    given = tensors()
    given["labels"][:] = -100
    for loss in (LigerFusedLinearJSD(), LigerFusedLinearJSDLoss(), LigerFusedLinearJSDLoss(temperature=2.0)):
        out, grads = call(loss, given)
        assert float(out.detach()) == 0.0
        assert all(float(x.abs().max()) == 0.0 for x in grads.values())


@pytest.mark.parametrize(("temperature", "hard", "cost"), [(1.0, 0.5, 8), (2.0, 0.5, 14), (2.0, 0.0, 8)])
def test_cost(temperature: float, hard: float, cost: int) -> None:
    """The labels' log-probabilities come along at temperature 1, from a pass of their own at another one."""
    g = torch.Generator().manual_seed(0)
    student, weight = torch.randn(32, H, generator=g), torch.randn(V, H, generator=g)
    given = {"student_input": student, "student_weight": weight, "teacher_input": student, "teacher_weight": weight}
    given["labels"] = torch.randint(V, (32,), generator=g)
    loss = LigerFusedLinearJSDLoss(hard, 0.5, temperature=temperature)
    assert count_flops(lambda: call(loss, given)) == cost * 32 * V * H


@pytest.mark.parametrize(
    ("where", "name", "ours"),
    [
        ("transformers.fused_linear_jsd", "LigerFusedLinearJSD", LigerFusedLinearJSD),
        ("chunked_loss", "LigerFusedLinearJSDLoss", LigerFusedLinearJSDLoss),
    ],
)
def test_the_call_is_ligers(where: str, name: str, ours: type) -> None:
    pytest.importorskip("liger_kernel.chunked_loss")
    pytest.importorskip("triton")
    theirs = getattr(importlib.import_module(f"liger_kernel.{where}"), name)
    for method in ("__init__", "forward"):
        known = parameters_of(getattr(theirs, method))
        assert parameters_of(getattr(ours, method))[: len(known)] == known
        values = (inspect.signature(getattr(x, method)).parameters for x in (theirs, ours))
        mine, yours = ({k: p.default for k, p in x.items() if k in known} for x in values)
        assert {k: v for k, v in mine.items() if v is not inspect.Parameter.empty} == {
            k: yours[k] for k, v in mine.items() if v is not inspect.Parameter.empty
        }


def test_wrong_values_are_named() -> None:
    with pytest.raises(ValueError, match=r"jsd_beta: expected a number in \[0, 1\], got 1.5"):
        LigerFusedLinearJSD(1.5)
    with pytest.raises(ValueError, match="temperature: expected a finite number > 0"):
        LigerFusedLinearJSDLoss(temperature=0.0)
    given = tensors()
    given["teacher_weight"] = torch.randn(V + 3, WIDE)
    for loss in (LigerFusedLinearJSD(), LigerFusedLinearJSDLoss()):
        with pytest.raises(ValueError, match="teacher_weight: expected the 61 rows that student_weight has"):
            call(loss, given)
    given = tensors()
    with pytest.raises(ValueError, match="shift_labels: expected shape"):
        call(LigerFusedLinearJSD(), given | {"labels": given["labels"][1:]})


def test_the_function_is_the_module_and_has_ligers_parameters() -> None:
    given = tensors()
    arguments = [given[x] for x in ("student_input", "student_weight", "teacher_input", "teacher_weight", "labels")]
    assert torch.equal(
        liger_fused_linear_jsd(*arguments, 0.3, -100, 2.0), LigerFusedLinearJSD(0.3, -100, 2.0)(*arguments)
    )
    functional = pytest.importorskip("liger_kernel.transformers.functional")
    theirs, ours = (
        inspect.signature(x).parameters for x in (functional.liger_fused_linear_jsd, liger_fused_linear_jsd)
    )
    assert [(x.name, x.default) for x in ours.values()] == [(x.name, x.default) for x in theirs.values()]
