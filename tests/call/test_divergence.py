"""`linear_divergence` against the float64 reference, by every engine and backend.

A failure prints the name of its case; `check_divergence(random_divergence_case(seed), ENGINES)` replays a random one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from grpo_kernels import linear_divergence, linear_divergence_with
from tests.support.case_builder import Case
from tests.support.divergence_case import check_divergence, divergence_case, random_divergence_case, run_divergence

BETAS = (0.0, 1.0, 0.5, 0.1)
ENGINES = ("auto", "one_pass", "two_pass", "lean")
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}


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
    for case in [*fixed_cases()][part::8]:
        check_divergence(case, ENGINES)


@pytest.mark.parametrize("block", range(10))
def test_random_cases(block: int, every_backend: str) -> None:
    count = 100 if every_backend == "torch" else 20  # the interpreter is slow
    for seed in range(block * count, (block + 1) * count):
        check_divergence(random_divergence_case(seed), ("auto", ENGINES[1 + seed % 3]))


def test_there_are_enough_fixed_cases() -> None:
    names = [case.name for case in fixed_cases()]
    assert len(names) == len(set(names)) >= 120


@pytest.mark.parametrize("beta", BETAS)
def test_of_equal_heads_value_and_gradient_are_exactly_0(beta: float, every_backend: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        case = divergence_case(f"equal/{beta}", beta=beta, teacher=0.0, dtype=dtype, bias=True, temperature=0.7)
        found, grads = run_divergence(case.but(teacher_hidden=case.hidden))
        assert not found["divergence"].any()
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
            assert bool(found["divergence"].isinf().all()) == (beta in infinite), (student, teacher, beta)
            if beta not in infinite:
                assert all(bool(torch.isfinite(x).all()) for x in grads.values())
                check_divergence(made, ("auto", "two_pass"))


def test_only_the_common_ids_count() -> None:
    case = divergence_case("common", v=40, mask="full", bias=True)
    wide = lambda x: torch.cat([x, torch.full_like(x[:7], 3.0)])  # noqa: E731
    plain = linear_divergence(case.hidden, case.weight, case.teacher_hidden, case.teacher_weight)
    for weight, teacher in ((wide(case.weight), case.teacher_weight), (case.weight, wide(case.teacher_weight))):
        assert torch.equal(linear_divergence(case.hidden, weight, case.teacher_hidden, teacher), plain)
    some = linear_divergence(case.hidden, case.weight, case.teacher_hidden, case.teacher_weight, vocab_size=31)
    cut = linear_divergence(case.hidden, case.weight[:31], case.teacher_hidden, case.teacher_weight[:31])
    assert torch.equal(some, cut)


def test_what_is_expected_changes_no_result_but_saves_the_second_pass(every_backend: str) -> None:
    case = divergence_case("expected", arrives="any", mask="full", dtype=torch.float64)
    from tests.support.divergence_case import upstream_of

    plain, grads = run_divergence(case)
    for expected in (upstream_of(case)["divergence"], torch.rand(case.completion_mask.shape, dtype=torch.float64)):
        found, same = run_divergence(case, expected=expected)
        assert torch.equal(found["divergence"], plain["divergence"])
        for name in ("hidden", "weight"):
            torch.testing.assert_close(same[name], grads[name], rtol=1e-9, atol=1e-12)


def test_a_second_derivative_is_refused() -> None:
    case = divergence_case("twice")
    hidden = case.hidden.requires_grad_()
    value = linear_divergence(hidden, case.weight, case.teacher_hidden, case.teacher_weight)
    (d_hidden,) = torch.autograd.grad(value.sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        torch.autograd.grad(d_hidden.sum(), hidden)


WRONG = [
    ({"divergence": "kl"}, ValueError, "divergence: expected one of"),
    ({"beta": 0.5}, ValueError, "beta: expected None with divergence = 'reverse_kl'"),
    ({"divergence": "jsd", "beta": 1.5}, ValueError, r"beta: expected a number in \[0, 1\]"),
    ({"divergence": "jsd", "beta": "half"}, TypeError, "beta: expected a number"),
    ({"outputs": ("logps",)}, ValueError, "ids: expected a tensor since"),
    ({"outputs": ("entropies",)}, ValueError, "outputs: expected some of"),
    ({"ids": torch.zeros(3, 7, dtype=torch.long)}, ValueError, "ids: expected None"),
    ({"engine": "score_dot"}, ValueError, "engine"),
    ({"temperature": 0.0}, ValueError, "temperature"),
    ({"mask": torch.ones(3, 8)}, ValueError, "mask: expected shape"),
    ({"expected": torch.ones(3, 8)}, ValueError, "expected: expected shape"),
    ({"teacher_bias": torch.zeros(49)}, ValueError, "teacher_bias: expected shape"),
    ({"teacher_logit_scale": "big"}, TypeError, "teacher_logit_scale"),
    ({"teacher_final_logit_softcapping": -1.0}, ValueError, "teacher_final_logit_softcapping"),
    ({"vocab_size": 51}, ValueError, "vocab_size: expected at most"),
    ({"workspace_bytes": 0}, ValueError, "workspace_bytes"),
]


@pytest.mark.parametrize(("options", "error", "match"), WRONG, ids=lambda x: str(x)[:40])
def test_wrong_arguments_are_named(options: dict, error: type[Exception], match: str) -> None:
    case = divergence_case("wrong")
    with pytest.raises(error, match=match):
        linear_divergence_with(case.hidden, case.weight, case.teacher_hidden, case.teacher_weight, **options)


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
        linear_divergence(**{**given, name: change(given[name])})
