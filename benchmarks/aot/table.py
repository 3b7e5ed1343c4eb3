"""A line for each case, made in a process of its own."""

from __future__ import annotations

from functools import cache

from benchmarks.aot.checks import Result, compile_launch
from benchmarks.aot.matrix import Case, cases

HEADER = f"{'target':8} {'kernel':11} {'variant':50} {'registers':>9} {'spilled':>7} {'shared':>6} {'warps':>5}"


@cache
def all_cases(quick: bool) -> list[Case]:
    return cases(quick=quick)


def line_of(place: int, quick: bool) -> tuple[str, bool]:
    """The line of the case at a place, and whether it breaks a rule."""
    case = all_cases(quick)[place]
    try:
        result = compile_launch(case.caught(), case.arch)
    except Exception as error:  # it is one more thing to report, next to what else breaks
        result = Result(broken=(f"{type(error).__name__}: {error}",))
    line = (
        f"{case.arch:8} {case.kernel:11} {case.variant:50} "
        f"{result.registers:9} {result.spilled:7} {result.shared:6} {result.warps:5}"
    )
    return line + "".join(f"\n  BROKEN: {reason}" for reason in result.broken), bool(result.broken)
