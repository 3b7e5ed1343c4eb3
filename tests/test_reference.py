"""The float64 reference against TRL's own loss, and the tolerance against right and deliberately
wrong candidates."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import get_args

import pytest
import torch

from grpo_kernels import LossConfig, policy_loss_from_logps
from grpo_kernels.typing import LossTypeName
from tests.support.case_builder import Case
from tests.support.cases import LOSSES, fixed_cases, random_case
from tests.support.plain import plain
from tests.support.reference import ReferenceResult, reference_loss
from tests.support.reference_terms import CLIPPED, DEFAULTS, TERMS, settings
from tests.support.tolerance import Bounds, assert_matches, bounds_of
from tests.support.trl_oracle import OracleResult, in_domain, trl_loss
from tests.support.wrong_candidates import FAULTS, Fault

IN_TRL = [pair for pair in LOSSES if TERMS[pair[0]].in_trl]
IN_DOMAIN = [case for case in fixed_cases() if in_domain(case)]
_known: dict[str, tuple[ReferenceResult, Bounds]] = {}


def known(case: Case) -> tuple[ReferenceResult, Bounds]:
    """The reference and its bounds, once a case."""
    if case.name not in _known:
        reference = reference_loss(case)
        _known[case.name] = (reference, bounds_of(reference, case))
    return _known[case.name]


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    if not got.numel():
        return 0.0
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-12))


def differences_from_trl(case: Case, trl: OracleResult) -> dict[str, float]:
    """Relative for the loss and the gradients, absolute for the metrics."""
    ours, _ = known(case)
    found = {
        name: relative(getattr(ours, name), getattr(trl, name))
        for name in ("loss", "d_hidden", "d_weight")
    }
    if trl.d_bias is not None:
        found["d_bias"] = relative(ours.d_bias, trl.d_bias)
    # TRL puts its 0 / 1 shares in float32.
    return found | {
        f"{name} / 1e4": abs(float(ours.metrics[name]) - value) / 1e4
        for name, value in trl.metrics.items()
    }


@pytest.mark.parametrize(("loss_type", "level"), IN_TRL)
def test_reference_equals_trl(loss_type: str, level: str) -> None:
    cases = [
        c
        for c in IN_DOMAIN
        if (settings(c).loss_type, settings(c).importance_sampling_level) == (loss_type, level)
    ]
    assert len(cases) >= 4
    for case in cases:
        if known(case)[1].ambiguous:
            continue
        for name, difference in differences_from_trl(case, trl_loss(case)).items():
            assert difference < 1e-10, f"{case.name}: {name}: {difference:.3g}"


def test_enough_cases() -> None:
    cases = fixed_cases()
    assert len(cases) >= 270
    assert len({case.name for case in cases}) == len(cases)
    assert len(IN_DOMAIN) >= 100
    assert {
        (settings(c).loss_type, settings(c).importance_sampling_level) for c in IN_DOMAIN
    } == set(IN_TRL)
    undecided = [case.name for case in cases if known(case)[1].ambiguous]
    assert not undecided, f"a discrete choice lies within the bounds: {undecided}"


@pytest.mark.parametrize("group", "ABCDEFGH")
def test_tolerance_accepts_plain_float32(group: str) -> None:
    for case in fixed_cases():
        if case.group == group:
            reference, bounds = known(case)
            assert_matches(*plain(case), reference, case, bounds)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_tolerance_rejects(fault: Fault) -> None:
    cases = [case for case in fixed_cases() if fault.applies(case)]
    missed = []
    for case in cases:
        reference, bounds = known(case)
        try:
            assert_matches(*plain(case, fault.hooks), reference, case, bounds)
        except AssertionError:
            continue
        missed.append(case.name)
    assert cases
    assert len(cases) - len(missed) >= fault.share * len(cases), (
        f"{len(missed)} of {len(cases)} missed: {missed[:5]}"
    )


def test_a_failure_names_the_worst_element() -> None:
    case = next(case for case in fixed_cases() if case.name == "A/dapo-t/off-policy/f32")
    output, grads = plain(case)
    grads["weight"][3, 5] += 1e-3
    with pytest.raises(
        AssertionError, match=r"A/dapo-t/off-policy/f32: d_weight\[3, 5\]: got .* want .* allowed"
    ):
        assert_matches(output, grads, known(case)[0], case)


def test_clipped_branch_of_an_overflowing_ratio_has_no_gradient() -> None:
    case = next(case for case in fixed_cases() if case.name == "F/overflow-clipped/dapo-t")
    reference, _ = known(case)
    hit = (torch.arange(case.completion_mask.shape[1]) % 2 == 0) & (case.completion_mask != 0)
    assert torch.isfinite(reference.d_hidden).all()
    assert (reference.d_logps[hit] == 0).all()
    assert (reference.d_logps != 0).any()


def test_a_random_case_depends_on_its_seed_alone() -> None:
    first, again, other = random_case(5), random_case(5), random_case(6)
    assert torch.equal(first.hidden, again.hidden)
    assert first.config == again.config
    assert first.config != other.config or first.hidden.shape != other.hidden.shape


def loss_of_three(kind: str, **fields: float) -> torch.Tensor:
    """The loss of one token with a ratio of 3 and a negative advantage."""
    now, one = torch.zeros(1, 1), torch.ones(1, 1)
    old = {"old_per_token_logps": now - 1.0986}
    return policy_loss_from_logps(now, now, one, -one[0], loss_type=kind, **old, **fields).loss


def test_the_reference_has_every_loss_and_every_option() -> None:
    assert get_args(LossTypeName) == tuple(TERMS)
    assert (
        tuple(kind for kind in TERMS if loss_of_three(kind) != loss_of_three(kind, delta=2.0))
        == CLIPPED
    )
    for option in fields(LossConfig):
        if not option.name.startswith("vllm_"):  # of a ratio that the reference is given
            assert DEFAULTS[option.name] == option.default, option.name


def test_reference_knows_nothing_of_the_library() -> None:
    for module in (
        "reference",
        "reference_head",
        "reference_terms",
        "case_builder",
        "cases",
        "head_cases",
        "random_cases",
        "head_bounds",
        "tolerance",
        "plain",
    ):
        source = inspect.getsource(__import__(f"tests.support.{module}", fromlist=[module]))
        assert "import grpo_kernels" not in source
        assert "from grpo_kernels" not in source
