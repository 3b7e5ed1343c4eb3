"""How steps are timed on a GPU, against a device that is acted out: what is launched when, and what
counts as time."""

from __future__ import annotations

import time
from functools import partial

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


def test_every_round_has_an_order_of_its_own() -> None:
    ran: list[str] = []
    steps = {name: partial(ran.append, name) for name in "abc"}
    *_, samples = interleaved(steps, Clock(CPU), failed=print, until=time.time() + 60, rounds=12)
    assert [len(x) for x in samples.values()] == [12] * 3 and ran[:3] != ran[3:6]
    of_six = {"samples": 6, "median": 2.5, "p20": 1.5, "p80": 8.0}
    assert quantiles([9.0, 1.0, 3.0, 2.0, 1.5, 8.0]) == of_six
    assert quantiles([]) == {"samples": 0}
