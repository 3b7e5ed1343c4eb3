"""``python -m benchmarks.gpu``: the whole command at toy sizes, and what it does when something goes wrong."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.child import ROOT, environment
from benchmarks.gpu.supervise import supervise
from benchmarks.plan import gpu_cases
from benchmarks.results import Results


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu", "--dry-run", *arguments]


CASES = ("main", "frozen", "half_zero", "score", "logits 20", "top entropy", "Gemma-2-2B", "v 32768")


def test_dry_run(tmp_path: Path) -> None:
    """Every step and every section; ours is right in a case of each kind, the file as documented."""
    out = tmp_path / "results.json"
    done = subprocess.run(
        command("--profile", "--out", str(out), "--budget-seconds", "240", "--cases", *CASES),
        cwd=ROOT, env=environment(toy=True), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert found["status"] == "complete"
    assert found["dry_run"]
    assert found["machine"]["torch"] == torch.__version__
    assert found["tests"]["together"]["counts"]["failed"] == 0
    assert found["tests"]["together"]["counts"]["skipped"] > 0  # loudly, in a file of their own reasons
    assert found["sanitizer"]["status"] == "absent"
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
        ours = providers["ours"]["errors"]
        assert ours.get("logp_mean", 0.0) < 1e-5
        assert max(ours.get("d_hidden", 0.0), ours.get("d_weight", 0.0)) < 5e-3
        assert case.rounds == 0 or found["cases"][case.name]["derived"]["eager_over_ours"] > 0
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
        if name in item.get("excluded", []):
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


def test_a_crash_or_a_hang_costs_one_provider(tmp_path: Path) -> None:
    """The case is measured again without it, as are the cases after it."""
    found = supervised(
        tmp_path,
        [
            {"kind": "case", "case": "one", "providers": ["a", "crashes", "b", "hangs", "c"]},
            {"kind": "other"},
            {"kind": "case", "case": "two", "providers": ["a", "crashes"]},
        ],
    )
    one = found["cases"]["one"]["providers"]
    assert {name: x["status"] for name, x in one.items()} == {
        "a": "ok", "crashes": "crashed", "b": "ok", "hangs": "hung", "c": "ok",
    }  # fmt: skip
    assert one["a"]["pid"] == one["b"]["pid"] == one["c"]["pid"]  # all timed in one process in the end
    two = found["cases"]["two"]["providers"]
    assert found["other"]["status"] == two["a"]["status"] == "ok"
    assert two["crashes"]["status"] == "left out"


def test_a_crash_outside_a_provider_costs_its_item(tmp_path: Path) -> None:
    found = supervised(tmp_path, [{"kind": "other", "dies": True}, {"kind": "case", "case": "two", "providers": ["a"]}])
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
