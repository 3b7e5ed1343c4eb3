"""The barrier by both of the names that Triton has for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

PACKAGE = Path(__file__).parents[3] / "grpo_kernels"


def test_kernels_are_the_same_by_both_names() -> None:
    env = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.barrier_names"], capture_output=True, text=True, env=env, check=False
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["same"]
    assert found["barriers"][0] == found["barriers"][1] > 0


def test_no_kernel_names_it_itself() -> None:
    naming = {path.name for path in PACKAGE.rglob("*.py") if "tl.debug_barrier" in path.read_text()}
    assert naming == {"barrier.py"}
