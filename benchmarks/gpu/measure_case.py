"""One case: build every provider, check its result, then time those that are right, interleaved."""

from __future__ import annotations

import time
from collections.abc import Callable, Container

import torch

from benchmarks.cases import BenchCase, Inputs, make_inputs
from benchmarks.events import Events
from benchmarks.measure import Step, check, times
from benchmarks.memory import Peak
from benchmarks.providers import MIB, Forward, build
from benchmarks.reference import reference
from benchmarks.timing import Clock, interleaved

FIRST_CALL_LIMIT = 100.0  # seconds: some compile for a minute
WARM_UP = 2


def measure_case(
    case: BenchCase,
    device: torch.device,
    events: Events,
    *,
    excluded: Container[str] = (),
    only: Container[str] | None = None,
    seconds: float,
    until: float,
    toy: bool = False,
    flush: bool = False,
) -> None:
    """Measure `case` and send what is found to ``cases/<name>``.

    Args:
        excluded: providers that brought the process down before.
        only: the providers to measure; None: all that the case names.
        seconds: for the rounds.
        until: ``time.time()`` after which no round is begun in any case.
        toy: one round, and Triton's interpreter for ours.
    """
    top = ("cases", case.name)
    events.result(*top, status="running", **case.about())
    events.begin(*top, "reference", limit=FIRST_CALL_LIMIT)
    inputs = make_inputs(case, device)
    want = reference(inputs)
    clock = Clock(device, flush=flush)

    forwards: dict[str, Forward] = {}
    for name in case.providers:
        if name in excluded or (only is not None and name not in only):
            continue
        path = (*top, "providers", name)
        with events.noting(*path, limit=FIRST_CALL_LIMIT):
            forward = build(name, inputs, "triton" if toy else "auto")
            found = check(name, forward, inputs, want)
            events.result(*path, **found)
            if found["status"] == "checked":
                events.result(*path, extra_mib=_extra_mib(forward, inputs))
                forwards[name] = forward
                if case.rounds == 0:
                    events.result(*path, status="ok")
    del want
    until = min(until, time.time() + seconds)
    if case.rounds:
        _time(forwards, inputs, clock, events, top, until=until, rounds=1 if toy else case.rounds)
    events.result(*top, status="complete")


def _extra_mib(forward: Forward, inputs: Inputs) -> float | None:
    inputs.clear_gradients()
    peak = Peak(inputs.hidden.device)
    Step(forward)()
    extra = peak.extra_bytes(sum(x.grad.nbytes for x in inputs.leaves if x.grad is not None))
    inputs.clear_gradients()
    return None if extra is None else round(extra / MIB, 1)


def _time(
    forwards: dict[str, Forward],
    inputs: Inputs,
    clock: Clock,
    events: Events,
    top: tuple[str, ...],
    *,
    until: float,
    rounds: int,
) -> None:
    expected = dict.fromkeys(forwards, 0.0)
    ready: dict[str, Callable[[], object]] = {}
    for name, forward in forwards.items():
        step = Step(forward, lap=clock.lap)
        with events.noting(*top, "providers", name):
            for _ in range(WARM_UP if rounds > 1 else 0):
                inputs.clear_gradients()
                expected[name] = clock.time(step)
            ready[name] = step

    def before(name: str) -> None:
        events.begin(*top, "providers", name)
        inputs.clear_gradients()

    laps: dict[str, list[float]] = {name: [] for name in ready}

    def after(name: str) -> None:
        if clock.forward_ms is not None:
            laps[name].append(clock.forward_ms)

    broken: set[str] = set()

    def failed(name: str, error: Exception) -> None:
        broken.add(name)
        events.failed(error, *top, "providers", name)

    mode = "score" if inputs.case.score else "full"

    def tell(status: str) -> None:
        for name, values in samples.items():
            if values and name not in broken:
                events.result(*top, "providers", name, status=status, **times(values, laps[name], mode=mode))

    told = time.time()
    samples: dict[str, list[float]] = {}
    for so_far in interleaved(
        ready, clock, expected_ms=expected, before=before, failed=failed, until=until, rounds=rounds, after=after
    ):
        samples.update(so_far)
        if time.time() - told > 5.0:
            told = time.time()
            tell("partial")
    tell("ok")
    inputs.clear_gradients()
