"""Every peer of the benchmarks on small cases: a right result, or the reason why there is none."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.cases import Absence, BenchCase, make_inputs
from benchmarks.machine import ROOT
from benchmarks.providers import build
from benchmarks.reference import errors, is_right, reference
from benchmarks.run import step

CPU = torch.device("cpu")
TOY = BenchCase("toy").toy()
CASES = {
    "fp32": TOY,
    "bf16": replace(TOY, dtype="bfloat16"),
    "soft-cap": replace(TOY, softcap=5.0),
    "padding": replace(TOY, padding=0.5),
    "frozen, padding": replace(TOY, frozen=True, padding=0.5),
    "score": replace(TOY, score=True),
    "score, padding": replace(TOY, score=True, padding=0.5, part="accuracy"),
    "top entropy, padding": replace(TOY, top_entropy=0.5, padding=0.5, frozen=True),
    "fp32 weight, autocast": replace(TOY, dtype="bfloat16", weight_dtype="float32", autocast=True),
    "off-policy sequences": replace(TOY, drift=0.25, sequence=True, beta=0.04),
}
RESTRICTED = {"unsloth_zoo", "cut-cross-entropy"}  # distributions
PACKAGES = {"liger": "liger_kernel", "verl": "verl", "unsloth": "unsloth_zoo"}
# peer -> the cases that it does not do, and why
ABSENT = {
    "linear_ce": {"soft-cap": "no soft-cap", "top entropy, padding": "gives no entropy"},
    "unsloth": {},
    **{
        name: {"soft-cap": "no soft-cap", "fp32 weight, autocast": "one dtype"}
        for name in ("liger_ce", "liger_torch", "verl_torch")
    },
}


def expected_absence(name: str, case: str) -> str | None:
    """Words of the reason for `name` not to do `case`; None if it has to do it."""
    package = PACKAGES.get(name.partition("_")[0])
    if package is not None and importlib.util.find_spec(package) is None:
        return package
    if name == "linear_ce" and not hasattr(torch.nn.functional, "linear_cross_entropy"):
        return "linear_cross_entropy"
    return ABSENT[name].get(case)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ABSENT)
def test_the_result_is_right_or_there_is_a_reason(name: str, case: str) -> None:
    inputs, reason = make_inputs(CASES[case], CPU), expected_absence(name, case)
    if reason is not None:
        with pytest.raises(Absence, match=reason):
            step(build(name, inputs))
        return
    outcome = step(build(name, inputs))
    off = errors(outcome, inputs, reference(inputs))
    assert is_right(off, inputs.case), off
    if name in ("linear_ce", "unsloth"):  # less work than theirs who give entropies: it shows
        assert ("no entropy" in outcome.note) == (outcome.entropies is None)
    else:
        assert outcome.note and (outcome.entropies is not None or not inputs.case.wants_entropy)


@pytest.mark.slow  # compiles
def test_compiled() -> None:
    inputs = make_inputs(replace(TOY, softcap=5.0, padding=0.5, top_entropy=0.5), CPU)
    with torch._dynamo.config.patch(recompile_limit=8):  # which the adapter raises
        compiled = build("compiled", inputs)
        for _ in range(2):  # compiles, and takes what it compiled
            inputs.clear_gradients()
            assert is_right(errors(step(compiled), inputs, reference(inputs)), inputs.case)


@pytest.mark.parametrize("targets", [("test", "demo", "lint", "parity"), ("bench",)], ids=" ".join)
def test_only_bench_installs_what_is_not_permissive(targets: Any, tmp_path: Path) -> None:
    """In an environment that is still to be made."""
    command = ["make", "--dry-run", f"VENV={tmp_path}/venv", *targets]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [(ROOT / file).read_text() for file in set(re.findall(r"-r (requirements/\S+)", said))]
    named = set(re.findall(r"^([\w-]+)==", "\n".join(files), re.MULTILINE))
    assert "verl" in named
    assert RESTRICTED & named == (RESTRICTED if targets == ("bench",) else set())
    for file in ("pyproject.toml", "requirements/constraints.txt"):
        assert not any(package in (ROOT / file).read_text() for package in RESTRICTED)
