"""How steps are timed on a GPU, against a device that is acted out: what is launched when, and what
counts as time."""

from __future__ import annotations

import time
from functools import partial
from unittest.mock import Mock

import pytest
import torch

from benchmarks.timing import Clock, TooLongToQueue, interleaved, quantiles

CPU = torch.device("cpu")


def acted(monkeypatch: pytest.MonkeyPatch, late_below: int = 0) -> Mock:
    """`torch.cuda`, whose calls are noted; a launch is late while it sleeps fewer cycles."""
    cuda = Mock()
    cuda.Event().elapsed_time.return_value = 0.25
    cuda.Event().query.side_effect = lambda: cuda._sleep.call_args.args[0] < late_below
    cuda.reset_mock()
    monkeypatch.setattr(torch, "cuda", cuda)
    return cuda


def clock_of(cuda: Mock, **options: bool) -> Clock:
    clock = Clock(torch.device("cuda"), **options)
    clock.flushed = cuda.flushed
    return clock


def asked(cuda: Mock) -> str:
    """What the device was asked for, in order."""
    names = [
        name.rpartition(".")[2] for name, _, how in cuda.mock_calls if "enable_timing" not in how
    ]
    return " ".join(names)


def test_a_launch_is_no_part_of_a_kernels_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device sleeps while the host launches; where the sleep was too short, once more with a
    longer one."""
    cuda = acted(monkeypatch)
    assert clock_of(cuda, queued=True).time(cuda.launch) == 0.25
    queued = "synchronize zero_ _sleep record launch query record synchronize elapsed_time"
    assert asked(cuda) == queued
    cuda = acted(monkeypatch, late_below=3 * 2**20)
    clock = clock_of(cuda, queued=True)
    clock.time(cuda.launch)
    assert [x.args for x in cuda._sleep.call_args_list] == [(2**20,), (2**21,), (2**22,)]
    clock.time(cuda.launch)
    assert cuda.launch.call_count == 4  # it has learnt
    cuda = acted(monkeypatch, late_below=2**40)
    with pytest.raises(TooLongToQueue, match="longer to launch the step than 67108864 cycles"):
        clock_of(cuda, queued=True).time(cuda.launch)
    cuda = acted(monkeypatch)
    clock_of(cuda).time(cuda.launch)
    of_wall = "synchronize zero_ synchronize record launch record synchronize elapsed_time"
    assert asked(cuda) == of_wall


def test_every_round_has_an_order_of_its_own() -> None:
    ran: list[str] = []
    steps = {name: partial(ran.append, name) for name in "abc"}
    *_, samples = interleaved(steps, Clock(CPU), failed=print, until=time.time() + 60, rounds=12)
    assert [len(x) for x in samples.values()] == [12] * 3 and ran[:3] != ran[3:6]
    of_six = {"samples": 6, "median": 2.5, "p20": 1.5, "p80": 8.0}
    assert quantiles([9.0, 1.0, 3.0, 2.0, 1.5, 8.0]) == of_six
    assert quantiles([]) == {"samples": 0}
