"""Time of steps that are interleaved: clocks drift, and must drift for all alike."""

from __future__ import annotations

import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch

LEAST_ROUNDS = 5
FLUSH_BYTES = 256 * 2**20  # a few times the L2 of any GPU there is
FIRST_SLEEP, LONGEST_SLEEP = 2**20, 2**26  # cycles: from half a millisecond to some 35
_asked = False  # to end: a signal only sets it, since an exception out of a handler could be lost


def end_at_signals() -> None:
    """SIGTERM and Ctrl-C now ask the command to end; a second Ctrl-C interrupts at once."""

    def ask(kind: int, frame: FrameType | None) -> None:
        global _asked
        _asked = True
        if kind == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGTERM, ask)
    # a shell's background ignores it
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, ask)


def is_asked() -> bool:
    return _asked


def is_past(until: float) -> bool:
    return _asked or time.time() > until


class TooLongToQueue(Exception):
    """A step's launch takes longer than the device may sleep."""


class Clock:
    """Milliseconds of a step: CUDA events on a GPU, the wall clock on a CPU.

    `flush` overwrites the L2 cache before each step. `queued` leaves out the time that the host
    takes to launch: the step is put behind the first event while the device sleeps. It is for steps
    of which the host knows all beforehand, such as one kernel.
    """

    def __init__(self, device: torch.device, *, flush: bool = False, queued: bool = False) -> None:
        self.on_gpu = device.type == "cuda"
        self._cycles = FIRST_SLEEP if queued else 0
        flushes = flush and self.on_gpu
        self.flushed: Any = (
            torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device) if flushes else None
        )

    def time(self, step: Callable[[], Any]) -> float:
        if not self.on_gpu:
            started = time.perf_counter()
            step()
            return 1e3 * (time.perf_counter() - started)
        start, stop, in_time = self._on_gpu(step)
        while not in_time and self._cycles < LONGEST_SLEEP:
            self._cycles *= 2
            start, stop, in_time = self._on_gpu(step)
        if not in_time:
            raise TooLongToQueue(
                f"the host takes longer to launch the step than {self._cycles} cycles of the device"
            )
        return float(start.elapsed_time(stop))

    def _on_gpu(self, step: Callable[[], Any]) -> tuple[Any, Any, bool]:
        """The events around one step, and True if it was launched before the first came."""
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        if self.flushed is not None:
            self.flushed.zero_()
            if not self._cycles:
                torch.cuda.synchronize()
        if self._cycles:
            torch.cuda._sleep(self._cycles)
        start.record()
        step()
        in_time = not (self._cycles and start.query())
        stop.record()
        stop.synchronize()
        return start, stop, in_time


def order(names: Sequence[str], i: int) -> list[str]:
    return random.Random(i).sample(list(names), len(names))


def quantiles(samples: list[float]) -> dict[str, Any]:
    if not samples:
        return {"samples": 0}
    at = sorted(samples)
    pick = lambda q: at[min(len(at) - 1, round(q * (len(at) - 1)))]  # noqa: E731
    return {
        "samples": len(at), "median": round(statistics.median(at), 4), "p20": round(pick(0.2), 4),
        "p80": round(pick(0.8), 4),
    }  # fmt: skip


def interleaved(
    steps: Mapping[str, Callable[[], Any]],
    clock: Clock,
    *,
    failed: Callable[[str, Exception], None],
    until: float,
    rounds: int,
    before: Callable[[str], None] = lambda name: None,
    after: Callable[[str], None] = lambda name: None,
) -> Iterator[dict[str, list[float]]]:
    """Run the steps in turn, in another order each round; yield all samples so far after each.

    A step that raised is told to `failed` and left out from then on. After `until` no round is
    begun, once there have been `LEAST_ROUNDS`; `before` and `after` are not timed.
    """
    samples: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for i in range(rounds):
        if is_asked() or (i >= min(LEAST_ROUNDS, rounds) and is_past(until)):
            return
        for name in order(names, i):
            before(name)
            try:
                samples[name].append(clock.time(steps[name]))
                after(name)
            except Exception as error:
                names.remove(name)
                failed(name, error)
        yield samples
