"""The part "memory": the peak of one step of each provider, on more and more tokens. No times: the steps run once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks import figures
from benchmarks.cases import BenchCase, Inputs, make_inputs
from benchmarks.harness.events import Absence, describe
from benchmarks.harness.measure import Step
from benchmarks.harness.memory import Peak, available_bytes, give_back_what_is_freed
from benchmarks.harness.reference import Reference, errors, is_right, reference
from benchmarks.harness.results import Results
from benchmarks.providers import MIB, build

CPU = torch.device("cpu")
ROOM = 0.85  # of the memory that is free, that a step may take
WARM_TOKENS = 8  # a sequence, in the step before the first, after which libraries have the scratch space that they keep


def measure(cases: Sequence[BenchCase], results: Results, *, backend: str = "auto") -> None:
    """Every provider of every case, one at a time; the fewest tokens first, which tell who still has room for more."""
    if cases:  # else what is timed next pays for it
        give_back_what_is_freed()
    for case in sorted(cases, key=lambda x: x.n):
        results.merge("cases", case.name, **case.about(), providers={})
        inputs = make_inputs(case, CPU)
        want = reference(inputs)
        for name in case.providers:
            found = _of_provider(name, inputs, want, results.data, backend)
            results.merge("cases", case.name, "providers", name, **found)


def _of_provider(name: str, inputs: Inputs, want: Reference, data: dict[str, Any], backend: str) -> dict[str, Any]:
    """Its status, errors and ``extra_mib``."""
    try:
        check_room(name, inputs.case, data)
        few = make_inputs(replace(inputs.case, n=len(inputs.ids) * WARM_TOKENS, t=WARM_TOKENS), CPU)
        Step(build(name, few, backend))()
        few.clear_gradients()
        step = Step(build(name, inputs, backend))
        peak = Peak(CPU)
        outcome = step()
        extra = peak.extra_bytes(sum(x.grad.nbytes for x in inputs.leaves if x.grad is not None))
        if extra is None:
            raise Absence("nothing measures memory here")
        found = errors(outcome, inputs, want)
    except Absence as absence:
        return {"status": "absent", "reason": str(absence)}
    except Exception as error:
        return {"status": "error", "reason": describe(error)}
    finally:
        inputs.clear_gradients()
    right = is_right(found, inputs.case)
    mib = round(max(0, extra) / MIB, 1)
    return {"status": "ok" if right else "wrong", "errors": found, "note": outcome.note, "extra_mib": mib}


def check_room(name: str, case: BenchCase, data: dict[str, Any]) -> None:
    """Refuse a provider that, growing with the tokens, would take more memory than there is.

    Raises:
        Absence: it would.
    """
    smaller = [x for x in figures.of_part(data, case.part).values() if x["n"] < case.n]
    known = [(x["n"], mib) for x in smaller if (mib := figures.extra_mib(x, name)) is not None]
    if not known or (room := available_bytes()) is None:
        return
    n, mib = max(known)
    if (needed := mib * MIB * case.n / n) > ROOM * room:
        raise Absence(f"would need about {needed / 2**30:.0f} GiB, and {room / 2**30:.0f} GiB are free")
