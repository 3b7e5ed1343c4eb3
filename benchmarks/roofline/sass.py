"""SASS, NVIDIA's machine code: from a cubin to its instructions, and instructions counted by what they are.

What is read is the text of ``nvdisasm -c -ndf`` (code alone; no data flow, which takes time)::

    .L_x_1:
            /*0770*/              @!P4 BRA `(.L_x_1) ;

"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

LINE = re.compile(
    r"\s*/\*(?P<place>[0-9a-f]{4,})\*/\s+(?:(?P<predicate>@!?U?P\w+)\s+)?(?P<code>[A-Z][\w.]*)(?P<rest>.*?);"
)
LABEL = re.compile(r"(\.L\w+):")
TARGET = re.compile(r"`\((\.L\w+)\)")
# Counted by the first word of their name; the rest of it says how they round.
ARITHMETIC = ("MUFU", "FMUL", "FADD", "FFMA", "FSEL", "FMNMX")
LOADS, STORES = ("LDG", "LDGSTS"), ("STG",)
OTHERS = ("SHFL", "LDL", "STL", "BAR")  # LDL and STL: spilled registers
WIDE_COMPARE = "ISETP.EX"  # the second half of a comparison in 64 bits
WIDTHS = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


@dataclass(frozen=True)
class Instruction:
    """One of a kernel's; `target` is the label it branches to, `labels` are those that stand before it."""

    code: str  # with what follows its dots, as in LDG.E.128
    predicate: str = ""  # as in @!P4
    operands: str = ""
    target: str | None = None
    labels: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.code.split(".")[0]

    @property
    def bytes(self) -> int:
        """What a thread moves to or from global memory."""
        if self.name not in LOADS + STORES:
            return 0
        return next((WIDTHS[word] for word in self.code.split(".") if word in WIDTHS), 4)


def disassembled(cubin: bytes) -> list[Instruction]:
    """By the disassembler that comes with Triton."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [knobs.nvidia.nvdisasm.path, "-c", "-ndf", file.name], capture_output=True, text=True, check=True
        )
    return parsed(done.stdout)


def parsed(text: str) -> list[Instruction]:
    """The instructions of one kernel, in order."""
    made: list[Instruction] = []
    labels: list[str] = []
    for line in text.splitlines():
        if match := LABEL.match(line):
            labels.append(match.group(1))
        elif match := LINE.match(line):
            target = TARGET.search(match["rest"])
            operands = match["rest"].strip()
            label = target and target.group(1)
            made.append(Instruction(match["code"], match["predicate"] or "", operands, label, tuple(labels)))
            labels = []
    if not made:
        raise ValueError("no instructions in what nvdisasm printed")
    return made


def counted(instructions: Iterable[Instruction]) -> dict[str, int]:
    """How many there are of each class, by the class's name; loads and stores by how many bits each moves."""
    return dict(sorted(Counter(name for x in instructions if (name := class_of(x))).items()))


def class_of(x: Instruction) -> str | None:
    """The class that an instruction is counted in, or None: it counts as one of all."""
    if x.name in LOADS + STORES:
        return f"{x.name}.{8 * x.bytes}"
    if x.name == "HGMMA":
        return x.code  # with its shape and types
    if x.name == "ISETP" and "EX" in x.code.split("."):
        return WIDE_COMPARE
    return x.name if x.name in ARITHMETIC + OTHERS else None
