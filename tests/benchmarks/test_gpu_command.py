"""``python -m benchmarks.gpu``: the whole command at toy sizes, and what it does when something goes wrong."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.cases import make_inputs
from benchmarks.gpu.__main__ import STEPS, arguments, plan_items
from benchmarks.gpu.supervise import supervise
from benchmarks.gpu.verdict import FAMILIES, GOALS
from benchmarks.harness.child import ROOT, environment
from benchmarks.harness.results import Results
from benchmarks.plan import GOAL_CASES, gpu_cases
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
    assert {"sanitized.log", "worker-0.log", "tests-together.xml"} <= logs.keys()
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
    assert {i: x["status"] for i, x in main["passes"].items()} == {"0": "complete", "1": "complete", "2": "complete"}
    assert [main["providers"][name]["pass"] for name in ("ours", "trl", "linear_ce", "ours/lean")] == [0, 0, 1, 2]
    assert main["passes"]["1"]["anchors"]["ours"]["status"] == "ok"
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


WORKER = """
import json, os, sys, time
plan, events = json.load(open(sys.argv[1])), open(sys.argv[2], "a", buffering=1)
say = lambda item, **event: events.write(json.dumps({"item": item, **event}) + "\\n")
begin = lambda item, path, limit=60: say(item, event="begin", path=path, limit=limit, at=time.time())
for i in range(plan["first"], len(plan["items"])):
    item = plan["items"][i]
    if item["kind"] == "other":
        begin(i, ["other"])
        if item.get("dies"):
            os._exit(3)
        say(i, event="result", path=["other"], value={"status": "ok"})
    for name in item.get("providers", []):
        if name in (*item.get("excluded", []), *item.get("done", [])):
            continue
        path = ["cases", item["case"], "providers", name]
        begin(i, path, 0.5 if name == "hangs" else 60)
        if name == "crashes":
            os.kill(os.getpid(), 11)
        if name == "hangs":
            time.sleep(60)
        say(i, event="result", path=path, value={"status": "ok", "pid": os.getpid()})
    say(i, event="done")
