"""The meaning of each instruction: a function of numbers (`each`), or of the lanes (`known`).

An opcode that matches no pattern is an error that names it. Arithmetic, bits and comparisons are in
`arithmetic`; conversions, moves, loads and stores, and what lanes do together, in `moves`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.emulator.ptx import Instruction, UnknownInstruction, Values

if TYPE_CHECKING:
    from tests.emulator.lanes import Lanes

SMALLEST = np.float32(2.0**-126)  # normal number
INTEGER, FTZ = "(?P<kind>[sub](?:8|16|32|64))", r"(?P<ftz>\.ftz)?"
Step = Callable[..., None]
_KNOWN: list[tuple[re.Pattern[str], Callable[[re.Match[str]], Step]]] = []


def known(pattern: str) -> Callable[[Step], Step]:
    """Enter a function of the lanes, the pattern's groups, and an instruction's operands."""

    def enter(function: Step) -> Step:
        def step_of(found: re.Match[str]) -> Step:
            return lambda lanes, *operands: function(lanes, *found.groups(), *operands)

        _KNOWN.append((re.compile(pattern), step_of))
        return function

    return enter


def each(pattern: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function of the operands' numbers, which gives the target's, for every lane.

    The group `kind` is the type of all operands (f32 where there is none), `ftz` flushes; other
    groups go to the function first.
    """

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        def step_of(found: re.Match[str]) -> Step:
            named = found.groupdict()
            kind, flush = named.get("kind", "f32"), named.get("ftz") is not None
            numbers = {*range(1, found.re.groups + 1)} - {*found.re.groupindex.values()}
            names = [found[i] for i in sorted(numbers)]

            def step(lanes: Lanes, target: str, *operands: str) -> None:
                values = (flushed(lanes.get(operand, kind), flush) for operand in operands)
                lanes.put(target, flushed(function(*names, *values), flush))

            return step

        _KNOWN.append((re.compile(pattern), step_of))
        return function

    return enter


def flushed(x: Values, flush: bool) -> Values:
    """Zero for numbers below the smallest normal one."""
    if not flush or x.dtype.kind != "f":
        return x
    return np.where(np.abs(x) < SMALLEST, np.copysign(np.float32(0), x), x)


def execute(lanes: Lanes, step: Instruction) -> None:
    """Have the active lanes of `lanes` take one step."""
    meaning(step.opcode)(lanes, *step.operands)


@functools.cache
def meaning(opcode: str) -> Step:
    from tests.emulator import arithmetic, moves  # noqa: F401  (they enter their functions)

    for pattern, step_of in _KNOWN:
        found = pattern.fullmatch(opcode)
        if found:
            return step_of(found)
    raise UnknownInstruction(f"expected an instruction that the emulator knows, got {opcode}")
