"""The float64 reference against TRL's own loss, and the tolerance against right and deliberately
wrong candidates."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from functools import cache
from typing import Any, get_args

import pytest
import torch

from grpo_kernels import LossConfig, policy_loss_from_logps
from grpo_kernels.typing import LossTypeName
from tests.support.case_builder import Case
from tests.support.cases import LOSSES, fixed_cases, random_case
from tests.support.plain import Hooks, plain
from tests.support.reference import ReferenceResult, reference_loss
from tests.support.reference_terms import CLIPPED, DEFAULTS, TERMS, settings
from tests.support.tolerance import Bounds, assert_matches, bounds_of
from tests.support.trl_oracle import OracleResult, in_domain, trl_loss
from tests.support.wrong_candidates import FAULTS, Fault

IN_TRL = [pair for pair in LOSSES if TERMS[pair[0]].in_trl]
CASES = {case.name: case for case in fixed_cases()}
IN_DOMAIN = [case for case in CASES.values() if in_domain(case)]


@cache
def known(name: str) -> tuple[ReferenceResult, Bounds]:
    """The reference and its bounds, once a case."""
    reference = reference_loss(CASES[name])
    return reference, bounds_of(reference, CASES[name])


def loss_of(case: Case) -> tuple[str, str]:
    o = settings(case)
    return o.loss_type, o.importance_sampling_level


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference over the largest value."""
    if not got.numel():
        return 0.0
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-12))


def differences_from_trl(case: Case, trl: OracleResult) -> dict[str, float]:
    """Relative for the loss and the gradients, absolute for the metrics."""
    ours, names = known(case.name)[0], ["loss", "d_hidden", "d_weight"]
    names += [] if trl.d_bias is None else ["d_bias"]
    found = {name: relative(getattr(ours, name), getattr(trl, name)) for name in names}
    for name, value in trl.metrics.items():  # TRL puts its 0 / 1 shares in float32
        found[f"{name} / 1e4"] = abs(float(ours.metrics[name]) - value) / 1e4
    return found


@pytest.mark.parametrize(("loss_type", "level"), IN_TRL)
def test_reference_equals_trl(loss_type: str, level: str) -> None:
    cases = [x for x in IN_DOMAIN if loss_of(x) == (loss_type, level)]
    assert len(cases) >= 4
    for case in cases:
        for name, difference in differences_from_trl(case, trl_loss(case)).items():
            assert difference < 1e-10, f"{case.name}: {name}: {difference:.3g}"


def test_enough_cases() -> None:
    assert len(CASES) == len(fixed_cases()) >= 270
    assert len(IN_DOMAIN) >= 100
    assert {loss_of(x) for x in IN_DOMAIN} == set(IN_TRL)
    undecided = [name for name in CASES if known(name)[1].ambiguous]
    assert not undecided, f"a discrete choice lies within the bounds: {undecided}"


def accepted(case: Case, hooks: Hooks | None = None) -> bool:
    reference, bounds = known(case.name)
    try:
        assert_matches(*plain(case, hooks), reference, case, bounds)
    except AssertionError:
        return False
    return True


def test_tolerance_accepts_plain_float32() -> None:
    assert [name for name, case in CASES.items() if not accepted(case)] == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_tolerance_rejects(fault: Fault) -> None:
    cases = [case for case in CASES.values() if fault.applies(case)]
    missed = [case.name for case in cases if accepted(case, fault.hooks)]
    assert cases
    assert len(missed) <= (1 - fault.share) * len(cases), f"of {len(cases)} missed: {missed[:5]}"


def test_a_failure_names_the_worst_element() -> None:
    name = "A/dapo-t/off-policy/f32"
    output, grads = plain(CASES[name])
    grads["weight"][3, 5] += 1e-3
    message = rf"{name}: d_weight\[3, 5\]: got .* want .* allowed"
    with pytest.raises(AssertionError, match=message):
        assert_matches(output, grads, known(name)[0], CASES[name])


def test_clipped_branch_of_an_overflowing_ratio_has_no_gradient() -> None:
    case = CASES["F/overflow-clipped/dapo-t"]
    reference, _ = known(case.name)
    hit = (torch.arange(case.completion_mask.shape[1]) % 2 == 0) & (case.completion_mask != 0)
    assert torch.isfinite(reference.d_hidden).all()
    assert (reference.d_logps[hit] == 0).all()
    assert (reference.d_logps != 0).any()


def test_a_random_case_depends_on_its_seed_alone() -> None:
    first, again, other = random_case(5), random_case(5), random_case(6)
    assert torch.equal(first.hidden, again.hidden)
    assert first.config == again.config
    assert first.config != other.config or first.hidden.shape != other.hidden.shape


def loss_of_three(kind: Any, **fields: Any) -> torch.Tensor:
    """The loss of one token with a ratio of 3 and a negative advantage."""
    now, one = torch.zeros(1, 1), torch.ones(1, 1)
    old = {"old_per_token_logps": now - 1.0986}
    config = LossConfig(loss_type=kind, max_completion_length=1, **fields)
    return policy_loss_from_logps(now, now, one, -one[0], config=config, **old).loss


def test_the_reference_has_every_loss_and_every_option() -> None:
    assert get_args(LossTypeName) == tuple(TERMS)
    clipped = [x for x in TERMS if loss_of_three(x) != loss_of_three(x, delta=2.0)]
    assert tuple(clipped) == CLIPPED
    for option in fields(LossConfig):
        if not option.name.startswith("vllm_"):  # of a ratio that the reference is given
            default = option.default
            if option.name == "max_completion_length":  # ours has none
                default = 512
            assert DEFAULTS[option.name] == default, option.name


def test_reference_knows_nothing_of_the_library() -> None:
    of_head = ("reference_head", "head_bounds", "head_cases")
    of_loss = ("reference", "reference_terms", "cases", "random_cases", "tolerance", "plain")
    for module in (*of_head, *of_loss, "case_builder"):
        source = inspect.getsource(__import__(f"tests.support.{module}", fromlist=[module]))
        assert not re.search(r"(import|from) grpo_kernels", source)
