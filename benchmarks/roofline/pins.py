"""What was counted before, and whether it still holds.

Triton 3.6 and 3.7 (`KIN`) make the same arithmetic, loads and stores of each loop, and of a tile of products: these are
compared exactly, an element, and all instructions within `TOTAL`. A kernel without a loop is compared as a whole, and
what it does once a row differs by an instruction between releases (`SLACK`). Registers, shared memory, barriers and the
order of things differ, and are compared only under the release that the pins were made with, or not at all. Of another
release (3.9 folds signs into additions, and selects more) no more is compared than what it cannot choose: exponentials,
products, and how much each access moves.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.roofline.parts import ONCE, TILE, Part
from benchmarks.roofline.sass import ARITHMETIC, LOADS, STORES, WIDE_COMPARE

FILE = Path(__file__).with_name("pins.json")
TOTAL = 0.1
SLACK = {TILE: 2}  # instructions of a class
EXACT = (*ARITHMETIC, *LOADS, *STORES, "HGMMA", WIDE_COMPARE)
# In a loop over a row: lanes that wait for each other, and spilled registers. Not pinned but forbidden.
FORBIDDEN = ("SHFL", "LDL", "STL")
KIN = ("3.6.", "3.7.")
ANYWHERE = ("MUFU", *LOADS, *STORES, "HGMMA")
LOOPS = ("reads", "writes", "rest", "tile")


@dataclass(frozen=True)
class Taken:
    """A kernel taken apart."""

    kernel: str
    variant: str
    vocab: int
    products: int  # of 2 N V H operations, in the call that it is a part of
    loaded: int  # bytes of an element, each time that it is read
    stored: int
    programs: int  # that share a row
    threads: int  # of one
    registers: int
    shared: int
    parts: tuple[Part, ...]

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.variant}"


@dataclass(frozen=True)
class Pins:
    """All of them, and the Triton release they were counted with."""

    triton: str
    cases: tuple[Taken, ...]

    def find(self, kernel: str, variant: str) -> Taken:
        for taken in self.cases:
            if (taken.kernel, taken.variant) == (kernel, variant):
                return taken
        raise LookupError(f"{FILE.name}: no {kernel!r} {variant!r}, only {[x.name for x in self.cases]}")


def read(file: Path = FILE) -> Pins:
    found = json.loads(file.read_text())
    cases = (Taken(**{**case, "parts": tuple(Part(**part) for part in case["parts"])}) for case in found["cases"])
    return Pins(found["triton"], tuple(cases))


def write(pins: Pins, file: Path = FILE) -> None:
    """A line for each part, so that a diff shows what changed."""
    file.write_text(f'{{"triton": "{pins.triton}", "cases": [\n' + ",\n".join(map(_lines, pins.cases)) + "\n]}\n")


def _lines(taken: Taken) -> str:
    case: dict[str, Any] = asdict(taken)
    parts = ",\n".join(f"  {json.dumps(part)}" for part in case.pop("parts"))
    return json.dumps(case)[:-1] + f', "parts": [\n{parts}\n]}}'


def differences(pinned: Taken, now: Taken, *, pinned_triton: str, triton: str) -> list[str]:
    """What is not as it was, one line each; the releases that each was compiled with say what must be."""
    is_kin = triton == pinned_triton or (triton.startswith(KIN) and pinned_triton.startswith(KIN))
    said = [f"{p.does}: {p.counts[x]} {x} in its loop" for p in now.parts if p.does in LOOPS for x in _forbidden(p)]
    if [p.does for p in pinned.parts] != [p.does for p in now.parts]:
        does = ["+".join(p.does for p in taken.parts) for taken in (pinned, now)]
        return [*said, f"its parts: expected {does[0]}, got {does[1]}"]
    for old, new in zip(pinned.parts, now.parts, strict=True):
        said += _of_part(old, new, is_kin=is_kin)
    for name in ("threads", "programs", *(("registers", "shared") if triton == pinned_triton else ())):
        before, after = getattr(pinned, name), getattr(now, name)
        if before != after:
            said.append(f"{name}: expected {before}, got {after}")
    return said


def _forbidden(part: Part) -> list[str]:
    """A whole program's lanes may wait for each other, once a row."""
    return [x for x in FORBIDDEN if x in part.counts and (x != "SHFL" or part.does != TILE)]


def _of_part(old: Part, new: Part, *, is_kin: bool) -> list[str]:
    said = []
    per = "" if old.does == ONCE else " an element"
    each = [1, 1] if old.does == ONCE else [old.elements, new.elements]
    before, after = old.instructions / each[0], new.instructions / each[1]
    if is_kin and abs(after - before) > TOTAL * before:
        said.append(f"{old.does}: expected {before:.2f} instructions{per} within {TOTAL:.0%}, got {after:.2f}")
    if old.does == ONCE:  # merged lanes, a row's loss: their order is the compiler's
        return said
    for name in sorted({*old.counts, *new.counts}):
        before, after = old.counts.get(name, 0) / old.elements, new.counts.get(name, 0) / new.elements
        slack = SLACK.get(old.does, 0) / old.elements if name in ARITHMETIC else 0.0
        if name.startswith(EXACT if is_kin else ANYWHERE) and abs(after - before) > slack + 1e-9:
            said.append(f"{old.does}: expected {before:.4g} {name}{per}, got {after:.4g}")
    return said
