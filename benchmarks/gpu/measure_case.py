"""One case: build every provider, check its result, then time those that are right, interleaved."""

from __future__ import annotations

import time
from collections.abc import Callable, Container

import torch

from benchmarks.gpu.cases import BenchCase, Inputs, make_inputs
from benchmarks.gpu.events import Events
from benchmarks.gpu.providers import Step, build
from benchmarks.gpu.reference import Reference, errors, is_right, reference
from benchmarks.gpu.timing import ROUNDS, Clock, interleaved, peak_extra_bytes, quantiles

FIRST_CALL_LIMIT = 100.0  # seconds: some compile for a minute
WARM_UP = 2
NOT_COMPARED = ("products",)
MIB = 2**20


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
    shape = {"n": case.n, "h": case.h, "v": case.v, "products_nvh": case.products_nvh, "flops": case.flops}
    traits = {"frozen": case.frozen, "zero_share": case.zero_share, "score": case.score, "off_policy": case.off_policy}
    events.result(*top, status="running", dtype="bfloat16", **shape, **traits)
    events.begin(*top, "reference", limit=FIRST_CALL_LIMIT)
    inputs = make_inputs(case, device)
    want = reference(inputs)
    clock = Clock(device, flush=flush)

    steps: dict[str, Step] = {}
    for name in case.providers:
        if name in excluded or (only is not None and name not in only):
            continue
        path = (*top, "providers", name)
        with events.noting(*path, limit=FIRST_CALL_LIMIT):
            step = build(name, inputs, "triton" if toy else "auto")
            if _check(step, name, inputs, want, clock, lambda path=path, **x: events.result(*path, **x)):
                steps[name] = step
    del want
    until = min(until, time.time() + seconds)
    _time(steps, inputs, clock, events, top, until=until, rounds=1 if toy else ROUNDS)
    events.result(*top, status="complete")


def _check(step: Step, name: str, inputs: Inputs, want: Reference, clock: Clock, tell: Callable[..., None]) -> bool:
    """Whether the step gives the right result; tells that, how long the first call took, and what memory it needs."""
    inputs.clear_gradients()
    started = time.perf_counter()
    outcome = step()
    found = {} if name in NOT_COMPARED else errors(outcome, inputs, want)
    right = name in NOT_COMPARED or is_right(found, inputs.case)
    tell(status="checked" if right else "wrong", errors=found, note=outcome.note)
    tell(first_call_s=round(time.perf_counter() - started, 3))
    del outcome
    inputs.clear_gradients()
    if right:
        peak = peak_extra_bytes(step, inputs.hidden.device)
        tell(peak_extra_mib=None if peak is None else round(peak / MIB, 1))
    inputs.clear_gradients()
    return right


def _time(
    steps: dict[str, Step],
    inputs: Inputs,
    clock: Clock,
    events: Events,
    top: tuple[str, ...],
    *,
    until: float,
    rounds: int,
) -> None:
    expected = dict.fromkeys(steps, 0.0)
    ready: dict[str, Step] = {}
    for name, step in steps.items():
        with events.noting(*top, "providers", name):
            for _ in range(WARM_UP if rounds > 1 else 0):
                inputs.clear_gradients()
                expected[name] = clock.time(step)
            ready[name] = step

    def before(name: str) -> None:
        events.begin(*top, "providers", name)
        inputs.clear_gradients()

    broken: set[str] = set()

    def failed(name: str, error: Exception) -> None:
        broken.add(name)
        events.failed(error, *top, "providers", name)

    def tell(status: str) -> None:
        for name, values in samples.items():
            if values and name not in broken:
                events.result(*top, "providers", name, status=status, ms=quantiles(values))

    told = time.time()
    samples: dict[str, list[float]] = {}
    for so_far in interleaved(
        ready, clock, expected_ms=expected, before=before, failed=failed, until=until, rounds=rounds
    ):
        samples.update(so_far)
        if time.time() - told > 5.0:
            told = time.time()
            tell("partial")
    tell("ok")
    inputs.clear_gradients()