"""


def supervised(tmp_path: Path, items: list[dict[str, Any]], seconds: float = 60.0) -> dict[str, Any]:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    results = Results(tmp_path / "results.json")
    plan = {"toy": True, "until": time.time() + seconds}
    supervise(items, plan, results, folder=tmp_path, worker=[sys.executable, str(worker)])
    return json.loads((tmp_path / "results.json").read_text())


def one_pass(name: str, providers: list[str], index: int = 0, last: bool = True) -> dict[str, Any]:
    return {"kind": "case", "case": name, "pass": index, "last": last, "seconds": 1.0, "providers": providers}


def test_a_crash_or_a_hang_costs_one_provider(tmp_path: Path) -> None:
    """What was timed before stays; the case goes on without it, as do the cases after it."""
    found = supervised(
        tmp_path,
        [
            one_pass("one", ["a", "crashes", "b", "hangs", "c"], last=False),
            {"kind": "other"},
            one_pass("two", ["a", "crashes"]),
            one_pass("one", ["d", "hangs"], index=1),
        ],
    )
    one = found["cases"]["one"]["providers"]
    assert {name: x["status"] for name, x in one.items()} == {
        "a": "ok", "crashes": "crashed", "b": "ok", "hangs": "hung", "c": "ok", "d": "ok",
    }  # fmt: skip
    assert len({one[name]["pid"] for name in "abc"}) == 3  # a process each: none of them was timed again
    two = found["cases"]["two"]["providers"]
    assert found["other"]["status"] == two["a"]["status"] == "ok"
    assert two["crashes"]["status"] == "left out"


CRASHING = """
import os, sys
from benchmarks.gpu import worker
from benchmarks.providers import eager
eager.eager = lambda inputs: os.kill(os.getpid(), 11)
worker.main(*sys.argv[1:3])
"""


@pytest.mark.slow
def test_results_before_a_crash_stay(tmp_path: Path) -> None:
    """With the worker itself: ours and a peer keep their times; the one after the crash has anchors of its own."""
    results = Results(tmp_path / "results.json")
    plan = {"toy": True, "until": time.time() + 120, "peers": [], "flush": False}
    seen: list[dict[str, Any]] = []
    merge = results.merge

    def watched(*path: str, **value: Any) -> None:
        merge(*path, **value)
        if value.get("status") == "crashed":
            seen.append(json.loads((tmp_path / "results.json").read_text())["cases"]["main"]["providers"])

    results.merge = watched  # type: ignore[method-assign]
    items = [one_pass("main", ["ours", "eager/selective", "eager", "ours/torch"])]
    supervise(items, plan, results, folder=tmp_path, worker=[sys.executable, "-c", CRASHING])
    case = results.data["cases"]["main"]
    now = case["providers"]
    assert {name: x["status"] for name, x in now.items()} == {
        "ours": "ok", "eager/selective": "ok", "eager": "crashed", "ours/torch": "ok",
    }  # fmt: skip
    assert len(seen) == 1
    for name in ("ours", "eager/selective"):
        assert seen[0][name]["samples_ms"] == now[name]["samples_ms"]
    assert now["ours/torch"]["anchors"]["ours"]["samples"] == 1
    assert case["passes"]["0"]["anchors"]["ours"]["status"] == "ok"
    assert case["status"] == "complete"


def test_nothing_is_done_again_when_the_last_provider_crashes(tmp_path: Path) -> None:
    found = supervised(tmp_path, [one_pass("one", ["a", "crashes"], last=False), {"kind": "other"}])
    assert found["cases"]["one"]["status"] == "partial"
    assert found["cases"]["one"]["passes"]["0"]["status"] == "complete"
    assert found["other"]["status"] == "ok"
    assert not (tmp_path / "worker-2.log").exists()


def test_goals_come_first() -> None:
    """Smoke, tests, then the goals' cases with all that is compared there; other peers with the anchors; the rest."""
    assert STEPS == ("smoke", "tests", "bench", "sanitizer")
    assert tuple(dict.fromkeys([*(goal.case for goal in GOALS), "score"])) == GOAL_CASES
    items = plan_items(arguments(["--profile"]))
    first = items[: len(GOAL_CASES)]
    assert [(x["case"], x["pass"]) for x in first] == [(name, 0) for name in GOAL_CASES]
    for goal in GOALS:
        providers = next(x["providers"] for x in first if x["case"] == goal.case)
        assert {goal.under} <= set(providers)
        names = FAMILIES.get(goal.over, (goal.over,))
        assert set(names) & set(providers)
        if goal.over == "liger":  # one that needs nothing but torch, and Liger's own choice
            assert {"liger_torch", "liger_ce"} <= set(providers)
    of_score = next(x["providers"] for x in first if x["case"] == "score")
    assert {"trl", "liger_torch", "liger_ce"} <= set(of_score)
    assert [x["kind"] for x in items[4:9]] == ["profile", "profile", "ceilings", "rows", "scoring"]
    for case in gpu_cases():
        of_case = [x for x in items if x["kind"] == "case" and x["case"] == case.name]
        assert sorted({name for x in of_case for name in x["providers"]}) == sorted(case.providers)
        assert [x["last"] for x in of_case] == [False] * (len(of_case) - 1) + [True]
        for x in of_case:
            assert case.rounds == 0 or x["providers"][:2] == ["ours", "products"]
    chosen = plan_items(arguments(["--providers", "quack", "--cases", "main", "--no-micro"]))
    assert [x["providers"] for x in chosen] == [["ours", "products"], ["ours", "products", "quack"]]


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


def test_a_crash_outside_a_provider_costs_its_item(tmp_path: Path) -> None:
    found = supervised(tmp_path, [{"kind": "other", "dies": True}, one_pass("two", ["a"])])
    assert found["other"]["status"] == "crashed"
    assert found["cases"]["two"]["providers"]["a"]["status"] == "ok"


def test_a_worker_that_cannot_start_is_reported(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json")
    plan = {"toy": True, "until": time.time() + 60}
    supervise(
        [{"kind": "other"}] * 2, plan, results, folder=tmp_path, worker=[sys.executable, "-c", "raise Exception(1)"]
    )
    assert results.data["worker"]["status"] == "crashed"
    assert "Exception: 1" in results.data["worker"]["log"]
