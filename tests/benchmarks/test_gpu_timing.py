"""How steps are timed on a GPU, against a device that is acted out: what is launched when, and what
counts as time."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from benchmarks.timing import Clock, TooLongToQueue, interleaved, quantiles

CPU = torch.device("cpu")


class Device:
    """What the host asks of a GPU, in its order; `busy` is for how many cycles of sleep a launch is
    not in time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, late_below: int = 0) -> None:
        self.asked: list[str] = []
        self.slept = 0
        device = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                device.asked.append("event")

            def query(self) -> bool:
                return device.slept < late_below

            def synchronize(self) -> None:
                device.asked.append("wait")

            def elapsed_time(self, other: Event) -> float:
                return 0.25

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.asked.append("synchronize"))
        monkeypatch.setattr(torch.cuda, "_sleep", self.sleep)

    def sleep(self, cycles: int) -> None:
        self.slept = cycles
        self.asked.append("sleep")

    def zero_(self) -> None:
        self.asked.append("flush")

    def clock(self, **options: bool) -> Clock:
        clock = Clock(torch.device("cuda"), **options)
        clock.flushed = self
        return clock


def test_a_launch_is_no_part_of_a_kernels_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device sleeps while the host launches; where the sleep was too short, once more with a
    longer one."""
    device = Device(monkeypatch)

    def step() -> None:
        device.asked.append("launch")

    assert device.clock(queued=True).time(step) == 0.25
    assert device.asked == ["synchronize", "flush", "sleep", "event", "launch", "event", "wait"]
    device = Device(monkeypatch, late_below=3 * 2**20)
    clock = device.clock(queued=True)
    clock.time(step)
    assert (device.asked.count("launch"), device.slept) == (3, 2**22)
    clock.time(step)
    assert device.asked.count("launch") == 4  # it has learnt
    device = Device(monkeypatch, late_below=2**40)
    with pytest.raises(TooLongToQueue, match="longer to launch the step than 67108864 cycles"):
        device.clock(queued=True).time(step)
    device = Device(monkeypatch)
    device.clock().time(step)
    asked = "synchronize flush synchronize event launch event wait"
    assert " ".join(device.asked) == asked


def test_interleaving() -> None:
    """Every provider in every round, in turn; one that fails is left out, and the rest go on, till
    time is up."""
    ran: list[str] = []
    failed: dict[str, Exception] = {}

    def step(name: str) -> Any:
        def run() -> None:
            ran.append(name)
            if name == "bad" and ran.count("bad") == 2:
                raise RuntimeError("x")

        return run

    names = ("a", "b", "bad")
    steps, until = {name: step(name) for name in names}, time.time() + 60
    rounds = list(interleaved(steps, Clock(CPU), failed=failed.__setitem__, until=until, rounds=12))
    samples = rounds[-1]
    assert len(rounds) == 12
    assert [len(samples[name]) for name in names] == [12, 12, 1]
    assert list(failed) == ["bad"]
    assert ran[:3] != ran[3:6]  # another order
    assert quantiles([9.0, 1.0, 3.0, 2.0, 1.5, 8.0]) == {
        "samples": 6,
        "median": 2.5,
        "p20": 1.5,
        "p80": 8.0,
    }
    assert quantiles([]) == {"samples": 0}
