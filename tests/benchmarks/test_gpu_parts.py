"""The parts of ``python -m benchmarks.gpu`` one by one: goals, reference, timing, and what others print or pack."""

from __future__ import annotations

import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import logs, measure_case, peers, run_sanitizer, run_tests, summary, verdict
from benchmarks.harness import machine
from benchmarks.harness.child import Ran
from benchmarks.harness.events import finite
from benchmarks.harness.timing import Clock, interleaved, quantiles
from benchmarks.providers import forgotten, without_init

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
    verdicts = {(x["case"], x["figure"]): (x["value"], x["verdict"]) for x in verdict.judge(cases)}
    assert verdicts[("main", "time, ours / products")] == (1.15, "pass")
    assert verdicts[("main", "time, trl / ours")] == (2.174, "pass")
    assert verdicts[("main", "time, liger / ours")] == (1.239, "fail")  # the fastest of Liger's
    assert verdicts[("frozen", "time, trl / ours")] == (1.667, "fail")
    assert verdicts[("frozen", "time, liger / ours")] == (None, "not measured")  # a wrong result has no time
    assert verdicts[("half_zero", "time, trl / ours")] == (None, "not measured")
    derived = verdict.derive(cases["main"])
    assert derived["tflops"]["ours"] == pytest.approx(21.7)
    assert (derived["liger_over_ours"], derived["liger_was"]) == (1.239, "liger_torch")
    turn = times(ours=40.0, trl=80.0, liger_torch=66.0)  # a peer's own turn counts, not when ours was timed first
    turn["providers"]["trl"]["anchors"] = {"ours": quantiles([50.0])}
    assert verdict.over_ours(turn, "trl") == 1.6
    turn["providers"]["liger_ce"] = {
        "status": "ok",
        "ms": {"full": quantiles([60.0])},
        "anchors": {"ours": quantiles([30.0])},
    }
    assert verdict.fastest(turn, *verdict.FAMILIES["liger"]) == ("liger_torch", 1.65)
    data = {"cases": cases, "goals": verdict.judge(cases)}
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
        "peers": {"installed": {"wheels": 1, "problems": {"big.whl": "expected part1 too, got part0"}}},
        "sanitizer": {"memcheck": {"status": "clean"}, "racecheck": {"status": "skipped", "reason": "no time left"}},
        "cases": {
            "main": {
                "passes": {"0": {"status": "complete"}, "1": {"status": "skipped"}},
                "providers": {"ours": {"status": "ok"}, "cce": {"status": "absent", "reason": "no wheel"}},
            },
            "score": {"status": "skipped", "providers": {"quack": {"status": "error", "reason": "x"}}},
            "frozen": {"providers": {"quack": {"status": "ok"}}},
        },
    }  # fmt: skip
    assert summary.did_not_run(data) == [
        "not run: GPU tests, 9 of them skipped: 'no device' (9)",
        "not installed: big.whl: expected part1 too, got part0",
        "not run: racecheck: skipped, no time left",
        "not run: no time for 2 cases or passes: score, main, pass 1",
        "not run: cce in any case: absent, no wheel",
    ]
    assert summary.did_not_run({"dry_run": True})[0].startswith("NOTHING RAN ON A GPU")
    assert summary.did_not_run({"tests": {"counts": {"passed": 3, "skipped": 1}}}) == []


def test_logs_are_bounded(tmp_path: Path) -> None:
    """Whole where they are short; of a long one the start and the end. Those of an earlier run are gone."""
    out = tmp_path / "results.json"
    folder = logs.folder_for(out)
    (folder / "short.log").write_text("short")
    (folder / "long.log").write_text("start" + "x" * 5000 + "end")
    logs.bound(folder, file_bytes=1000, folder_bytes=10**6)
    assert (folder / "short.log").read_text() == "short"
    long = (folder / "long.log").read_text()
    assert len(long) == 1000
    assert long.startswith("startx")
    assert long.endswith("xend")
    assert "5008 bytes in all" in long
    for i in range(10):
        (folder / f"{i}.log").write_text("y" * 900)
    logs.bound(folder, file_bytes=1000, folder_bytes=6000)
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 6000
    assert list(logs.folder_for(out).iterdir()) == []


def test_a_first_call_may_take_three_minutes() -> None:
    assert measure_case.FIRST_CALL_LIMIT == 180.0


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


MEMCHECK = """sanitized: one_pass 5x64x1031 torch.bfloat16
========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at {kernel}+0x1d0 in stats.py:40
=========     by thread (0,0,0) in block (1,0,0)
=========
sanitized: all done
========= ERROR SUMMARY: 1 error
"""


