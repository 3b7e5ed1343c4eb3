"""The meaning of each instruction: a function of the lanes, its name's parts, and its operands.

An opcode that matches no pattern is an error that names it. Arithmetic, bits and comparisons are in
`arithmetic`; conversions, moves, loads and stores, and what lanes do together, in `moves`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.emulator.ptx import Instruction, UnknownInstruction

if TYPE_CHECKING:
    from tests.emulator.lanes import Lanes

_KNOWN: list[tuple[re.Pattern[str], Callable[..., None]]] = []


def known(pattern: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Enter a function for the opcodes that `pattern` matches; it takes groups, then operands."""

    def enter(function: Callable[..., None]) -> Callable[..., None]:
        _KNOWN.append((re.compile(pattern), function))
        return function

    return enter


def execute(lanes: Lanes, step: Instruction) -> None:
    """Have the active lanes of `lanes` take one step."""
    function, found = meaning(step.opcode)
    function(lanes, *found, *step.operands)


@functools.cache
def meaning(opcode: str) -> tuple[Callable[..., None], tuple[Any, ...]]:
    """The function of an opcode, and what its pattern's groups are.

    Raises:
        UnknownInstruction: there is none.
    """
    from tests.emulator import arithmetic, moves  # noqa: F401  (they enter their functions)

    for pattern, function in _KNOWN:
        found = pattern.fullmatch(opcode)
        if found:
            return function, found.groups()
    raise UnknownInstruction(f"expected an instruction that the emulator knows, got {opcode}")
