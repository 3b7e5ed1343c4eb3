"""Measure cases: each provider is held against float64, then timed in turn with others.

The results are in their file after every round, so that whatever happens next loses nothing.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import figures, timing
from benchmarks.cases import Absence, BenchCase, Inputs, make_inputs
from benchmarks.head_flops import counter
from benchmarks.machine import Watch, write_whole
from benchmarks.memory import MIB, Peak
from benchmarks.plan import ANCHORS
from benchmarks.providers import Forward, Outcome, build, named
from benchmarks.reference import Reference, errors, is_right, reference
from benchmarks.timing import Clock, interleaved, quantiles

FIRST_CALL_SECONDS = 180.0  # Liger's kernels for Hopper take up to 55 to import and 30 to compile
WARM_UP = 2  # steps on a GPU before the first that is timed
CPU = torch.device("cpu")


class Results:
    """A tree of plain values that is always on disk, whatever happens next."""

    def __init__(self, path: Path, **data: Any) -> None:
        self.path, self.data = path, data
        path.parent.mkdir(parents=True, exist_ok=True)
        self.save()

    def at(self, *path: str) -> dict[str, Any]:
        here = self.data
        for key in path:
            here = here.setdefault(key, {})
        return here

    def merge(self, *path: str, **value: Any) -> None:
        self.at(*path).update(value)
        self.save()

    def save(self) -> None:
        write_whole(self.path, json.dumps(finite(self.data), indent=1) + "\n")

    @contextmanager
    def noting(self, *path: str, seconds: float | None = None) -> Iterator[None]:
        """Write whatever goes wrong within at `path`, unless the device is lost; after `seconds`
        the process ends with a traceback."""
        if seconds is not None:
            faulthandler.dump_traceback_later(seconds, exit=True)
        try:
            yield
        except Exception as error:
            self.merge(*path, **failure(error))
            check_device()
        finally:
            if seconds is not None:
                faulthandler.cancel_dump_traceback_later()


def check_device() -> None:
    """Raise if the GPU no longer answers this process; another one may go on."""
    if torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except Exception as error:
            raise RuntimeError(f"the device is lost to this process: {error}") from error


def failure(error: Exception) -> dict[str, str]:
    if isinstance(error, Absence):
        return {"status": "absent", "reason": str(error)}
    if isinstance(error, torch.OutOfMemoryError):
        return {"status": "out of memory", "reason": str(error)[:300]}
    return {"status": "error", "reason": describe(error)}


def describe(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-3:]
    places = " < ".join(f"{Path(x.filename).name}:{x.lineno}" for x in reversed(where))
    return f"{type(error).__name__}: {str(error)[:1500]} [{places}]"


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): finite(x) for k, x in value.items()}
    if isinstance(value, list | tuple):
        return [finite(x) for x in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)


@dataclass(frozen=True)
class How:
    """How cases are measured."""

    device: torch.device = CPU
    backend: str = "auto"
    # each provider with ours and the products alone: one that crashes costs none that was measured
    # before, and a ratio is of the same minute; else all in the same rounds
    one_by_one: bool = False
    flush: bool = False  # the L2 cache, before each step
    once: bool = False
    seconds: float = math.inf  # of the rounds of one provider, after the first few
    until: float = math.inf  # ``time.time()`` after which no provider is begun


def step(forward: Forward) -> Outcome:
    outcome = forward()
    if outcome.loss is not None and outcome.loss.requires_grad:
        outcome.loss.backward()
    return outcome


def beyond(peak: Peak, inputs: Inputs) -> float | None:
    extra = peak.extra_bytes(sum(x.grad.nbytes for x in inputs.leaves if x.grad is not None))
    return None if extra is None else round(max(0, extra) / MIB, 1)


def check(name: str, forward: Forward, inputs: Inputs, want: Reference) -> dict[str, Any]:
    """Run the first call: ``status`` "checked" or "wrong", errors, and counted operations in NVH.

    In the part "accuracy" a peer's errors are what is measured, however large.
    """
    provider, case = named(name), inputs.case
    inputs.clear_gradients()
    operations = counter()
    with operations if provider.counted else nullcontext():
        outcome = step(forward)
    off = errors(outcome, inputs, want) if provider.compared else {}
    shown_as_it_is = case.part == "accuracy" and not figures.is_ours(name)
    inputs.clear_gradients()
    well = not provider.compared or shown_as_it_is or is_right(off, case)
    found = {"status": "checked" if well else "wrong", "errors": off, "note": outcome.note}
    nvh = round(operations.get_total_flops() / case.nvh, 3) if provider.counted else None
    return {**found, "flops_nvh": nvh}


def measure_case(case: BenchCase, providers: Sequence[str], results: Results, how: How) -> None:
    top = ("cases", case.name)
    gc.collect()
    gc.freeze()  # what was imported is not looked through again at every step
    try:
        results.merge(*top, **case.about(), status="running")
        task = _Task(case, results, how)
        anchors = [x for x in providers if x in ANCHORS] if how.one_by_one else []
        task.anchors = task.turn(anchors)
        turns = [list(providers)]
        if how.one_by_one:
            turns = [[x] for x in providers if x not in anchors]
        late = []
        for names in turns:
            if timing.is_past(how.until):
                late += names
            else:
                task.turn(names)
        for name in late:
            results.merge(*top, "providers", name, status="skipped", reason="no time left")
        status = "partial" if late else "complete"
        results.merge(*top, status=status, cpu_of_others=task.watch.others())
    finally:
        gc.unfreeze()


class _Task:
    def __init__(self, case: BenchCase, results: Results, how: How) -> None:
        self._case, self._results, self._how = case, results, how
        self._inputs = make_inputs(case, how.device)
        self._want = reference(self._inputs)
        self._clock = Clock(how.device, flush=how.flush)
        self._mode = "score" if case.score else "full"
        self._limit = FIRST_CALL_SECONDS if self._clock.on_gpu else None
        self.anchors: dict[str, Forward] = {}
        self.watch = Watch()

    def turn(self, names: Sequence[str]) -> dict[str, Forward]:
        steps = {name: run for name in names if (run := self._checked(name)) is not None}
        if not self.anchors:
            self.watch = Watch()  # what the first checks compile is not other processes' work
        if steps:
            with self._results.noting(*self._path(next(iter(steps))), seconds=self._limit):
                self._rounds(steps)
        self._inputs.clear_gradients()
        if self._clock.on_gpu:
            gc.collect()
            torch.cuda.empty_cache()
        return steps

    def _path(self, name: str) -> tuple[str, ...]:
        return ("cases", self._case.name, "providers", name)

    def _checked(self, name: str) -> Forward | None:
        """Build, check and warm up a provider; None if it has nothing to time."""
        path, case, inputs, warm = self._path(name), self._case, self._inputs, None
        # an anchor, which keeps what an earlier call measured
        if figures.ran(self._results.at(*path)):
            path = (*path, "again")
        self._results.merge(*path, status="running")  # what it stays if the process ends here
        with self._results.noting(*path, seconds=self._limit):
            forward = build(name, inputs, self._how.backend)
            checked = check(name, forward, inputs, self._want)
            if checked["status"] == "checked" and not case.rounds:
                checked["status"] = "ok"
            self._results.merge(*path, **checked)
            if checked["status"] == "checked":
                run = partial(step, forward)
                if self._clock.on_gpu:
                    peak = Peak(self._how.device)
                    run()
                    self._results.merge(*path, extra_mib=beyond(peak, inputs))
                    for _ in range(WARM_UP):
                        inputs.clear_gradients()
                        run()
                warm = run
        return warm

    def _rounds(self, turn: dict[str, Forward]) -> None:
        """Time the steps of a turn and of the anchors, interleaved; results after each round."""
        steps = {**self.anchors, **turn}
        mib: dict[str, list[float]] = {name: [] for name in steps}
        peaks: list[Peak] = []
        written = [name for name in turn if "ms" not in self._results.at(*self._path(name))]

        def before(_: str) -> None:
            self._inputs.clear_gradients()
            if not self._clock.on_gpu:
                peaks[:] = [Peak(self._how.device)]

        def after(name: str) -> None:
            if peaks and (extra := beyond(peaks[0], self._inputs)) is not None:
                mib[name].append(extra)

        def failed(name: str, error: Exception) -> None:
            beside = (*self._path(next(iter(turn))), "failures", name)
            self._results.merge(*(self._path(name) if name in turn else beside), **failure(error))
            steps.pop(name)
            check_device()

        until = min(self._how.until, time.time() + self._how.seconds)
        rounds = 1 if self._how.once else self._case.rounds
        around = {"before": before, "after": after, "failed": failed}
        for samples in interleaved(steps, self._clock, **around, until=until, rounds=rounds):
            ms = {name: quantiles(x) for name, x in samples.items() if name in steps and x}
            of_anchors = {name: ms[name] for name in self.anchors if name in ms}
            for name in [x for x in written if x in ms]:
                beside = {"anchors": of_anchors} if of_anchors else {}
                beside |= {"extra_mib": statistics.median(mib[name])} if mib[name] else {}
                every = {self._mode: [round(x, 4) for x in samples[name]]}
                beside |= {"ms": {self._mode: ms[name]}, "samples_ms": every}
                self._results.merge(*self._path(name), status="ok", **beside)
        self._inputs.clear_gradients()


def measure_runs(
    runs: dict[str, Callable[[], Any]], clock: Clock, results: Results, top: tuple[str, ...], *,
    once: bool,
) -> dict[str, float]:  # fmt: skip
    """Median milliseconds of each of `runs`, warmed up and interleaved; written under `top` too."""
    warm = {}
    for name, run in runs.items():
        with results.noting(*top, name):
            run()
            clock.time(run)
            warm[name] = run

    def failed(name: str, error: Exception) -> None:
        results.merge(*top, name, **failure(error))

    samples: dict[str, list[float]] = {}
    until, rounds = time.time() + 5.0, 1 if once else 20
    for so_far in interleaved(warm, clock, failed=failed, until=until, rounds=rounds):
        samples.update(so_far)
    found = {name: quantiles(values) for name, values in samples.items() if values}
    for name, ms in found.items():
        results.merge(*top, name, status="ok", ms=ms)
    return {name: ms["median"] for name, ms in found.items()}
