"""SASS, NVIDIA's machine code: from a cubin to its instructions, and its loops.

What is read is the text of ``nvdisasm -c -ndf`` (code alone; no data flow, which takes time)::

    .L_x_1:
            /*0770*/              @!P4 BRA `(.L_x_1) ;

A loop is what lies between a branch back and its label. In our kernels nothing in a row's loop is
conditional: the masked tiles at its end are apart.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

LINE = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?P<code>[A-Z][\w.]*)(?P<rest>.*?);")
LABEL = re.compile(r"(\.L\w+):")
TARGET = re.compile(r"`\((\.L\w+)\)")
LOADS, STORES, SPILLING = ("LDG", "LDGSTS"), ("STG",), ("LDL", "STL")
WIDTHS = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


@dataclass(frozen=True)
class Instruction:
    """One of a kernel's; `target` is the label it branches to, `labels` stand before it."""

    code: str  # with what follows its dots, as in LDG.E.128
    target: str | None = None
    labels: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.code.split(".")[0]

    @property
    def bytes(self) -> int:
        return next((WIDTHS[word] for word in self.code.split(".") if word in WIDTHS), 4)


def printed(tool: str, cubin: bytes, *options: str) -> str:
    """What one of the tools that come with Triton prints about `cubin`."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [getattr(knobs.nvidia, tool).path, *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def disassembled(cubin: bytes) -> list[Instruction]:
    return parsed(printed("nvdisasm", cubin, "-c", "-ndf"))


def parsed(text: str) -> list[Instruction]:
    made: list[Instruction] = []
    labels: list[str] = []
    for line in text.splitlines():
        if match := LABEL.match(line):
            labels.append(match.group(1))
        elif match := LINE.match(line):
            target = TARGET.search(match["rest"])
            made.append(Instruction(match["code"], target and target.group(1), tuple(labels)))
            labels = []
    if not made:
        raise ValueError("no instructions in what nvdisasm printed")
    return made


def inner_loops(
    instructions: list[Instruction], works: Callable[[Instruction], bool] = lambda x: True
) -> list[list[Instruction]]:
    """The instructions of each loop that holds some that do `works` and no further such loop."""
    place = {label: i for i, x in enumerate(instructions) for label in x.labels}
    spans = [
        (place[x.target], i)
        for i, x in enumerate(instructions)
        if x.name == "BRA" and x.target in place and place[x.target] <= i
    ]
    working = [span for span in spans if any(map(works, instructions[span[0] : span[1] + 1]))]
    inner = [
        a for a in working if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in working)
    ]
    return [instructions[start : end + 1] for start, end in sorted(inner)]


def count(instructions: list[Instruction], *names: str) -> int:
    return sum(x.name in names for x in instructions)


def moved(instructions: list[Instruction], names: tuple[str, ...]) -> int:
    return sum(x.bytes for x in instructions if x.name in names)
