"""`linear_divergence` against the float64 reference, by every engine and backend.

A failure prints the name of its case; `check_divergence(random_divergence_case(seed), ENGINES)` replays a random one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_kernels import Head, LoRA, LossConfig, Run, grpo_loss, linear_divergence, policy_loss_from_logps
from tests.support.case_builder import Case, thinned
from tests.support.divergence_case import (
    check_divergence,
    divergence_case,
    random_divergence_case,
    run_divergence,
    upstream_of,
)
from tests.support.reference import head, teacher_log_probs
from tests.support.reference_terms import divergence

BETAS = (0.0, 1.0, 0.5, 0.1)
ENGINES = ("auto", "one_pass", "two_pass", "lean")
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}


def divergence_of(*given: Any, **options: Any) -> torch.Tensor:
    return linear_divergence(*given, **options).divergence


def fixed_cases() -> Iterator[Case]:
    """30 of each divergence."""
    for beta in BETAS:
        heads = {
            "plain": {}, "bias": {"bias": True}, "temperature": {"temperature": 0.6}, "hot": {"temperature": 2.0},
            "cap": {"final_logit_softcapping": 3.0},
            "cap-of-teacher": {"others": {"teacher_final_logit_softcapping": 2.0}},
            "caps": {"final_logit_softcapping": 5.0, "others": {"teacher_final_logit_softcapping": 1.0}, "bias": True},
            "scales": {"logit_scale": -0.7, "others": {"teacher_logit_scale": 1.4}}, "other-width": {"teacher_h": 33},
            "narrow": {"teacher_h": 1, "bias": True}, "same": {"teacher": 0.0}, "near": {"teacher": 1e-4},
            "far": {"teacher": 4.0, "teacher_h": 8}, "confident": {"spread": 20.0}, "wide": {"v": 700, "b": 2},
            "one-row": {"b": 1, "t": 1}, "two-ids": {"v": 2}, "none": {"mask": "none"}, "full": {"mask": "full"},
            "workspace": {"workspace": 3 * 50 * 4, "b": 6}, "frozen": {"frozen": ("weight", "bias"), "bias": True},
            "frozen-any": {"frozen": ("weight",), "arrives": "any"}, "only-head": {"frozen": ("hidden",)},
            "any": {"arrives": "any"}, "some": {"arrives": "some"}, "more": {"more": True, "arrives": "any"},
        }  # fmt: skip
        for name, options in heads.items():
            yield divergence_case(f"{name}/{beta}", beta=beta, **options)
        for short, dtype in DTYPES.items():
            yield divergence_case(f"{short}/{beta}", beta=beta, dtype=dtype, teacher_h=24, bias=True, arrives="any")


@pytest.mark.parametrize("part", range(8))
def test_fixed_cases(part: int, every_backend: str) -> None:
    for case in thinned([*fixed_cases()][part::8], every_backend):
        check_divergence(case, ENGINES)


@pytest.mark.parametrize("block", range(10))
def test_random_cases(block: int, every_backend: str) -> None:
    count = {"torch": 40, "cpp": 12, "triton": 3}[every_backend]  # the interpreter is slow
    for seed in range(block * count, (block + 1) * count):
        check_divergence(random_divergence_case(seed), ("auto", ENGINES[1 + seed % 3]))


@pytest.mark.parametrize("beta", BETAS)
def test_of_equal_heads_value_and_gradient_are_exactly_0(beta: float, every_backend: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        case = divergence_case(f"equal/{beta}", beta=beta, teacher=0.0, dtype=dtype, bias=True, temperature=0.7)
        found, grads = run_divergence(case.but(teacher_hidden=case.hidden))
        assert not found.divergence.any()
        assert not any(x.any() for x in grads.values())


def test_banned_ids_are_infinite_only_where_they_must_be(every_backend: str) -> None:
    case = divergence_case("banned", bias=True, v=40, mask="full")
    lanes, ids = torch.arange(40), case.completion_ids
    banned = (lanes % 3 == 0) & ~torch.isin(lanes, ids)
    for student, teacher, infinite in (
        (False, True, (1.0,)), (True, False, (0.0,)), (True, True, ()),
    ):  # fmt: skip
        bias = case.bias.masked_fill(banned, -math.inf) if student else case.bias
        other = case.bias.masked_fill(banned, -math.inf) if teacher else case.bias
        for beta in BETAS:
            made = case.but(bias=bias, teacher_bias=other, others={"beta_of_divergence": beta})
            found, grads = run_divergence(made)
            assert bool(found.divergence.isinf().all()) == (beta in infinite), (student, teacher, beta)
            if beta not in infinite:
                assert all(bool(torch.isfinite(x).all()) for x in grads.values())
                check_divergence(made, ("auto", "two_pass"))


def test_only_the_common_ids_count() -> None:
    case = divergence_case("common", v=40, mask="full", bias=True)
    wide = lambda x: torch.cat([x, torch.full_like(x[:7], 3.0)])  # noqa: E731
    plain = divergence_of(case.hidden, case.weight, case.teacher_hidden, case.teacher_weight)
    for weight, teacher in ((wide(case.weight), case.teacher_weight), (case.weight, wide(case.teacher_weight))):
        assert torch.equal(divergence_of(case.hidden, weight, case.teacher_hidden, teacher), plain)
    some = divergence_of(case.hidden, Head(case.weight, vocab_size=31), case.teacher_hidden, case.teacher_weight)
    theirs = Head(case.teacher_weight, vocab_size=31)
    assert torch.equal(divergence_of(case.hidden, case.weight, case.teacher_hidden, theirs), some)
    cut = divergence_of(case.hidden, case.weight[:31], case.teacher_hidden, case.teacher_weight[:31])
    assert torch.equal(some, cut)


def test_what_is_expected_changes_no_result(every_backend: str) -> None:
    case = divergence_case("expected", arrives="any", mask="full", dtype=torch.float64)
    plain, grads = run_divergence(case)
    for expected in (upstream_of(case)["divergence"], torch.rand(case.completion_mask.shape, dtype=torch.float64)):
        found, same = run_divergence(case, expected=expected)
        assert torch.equal(found.divergence, plain.divergence)
        for name in ("hidden", "weight"):
            torch.testing.assert_close(same[name], grads[name], rtol=1e-9, atol=1e-12)


def test_a_second_derivative_is_refused() -> None:
    case = divergence_case("twice")
    hidden = case.hidden.requires_grad_()
    value = divergence_of(hidden, case.weight, case.teacher_hidden, case.teacher_weight)
    (d_hidden,) = torch.autograd.grad(value.sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        torch.autograd.grad(d_hidden.sum(), hidden)


WRONG = [
    ({"divergence": "kl"}, ValueError, "divergence: expected one of"),
    ({"beta": 0.5}, ValueError, "beta: expected None with divergence = 'reverse_kl'"),
    ({"divergence": "jsd", "beta": 1.5}, ValueError, r"beta: expected a number in \[0, 1\]"),
    ({"divergence": "jsd", "beta": "half"}, TypeError, "beta: expected a number"),
    ({"ids": torch.zeros(3, 8, dtype=torch.long)}, ValueError, "ids: expected shape"),
    ({"expected": (torch.ones(3, 7), torch.ones(3, 7))}, ValueError, "expected: expected a tensor, or with ids two"),
    ({"run": Run("score_dot")}, ValueError, "engine"),
    ({"temperature": 0.0}, ValueError, "temperature"),
    ({"mask": torch.ones(3, 8)}, ValueError, "mask: expected shape"),
    ({"expected": torch.ones(3, 8)}, ValueError, "expected: expected shape"),
    ({"run": Run(workspace_bytes=0)}, ValueError, "workspace_bytes"),
]


@pytest.mark.parametrize(("options", "error", "match"), WRONG, ids=lambda x: str(x)[:40])
def test_wrong_arguments_are_named(options: dict, error: type[Exception], match: str) -> None:
    case = divergence_case("wrong")
    with pytest.raises(error, match=match):
        linear_divergence(case.hidden, case.weight, case.teacher_hidden, case.teacher_weight, **options)


@pytest.mark.parametrize(
    ("student", "teacher", "match"),
    [
        ({}, {"bias": torch.zeros(49)}, "teacher_bias: expected shape"),
        ({"vocab_size": 51}, {}, "vocab_size: expected at most"),
        ({}, {"lora": LoRA(torch.zeros(2, 16), torch.zeros(50, 2))}, r"teacher_head\.lora: expected None"),
        ({"logit_scale": 2.0}, None, "teacher_head: expected a Head, which says its own logit_scale, .* 2.0"),
        ({"final_logit_softcapping": 9.0}, None, "teacher_head: expected a Head, which says its own final_logit_soft"),
    ],
)
def test_wrong_heads_are_named(student: dict, teacher: dict | None, match: str) -> None:
    case = divergence_case("wrong")
    other = case.teacher_weight if teacher is None else Head(case.teacher_weight, **teacher)
    with pytest.raises(ValueError, match=match):
        linear_divergence(case.hidden, Head(case.weight, **student), case.teacher_hidden, other)


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        ("teacher_hidden", lambda x: x[:, :3], "teacher_hidden: expected shape"),
        ("teacher_hidden", lambda x: x.long(), "teacher_hidden: expected a floating-point tensor"),
        ("teacher_hidden", lambda x: x.tolist(), "teacher_hidden: expected a tensor"),
        ("teacher_weight", lambda x: x[:, :5], "teacher_weight: expected shape"),
        ("teacher_weight", lambda x: x.to("meta"), "teacher_weight: expected a tensor with data"),
    ],
)
def test_wrong_tensors_of_the_teacher_are_named(name, change, match) -> None:
    case = divergence_case("wrong")
    given = {x: getattr(case, x) for x in ("hidden", "weight", "teacher_hidden", "teacher_weight")}
    with pytest.raises((TypeError, ValueError), match=match):
        linear_divergence(*{**given, name: change(given[name])}.values())


def plain_divergence(hidden, weight, teacher_hidden, teacher_weight, temperature=1.0) -> torch.Tensor:
    """The reverse KL by all logits."""
    log_p = ((hidden @ weight.T) / temperature).log_softmax(-1)
    log_q = ((teacher_hidden @ teacher_weight.T) / temperature).log_softmax(-1)
    return divergence(1.0, log_p.flatten(0, -2), log_q.flatten(0, -2)).view(hidden.shape[:-1])


def given_tensors(dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (3, 7)) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    sizes = ((*shape, 16), (50, 16), (*shape, 12), (50, 12))
    made = [torch.randn(size, generator=g, dtype=torch.float64).to(dtype) for size in sizes]
    return [x.requires_grad_(i < 2) for i, x in enumerate(made)]


@pytest.mark.parametrize("engine", ["auto", "two_pass", "lean"])
@pytest.mark.parametrize("frozen", [False, True])
def test_an_adapter_on_the_student_is_its_dense_head(engine: str, frozen: bool) -> None:
    hidden, weight, teacher_hidden, teacher_weight = given_tensors()
    weight.requires_grad_(not frozen)
    a, b = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in ((4, 16), (50, 4)))
    student = Head(weight, lora=LoRA(a, b, 0.5))
    value = divergence_of(hidden, student, teacher_hidden, teacher_weight, run=Run(engine))
    want = plain_divergence(hidden, weight + 0.5 * b @ a, teacher_hidden, teacher_weight)
    torch.testing.assert_close(value, want)
    leaves = [hidden, a, b, *([] if frozen else [weight])]
    upstream = torch.rand(3, 7, dtype=torch.float64)
    got, expected = (torch.autograd.grad(x, leaves, upstream) for x in (value, want))
    torch.testing.assert_close(got, expected)


def test_any_leading_shape_and_a_temperature_a_position() -> None:
    for shape in ((11,), (2, 3, 4)):
        given = given_tensors(shape=shape)
        temperature = torch.linspace(0.5, 2.0, math.prod(shape), dtype=torch.float64).view(shape)
        value = divergence_of(*given, temperature=temperature)
        torch.testing.assert_close(value, plain_divergence(*given, temperature=temperature[..., None]))


def test_within_autocast_operands_are_rounded_to_its_dtype() -> None:
    given = given_tensors(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        value = divergence_of(*given)
    rounded = [x.detach().bfloat16().float() for x in given]
    torch.testing.assert_close(value, plain_divergence(*rounded), rtol=1e-5, atol=1e-5)
    value.sum().backward()
    assert given[0].grad.dtype == given[1].grad.dtype == torch.float32


def test_heads_of_different_dtypes_keep_their_own() -> None:
    hidden, weight, teacher_hidden, teacher_weight = given_tensors(torch.float32)
    value = divergence_of(hidden, weight, teacher_hidden.bfloat16(), teacher_weight.bfloat16())
    rounded = [x.bfloat16().float() for x in (teacher_hidden, teacher_weight)]
    torch.testing.assert_close(value, plain_divergence(hidden, weight, *rounded), rtol=1e-5, atol=1e-5)
    double = divergence_of(hidden.double(), weight.double(), teacher_hidden, teacher_weight)
    assert double.dtype == torch.float64


def test_a_16_bit_student_leaves_its_teacher_in_fp32() -> None:
    hidden, weight, *_ = given_tensors(torch.float32)
    student = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    value = divergence_of(*student, hidden, weight)  # of a teacher with the same numbers, not rounded
    want = plain_divergence(*(x.double() for x in (*student, hidden, weight)))
    torch.testing.assert_close(value.double(), want, rtol=1e-3, atol=1e-8)
    assert want.mean() > 1e-5

    config, ids = LossConfig(beta=0.1, kl_estimator="full"), torch.zeros(3, 7, dtype=torch.long)
    reference = hidden, weight
    out = grpo_loss(*student, ids, None, torch.ones(3), reference=reference, config=config)
    torch.testing.assert_close(out.metrics["kl"].double(), want.mean(), rtol=1e-3, atol=1e-8)


def test_a_teacher_beyond_the_range_of_the_student_s_dtype() -> None:
    *student, teacher_hidden, teacher_weight = given_tensors(torch.float32)
    teacher_hidden.index_fill_(2, torch.tensor(0), 7e4)  # 65504 is the largest fp16
    teacher, student = (teacher_hidden, teacher_weight * 1e-5), [x.half() for x in student]
    value = divergence_of(*student, *teacher)
    want = plain_divergence(*(x.double() for x in (*student, *teacher)))
    torch.testing.assert_close(value.double(), want, rtol=1e-4, atol=1e-5)


def test_a_float64_teacher_of_a_float32_student() -> None:
    given = given_tensors(torch.float32)
    value = divergence_of(*given[:2], *(x.double() for x in given[2:]))
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, divergence_of(*given))


def test_the_teacher_gets_no_gradient() -> None:
    given = [x.requires_grad_() for x in given_tensors()]
    divergence_of(*given).sum().backward()
    assert given[0].grad is not None and given[2].grad is None and given[3].grad is None


def test_compiled_code_breaks_its_graph_and_has_the_same_bits() -> None:
    def step(*given: torch.Tensor) -> torch.Tensor:
        return linear_divergence(*given).divergence.mean() * 2.0

    given = given_tensors(torch.float32)
    found = torch.compile(step, backend="eager")(*given)
    found.backward()
    grads = [x.grad.clone() for x in given[:2]]
    for x in given[:2]:
        x.grad = None
    again = step(*given)
    again.backward()
    assert torch.equal(found, again)
    assert all(torch.equal(x, y.grad) for x, y in zip(grads, given[:2], strict=True))


LOSS_WRONG = [
    ({}, {"kl_estimator": "full", "beta": 0.1}, ValueError, r"reference: expected \(hidden, head\)"),
    ({"reference": "given"}, {"beta": 0.1}, ValueError, "reference: expected None with kl_estimator = 'k3'"),
    (
        {"reference": 3},
        {"kl_estimator": "full", "beta": 0.1},
        TypeError,
        r"reference: expected \(hidden, head\), got int",
    ),
    ({"reference": "narrow"}, {"kl_estimator": "full", "beta": 0.1}, ValueError, "reference.weight: expected shape"),
]


@pytest.mark.parametrize(("options", "config", "error", "match"), LOSS_WRONG)
def test_a_loss_says_what_reference_it_takes(options, config, error, match) -> None:
    case = divergence_case("wrong")
    heads = {"given": case.teacher_weight, "narrow": case.teacher_weight[:40]}
    if options.get("reference") in heads:
        options = {"reference": (case.teacher_hidden, heads[options["reference"]])}
    given = (case.hidden, case.weight, case.completion_ids, case.completion_mask, case.advantages)
    logps = torch.zeros(3, 7) if config.get("kl_estimator") != "full" else None
    with pytest.raises(error, match=match):
        grpo_loss(*given, config=LossConfig(**config), ref_per_token_logps=logps, **options)


def test_given_log_probabilities_have_no_full_kl() -> None:
    logps = torch.zeros(3, 7)
    with pytest.raises(ValueError, match=r"reference: expected \(hidden, head\), which grpo_loss takes"):
        policy_loss_from_logps(
            logps, logps, torch.ones(3, 7), torch.ones(3), config=LossConfig(beta=0.1, kl_estimator="full")
        )


def test_the_bias_correction_has_nothing_to_correct() -> None:
    """The corrected estimate's expectation over the old policy's tokens is the exact KL, whatever that policy was."""
    case = divergence_case("corrected", v=30, mask="full", dtype=torch.float64)
    h = head(case)
    log_p, log_q = h.log_probs.detach(), teacher_log_probs(case)
    old = torch.randn(log_p.shape, dtype=torch.float64).log_softmax(-1)
    corrected = (old.exp() * (log_p - old).exp() * (torch.expm1(log_q - log_p) - (log_q - log_p))).sum(-1)
    torch.testing.assert_close(corrected, divergence(1.0, log_p, log_q))
    plain = {"beta": 0.1, "kl_estimator": "full"}
    one, other = (LossConfig(**plain, use_bias_correction_kl=x) for x in (True, False))
    reference = case.teacher_hidden, case.teacher_weight
    given = (case.hidden, case.weight, case.completion_ids, case.completion_mask, case.advantages)
    losses = [grpo_loss(*given, config=x, reference=reference).loss for x in (one, other)]
    assert torch.equal(*losses)


def test_the_examples_of_the_docs_run_as_they_stand() -> None:
    page = (Path(__file__).parents[2] / "docs" / "divergences.md").read_text()
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, names)
    assert names["hidden"].grad.abs().sum() > 0
    assert names["scores"].divergence.shape == names["ids"].shape
