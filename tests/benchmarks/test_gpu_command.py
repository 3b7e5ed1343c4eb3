"""``python -m benchmarks.gpu``: the whole command at toy sizes, and what it does when something
goes wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.expression import Expression

from benchmarks import gpu
from benchmarks.machine import ROOT
from benchmarks.plan import gpu_cases
from benchmarks.timing import quantiles

TOY = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.gpu", "--dry-run", *arguments]


CASES = ("main", "frozen", "score", "fp32 weight, autocast", "Gemma-2-2B")


@pytest.mark.slow
def test_dry_run(tmp_path: Path) -> None:
    """Every step and every section; ours is right in a case of each kind."""
    out = tmp_path / "results.json"
    options = ["--profile", "--out", str(out), "--budget-seconds", "1800", "--cases", *CASES]
    done = subprocess.run(
        command(*options), cwd=ROOT, env=TOY, capture_output=True, text=True, timeout=2000
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert (found["status"], found["dry_run"]) == ("complete", True)
    smoke, together = found["tests"]["smoke"], found["tests"]["together"]["counts"]
    assert smoke["status"] == "passed" and smoke["counts"]["passed"] > 25
    assert all("of what is allowed, in " in x["error"] for x in smoke["said"].values())
    assert together["failed"] == 0
    for line in ("NOTHING RAN ON A GPU: a dry run", "not run: memcheck: absent, dry run"):
        assert line in done.stdout
    assert sorted(found["cases"]) == sorted(CASES)
    for case in (case for case in gpu_cases() if case.name in CASES):
        providers = found["cases"][case.name]["providers"]
        assert set(providers) == set(case.providers)
        ours = [x["status"] for name, x in providers.items() if name.startswith("ours")]
        assert set(ours) == {"ok"}, providers
        wrong = providers["ours"]["errors"]
        assert wrong.get("logp_mean", 0.0) < 1e-5
        # Triton's interpreter cuts d logits off to bf16, where it should round
        assert max(wrong.get("d_hidden", 0.0), wrong.get("d_weight", 0.0)) < 1e-2
    assert found["micro"]["rows"]["triton"]["fused"]["status"] == "ok"
    assert found["profile"]["main"]["kernels"]
    assert "goals" not in found  # a CPU at toy size has none


@pytest.mark.slow
def test_what_is_known_survives_an_interrupt(tmp_path, capsys):
    """In the background of a shell, too, where SIGINT is ignored."""
    out = tmp_path / "results.json"
    ignoring = ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]
    background = [*ignoring, *command("--only", "bench", "--out", str(out))]
    process = subprocess.Popen(background, cwd=ROOT, env=TOY, stdout=subprocess.DEVNULL)
    try:
        until = time.time() + 300
        while time.time() < until and not (out.exists() and '"main"' in out.read_text()):
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 1
    finally:
        process.kill()
    found = json.loads(out.read_text())
    assert found["status"] == "interrupted"
    assert "main" in found["cases"]
    capsys.readouterr()
    gpu.main(["--report", str(out)])
    assert "## Main cases" in capsys.readouterr().out


def timed(ms: float) -> dict[str, Any]:
    return {"status": "ok", "ms": {"full": quantiles([ms])}}


def test_goals() -> None:
    """The fastest of Liger's forms counts; a peer's own turn; no wrong result."""
    main = {"ours": timed(46.0), "trl": timed(100.0)}
    main |= {"liger_ce": timed(70.0), "liger_torch": timed(57.0)}
    half = {"ours": timed(40.0), "trl": timed(80.0) | {"anchors": {"ours": quantiles([50.0])}}}
    frozen = {"ours": timed(30.0), "liger_ce": timed(1.0) | {"status": "wrong"}}
    given = {"main": main, "half_zero": half, "frozen": frozen}
    cases = {
        name: {"products_nvh": 1.0, "counted": 10**6, "v": 10**3, "h": 10**3, "providers": x}
        for name, x in given.items()
    }
    verdicts = {(x["case"], x["figure"]): (x["value"], x["verdict"]) for x in gpu.judge(cases)}
    assert verdicts["main", "time, trl / ours"] == (2.174, "pass")
    assert verdicts["main", "time, liger / ours"] == (1.239, "fail")
    assert verdicts["half_zero", "time, trl / ours"] == (1.6, "fail")
    assert verdicts["frozen", "time, liger / ours"] == (None, "not measured")


WRONG = {"status": "wrong"}


@pytest.mark.parametrize(
    ("well", "data"),
    [
        (True, {"cases": {"main": {"providers": {"ours": timed(1.0), "trl": WRONG}}}}),
        (True, {"layouts": {"flash": {"status": "absent", "reason": "not installed"}}}),
        (False, {"goals": [{"verdict": "fail"}]}),
        (False, {"cases": {"score": {"providers": {"ours": WRONG}}}}),
        # nothing ran on a GPU
        (False, {"tests": {"together": {"status": "passed", "counts": {"skipped": 200}}}}),
        (False, {"tests": {"smoke": {"status": "out of time", "counts": {"passed": 3}}}}),
        (False, {"sanitizer": {"memcheck": {"status": "found", "in_our_kernels": 1}}}),
        (False, {"failed_steps": {"bench": "RuntimeError"}}),
        (False, {"layouts": {"sdpa": {"P 1": {"padded": {"status": "ok"}, "tree": WRONG}}}}),
    ],
)
def test_exit_status(well: bool, data: dict[str, Any]) -> None:
    assert gpu.is_well(data) is well


def test_a_report_of_the_sanitizer_is_of_our_kernels_or_of_others() -> None:
    report = """========= Invalid __global__ read of size 4 bytes
=========     at {}+0x1d0 in stats.py:40
========= ERROR SUMMARY: 1 error
"""
    clean, ran = "========= RACECHECK SUMMARY: 0 hazards displayed\n", {"passed": 3}
    for code, output, counts, status in (
        (99, report.format(gpu.kernel_names()[-1]), ran, "found"),
        (99, report.format("cublas_gemm"), ran, "found elsewhere"),
        (0, clean, ran, "clean"),
        (0, clean, {"skipped": 3}, "error"),
        (1, clean, {"passed": 3, "failed": 1}, "tests failed"),
        (None, "", ran, "out of time"),
    ):
        assert gpu.sanitizer_summary(code, output, counts)["status"] == status


def test_the_sanitizers_watch_every_kernel() -> None:
    """And none of the sizes for which they are too slow."""
    pytest.importorskip("triton")
    from tests.gpu import test_gpu_smoke as smoke

    ids = ["-".join(map(str, form)).replace("torch.", "") for form in smoke.FORMS]
    for selects in map(Expression.compile, gpu.TOOLS.values()):
        watched = [x for x in ids if selects.evaluate(f"test_kernel[cuda-{x}]".__contains__)]
        assert {x.split("-")[0] for x in watched} == {*smoke.KERNELS}
        assert not any("151936" in x for x in watched)
