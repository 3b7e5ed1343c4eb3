"""One case: build every provider, check its result, time those that are right, in turn, and measure their memory."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu.cases import CpuCase, make_inputs
from benchmarks.cpu.memory import extra_memory
from benchmarks.cpu.providers import build
from benchmarks.gpu.cases import Inputs
from benchmarks.gpu.events import Absence, describe
from benchmarks.gpu.providers import Step
from benchmarks.gpu.reference import Reference, errors, reference
from benchmarks.gpu.results import Results
from benchmarks.gpu.timing import Clock, interleaved, quantiles


def measure_case(
    case: CpuCase,
    results: Results,
    *,
    providers: Sequence[str],
    backend: str,
    repetitions: int,
    threads: int,
    memory: bool,
) -> None:
    """Measure `case` and put what is found into ``cases/<name>`` of the results.

    Args:
        backend: of ours.
        repetitions: how often each provider is timed, after one run that is checked.
        memory: whether to measure memory too.
    """
    top = ("cases", case.name)
    shape = {"n": case.n, "h": case.h, "v": case.v, "t": case.t, "dtype": case.dtype, "zero_share": case.zero_share}
    results.merge(*top, **shape, providers={})
    inputs = make_inputs(case)
    want = reference(inputs)
    steps: dict[str, Step] = {}
    for name in providers:
        _tell(case, name, "checking")
        found, step = _checked(case, name, inputs, want, backend)
        results.merge(*top, "providers", name, **found)
        if step is not None:
            steps[name] = step
    _tell(case, " ".join(steps), "timing")
    watch = Watch()
    for name, entry in _timed(steps, inputs, repetitions).items():
        results.merge(*top, "providers", name, **entry)
    results.merge(*top, cpu_of_others=watch.others())
    right = [name for name in steps if results.at(*top, "providers", name)["status"] == "ok"]
    del inputs, steps, want
    for name in right if memory else ():
        if not name.startswith("products"):
            _tell(case, name, "memory of")
            results.merge(*top, "providers", name, **extra_memory(case, name, backend, threads))


def _tell(case: CpuCase, name: str, what: str) -> None:
    print(f"{case.name}: {what} {name}", file=sys.stderr, flush=True)


def _checked(
    case: CpuCase, name: str, inputs: Inputs, want: Reference, backend: str
) -> tuple[dict[str, Any], Step | None]:
    """What is to be said of the provider, and its step if the result is right (products have none)."""
    inputs.clear_gradients()
    try:
        step = build(name, inputs, backend)
        outcome = step()
    except Absence as absence:
        return {"status": "absent", "reason": str(absence)}, None
    except Exception as error:
        return {"status": "error", "reason": describe(error)}, None
    if name.startswith("products"):
        return {"status": "checked", "note": outcome.note}, step
    off = errors(outcome, inputs, want)
    is_right = case.is_right(off)
    found = {"status": "checked" if is_right else "wrong", "note": outcome.note, "errors": off}
    return found, step if is_right else None


def _timed(steps: dict[str, Step], inputs: Inputs, repetitions: int) -> dict[str, dict[str, Any]]:
    """Quantiles and all samples of each step, in milliseconds."""
    failed: dict[str, dict[str, Any]] = {}
    *_, samples = interleaved(
        steps,
        Clock(torch.device("cpu")),
        expected_ms=dict.fromkeys(steps, 0.0),
        before=lambda _: inputs.clear_gradients(),
        failed=lambda name, error: failed.update({name: {"status": "error", "reason": describe(error)}}),
        until=math.inf,
        rounds=repetitions,
    )
    inputs.clear_gradients()
    timed = {name: {"status": "ok", "ms": quantiles(ms), "samples_ms": ms} for name, ms in samples.items()}
    return {**timed, **failed}


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
