"""``python -m benchmarks.gpu``: the whole command at toy sizes, and what it does when something goes wrong."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.cases import make_inputs
from benchmarks.gpu import bench
from benchmarks.gpu.__main__ import STEPS
from benchmarks.gpu.summary import FAMILIES, GOALS
from benchmarks.plan import GOAL_CASES, gpu_cases
from benchmarks.process import ROOT, environment
from benchmarks.providers import Outcome, under_autocast


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu", "--dry-run", *arguments]


CASES = ("main", "frozen", "score", "fp32 weight, autocast", "reverse KL", "Gemma-2-2B")


@pytest.mark.slow
def test_dry_run(tmp_path: Path) -> None:
    """Every step and every section; ours is right in a case of each kind, the file as documented."""
    out = tmp_path / "results.json"
    done = subprocess.run(
        command("--profile", "--out", str(out), "--budget-seconds", "600", "--cases", *CASES),
        cwd=ROOT, env=environment(toy=True), capture_output=True, text=True, timeout=660,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert found["status"] == "complete"
    assert found["dry_run"]
    assert found["machine"]["torch"] == torch.__version__
    assert found["tests"]["together"]["counts"]["failed"] == 0
    assert found["tests"]["together"]["counts"]["skipped"] > 0  # loudly, in a file of their own reasons
    assert found["smoke"]["status"] == "passed"
    assert found["sanitizer"]["status"] == "absent"
    skipped = found["tests"]["counts"]["skipped"]
    for words in (
        "NOTHING RAN ON A GPU: a dry run",
        f"not run: GPU tests, {skipped} of them skipped: 'needs a CUDA or ROCm device' ({skipped})",
        "not run: compute-sanitizer: absent, dry run",
        "not run: quack in any case: absent, its kernels serve GPUs from H100 on",
    ):
        assert any(line.startswith(words) for line in done.stdout.splitlines()[-25:]), (words, done.stdout[-3000:])
        assert any(line.startswith(words) for line in found["did_not_run"])
    logs = {x.name: x.read_text(errors="replace") for x in (tmp_path / "results.json.logs").iterdir()}
    assert "SKIPPED" in logs["tests-together.log"]
    assert {"tests-together.log", "tests-together.xml"} <= logs.keys()
    assert list(found["cases"])[:3] == ["main", "frozen", "score"]
    assert sorted(found["cases"]) == sorted(CASES)
    for case in (case for case in gpu_cases() if case.name in CASES):
        providers = found["cases"][case.name]["providers"]
        assert set(providers) == set(case.providers)
        for name, x in providers.items():
            if name == "products":  # in bf16 the limit is a GPU's
                assert x["status"] == "absent", x
            if name.startswith("ours"):
                assert x["status"] == "ok", (case.name, name, x)
                assert case.rounds == 0 or x["ms"]["score" if case.score else "full"]["samples"] >= 1
            if x["status"] == "ok" and case.rounds and name != "ours":
                assert list(x["anchors"]) == ["ours"], (case.name, name)  # the products are absent from a CPU
        ours = providers["ours"]["errors"]
        assert ours.get("logp_mean", 0.0) < 1e-5
        gradients = max(ours.get("d_hidden", 0.0), ours.get("d_weight", 0.0))
        assert gradients < 1e-2  # Triton's interpreter cuts d logits off to bf16, where it should round
        assert case.rounds == 0 or found["cases"][case.name]["derived"]["eager_over_ours"] > 0
    main = found["cases"]["main"]
    assert main["status"] == "complete"
    assert found["cases"]["fp32 weight, autocast"]["providers"]["trl"]["status"] == "ok"
    assert found["micro"]["rows"]["triton"]["fused"]["status"] == "ok"
    assert set(found["micro"]["scoring"]["16x32x70"]) == {"score", "score_dot", "difference"}
    assert found["profile"]["main"]["kernels"]
    assert "goals" not in found  # a CPU at toy size has none
    assert not list(tmp_path.glob("*.part"))


def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu"], cwd=ROOT, env=environment(toy=True), capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "--dry-run" in done.stderr


def test_what_is_known_survives_an_interrupt(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    process = subprocess.Popen(
        command("--only", "bench", "--out", str(out)), cwd=ROOT, env=environment(toy=True), stdout=subprocess.DEVNULL
    )
    try:
        until = time.time() + 120
        while time.time() < until and not (out.exists() and '"main"' in out.read_text()):
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 1
    finally:
        process.kill()
    found = json.loads(out.read_text())
    assert found["status"] == "interrupted"
    assert "main" in found["cases"]


CRASHING = """
import os, signal, sys
from benchmarks.gpu import bench, __main__ as command
from benchmarks.providers import torch_heads
torch_heads.eager = lambda inputs: os.kill(os.getpid(), signal.SIGSEGV)
given = "--dry-run --only bench --cases main --providers trl eager --no-micro --out"
command.main([*given.split(), sys.argv[1]])
"""


@pytest.mark.slow
def test_results_before_a_crash_stay(tmp_path: Path) -> None:
    """A peer that brings the process down: ours, and the peer before it, keep their times, and can be summed up."""
    out = tmp_path / "results.json"
    done = subprocess.run([sys.executable, "-c", CRASHING, str(out)], cwd=ROOT, env=environment(toy=True))
    assert done.returncode == -signal.SIGSEGV
    found = json.loads(out.read_text())["cases"]["main"]["providers"]
    assert {name for name, x in found.items() if x.get("status") == "ok"} == {"ours", "trl"}
    assert found["trl"]["anchors"]["ours"]["samples"] == 1
    assert found["eager"] == {"status": "running"}
    again = command("--report", str(out))
    said = subprocess.run(again, cwd=ROOT, env=environment(toy=True), capture_output=True, text=True)
    assert said.returncode == 0, said.stdout + said.stderr
    assert "trl " in said.stdout


def test_goals_come_first() -> None:
    """Smoke, tests, then the goals' cases with all that is compared there; other peers with the anchors; the rest."""
    assert STEPS == ("smoke", "tests", "sanitizer", "bench")
    assert tuple(dict.fromkeys([*(goal.case for goal in GOALS), "score"])) == GOAL_CASES
    items = bench.plan(None, None, profiles=True)
    first = items[: len(GOAL_CASES)]
    assert [x.case for x in first] == list(GOAL_CASES)
    for goal in GOALS:
        providers = next(x.providers for x in first if x.case == goal.case)
        assert {goal.under} <= set(providers)
        names = FAMILIES.get(goal.over, (goal.over,))
        assert set(names) & set(providers)
        if goal.over == "liger":  # one that needs nothing but torch, and Liger's own choice
            assert {"liger_torch", "liger_ce"} <= set(providers)
    of_score = next(x.providers for x in first if x.case == "score")
    assert {"trl", "liger_torch", "liger_ce"} <= set(of_score)
    assert [x.kind for x in items[4:9]] == ["profile", "profile", "ceilings", "rows", "scoring"]
    for case in gpu_cases():
        of_case = [x for x in items if x.kind == "case" and x.case == case.name]
        assert sorted({name for x in of_case for name in x.providers}) == sorted(case.providers)
        for x in of_case:
            assert case.rounds == 0 or x.providers[:2] == ("ours", "products")
    chosen = bench.plan(["main"], ["quack"], parts=False)
    assert [x.providers for x in chosen] == [("ours", "products"), ("ours", "products", "quack")]


def test_cases_that_users_have() -> None:
    """fp32 weights under autocast, odd vocabularies, small heads and few rows, trainable, frozen and scoring."""
    cases = {case.name: case for case in gpu_cases()}
    mixed = cases["fp32 weight, autocast"]
    assert (mixed.dtype, mixed.weight_dtype, mixed.autocast) == ("bfloat16", "float32", True)
    assert (cases["V 151665"].v, cases["V 50257"].v) == (151665, 50257)
    shapes = {"H 1024": (8192, 1024), "1024 rows": (1024, 4096), "fp32 weight, autocast": (8192, 4096)}
    for name, fields in shapes.items():
        for mode in ("", ", frozen", ", score"):
            case = cases[name + mode]
            assert (case.n, case.h, case.frozen, case.score) == (*fields, mode == ", frozen", mode == ", score")
    inputs = make_inputs(mixed.toy(), torch.device("cpu"))
    assert (inputs.hidden.dtype, inputs.weight.dtype) == (torch.bfloat16, torch.float32)
    assert under_autocast(lambda: Outcome(note=str(torch.is_autocast_enabled("cpu"))), "cpu")().note == "True"
