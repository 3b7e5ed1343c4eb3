"""The suite on a CPU: every case and provider an item of pytest, every timed step a round of pytest-benchmark.

A case begins with an item for each provider that checks its result; those that are right are then timed in turn, in
another order each round, so that a change of the machine's speed meets all alike.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.cases import BenchCase, Inputs, make_inputs
from benchmarks.harness.events import Absence, describe
from benchmarks.harness.measure import Step, check, times
from benchmarks.harness.memory import Peak
from benchmarks.harness.reference import Reference, reference
from benchmarks.harness.results import Results
from benchmarks.harness.timing import order
from benchmarks.providers import MIB, Forward, build

ITEMS = Path(__file__).with_name("items.py")


@dataclass(frozen=True)
class Turn:
    """`provider` in `case`: its check, or a timed round."""

    case: BenchCase
    provider: str
    round: int | None  # None: the check

    def __str__(self) -> str:
        return f"{self.case.name}-{'check' if self.round is None else self.round}-{self.provider}"


class Suite:
    """A plugin of pytest that gives `items.py` its turns, and puts what is found into the results.

    Args:
        cases: what to measure.
        backend: of ours.
        forward_only: time forwards without their backward.
    """

    def __init__(self, cases: Sequence[BenchCase], results: Results, *, backend: str, forward_only: bool) -> None:
        self._cases, self._results = cases, results
        self._backend, self._forward_only = backend, forward_only
        self._open: Measured | None = None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        turns = [turn for case in self._cases for turn in _turns(case, self._forward_only)]
        metafunc.parametrize("turn", turns, ids=str)

    @pytest.fixture
    def measured(self, turn: Turn) -> Measured:
        if self._open is None or self._open.case is not turn.case:
            self.close()
            self._open = Measured(turn.case, self._results, backend=self._backend, forward_only=self._forward_only)
        return self._open

    def pytest_sessionfinish(self) -> None:
        self.close()

    def close(self) -> None:
        """End the case that is open."""
        if self._open is not None:
            self._open.close()
            self._open = None
            gc.collect()


class Measured:
    """A case that is being measured: inputs, truth, and the steps that were found right."""

    def __init__(self, case: BenchCase, results: Results, *, backend: str, forward_only: bool) -> None:
        self.case = case
        self._results, self._backend, self._forward_only = results, backend, forward_only
        self._path = ("cases", case.name)
        gc.collect()
        gc.freeze()  # what was imported is not looked through again at every step
        results.merge(*self._path, **case.about(), forward_only=forward_only, providers={})
        self._inputs: Inputs = make_inputs(case, torch.device("cpu"))
        self._want: Reference = reference(self._inputs)
        self._forwards: dict[str, Forward] = {}
        self._samples: dict[str, tuple[list[float], list[float]]] = {}
        self._extra: dict[str, list[float]] = {}
        self._watch = Watch()

    def check(self, provider: str) -> None:
        """Hold the result of `provider` against float64; skips the item if it cannot run, or is wrong."""
        try:
            forward = build(provider, self._inputs, self._backend)
            found = check(provider, forward, self._inputs, self._want)
        except Absence as absence:
            found = {"status": "absent", "reason": str(absence)}
        except Exception as error:
            found = {"status": "error", "reason": describe(error)}
        if found["status"] == "checked":
            self._forwards[provider] = forward
            found["status"] = "ok" if self.case.rounds == 0 else "checked"
        self._results.merge(*self._path, "providers", provider, **found)
        if provider not in self._forwards:
            pytest.skip(f"{provider}: {found['status']}: {found.get('reason', found.get('errors'))}")

    def time(self, provider: str, benchmark: Any) -> None:
        """One more round of `provider`."""
        if provider not in self._forwards:
            pytest.skip(f"{provider}: not right, or not here")
        if not self._samples:
            self._watch = Watch()  # what the checks compile is not other processes' work
        laps: list[float] = []
        step = Step(
            self._forwards[provider],
            forward_only=self._forward_only,
            lap=lambda: laps.append(time.perf_counter()),
        )
        started: list[float] = []
        peaks: list[Peak] = []

        def setup() -> None:
            self._inputs.clear_gradients()
            peaks.append(Peak(torch.device("cpu")))
            started.append(time.perf_counter())

        benchmark.group = self.case.name
        benchmark.pedantic(step, setup=setup, rounds=1, iterations=1)
        returned = sum(x.grad.nbytes for x in self._inputs.leaves if x.grad is not None)
        extra = peaks[-1].extra_bytes(returned)
        full, forward = self._samples.setdefault(provider, ([], []))
        full.extend(1e3 * seconds for seconds in benchmark.stats.stats.data)
        forward.extend(1e3 * (lap - begun) for lap, begun in zip(laps, started, strict=False))
        if extra is not None:
            self._extra.setdefault(provider, []).append(extra / MIB)
        self._inputs.clear_gradients()
        self._tell(provider)

    def _tell(self, provider: str) -> None:
        extra = self._extra.get(provider)
        self._results.merge(
            *self._path,
            "providers",
            provider,
            status="ok",
            extra_mib=round(max(0.0, statistics.median(extra)), 1) if extra else None,
            **times(*self._samples[provider], mode=self._mode),
        )

    @property
    def _mode(self) -> str:
        return "score" if self.case.score else "forward" if self._forward_only else "full"

    def close(self) -> None:
        """Say how quiet the machine was."""
        self._results.merge(*self._path, cpu_of_others=self._watch.others())
        gc.unfreeze()


class Watch:
    """How much of the machine other processes use while this one measures."""

    def __init__(self) -> None:
        self._before = self._read()

    def others(self) -> float | None:
        """Share of all cores since the start; None where the system does not tell."""
        if self._before is None or (now := self._read()) is None:
            return None
        wall, busy, own = (b - a for a, b in zip(self._before, now, strict=True))
        return round(max(0.0, busy - own) / max(wall, 1e-9) / (os.cpu_count() or 1), 3)

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        """Seconds: on the wall, of all cores at work, of this process's."""
        try:
            user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
        except (OSError, ValueError):
            return None
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), busy, time.process_time()


def run(suite: Suite) -> int:
    """pytest's exit status; its settings, and what plugins and options the environment has, stay out."""
    arguments = ["-c", os.devnull, "--rootdir", str(ITEMS.parent), "-p", "no:cacheprovider"]
    arguments += ["-p", "pytest_benchmark.plugin", "--benchmark-quiet"]
    arguments += ["-q", "--no-header", "-rs", "--capture=no", "--tb=short", str(ITEMS)]
    with mock.patch.dict(os.environ):
        for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"):  # of a run of tests that this may be part of
            os.environ.pop(name, None)
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        return int(pytest.main(arguments, plugins=[suite]))


def _turns(case: BenchCase, forward_only: bool) -> Iterator[Turn]:
    """The checks, then the rounds; products have no forward of their own."""
    providers = [x for x in case.providers if case.score or not (forward_only and x == "products")]
    for provider in providers:
        yield Turn(case, provider, None)
    for i in range(case.rounds):
        for provider in order(providers, i):
            yield Turn(case, provider, i)
