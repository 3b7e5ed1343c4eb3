"""Which kernels a step spends its time in, so that a missed goal can be explained."""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.cases import BenchCase, make_inputs
from benchmarks.harness.events import Events
from benchmarks.harness.measure import Step
from benchmarks.harness.timing import Clock
from benchmarks.providers import build

TOP = 25


def profile_step(case: BenchCase, device: torch.device, events: Events, *, toy: bool = False) -> None:
    """One step of ours on `case`: its kernels by time, and how much of the step is none of them."""
    path = ("profile", case.name)
    with events.noting(*path, limit=150.0):
        inputs = make_inputs(case, device)
        step = Step(build("ours", inputs, "triton" if toy else "auto"))
        clock = Clock(device)
        for _ in range(3):
            inputs.clear_gradients()
            ms = clock.time(step)
        inputs.clear_gradients()
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if clock.on_gpu else [])
        with profile(activities=activities) as prof:
            step()
            if clock.on_gpu:
                torch.cuda.synchronize()
        where = "CUDA" if clock.on_gpu else "CPU"  # an operation's own entry counts its kernels again
        averages = [x for x in prof.key_averages() if str(x.device_type).endswith(where)]
        rows = [row for x in averages if (row := _row(x, clock.on_gpu))["ms"] > 0]
        rows.sort(key=lambda x: -x["ms"])
        total = sum(x["ms"] for x in rows)
        events.result(
            *path, status="ok", step_ms=round(ms, 3), kernels_ms=round(total, 3), distinct=len(rows), kernels=rows[:TOP]
        )
        inputs.clear_gradients()


def _row(average: Any, on_gpu: bool) -> dict[str, Any]:
    microseconds = average.self_device_time_total if on_gpu else average.self_cpu_time_total
    return {"name": str(average.key)[:160], "calls": average.count, "ms": round(microseconds / 1e3, 4)}
