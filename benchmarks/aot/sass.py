"""SASS, NVIDIA's machine code: from a cubin to its instructions, which are counted by what they are, and its loops.

What is read is the text of ``nvdisasm -c -ndf`` (code alone; no data flow, which takes time)::

    .L_x_1:
            /*0770*/              @!P4 BRA `(.L_x_1) ;

A loop is a natural one: an edge from a block back to one that dominates it. Loops that wait (a spin on a barrier, the
trap behind the last instruction) do no work on the row, and are told from the others by what they hold.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable
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


Score = tuple[int, ...]
ENDS = ("EXIT", "RET", "BRX", "JMX")
JUMPS = ("BRA", "JMP", "BSYNC")


@dataclass(frozen=True)
class Loop:
    """Places of blocks: where it begins, where it goes back from, and all of them, inner loops' too."""

    header: int
    latches: frozenset[int]
    blocks: frozenset[int]


class Flow:
    """The basic blocks of a kernel and what follows on what."""

    def __init__(self, instructions: list[Instruction]) -> None:
        self.blocks, starts = _blocks(instructions)
        self.after = _edges(self.blocks, starts)
        self.order = _order(self.after)
        self.loops = _loops(self.after, self.order)

    def instructions(self, blocks: Collection[int]) -> list[Instruction]:
        return [x for place in blocks for x in self.blocks[place]]

    def best_path(
        self,
        score: Callable[[int], Score],
        start: int = 0,
        ends: Collection[int] | None = None,
        within: Collection[int] | None = None,
    ) -> list[int]:
        """The blocks on the way of the highest sum of scores that goes back nowhere.

        Args:
            score: of a block.
            ends: where the way may end; without, where the kernel does.
            within: blocks it may pass; all without.
        """
        rank = {place: i for i, place in enumerate(self.order)}
        best: dict[int, tuple[Score, int | None]] = {}
        for place in reversed(self.order):
            if within is not None and place not in within:
                continue
            ahead = [x for x in self.after[place] if x in best and rank[x] > rank[place]]
            own = score(place)
            if place in ends if ends is not None else not self.after[place]:
                best[place] = own, None
            elif ahead:
                follower = max(ahead, key=lambda x: best[x][0])
                best[place] = tuple(a + b for a, b in zip(own, best[follower][0], strict=True)), follower
        path, at = [], start if start in best else None
        while at is not None:
            path.append(at)
            at = best[at][1]
        return path


def _blocks(instructions: list[Instruction]) -> tuple[list[list[Instruction]], dict[str, int]]:
    """Instructions that run one after the other, and the block that a label stands before."""
    targets = {x.target for x in instructions if x.target}
    blocks: list[list[Instruction]] = [[]]
    starts: dict[str, int] = {}
    for x in instructions:
        if blocks[-1] and (targets.intersection(x.labels) or blocks[-1][-1].name in JUMPS + ENDS):
            blocks.append([])
        starts |= dict.fromkeys(x.labels, len(blocks) - 1)
        blocks[-1].append(x)
    return blocks, starts


def _edges(blocks: list[list[Instruction]], starts: dict[str, int]) -> list[list[int]]:
    """What may follow each block. Threads that parted go on together behind a BSYNC, where its BSSY says."""
    after: list[list[int]] = []
    meet: dict[str, str] = {}  # by the barrier's register
    for place, block in enumerate(blocks):
        for x in block:
            if x.name == "BSSY" and x.target:
                meet[_first_operand(x)] = x.target
        last = block[-1]
        label = meet.get(_first_operand(last)) if last.name == "BSYNC" else last.target
        goes_on = last.name not in JUMPS + ENDS or _is_conditional(last)
        following = [place + 1] if goes_on and place + 1 < len(blocks) else []
        if last.name in JUMPS:
            following += [starts[label]] if label in starts else [place + 1]
        after.append(list(dict.fromkeys(x for x in following if x < len(blocks))))
    return after


def _is_conditional(x: Instruction) -> bool:
    """A branch may also have its predicate among its operands, before the label; or the lanes that must have parted."""
    return x.predicate not in ("", "@PT", "@UPT") or (x.name == "BRA" and x.operands.split("`")[0].strip() != "")


def _first_operand(x: Instruction) -> str:
    return x.operands.split(",")[0].strip()


def _order(after: list[list[int]]) -> list[int]:
    """Blocks that can be reached, each before what it leads to, but for ways back."""
    seen, done = {0}, []
    stack = [(0, iter(after[0]))]
    while stack:
        place, following = stack[-1]
        step = next((x for x in following if x not in seen), None)
        if step is None:
            done.append(place)
            stack.pop()
        else:
            seen.add(step)
            stack.append((step, iter(after[step])))
    return done[::-1]


def _loops(after: list[list[int]], order: list[int]) -> list[Loop]:
    """All natural loops in the order of their headers' places; those of one header are one."""
    before: dict[int, list[int]] = {place: [] for place in order}
    for place in order:
        for x in after[place]:
            before[x].append(place)
    dominators = _dominators(before, order)
    latches: dict[int, set[int]] = {}
    for place in order:
        for header in dominators[place].intersection(after[place]):
            latches.setdefault(header, set()).add(place)
    loops = []
    for header, ends in sorted(latches.items()):
        body, ahead = {header}, [x for x in ends if x != header]
        while ahead:
            place = ahead.pop()
            if place not in body:
                body.add(place)
                ahead += before[place]
        loops.append(Loop(header, frozenset(ends), frozenset(body)))
    return loops


def _dominators(before: dict[int, list[int]], order: list[int]) -> dict[int, set[int]]:
    """Through which blocks every way to a block leads, itself included."""
    found = {place: set(order) for place in order}
    found[order[0]] = {order[0]}
    changes = True
    while changes:
        changes = False
        for place in order[1:]:
            new = {place} | set.intersection(*(found[x] for x in before[place]))
            changes |= new != found[place]
            found[place] = new
    return found
