"""PTX text as a kernel: its parameters, registers and labels, and its instructions in order."""

from __future__ import annotations

import functools
import re
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

BITS = {"pred": 0, **{f"{kind}{bits}": bits for kind in "bsuf" for bits in (8, 16, 32, 64)}}
ENTRY = re.compile(r"\.visible \.entry (\w+)\((.*?)\)[^{]*\{(.*?)\n\}", re.DOTALL)
STATEMENT = re.compile(
    r"""\s*(?:
    (?P<label>\$?\w+):(?!:)
    | \.loc\s+(?P<file>\d+)\s+(?P<line>\d+)[^\n]*
    | \.reg\s+\.(?P<kind>\w+)\s+(?P<registers>[^;]*);
    | (?P<directive>\.\w[^;]*);
    | (?P<brace>[{}])
    | (?:@(?P<negated>!?)(?P<guard>%\w+)\s+)?(?P<opcode>[a-z][\w.:]*)\s*(?P<operands>[^;]*);
    )""",
    re.VERBOSE,
)


class Fault(Exception):
    """An access, or a step of several lanes, that is wrong on a GPU whatever its result."""


class UnknownInstruction(Exception):
    """A statement or an opcode that the emulator has no meaning for."""


@dataclass(frozen=True)
class Instruction:
    """One statement, such as ``@%p1 ld.global.b32 %r1, [%rd1+4];``."""

    opcode: str
    operands: tuple[str, ...]
    guard: str | None = None  # a predicate: lanes where it is false do nothing
    negated: bool = False  # lanes where it is true do nothing
    line: str = ""  # of the source: "steps.py:93"

    def __str__(self) -> str:
        return f"{self.opcode} {', '.join(self.operands)}" + (
            f" ({self.line})" if self.line else ""
        )


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel."""

    name: str
    parameters: tuple[str, ...]
    registers: dict[str, int]  # bits by the register's prefix, such as "%rd"; 0 of a predicate
    code: tuple[Instruction, ...]
    labels: dict[str, int]  # the place in `code` that a label stands before

    def bits(self, register: str) -> int:
        """How many bits a register such as ``%rd12`` has."""
        return self.registers[register.rstrip("0123456789")]


def parse(text: str) -> Kernel:
    """The only kernel in `text`.

    Raises:
        UnknownInstruction: no kernel, or a statement of an unknown form.
    """
    entry = ENTRY.search(text)
    if entry is None:
        raise UnknownInstruction("expected PTX with a .visible .entry, got none")
    name, parameters, body = entry.groups()
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"(?:[^"]*/)?([^"/]*)"', text, re.MULTILINE))
    body = re.sub(r"//[^\n]*", "", body)
    registers: dict[str, int] = {}
    labels: dict[str, int] = {}
    code: list[Instruction] = []
    line, at = "", 0
    end = len(body.rstrip())
    while at < end:
        found = STATEMENT.match(body, at)
        if found is None:
            raise UnknownInstruction(
                f"{name}: expected a statement of PTX, got {body[at : at + 80].strip()!r}"
            )
        at = found.end()
        if found["label"]:
            labels[found["label"]] = len(code)
        elif found["file"]:
            line = f"{files.get(found['file'], '?')}:{found['line']}"
        elif found["kind"]:
            prefixes = (
                re.sub(r"<\d+>$|\d*$", "", each.strip()) for each in found["registers"].split(",")
            )
            registers |= dict.fromkeys(prefixes, BITS[found["kind"]])
        elif found["opcode"]:
            operands, negated = split(found["operands"]), found["negated"] == "!"
            code.append(Instruction(found["opcode"], operands, found["guard"], negated, line))
    return Kernel(
        name, tuple(re.findall(r"(\w+_param_\d+)", parameters)), registers, tuple(code), labels
    )


@functools.cache
def split(operands: str) -> tuple[str, ...]:
    """The operands between commas, without those inside of braces."""
    return (
        tuple(part.strip() for part in re.split(r",(?![^{]*\})", operands))
        if operands.strip()
        else ()
    )


@functools.cache
def elements(operand: str) -> tuple[str, ...]:
    """The registers of ``{%r1, %r2}``, or of ``%r1``."""
    return tuple(part.strip() for part in operand.strip("{} ").split(","))


@functools.cache
def address(operand: str) -> tuple[str, int]:
    """Register (or name) and offset of ``[%rd1+4]``."""
    base, _, offset = operand.strip("[] ").partition("+")
    return base.strip(), int(offset or "0", 0)


Values = NDArray[Any]

UNSIGNED = {bits: np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)}
TYPES = {
    f"{kind}{bits}": np.dtype(f"{'iu'[kind != 's']}{bits // 8}")
    for kind in "sub"
    for bits in UNSIGNED
}
TYPES |= {
    "f16": np.dtype("f2"),
    "f32": np.dtype("f4"),
    "f64": np.dtype("f8"),
    "bf16": np.dtype("u2"),
}


@functools.cache
def constant(operand: str, kind: str) -> Values:
    """A number of PTX: ``3``, ``0f3F800000``; a name's address is 0, where shared memory begins."""
    dtype = TYPES[kind]
    if re.fullmatch(r"0[fFdD][0-9A-Fa-f]+", operand):
        form = "<f" if operand[1] in "fF" else "<d"
        bits = bytes.fromhex(operand[2:])[::-1]
        return (
            np.asarray(struct.unpack(form, bits)[0], "f4" if form == "<f" else "f8")
            .view(UNSIGNED[8 * len(bits)])
            .view(dtype)
        )
    number = 0 if operand == "global_smem" else int(operand, 0)
    return np.asarray(number & ((1 << 8 * dtype.itemsize) - 1), UNSIGNED[8 * dtype.itemsize]).view(
        dtype
    )
