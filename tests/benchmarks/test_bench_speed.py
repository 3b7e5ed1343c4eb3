"""`benchmarks/speed.py`: the cases for comparing two commits, at toy sizes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.plan import cpu_cases

pytest.importorskip("pytest_benchmark")


def test_every_case_runs_and_is_right() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "benchmarks/speed.py",
        "--benchmark-disable",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    cases = [case for case in cpu_cases() if case.part in ("main", "workloads")]
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(cases)} passed" in done.stdout
