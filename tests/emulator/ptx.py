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
        line = f" ({self.line})" if self.line else ""
        return f"{self.opcode} {', '.join(self.operands)}{line}"


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
    """The only kernel in `text`."""
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
            given = body[at : at + 80].strip()
            raise UnknownInstruction(f"{name}: expected a statement of PTX, got {given!r}")
        at = found.end()
        if found["label"]:
            labels[found["label"]] = len(code)
        elif found["file"]:
            line = f"{files.get(found['file'], '?')}:{found['line']}"
        elif found["kind"]:
            for each in found["registers"].split(","):
                registers[re.sub(r"<\d+>$|\d*$", "", each.strip())] = BITS[found["kind"]]
        elif found["opcode"]:
            operands, negated = split(found["operands"]), found["negated"] == "!"
            code.append(Instruction(found["opcode"], operands, found["guard"], negated, line))
    names = tuple(re.findall(r"(\w+_param_\d+)", parameters))
    return Kernel(name, names, registers, tuple(code), labels)


@functools.cache
def split(operands: str) -> tuple[str, ...]:
    """The operands between commas, without those inside of braces."""
    parts = re.split(r",(?![^{]*\})", operands) if operands.strip() else ()
    return tuple(part.strip() for part in parts)


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
KINDS = ((kind, bits) for kind in "sub" for bits in UNSIGNED)
TYPES = {f"{x}{bits}": np.dtype(f"{'iu'[x != 's']}{bits // 8}") for x, bits in KINDS}
TYPES |= {"f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8")}
TYPES |= {"bf16": np.dtype("u2")}


@functools.cache
def constant(operand: str, kind: str) -> Values:
    """A number of PTX: ``3``, ``0f3F800000``; a name's address is 0, where shared memory begins."""
    dtype = TYPES[kind]
    if re.fullmatch(r"0[fFdD][0-9A-Fa-f]+", operand):
        form, wide = ("<f", "f4") if operand[1] in "fF" else ("<d", "f8")
        number = struct.unpack(form, bytes.fromhex(operand[2:])[::-1])[0]
        return np.asarray(number, wide).view(dtype)
    number = 0 if operand == "global_smem" else int(operand, 0)
    unsigned = UNSIGNED[8 * dtype.itemsize]
    return np.asarray(number & ((1 << 8 * dtype.itemsize) - 1), unsigned).view(dtype)
