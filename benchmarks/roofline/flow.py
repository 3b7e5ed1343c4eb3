"""Where a kernel's control goes: basic blocks, loops, and the way through them that a whole tile takes.

A loop is a natural one: an edge from a block back to one that dominates it. Loops that wait (a spin on a barrier, the
trap behind the last instruction) do no work on the row, and are told from the others by what they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from benchmarks.roofline.sass import Instruction

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
