"""The workload `distill` at toy size: its float64 truth, every provider's result, and the operations each needs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import kl_div, softmax

pytest.importorskip("trl")
pytest.importorskip("liger_kernel")

from benchmarks.cases import Absence, BenchCase, case, make_inputs
from benchmarks.plan import cpu_cases, gpu_cases
from benchmarks.providers import DISTILLERS, build
from benchmarks.reference import divergence_terms, errors, is_right, reference
from benchmarks.run import Step, check

CPU = torch.device("cpu")
TOY = case("toy", workload="distill", part="distill", n=16, h=32, v=70, t=4)
KINDS = {"reverse": 1.0, "forward": 0.0, "JSD": 0.3}
CASES = {
    **{name: replace(TOY, divergence=beta) for name, beta in KINDS.items()},
    "wider, padding": replace(TOY, teacher_h=48, padding=0.5),
    "frozen": replace(TOY, frozen=True),
    "score": replace(TOY, score=True),
    "bf16": replace(TOY, dtype="bfloat16"),
    "soft-cap": replace(TOY, softcap=5.0, divergence=0.5),
}
# NVH of the student's head: with a weight that trains, a frozen one, and no gradient
COUNTED = {"ours/torch": (8, 6, 4), "products": (8, 6, 4), "eager": (8, 6, 4), "liger_jsd": (8, 8, 8)}


@pytest.mark.parametrize("given", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("name", ["ours/torch", "trl", "liger_jsd", "eager"])
def test_every_provider_is_right_and_a_wrong_gradient_is_seen(name: str, given: BenchCase) -> None:
    inputs = make_inputs(given, CPU)
    if name == "liger_jsd" and given.softcap is not None:
        with pytest.raises(Absence, match="no soft-cap"):
            build(name, inputs)
        return
    want = reference(inputs)
    outcome = Step(build(name, inputs))()
    found = errors(outcome, inputs, want)
    assert is_right(found, given), found
    assert found["loss"] < 1e-6 or given.dtype != "float32"
    assert ("divergence" in found) == (name in ("ours/torch", "eager"))  # the others give a mean alone
    if not given.score:
        inputs.hidden.grad.mul_(1.5)
        assert not is_right(errors(outcome, inputs, want), given)
    assert not is_right({**found, "loss": 0.5}, given)


@pytest.mark.parametrize("beta", KINDS.values(), ids=KINDS.keys())
def test_the_truth_is_torchs_divergence_and_its_gradient(beta: float) -> None:
    g = torch.Generator().manual_seed(3)
    z, other = (2 * torch.randn(5, 9, generator=g, dtype=torch.float64) for _ in range(2))
    z.requires_grad_()
    p, q = softmax(z, dim=1), softmax(other, dim=1)
    m = (1 - beta) * p + beta * q
    of_student, of_teacher = (kl_div(m.log(), x, reduction="none").sum(dim=1) for x in (p, q))
    want = {0.0: of_teacher, 1.0: of_student}.get(beta, (1 - beta) * of_student + beta * of_teacher)
    value, k = divergence_terms(p.detach().log(), q.log(), beta)
    d = k - p.detach() * k.sum(dim=1, keepdim=True)
    torch.testing.assert_close(value.sum(dim=1), want.detach(), atol=1e-13, rtol=1e-12)
    torch.testing.assert_close(d, torch.autograd.grad(want.sum(), z)[0], atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize(("name", "counted"), COUNTED.items())
def test_operations_in_nvh_of_the_student(name: str, counted: tuple[int, int, int]) -> None:
    assert tuple(nvh(name, CASES[x]) for x in ("reverse", "frozen", "score")) == counted


def test_trl_multiplies_both_heads_again_in_the_backward_and_once_more_for_a_jsd() -> None:
    assert [nvh("trl", CASES[x]) for x in ("reverse", "forward", "JSD", "frozen", "score")] == [12, 12, 16, 10, 4]


def test_a_wider_teacher_costs_its_own_logits() -> None:
    wider = replace(TOY, teacher_h=64)
    assert wider.products_nvh == nvh("ours/torch", wider) == nvh("products", wider) == 2 + 2 * 64 / 32 + 4


def nvh(name: str, given: BenchCase) -> float:
    inputs = make_inputs(given, CPU)
    found = check(name, build(name, inputs), inputs, reference(inputs))
    assert found["status"] == "checked"
    return float(found["flops_nvh"])


def test_the_teacher_is_near_the_student_and_another_head() -> None:
    inputs = make_inputs(replace(TOY, n=256, t=8, h=64, v=4000, teacher_h=96), CPU)
    assert inputs.teacher is not None
    assert inputs.teacher.hidden.shape == (32, 8, 96) and inputs.teacher.weight.shape == (4000, 96)
    assert 0.05 < float(reference(inputs).loss) < 0.5
    assert make_inputs(replace(TOY, divergence=None), CPU).teacher is None


@pytest.mark.parametrize(("name", "given"), [("unsloth", TOY), ("liger_jsd", replace(TOY, divergence=None))])
def test_a_provider_of_the_other_kind_is_absent(name: str, given: BenchCase) -> None:
    with pytest.raises(Absence, match="no divergence from a teacher" if given is TOY else "no policy loss"):
        build(name, make_inputs(given, CPU))


def test_the_kernel_for_gpus_says_so() -> None:
    with pytest.raises(Absence, match="GPU"):
        build("liger_jsd/fused", make_inputs(TOY, CPU))


@pytest.mark.parametrize("plan", [cpu_cases, gpu_cases])
def test_both_plans_have_every_divergence_with_ours_and_the_products_first(plan: object) -> None:
    cases = [x for x in plan() if x.part == "distill"]  # type: ignore[operator]
    assert {x.divergence for x in cases} == {0.0, 0.5, 1.0}
    assert all(x.providers[:2] == ("ours", "products") for x in cases)
    assert {name for x in cases for name in x.providers} <= DISTILLERS.keys()
    assert {x.divergence for x in plan()} - {0.0, 0.5, 1.0} == {None}  # type: ignore[operator]
