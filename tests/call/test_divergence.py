"""`linear_divergence` beyond `test_differential`: infinities, 0, dtypes, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grpo_kernels import (
    Expectation,
    Head,
    LoRA,
    grpo_loss,
    linear_divergence,
    policy_loss_from_logps,
)
from tests.support.case_builder import Case
from tests.support.cases import diverging
from tests.support.run_case import check_scores, run_scores, upstream_of


def divergence_of(*given: Any, **options: Any) -> Tensor:
    return linear_divergence(*given, **options).divergence


def test_only_the_common_ids_count() -> None:
    case = diverging("common", v=40, mask="full", bias=True)
    ours, theirs = case.weight, case.teacher_weight
    wide = lambda x: torch.cat([x, torch.full_like(x[:7], 3.0)])  # noqa: E731

    def found(head: Any, other: Any) -> Tensor:
        return divergence_of(case.hidden, head, (case.teacher_hidden, other))

    plain, some = found(ours, theirs), found(ours[:31], theirs[:31])
    assert torch.equal(found(wide(ours), theirs), plain)
    assert torch.equal(found(ours, wide(theirs)), plain)
    assert torch.equal(found(Head(ours, vocab_size=31), theirs), some)
    cut = Head(ours[:31], case.bias[:31])
    assert torch.equal(found(Head(ours, case.bias, vocab_size=31), theirs), found(cut, theirs[:31]))
    assert torch.equal(found(ours, Head(theirs, vocab_size=31)), some)
    module = torch.nn.Linear(theirs.shape[1], theirs.shape[0], bias=False)
    module.weight = torch.nn.Parameter(theirs)
    assert torch.equal(found(ours, Head(module, vocab_size=31)), some)


def test_what_is_expected_changes_no_result(every_backend: str) -> None:
    case = diverging("expected", arrives="any", mask="full", dtype=torch.float64)
    plain, grads = run_scores(case)
    asked: list[Tensor] = []
    upstream = upstream_of(case)["divergences"]

    def slopes(index: Tensor, logps: Tensor, _: Any) -> tuple[Tensor, None, Tensor]:
        asked.append(index)
        return torch.zeros_like(logps), None, upstream.flatten()[index]

    unusable = upstream.clone()
    unusable[0, :3] = torch.tensor([math.nan, math.inf, 1e300])
    for expected in (upstream, torch.rand(upstream.shape).double(), unusable, Expectation(slopes)):
        found, same = run_scores(case, expected=expected)
        assert torch.equal(found["divergences"], plain["divergences"])
        for name in ("hidden", "weight"):
            torch.testing.assert_close(same[name], grads[name], rtol=1e-9, atol=1e-12)
    assert asked


def adapted() -> nn.Module:
    peft = pytest.importorskip("peft")
    model = nn.ModuleDict({"head": nn.Linear(16, 50)})
    peft.inject_adapter_in_model(peft.LoraConfig(r=2, target_modules=["head"]), model)
    return model["head"]


# changed arguments, or functions of the right ones; the error, and what it says
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"divergence": "kl"}, ValueError, "divergence: expected one of"),
    ({"beta": 0.5}, ValueError, "beta: expected None with divergence = 'reverse_kl'"),
    ({"divergence": "jsd", "beta": 1.5}, ValueError, r"beta: expected a number in \[0, 1\]"),
    ({"divergence": "jsd", "beta": "half"}, TypeError, "beta: expected a number"),
    ({"expected": (torch.ones(3, 7), torch.ones(3, 7))}, ValueError,
     "expected: expected a tensor, or two with completion_ids"),
    ({"teacher_head": lambda w: Head(w, torch.zeros(49))}, ValueError,
     "teacher.head.bias: expected shape"),
    ({"head": lambda w: Head(w, vocab_size=51), "teacher_head": Head}, ValueError,
     "head.vocab_size: expected at most"),
    ({"teacher_head": lambda w: Head(nn.Linear(*w.T.shape), torch.zeros(50))}, ValueError,
     "teacher.head.bias: expected None, since the module has its own bias"),
    ({"teacher_head": lambda w: Head(w, lora=LoRA(torch.zeros(2, 16), torch.zeros(50, 2)))},
     ValueError, r"teacher\.head\.lora: expected None"),
    ({"teacher_head": lambda w: adapted()}, ValueError,
     "teacher.head: expected no active adapter"),
    ({"teacher_head": lambda w: nn.Embedding(50, 16)}, TypeError,
     "teacher.head: expected an nn.Linear with its own forward"),
    ({"teacher_head": lambda w: nn.Linear(5, 50)}, ValueError,
     "teacher.head.weight: expected shape"),
    ({"head": lambda w: Head(w, logit_scale=2.0)}, ValueError,
     "teacher.head: expected a Head that states its own logit_scale, .* 2.0"),
    ({"teacher_hidden": lambda x: x[:, :3]}, ValueError, "teacher.hidden: expected shape"),
    ({"teacher_head": lambda x: x[:, :5]}, ValueError, "teacher.head.weight: expected shape"),
    ({"teacher_head": lambda x: x.to("meta")}, ValueError,
     "teacher.head.weight: expected a tensor with data"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "match"), WRONG, ids=lambda x: str(x)[:9])
def test_wrong_arguments_are_named(changes: dict, error: type[Exception], match: str) -> None:
    case = diverging("wrong")
    given = {"hidden": case.hidden, "head": case.weight}
    given |= {"teacher_hidden": case.teacher_hidden, "teacher_head": case.teacher_weight}
    given |= {name: x(given[name]) if callable(x) else x for name, x in changes.items()}
    given["teacher"] = given.pop("teacher_hidden"), given.pop("teacher_head")
    with pytest.raises(error, match=f"^{match}"):
        linear_divergence(**given)


def with_dtypes(case: Case, student: torch.dtype, teacher: torch.dtype) -> Case:
    names = {"hidden": student, "weight": student}
    names |= {f"teacher_{x}": teacher for x in ("hidden", "weight")}
    return case.but(**{name: getattr(case, name).to(dtype) for name, dtype in names.items()})


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("student", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_student_and_teacher_of_different_dtypes_keep_their_own(student, far):
    """Nothing of the teacher is rounded to the student's dtype, or leaves its range."""
    case = diverging("dtypes", teacher_h=12, arrives="any")
    if far:
        large = case.teacher_hidden.index_fill(2, torch.tensor(0), 7e4)
        case = case.but(teacher_hidden=large, teacher_weight=case.teacher_weight * 1e-5)
    for teacher in (torch.bfloat16, torch.float32, torch.float64):
        check_scores(with_dtypes(case, student, teacher))


