"""Our head alone, to compare two commits: pytest-benchmark keeps the times of runs.

::

    python -m pytest benchmarks/speed.py --benchmark-autosave  # on the one commit
    python -m pytest benchmarks/speed.py --benchmark-compare   # on the other

The cases are those of `python -m benchmarks` on a CPU that are about ours; each result is held
against float64 first.
"""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.cases import BenchCase, make_inputs
from benchmarks.plan import cpu_cases
from benchmarks.providers import build
from benchmarks.reference import errors, is_right, reference
from benchmarks.run import CPU, Step

CASES = [case for case in cpu_cases() if case.part in ("main", "workloads")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_step(case: BenchCase, benchmark: Any, request: pytest.FixtureRequest) -> None:
    shown = case.toy() if request.config.getoption("--benchmark-disable") else case
    inputs = make_inputs(shown, CPU)
    step = Step(build("ours", inputs))
    assert is_right(errors(step(), inputs, reference(inputs)), shown)
    benchmark.pedantic(step, setup=inputs.clear_gradients, rounds=case.rounds + 2, iterations=1)
