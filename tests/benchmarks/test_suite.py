"""`python -m benchmarks` at toy size: its cases, their float64 truth, what is right, operations,
and its page."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
pytest.importorskip("liger_kernel")
from benchmarks import __main__ as command
from benchmarks.cases import (
    HEADS,
    WORKLOADS,
    Absence,
    BenchCase,
    Inputs,
    case,
    make_inputs,
    policy_loss,
)
from benchmarks.machine import ROOT
from benchmarks.plan import cpu_cases
from benchmarks.providers import Outcome, build, heads
from benchmarks.reference import errors, is_right, reference
from benchmarks.run import How, Results, check, measure_case, step
from benchmarks.timing import Clock, interleaved, quantiles

CPU = torch.device("cpu")
PLAIN = BenchCase("plain").toy()
POLICIES = {name: replace(case(name, workload=name).toy(), n=64, t=8) for name in WORKLOADS}
POLICIES |= {model: replace(case(model, model).toy(), n=24) for model in HEADS}
POLICIES |= {"more rows than are sampled, in two chunks": replace(PLAIN, n=320)}
POLICIES |= {"frozen": replace(PLAIN, frozen=True), "scored": replace(PLAIN, score=True)}


@pytest.mark.parametrize("given", POLICIES.values(), ids=POLICIES)
def test_reference_is_right_and_sees_errors(given: BenchCase) -> None:
    """Plain autograd in float32 agrees with the reference to its rounding; with a planted fault it
    does not."""
    inputs = make_inputs(given, CPU)
    want, outcome = reference(inputs), step(build("eager", inputs))
    found = errors(outcome, inputs, want)
    assert is_right(found, given)
    assert max(found.values()) < 1e-5
    assert found["ratio_off"] == 0
    if not given.score:
        inputs.hidden.grad.mul_(1.5)
        assert not is_right(errors(outcome, inputs, want), given)
    assert not is_right({**found, "loss": 0.5, "logp_mean": float("nan")}, given)
    assert not is_right({}, given)


@pytest.mark.parametrize(
    ("name", "counted"),
    {  # NVH of a policy loss, with half of the tokens masked, with a frozen head
        "ours/torch": (6, 6, 4),
        "products": (6, 6, 4),
        "eager": (6, 12, 4),
        "trl": (8, 16, 6),
        "liger_torch": (8, 8, 8),  # packs
    }.items(),
)
def test_counted_operations(name: str, counted: tuple[int, ...]) -> None:
    given = replace(BenchCase("x"), n=64, t=8, h=32, v=700)
    found = []
    for x in (given, replace(given, n=128, t=16, padding=0.5), replace(given, frozen=True)):
        inputs = make_inputs(x, CPU)
        checked = check(name, build(name, inputs), inputs, reference(inputs))
        assert checked["status"] == "checked"
        found.append(checked["flops_nvh"])
    assert tuple(found) == counted


def test_every_round_has_an_order_of_its_own() -> None:
    ran: list[str] = []
    steps = {name: partial(ran.append, name) for name in "abc"}
    *_, samples = interleaved(steps, Clock(CPU), failed=print, until=math.inf, rounds=12)
    assert [len(x) for x in samples.values()] == [12] * 3 and ran[:3] != ran[3:6]
    of_six = {"samples": 6, "median": 2.5, "p20": 1.5, "p80": 8.0}
    assert quantiles([9.0, 1.0, 3.0, 2.0, 1.5, 8.0]) == of_six


def test_inputs_are_as_their_case_says() -> None:
    given = replace(case("x", workload="padding"), n=128, t=16, v=300, h=16)
    assert given.counted == int(make_inputs(given, CPU).mask.sum()) == 64
    half = replace(given, padding=0.0, zero_share=0.5)
    assert (given.products_nvh, half.graded, half.products_nvh) == (6.0, 64, 4.0)
    assert replace(half, beta=0.04).products_nvh == 6.0  # a KL term gives every token a gradient
    peaked = replace(BenchCase("peaked", peaked=True), n=256, t=16, h=256, v=8192)
    entropies = reference(make_inputs(peaked, CPU)).entropies
    assert 1e-4 < entropies.quantile(0.5) < 0.05 and 0.1 < entropies.quantile(0.8) < 1.0


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrong = lambda *given: 1.001 * policy_loss(*given)  # noqa: E731
    monkeypatch.setattr("benchmarks.providers.policy_loss", wrong)
    given = replace(BenchCase("x", providers=("eager", "ours", "cce")).toy(), rounds=2)
    found = Results(tmp_path / "found.json", status="complete", cases={})
    measure_case(given, given.providers, found, How(backend="torch"))
    providers = found.data["cases"]["x"]["providers"]
    assert providers["eager"]["status"] == "wrong" and "ms" not in providers["eager"]
    assert providers["cce"]["status"] == "absent" and providers["cce"]["reason"]
    assert providers["ours"]["status"] == "ok" and providers["ours"]["ms"]["full"]["samples"] == 2
    assert not command.is_wrong(found.data), "a peer is"
    providers["ours"]["status"] = "wrong"
    assert command.is_wrong(found.data)


def test_what_fails_in_a_timed_step_costs_no_other_provider(monkeypatch, tmp_path):
    left, eager = [2], heads.eager

    def breaking(inputs: Inputs) -> Any:
        forward = eager(inputs)

        def step() -> Outcome:
            assert all(x.grad is None for x in inputs.leaves), "adding to gradients does more"
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("broken")
            return forward()

        return step

    monkeypatch.setattr(heads, "compiled", breaking)
    names, stored = ("ours", "compiled", "eager"), Results(tmp_path / "found.json", cases={})
    measure_case(replace(PLAIN, rounds=3), names, stored, How(one_by_one=True, backend="torch"))
    found = stored.data["cases"]["plain"]["providers"]
    assert [found[x]["status"] for x in names] == ["ok", "error", "ok"]
    assert "RuntimeError: broken" in found["compiled"]["reason"]
    assert [found[x]["ms"]["full"]["samples"] for x in names] == [3, 1, 3]


@pytest.mark.slow
def test_smoke(tmp_path: Path) -> None:
    """The whole command at toy size: every part and table."""
    out, folder = tmp_path / "found.json", tmp_path / "page"
    assert command.main(["--smoke", "--save", str(out), "--page", "--into", str(folder)]) == 0
    found = json.loads(out.read_text())
    assert found["status"] == "complete" and found["format"] == 2 and found["commit"]
    assert list(found["cases"]) == [x.name for x in cpu_cases()]
    for given in cpu_cases():
        providers = found["cases"][given.name]["providers"]
        assert list(providers) == list(given.providers)
        for name, x in providers.items():
            assert x["status"] == "ok" or (x["status"] == "absent" and x["reason"]), (name, x)
            limit = name == "products" and given.dtype == "float32"
            if limit or name.split("/")[0] in ("ours", "eager", "trl"):
                assert x["status"] == "ok", (given.name, name, x)
    page = (folder / "README.md").read_text()
    assert str(tmp_path) not in page and str(ROOT) not in page + out.read_text()


def test_the_page_is_what_the_committed_results_say(tmp_path: Path) -> None:
    newest = sorted(command.RESULTS.glob("cpu-20*.json"))[-1]
    assert command.main(["--report", str(newest), "--page", "--into", str(tmp_path)]) == 0
    assert (tmp_path / "README.md").read_text() == (newest.parent / "README.md").read_text()


def numbers(text: str) -> set[float]:
    found = re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", text.replace("\u2011", "-"))
    return {float(x) for x in found}


@pytest.mark.parametrize("title", ["A whole training step", "The head alone"])
def test_the_numbers_of_the_documentation_are_those_of_the_page(title: str) -> None:
    """Those of its tables, but in the first column."""
    page = numbers((ROOT / "benchmarks" / "results" / "README.md").read_text())
    text = (ROOT / "docs" / "results.md").read_text()
    section = text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\|[^|]*\|(.*)\|$", section, re.MULTILINE)
    assert len(rows) > 3 and set().union(*map(numbers, rows)) <= page


# Every peer on small cases: a right result, or the reason why there is none

CASES = {
    "fp32": PLAIN,
    "bf16": replace(PLAIN, dtype="bfloat16"),
    "soft-cap": replace(PLAIN, softcap=5.0),
    "padding": replace(PLAIN, padding=0.5),
    "frozen, padding": replace(PLAIN, frozen=True, padding=0.5),
    "score": replace(PLAIN, score=True),
    "score, padding": replace(PLAIN, score=True, padding=0.5, part="accuracy"),
    "top entropy, padding": replace(PLAIN, top_entropy=0.5, padding=0.5, frozen=True),
    "fp32 weight, autocast": replace(
        PLAIN, dtype="bfloat16", weight_dtype="float32", autocast=True
    ),
    "off-policy sequences": replace(PLAIN, drift=0.25, sequence=True, beta=0.04),
}
LACKS_OF_THREE = {"soft-cap": "no soft-cap", "fp32 weight, autocast": "one dtype"}
# peer -> its package, and the cases that it does not do, with the reason
PEERS: dict[str, tuple[str, dict[str, str]]] = {
    "linear_ce": ("torch", {"soft-cap": "no soft-cap", "top entropy, padding": "gives no entropy"}),
    "unsloth": ("unsloth_zoo", {}),
    "cce": ("cut_cross_entropy", dict.fromkeys(CASES, "serve GPUs only")),
    "liger_ce": ("liger_kernel", LACKS_OF_THREE),
    "liger_torch": ("liger_kernel", LACKS_OF_THREE),
    "verl_torch": ("verl", LACKS_OF_THREE),
}
# asked before any runs: an adapter may put a module without a specification in its package's place
ABSENT = {package for package, _ in PEERS.values() if importlib.util.find_spec(package) is None}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_is_right_or_lacks_the_case(peer: str, case: str) -> None:
    (package, lacks), inputs = PEERS[peer], make_inputs(CASES[case], CPU)
    reason = package if package in ABSENT else lacks.get(case)
    if reason is not None:
        with pytest.raises(Absence, match=reason):
            step(build(peer, inputs))
        return
    outcome = step(build(peer, inputs))
    off = errors(outcome, inputs, reference(inputs))
    assert is_right(off, inputs.case), off
    if peer in ("linear_ce", "unsloth"):  # less work than theirs who give entropies: it shows
        assert ("no entropy" in outcome.note) == (outcome.entropies is None)
    else:
        assert outcome.note and (outcome.entropies is not None or not inputs.case.wants_entropy)


@pytest.mark.slow  # compiles
def test_compiled() -> None:
    inputs = make_inputs(replace(PLAIN, softcap=5.0, padding=0.5, top_entropy=0.5), CPU)
    with torch._dynamo.config.patch(recompile_limit=8):  # which the adapter raises
        compiled = build("compiled", inputs)
        for _ in range(2):  # compiles, and takes what it compiled
            inputs.clear_gradients()
            assert is_right(errors(step(compiled), inputs, reference(inputs)), inputs.case)


RESTRICTED = {"unsloth_zoo", "cut-cross-entropy"}  # distributions


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
