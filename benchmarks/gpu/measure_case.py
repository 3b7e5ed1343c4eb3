"""One pass over a case: its anchors, then each peer in turn: built, checked, timed with the anchors, written down.

The anchors are ours and the products alone. A peer's times come with theirs from the same rounds, so that a ratio does
not depend on when, or in which process, the others were timed; and a crash costs the peer whose turn it was.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.cases import BenchCase, Inputs, make_inputs
from benchmarks.harness.events import Events
from benchmarks.harness.measure import Step, check, times
from benchmarks.harness.memory import Peak
from benchmarks.harness.reference import Reference, reference
from benchmarks.harness.timing import Clock, interleaved
from benchmarks.plan import ANCHORS
from benchmarks.providers import MIB, Forward, build

FIRST_CALL_LIMIT = 180.0  # seconds: Liger's kernels for Hopper take up to 55 to import and 30 to compile
STEPS_LIMIT = 60.0  # for the rounds of a turn
WARM_UP = 2
Path = tuple[str, ...]


@dataclass(frozen=True)
class Pass:
    """A pass over a case.

    Attributes:
        index: 0 for the first of the case.
        last: whether it is the last.
        providers: the anchors among them first.
        excluded: those that brought the process down before.
        done: those that have their results from an earlier process, and keep them.
        seconds: for the rounds of a turn.
        until: ``time.time()`` after which no turn is begun.
        toy: one round, and Triton's interpreter for ours.
        flush: overwrite the L2 cache before each step.
    """

    index: int
    last: bool
    providers: Sequence[str]
    excluded: Container[str] = ()
    done: Container[str] = ()
    seconds: float = 8.0
    until: float = float("inf")
    toy: bool = False
    flush: bool = False


def measure_case(case: BenchCase, device: torch.device, events: Events, this: Pass) -> None:
    """Do `this` pass over `case` and send what is found to ``cases/<name>``."""
    top = ("cases", case.name)
    if this.index == 0:
        events.result(*top, status="running", **case.about())
    events.result(*top, "passes", str(this.index), status="running")
    events.begin(*top, "reference", limit=FIRST_CALL_LIMIT)
    gc.collect()
    gc.freeze()  # what was imported is not looked through again in every turn
    try:
        _take_turns(_Turns(case, device, events, this), events, top, this)
    finally:
        gc.unfreeze()


def _take_turns(turns: _Turns, events: Events, top: Path, this: Pass) -> None:
    """The anchors, then the peers as long as there is time; and what of the pass, and of the case, is complete."""
    names = [name for name in this.providers if name not in this.excluded]
    turns.anchors([name for name in names if name in ANCHORS])
    late = []
    for name in names:
        if name in ANCHORS or name in this.done:
            continue
        if time.time() > this.until:
            late.append(name)
            events.result(*top, "providers", name, status="skipped", reason="no time left")
            continue
        turns.peer(name)
    status = "partial" if late else "complete"
    events.result(*top, "passes", str(this.index), status=status, **({"skipped": late} if late else {}))
    events.result(*top, status=status if this.last else "partial")


class _Turns:
    """The inputs of a case and their truth, the anchors' steps, and one peer at a time."""

    def __init__(self, case: BenchCase, device: torch.device, events: Events, this: Pass) -> None:
        self._case, self._events, self._this = case, events, this
        self._top: Path = ("cases", case.name)
        self._inputs: Inputs = make_inputs(case, device)
        self._want: Reference = reference(self._inputs)
        self._clock = Clock(device, flush=this.flush)
        self._ready: dict[str, _Timed] = {}  # the anchors

    def anchors(self, names: Sequence[str]) -> None:
        """Check and time the anchors. What an earlier pass or process found of them is not overwritten."""
        for name in names:
            is_first = self._this.index == 0 and name not in self._this.done
            place = ("providers",) if is_first else ("passes", str(self._this.index), "anchors")
            timed = self._checked(name, (*self._top, *place, name))
            if timed is not None:
                self._ready[name] = timed
        found = self._rounds(self._ready)
        self._ready = {name: timed for name, timed in self._ready.items() if name in found}
        for name, samples in found.items():
            self._events.result(*self._ready[name].path, status="ok", **samples)

    def peer(self, name: str) -> None:
        """The whole turn of a peer; whatever goes wrong in it is written down as its own."""
        path = (*self._top, "providers", name)
        timed = self._checked(name, path)
        if timed is not None:
            found = self._rounds({**self._ready, name: timed}, name)
            if name in found:
                of_anchors = {x: found[x]["ms"][self._mode] for x in self._ready if x in found}
                self._events.result(*path, status="ok", anchors=of_anchors, **found[name])
        self._inputs.clear_gradients()
        if self._clock.on_gpu:
            del timed
            gc.collect()
            torch.cuda.empty_cache()

    def _checked(self, name: str, path: Path) -> _Timed | None:
        """Build and check a provider, and run it till it is warm; None if it has no result worth timing."""
        timed = None
        with self._events.noting(*path, limit=FIRST_CALL_LIMIT):
            forward = build(name, self._inputs, "triton" if self._this.toy else "auto")
            found = check(name, forward, self._inputs, self._want)
            self._events.result(*path, **{"pass": self._this.index}, **found)
            if found["status"] != "checked":
                return None
            self._events.result(*path, extra_mib=_extra_mib(forward, self._inputs))
            if self._case.rounds == 0:
                self._events.result(*path, status="ok")
                return None
            step, ms = Step(forward, lap=self._clock.lap), 0.0
            for _ in range(0 if self._this.toy else WARM_UP):
                self._inputs.clear_gradients()
                ms = self._clock.time(step)
            timed = _Timed(step, ms, path)
        return timed

    def _rounds(self, steps: dict[str, _Timed], peer: str | None = None) -> dict[str, dict[str, Any]]:
        """Time the steps, interleaved: ``ms`` and ``samples_ms`` by name. In a peer's turn it answers for all."""
        laps: dict[str, list[float]] = {name: [] for name in steps}

        def before(name: str) -> None:
            self._events.begin(*steps[peer or name].path, limit=STEPS_LIMIT)
            self._inputs.clear_gradients()

        def after(name: str) -> None:
            if self._clock.forward_ms is not None:
                laps[name].append(self._clock.forward_ms)

        failures: dict[str, Exception] = {}
        samples: dict[str, list[float]] = {}
        for so_far in interleaved(
            {name: x.step for name, x in steps.items()},
            self._clock,
            expected_ms={name: x.ms for name, x in steps.items()},
            before=before,
            failed=failures.__setitem__,
            until=min(self._this.until, time.time() + self._this.seconds),
            rounds=1 if self._this.toy else self._case.rounds,
            after=after,
        ):
            samples.update(so_far)
        self._inputs.clear_gradients()
        for name, error in failures.items():
            rest = () if peer in (None, name) else ("failures", name)
            self._events.failed(error, *steps[peer or name].path, *rest)
        ran = {name: x for name, x in samples.items() if x and name not in failures}
        return {name: times(x, laps[name], mode=self._mode) for name, x in ran.items()}

    @property
    def _mode(self) -> str:
        return "score" if self._case.score else "full"


@dataclass(frozen=True)
class _Timed:
    """A provider whose result is right: its step, how long that took, and where its results go."""

    step: Callable[[], object]
    ms: float
    path: Path


def _extra_mib(forward: Forward, inputs: Inputs) -> float | None:
    inputs.clear_gradients()
    peak = Peak(inputs.hidden.device)
    Step(forward)()
    extra = peak.extra_bytes(sum(x.grad.nbytes for x in inputs.leaves if x.grad is not None))
    inputs.clear_gradients()
    return None if extra is None else round(extra / MIB, 1)
