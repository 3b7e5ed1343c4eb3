"""The float64 reference against TRL's own loss, and the tolerance against right and deliberately
wrong candidates."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from grpo_kernels import LossConfig
from grpo_kernels.typing import LossTypeName
from tests.support.case_builder import Case
from tests.support.cases import LOSSES, fixed_cases
from tests.support.reference import ReferenceResult, reference_loss
from tests.support.reference_terms import DEFAULTS, TERMS, settings
from tests.support.tolerance import Bounds, assert_matches, bounds_of, computed_in
from tests.support.trl_oracle import OracleResult, in_domain, trl_loss

IN_TRL = [pair for pair in LOSSES if TERMS[pair[0]].in_trl]
CASES = {case.name: case for case in fixed_cases()}
IN_DOMAIN = [case for case in CASES.values() if in_domain(case)]


@cache
def known(name: str) -> tuple[ReferenceResult, Bounds]:
    reference = reference_loss(CASES[name])
    return reference, bounds_of(reference, CASES[name])


def loss_of(case: Case) -> tuple[str, str]:
    o = settings(case)
    return o.loss_type, o.importance_sampling_level


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    if not got.numel():
        return 0.0
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-12))


def differences_from_trl(case: Case, trl: OracleResult) -> dict[str, float]:
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


Edit = Callable[[Any], Any]


def candidate(case, told, raw, edits):
    """Output and gradients by name, each rounded once, of the case as it was `told`; with another
    result of the products, and edited results."""
    want = reference_loss(case.but(**told), raw)
    edited = lambda name: edits.get(name, lambda x: x)(getattr(want, name))  # noqa: E731
    found = {name: edited(name) for name in ("loss", "logps", "entropies", "metrics")}
    for name in ("loss", "logps", "entropies"):
        found[name] = found[name].to(computed_in(case))
    grads: dict[str, Tensor | None] = {}
    for name in want.head.leaves:
        dtype = getattr(case, name).dtype
        grads[name] = None if name in case.frozen else edited(f"d_{name}").to(dtype)
    return SimpleNamespace(**found), grads


def accepted(name, told=None, raw=None, edits=None):
    reference, bounds = known(name)
    output, grads = candidate(CASES[name], told or {}, raw, edits or {})
    try:
        assert_matches(output, grads, reference, CASES[name], bounds)
    except AssertionError:
        return False
    return True


def through(dtype: torch.dtype) -> Edit:
    """A stop at another dtype on the way."""
    return lambda x: x.to(dtype).to(x.dtype)


def swapped(metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    """Low and high clip shares the wrong way round."""
    names = ("clip_ratio/low_mean", "clip_ratio/high_mean")
    other = dict(zip(names, reversed(names), strict=True))
    return {other.get(name, name): x for name, x in metrics.items()}


OFF_POLICY, BIASED = "A/dapo-t/off-policy/f32", "B/head/f32"
# the case, and what is wrong: of what is told, of the products, or of a result
FAULTS: dict[str, tuple[str, dict[str, Any]]] = {
    "weight gradient x 1.001": (OFF_POLICY, {"edits": {"d_weight": lambda x: 1.001 * x}}),
    "hidden gradient x 0.9995": (OFF_POLICY, {"edits": {"d_hidden": lambda x: 0.9995 * x}}),
    "bias gradient lost": (BIASED, {"edits": {"d_bias": torch.zeros_like}}),
    "masked logps not 0": (OFF_POLICY, {
        "edits": {"logps": lambda x: torch.where(x == 0, 1e-12, x)}
    }),
    "loss x 1.0001": (OFF_POLICY, {"edits": {"loss": lambda x: 1.0001 * x}}),
    "clip shares swapped": (OFF_POLICY, {"edits": {"metrics": swapped}}),
    "logits in bfloat16": (BIASED, {"raw": through(torch.bfloat16)}),
    "logits off by 2^-12 (TF32)": (BIASED, {
        "raw": lambda x: x * (1 + 2**-12 * torch.cos(1e4 * x))
    }),
    "last vocabulary lane lost": (BIASED, {
        "raw": lambda x: x.masked_fill(torch.arange(x.shape[1]) == x.shape[1] - 1, -1e4)
    }),
    "epsilons swapped": (OFF_POLICY, {
        "told": {"config": {"epsilon": 0.28, "epsilon_high": 0.2}}
    }),
    "delta ignored": ("B/delta/dapo-t", {"told": {"config": {"delta": None}}}),
    "mean over all tokens": ("A/grpo-t/off-policy/f32", {
        "told": {"config": {"loss_type": "bnpo"}}
    }),
    "KL without bias correction": ("B/kl/dapo-t", {
        "told": {"config": {"use_bias_correction_kl": False}}
    }),
    "importance ratio ignored": ("B/ratio-token/dapo-t", {
        "told": {"importance_sampling_ratio": None}
    }),
    "off-policy mask ignored": ("B/off-policy-mask/dapo-t", {
        "told": {"config": {"off_policy_mask_threshold": None}}
    }),
    "top-entropy mask ignored": ("B/top-entropy/dapo-t", {
        "told": {"config": {"top_entropy_quantile": 1.0}}
    }),
}  # fmt: skip


def test_the_tolerance_accepts_what_is_right() -> None:
    assert [name for name in CASES if name[0] in "AB" and not accepted(name)] == []


@pytest.mark.parametrize("fault", FAULTS)
def test_the_tolerance_rejects(fault: str) -> None:
    name, wrong = FAULTS[fault]
    assert not accepted(name, **wrong)


def test_a_failure_names_the_worst_element() -> None:
    name = OFF_POLICY
    output, grads = candidate(CASES[name], {}, None, {})
    grads["weight"][3, 5] += 1e-3
    message = rf"{name}: d_weight\[3, 5\]: got .* want .* allowed"
    with pytest.raises(AssertionError, match=message):
        assert_matches(output, grads, known(name)[0], CASES[name])


def test_the_reference_has_every_loss_and_every_option() -> None:
    assert get_args(LossTypeName) == tuple(TERMS)
    for option in fields(LossConfig):
        if not option.name.startswith("vllm_"):  # of a ratio that the reference is given
            default = option.default
            if option.name == "max_completion_length":  # ours has none
                default = 512
            assert DEFAULTS[option.name] == default, option.name


def test_reference_knows_nothing_of_the_library() -> None:
    of_reference = ("reference", "reference_head", "reference_terms", "tolerance")
    for module in (*of_reference, "cases", "case_builder", "random_cases"):
        source = inspect.getsource(__import__(f"tests.support.{module}", fromlist=[module]))
        assert not re.search(r"(import|from) grpo_kernels", source)
