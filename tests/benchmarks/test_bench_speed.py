"""`benchmarks/speed.py`: the cases for comparing two commits, at toy sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pytest_benchmark")

from benchmarks import speed
from benchmarks.cases import BenchCase


@pytest.mark.parametrize("case", speed.CASES, ids=lambda case: case.name)
def test_every_case_runs_and_is_right(case: BenchCase, benchmark: Any) -> None:
    config = SimpleNamespace(getoption={"--benchmark-disable": True}.__getitem__)
    speed.test_step(case, benchmark, SimpleNamespace(config=config))