def test_within_autocast_operands_are_rounded_to_its_dtype() -> None:
    case = diverging("autocast", teacher_h=12)
    with torch.autocast("cpu", torch.bfloat16):
        found, grads = run_scores(case)
    want, _ = run_scores(case.to(torch.bfloat16).to(torch.float32))
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
    assert grads["hidden"].dtype == grads["weight"].dtype == torch.float32


def test_the_teacher_gets_no_gradient() -> None:
    sizes = ((3, 7, 16), (50, 16), (3, 7, 12), (50, 12))
    given = [torch.randn(size).requires_grad_() for size in sizes]
    divergence_of(*given[:2], (given[2], given[3])).sum().backward()
    assert given[0].grad is not None and given[2].grad is None and given[3].grad is None


FULL = {"kl_estimator": "full", "beta": 0.1}


@pytest.mark.parametrize(
    ("reference", "config", "match"),
    [
        (None, FULL, r"reference: expected \(hidden, head\)"),
        (Head, {"beta": 0.1}, "expected None with kl_estimator = 'k3', .*; pass ref_per_token"),
        (3, FULL, r"reference: expected a tuple \(hidden, head\), got int"),
        (lambda x: adapted(), FULL, r"reference\.head: expected no active adapter"),
        (lambda x: Head(x, vocab_size=31), FULL,
         r"reference\.head\.vocab_size: expected None or the other head's value, got 31"),
    ],
)  # fmt: skip
def test_a_loss_says_what_reference_it_takes(reference: Any, config: Any, match: str) -> None:
    case = diverging("wrong")
    if callable(reference):
        reference = case.teacher_hidden, reference(case.teacher_weight)
    given = (case.hidden, case.weight, case.completion_ids, case.completion_mask, case.advantages)
    logps = torch.zeros(3, 7) if config is not FULL else None
    with pytest.raises((TypeError, ValueError), match=match):
        grpo_loss(*given, **config, ref_per_token_logps=logps, reference=reference)
    given = torch.zeros(3, 7), torch.ones(3, 7), torch.ones(3)
    with pytest.raises(ValueError, match=r"reference: expected \(hidden, head\), which grpo_loss"):
        policy_loss_from_logps(*given, **FULL)
