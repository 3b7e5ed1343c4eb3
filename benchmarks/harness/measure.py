"""One provider on one case: is its result right, how many operations does it do; and the step that is timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from benchmarks import figures
from benchmarks.cases import Inputs
from benchmarks.harness.flops import counter
from benchmarks.harness.reference import Reference, errors, is_right
from benchmarks.harness.timing import quantiles
from benchmarks.providers import Forward, Outcome, named


class Step:
    """A forward, and unless it is `forward_only` the backward of its loss if that has one; `lap` is called between."""

    def __init__(self, forward: Forward, *, forward_only: bool = False, lap: Callable[[], None] | None = None) -> None:
        self._forward, self._forward_only, self._lap = forward, forward_only, lap

    def __call__(self) -> Outcome:
        outcome = self._forward()
        if outcome.loss is not None and outcome.loss.requires_grad and not self._forward_only:
            if self._lap is not None:
                self._lap()
            outcome.loss.backward()
        return outcome


def check(name: str, forward: Forward, inputs: Inputs, want: Reference) -> dict[str, Any]:
    """What the first call tells: ``status`` "checked" or "wrong", the errors, counted operations in NVH, and its time.

    Products have no result to compare. In the part "accuracy" a peer's errors are what is measured, however large.
    """
    provider = named(name, distils=inputs.teacher is not None)
    inputs.clear_gradients()
    operations = counter()
    started = time.perf_counter()
    with operations if provider.counted else nullcontext():
        outcome = Step(forward)()
    seconds = time.perf_counter() - started
    found = errors(outcome, inputs, want) if provider.compared else {}
    shown_as_it_is = inputs.case.part == "accuracy" and not figures.is_ours(name)
    right = not provider.compared or shown_as_it_is or is_right(found, inputs.case)
    inputs.clear_gradients()
    return {
        "status": "checked" if right else "wrong",
        "errors": found,
        "note": outcome.note,
        "flops_nvh": round(operations.get_total_flops() / inputs.case.nvh, 3) if provider.counted else None,
        "first_call_s": round(seconds, 3),
    }


def times(full: Sequence[float], forward: Sequence[float], *, mode: str = "full") -> dict[str, Any]:
    """``ms`` and ``samples_ms`` of the results, from milliseconds of whole steps (of `mode`) and of their forwards."""
    samples: Mapping[str, Sequence[float]] = {mode: full}
    if len(forward) == len(full):
        backward = [a - b for a, b in zip(full, forward, strict=True)]
        samples = {mode: full, "forward": forward, "backward": backward}
    return {
        "ms": {k: quantiles(list(x)) for k, x in samples.items()},
        "samples_ms": {k: [round(ms, 4) for ms in x] for k, x in samples.items()},
    }
