"""Every peer of the benchmarks on small cases: a right result, or the reason why there is none."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.cases import Absence, BenchCase, Inputs, make_inputs
from benchmarks.machine import ROOT
from benchmarks.providers import Outcome, build
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
PACKAGES = {
    "liger_ce": "liger_kernel", "liger_torch": "liger_kernel", "verl_torch": "verl",
    "verl_triton": "verl", "unsloth": "unsloth_zoo", "cce": "cut_cross_entropy",
}  # fmt: skip
RESTRICTED = {"unsloth_zoo", "cut-cross-entropy"}  # distributions
ON_A_CPU = ("linear_ce", "liger_ce", "liger_torch", "verl_torch", "unsloth")
NO_SOFTCAP = ("linear_ce", "liger_ce", "liger_torch", "verl_torch")
ONE_DTYPE = ("liger_ce", "liger_torch", "verl_torch")  # of hidden states and weight
GIVES_ENTROPY = ("liger_ce", "liger_torch", "verl_torch", "unsloth")
HAS_LINEAR_CE = hasattr(torch.nn.functional, "linear_cross_entropy")


def run(name: str, inputs: Inputs) -> Outcome:
    """What the provider computed, right."""
    outcome = step(build(name, inputs))
    off = errors(outcome, inputs, reference(inputs))
    assert is_right(off, inputs.case), off
    return outcome


def is_installed(name: str) -> bool:
    return name not in PACKAGES or importlib.util.find_spec(PACKAGES[name]) is not None


def expected_absence(name: str, case: BenchCase) -> str | None:
    """What the reason for `name` not to do `case` has to contain; None if it has to do it."""
    if not is_installed(name):
        return PACKAGES[name]
    if name == "linear_ce" and not HAS_LINEAR_CE:
        return "linear_cross_entropy"
    if case.softcap is not None and name in NO_SOFTCAP:
        return "no soft-cap"
    if case.autocast and name in ONE_DTYPE:
        return "one dtype"
    if case.top_entropy < 1 and name not in GIVES_ENTROPY:
        return "gives no entropy"
    return None


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("name", ON_A_CPU)
def test_the_result_is_right_or_there_is_a_reason(name: str, case: BenchCase) -> None:
    inputs = make_inputs(case, CPU)
    reason = expected_absence(name, case)
    if reason is not None:
        with pytest.raises(Absence, match=reason):
            run(name, inputs)
        return
    outcome = run(name, inputs)
    assert outcome.note
    # less work than theirs who give entropies: to be seen beside its time
    if name in ("linear_ce", "unsloth"):
        assert ("no entropy" in outcome.note) == (outcome.entropies is None)
    assert (outcome.entropies is not None) or not case.wants_entropy or name not in GIVES_ENTROPY


@pytest.mark.slow  # compiles
def test_compiled() -> None:
    inputs = make_inputs(replace(TOY, softcap=5.0, padding=0.5, top_entropy=0.5), CPU)
    with torch._dynamo.config.patch(recompile_limit=8):  # which the adapter raises
        compiled = build("compiled", inputs)
        for _ in range(2):  # compiles, and takes what it compiled
            inputs.clear_gradients()
            assert is_right(errors(step(compiled), inputs, reference(inputs)), inputs.case)


@pytest.mark.parametrize("targets", [("test", "demo", "lint", "parity"), ("bench",)], ids=" ".join)
def test_only_bench_installs_what_is_not_permissive(
    targets: tuple[str, ...], tmp_path: Path
) -> None:
    """In an environment that is still to be made."""
    command = ["make", "--dry-run", f"VENV={tmp_path}/venv", *targets]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [(ROOT / file).read_text() for file in set(re.findall(r"-r (requirements/\S+)", said))]
    named = set(re.findall(r"^([\w-]+)==", "\n".join(files), re.MULTILINE))
    assert "verl" in named
    assert RESTRICTED & named == (RESTRICTED if targets == ("bench",) else set())
    for file in ("pyproject.toml", "requirements/constraints.txt"):
        assert not any(package in (ROOT / file).read_text() for package in RESTRICTED)
