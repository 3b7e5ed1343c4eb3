"""The parts of ``python -m benchmarks.gpu`` one by one: goals, timing, and what others print."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import outside, summary
from benchmarks.process import Ran
from benchmarks.providers import forgotten, without_init
from benchmarks.run import finite
from benchmarks.timing import Clock, interleaved, quantiles

CPU = torch.device("cpu")


def times(**ms: float) -> dict[str, Any]:
    providers = {name: {"status": "ok", "ms": {"full": quantiles([x])}} for name, x in ms.items()}
    return {"products_nvh": 1.0, "counted": 10**6, "v": 10**3, "h": 10**3, "providers": providers}


def test_goals() -> None:
    cases = {
        "main": times(ours=46.0, products=40.0, trl=100.0, liger_ce=70.0, liger_torch=57.0),
        "frozen": times(ours=30.0, products=26.0, trl=50.0),
    }
    cases["frozen"]["providers"]["liger_ce"] = {"status": "wrong", "ms": {"full": quantiles([1.0])}}
    verdicts = {(x["case"], x["figure"]): (x["value"], x["verdict"]) for x in summary.judge(cases)}
    assert verdicts[("main", "time, ours / products")] == (1.15, "pass")
    assert verdicts[("main", "time, trl / ours")] == (2.174, "pass")
    assert verdicts[("main", "time, liger / ours")] == (1.239, "fail")  # the fastest of Liger's
    assert verdicts[("frozen", "time, trl / ours")] == (1.667, "fail")
    assert verdicts[("frozen", "time, liger / ours")] == (None, "not measured")  # a wrong result has no time
    assert verdicts[("half_zero", "time, trl / ours")] == (None, "not measured")
    derived = summary.derive(cases["main"])
    assert derived["tflops"]["ours"] == pytest.approx(21.7)
    assert (derived["liger_over_ours"], derived["liger_was"]) == (1.239, "liger_torch")
    turn = times(ours=40.0, trl=80.0, liger_torch=66.0)  # a peer's own turn counts, not when ours was timed first
    turn["providers"]["trl"]["anchors"] = {"ours": quantiles([50.0])}
    assert summary.over_ours(turn, "trl") == 1.6
    turn["providers"]["liger_ce"] = {
        "status": "ok",
        "ms": {"full": quantiles([60.0])},
        "anchors": {"ours": quantiles([30.0])},
    }
    assert summary.fastest(turn, *summary.FAMILIES["liger"]) == ("liger_torch", 1.65)
    data = {"cases": cases, "goals": summary.judge(cases)}
    assert not summary.is_well(data)
    assert summary.is_well({"cases": cases})
    assert not summary.is_well({"cases": {"score": {"providers": {"ours": {"status": "wrong"}}}}})
    assert not summary.is_well({"tests": {"counts": {"skipped": 200}}})  # a GPU was there and nothing ran on it
    assert any("fail" in line for line in summary.lines(data))


def test_what_did_not_run_is_said() -> None:
    data = {
        "tests": {
            "counts": {"skipped": 9, "passed": 0, "failed": 0},
            "together": {"skipped_for": {"no device": 7}}, "alone": {"skipped_for": {"no device": 2}},
        },
        "not_begun": {"case score": "no time left", "rows": "no time left"},
        "sanitizer": {"memcheck": {"status": "clean"}, "racecheck": {"status": "skipped", "reason": "no time left"}},
        "cases": {
            "main": {
                "providers": {"ours": {"status": "ok"}, "cce": {"status": "absent", "reason": "no wheel"}},
            },
            "score": {"status": "skipped", "providers": {"quack": {"status": "error", "reason": "x"}}},
            "frozen": {"providers": {"quack": {"status": "ok"}}},
        },
    }  # fmt: skip
    assert summary.did_not_run(data) == [
        "not run: GPU tests, 9 of them skipped: 'no device' (9)",
        "not run: racecheck: skipped, no time left",
        "not run: no time for case score, rows",
        "not run: cce in any case: absent, no wheel",
    ]
    assert summary.did_not_run({"dry_run": True})[0].startswith("NOTHING RAN ON A GPU")
    assert summary.did_not_run({"tests": {"counts": {"passed": 3, "skipped": 1}}}) == []


def test_interleaving() -> None:
    """Every provider in every round, in turn; a slow one in some; one that fails is left out, and the rest go on."""
    ran: list[str] = []
    failed: dict[str, Exception] = {}

    def step(name: str) -> Any:
        def run() -> None:
            ran.append(name)
            if name == "bad" and ran.count("bad") == 2:
                raise RuntimeError("x")

        return run

    names = ("a", "b", "slow", "bad")
    rounds = list(
        interleaved(
            {name: step(name) for name in names}, Clock(CPU), expected_ms={"a": 1, "b": 1, "slow": 500, "bad": 1},
            before=lambda name: None, failed=failed.__setitem__, until=time.time() + 60, rounds=12,
        )
    )  # fmt: skip
    samples = rounds[-1]
    assert len(rounds) == 12
    assert [len(samples[name]) for name in names] == [12, 12, 6, 1]
    assert list(failed) == ["bad"]
    assert ran[:4] != ran[4:8]  # another order
    assert quantiles([3.0, 1.0, 2.0])["median"] == 2.0
    assert quantiles([]) == {"samples": 0}


CHECKED = '{"name": "stats, V 9001, float32", "status": "ok"}'
MEMCHECK = """{checked}
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at {kernel}+0x1d0 in stats.py:40
=========     by thread (0,0,0) in block (1,0,0)
=========
========= ERROR SUMMARY: 1 error
"""


def test_sanitizer_output() -> None:
    def summed(code: int | None, output: str, *more: str) -> dict[str, Any]:
        return outside.sanitizer_summary(Ran(code, 1.0, output), ["stats, V 9001, float32", *more])

    names = outside.kernel_names()
    assert names
    ours = summed(99, MEMCHECK.format(checked=CHECKED, kernel=names[-1]))
    assert (ours["status"], ours["in_our_kernels"], ours["reports"]) == ("found", 1, 1)
    theirs = summed(99, MEMCHECK.format(checked=CHECKED, kernel="cublas_gemm"))
    assert (theirs["status"], theirs["in_our_kernels"]) == ("found elsewhere", 0)
    clean = CHECKED + "\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
    assert summed(0, clean)["status"] == "clean"
    assert summed(0, clean, "grad, V 9001, float32")["status"] == "error"  # it ended before the last check
    assert summed(0, clean.replace('"ok"', '"wrong"'))["status"] == "checks failed"
    assert summed(None, CHECKED)["status"] == "out of time"
    assert summed(255, "========= Error: Device not supported")["status"] == "error"


def test_pytest_results(tmp_path: Path) -> None:
    test = tmp_path / "test_x.py"
    test.write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 1 == 2\ndef test_c(): pytest.skip('why')\n"
    )
    xml = tmp_path / "x.xml"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", f"--junitxml={xml}", str(test)],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    found = outside.tests_summary(Ran(done.returncode, 1.0, done.stdout), xml)
    assert found["status"] == "failed"
    assert found["counts"] == {"passed": 1, "failed": 1, "error": 0, "skipped": 1}
    assert "assert 1 == 2" in found["failures"][0]["text"]
    assert found["skipped_for"] == {"why": 1}
    without = outside.tests_summary(Ran(None, 1.0, done.stdout), tmp_path / "none.xml")
    assert without["status"] == "out of time"
    assert (without["counts"]["passed"], without["counts"]["failed"]) == (1, 1)


def test_a_package_is_imported_without_its_own_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the sake of one file; afterwards others may want it whole."""
    package = tmp_path / "goodpeer"
    (package / "part").mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('needs what is not here')")
    (package / "part" / "__init__.py").write_text("")
    (package / "part" / "code.py").write_text("value = 7")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    with pytest.raises(ImportError):
        without_init("nopeer")
    with forgotten("goodpeer"):
        without_init("goodpeer", "goodpeer.part")
        assert importlib.import_module("goodpeer.part.code").value == 7
    assert not [name for name in sys.modules if name.startswith("goodpeer")]


def test_values_json_cannot_hold() -> None:
    assert finite({"a": [float("nan"), 1.0, float("inf")], "b": torch.bfloat16, "c": (1, None, True)}) == {
        "a": [None, 1.0, None], "b": "torch.bfloat16", "c": [1, None, True],
    }  # fmt: skip
