"""Where a training step spends its seconds and its operations: the clock always runs for exactly one part.

The head is entered and left twice: in the forward where TRL calls its fused head, and in the backward where the first
gradient of its results is there and where the gradient of its hidden states is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.harness.flops import counter
from benchmarks.harness.memory import CLEAR_REFS, is_measured, status_bytes
from benchmarks.providers import MIB

PARTS = ("generation", "head", "body", "optimizer", "other")


class Clock:
    """Seconds, operations and peak memory of one step; the parts add up to the step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.part = ""  # the one that runs; empty between steps
        self.seconds: dict[str, float] = {}
        self.flops: dict[str, int] = {}
        self._counter: FlopCounterMode | None = None
        self._since, self._counted = 0.0, 0

    def start(self, *, count: bool) -> None:
        """A step begins. Counting operations slows it down, so `count` in steps whose seconds are of no interest."""
        self.seconds, self.flops = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0)
        reset_peak(self._device)
        self._counter = counter() if count else None
        if self._counter is not None:
            self._counter.__enter__()
        self._since, self._counted = self._now(), 0
        self.part = "other"

    def enter(self, part: str) -> None:
        """What comes belongs to `part`, what was since the last call to the part before. Nothing between steps."""
        if not self.part:
            return
        now, counted = self._now(), 0 if self._counter is None else self._counter.get_total_flops()
        self.seconds[self.part] += now - self._since
        self.flops[self.part] += counted - self._counted
        self.part, self._since, self._counted = part, now, counted

    def stop(self) -> dict[str, Any]:
        """The step is over: its ``seconds`` and ``flops`` by part, and ``peak_mib``."""
        self.enter("")
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
        return {"seconds": self.seconds, "flops": self.flops, "peak_mib": peak_mib(self._device)}

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def _marked(apply: Callable[..., Any], clock: Clock) -> Callable[..., Any]:
    """`apply` of a fused head, known to the clock."""

    def wrapped(hidden: Tensor, *others: Any) -> Any:
        if torch.is_grad_enabled() and hidden.requires_grad:
            hidden.register_hook(lambda _: clock.enter("body"))
        clock.enter("head")
        results = apply(hidden, *others)
        for result in results:
            if result is not None and result.requires_grad:
                result.register_hook(lambda _: clock.enter("head"))
        clock.enter("other")
        return results

    return wrapped


@contextmanager
def heads_marked(clock: Clock) -> Iterator[None]:
    """Inside, the clock knows when TRL's head or ours runs."""
    import trl.trainer.utils as trl_utils

    from grpo_kernels.integrations.trl import hook as trl_hook

    theirs = trl_utils._ChunkedLogProbFunction
    # `forward` too: by its signature our hook knows which TRL this is
    stock = type("Marked", (), {"apply": staticmethod(_marked(theirs.apply, clock)), "forward": theirs.forward})
    with (
        mock.patch.object(trl_utils, "_ChunkedLogProbFunction", stock),
        mock.patch.object(trl_hook.FusedHead, "apply", staticmethod(_marked(trl_hook.FusedHead.apply, clock))),
    ):
        yield


def reset_peak(device: torch.device) -> None:
    """Forget the largest memory so far: of the GPU's allocator, or resident memory of this process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif is_measured(device):
        CLEAR_REFS.write_text("5")


def peak_mib(device: torch.device) -> float | None:
    """The largest memory since, None where the system does not tell."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated() / MIB, 1)
    return round(status_bytes("VmHWM") / MIB, 1) if is_measured(device) else None