def test_sanitizer_output() -> None:
    names = run_sanitizer.kernel_names()
    assert names
    ours = run_sanitizer.summary(Ran(99, 1.0, MEMCHECK.format(kernel=names[-1])))
    assert (ours["status"], ours["in_our_kernels"], ours["reports"]) == ("found", 1, 1)
    theirs = run_sanitizer.summary(Ran(99, 1.0, MEMCHECK.format(kernel="cublas_gemm")))
    assert (theirs["status"], theirs["in_our_kernels"]) == ("found elsewhere", 0)
    clean = "sanitized: all done\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
    assert run_sanitizer.summary(Ran(0, 1.0, clean))["status"] == "clean"
    assert run_sanitizer.summary(Ran(None, 1.0, "sanitized: score"))["status"] == "out of time"
    assert run_sanitizer.summary(Ran(255, 1.0, "========= Error: Device not supported"))["status"] == "error"


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
    found = run_tests.summary(Ran(done.returncode, 1.0, done.stdout), xml)
    assert found["status"] == "failed"
    assert found["counts"] == {"passed": 1, "failed": 1, "error": 0, "skipped": 1}
    assert "assert 1 == 2" in found["failures"][0]["text"]
    assert found["skipped_for"] == {"why": 1}
    without = run_tests.summary(Ran(None, 1.0, done.stdout), tmp_path / "none.xml")
    assert without["status"] == "out of time"
    assert (without["counts"]["passed"], without["counts"]["failed"]) == (1, 1)


def make_wheel(folder: Path, name: str) -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        info = f"{name}-1.0.dist-info"
        wheel.writestr(f"{name}/__init__.py", "raise ImportError('needs what is not here')\n")
        wheel.writestr(f"{name}/part/__init__.py", "")
        wheel.writestr(f"{name}/part/code.py", "value = 7\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_peers_from_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad wheel does not keep a good one out; a package's own start is not run for the sake of one file."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    assert peers.install([wheels], tmp_path / "none") == ([], {"wheels": 0})
    make_wheel(wheels, "goodpeer")
    (wheels / "badpeer-1.0-py3-none-any.whl").write_text("no zip file")
    paths, report = peers.install([wheels], tmp_path / "target")
    assert len(paths) == 1
    assert Path(paths[0]).name == "site-packages"  # elsewhere QuACK takes functions for the user's own, and raises
    assert report["wheels"] == 2
    assert any(name.startswith("badpeer") for name in report["problems"])
    monkeypatch.setattr(sys, "path", [*sys.path, *paths])
    for name in [name for name in sys.modules if name.startswith("goodpeer")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError):
        without_init("nopeer")
    without_init("goodpeer", "goodpeer.part")
    import goodpeer.part.code as code  # type: ignore[import-not-found]

    assert code.value == 7
    for name in [name for name in sys.modules if name.startswith("goodpeer")]:
        del sys.modules[name]
    with forgotten("goodpeer"):
        without_init("goodpeer", "goodpeer.part")
        import goodpeer.part.code as again

        assert again.value == 7
    assert not [name for name in sys.modules if name.startswith("goodpeer")]


def test_a_wheel_in_parts(tmp_path: Path) -> None:
    """As `split` makes them, in any folders; what is missing or damaged is named, and keeps nothing else out."""
    parts, other, joined = (tmp_path / name for name in ("parts", "other", "joined"))
    for folder in (parts, other):
        folder.mkdir()
    make_wheel(parts, "inparts")
    make_wheel(other, "whole")
    wheel = next(parts.glob("*.whl"))
    content = wheel.read_bytes()
    subprocess.run(["split", "-b", "300", "-d", "-a", "1", wheel.name, f"{wheel.name}.part"], cwd=parts, check=True)
    wheel.unlink()
    made = sorted(parts.iterdir())
    assert len(made) > 2
    made[1].rename(other / made[1].name)
    wheels, problems = peers.find([parts, other], joined)
    assert problems == {}
    assert [x.name for x in wheels] == [wheel.name, "whole-1.0-py3-none-any.whl"]
    assert wheels[0].read_bytes() == content
    paths, report = peers.install([parts, other], tmp_path / "target")
    assert (len(paths), report) == (1, {"wheels": 2})
    assert (Path(paths[0]) / "inparts").is_dir()

    wheels, problems = peers.find([parts], joined)
    assert wheels == []
    assert problems[wheel.name].startswith("expected part1 too, got part0, part2")
    made[-1].unlink()
    _, problems = peers.find([parts, other], joined)
    assert "expected a whole wheel of its parts, got part0, part1" in problems[wheel.name]
    assert "the last missing?" in problems[wheel.name]
    (parts / f"{wheel.name}.part0").write_bytes(content.replace(b"value = 7", b"value = 8"))
    for rest in range(1, 10):
        (parts / f"{wheel.name}.part{rest}").unlink(missing_ok=True)
    wheels, problems = peers.find([parts], joined)
    assert wheels == []
    assert "inparts/part/code.py is damaged" in problems[wheel.name]
    report = peers.install([parts], tmp_path / "nothing")[1]
    assert report["wheels"] == 0
    assert wheel.name in report["problems"]


def test_commit_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert machine.git_commit(tmp_path) is None
    git = tmp_path / ".git"
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "packed-refs").write_text("# pack-refs\nabc123 refs/heads/main\n")
    assert machine.git_commit(tmp_path) == "abc123"
    (git / "refs" / "heads" / "main").write_text("def456\n")
    assert machine.git_commit(tmp_path) == "def456"
    (git / "HEAD").write_text("789abc\n")
    assert machine.git_commit(tmp_path) == "789abc"
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / ".git").write_text("gitdir: ../.git\n")
    assert machine.git_commit(tree) == "789abc"


def test_values_json_cannot_hold() -> None:
    assert finite({"a": [float("nan"), 1.0, float("inf")], "b": torch.bfloat16, "c": (1, None, True)}) == {
        "a": [None, 1.0, None], "b": "torch.bfloat16", "c": [1, None, True],
    }  # fmt: skip
