"""A kernel's costs: its loops over a row and what runs once, with the elements of a round; and whether they still hold.

How many elements a thread handles in a round follows from the code itself, not from the tile: from the bytes of logits
and bias that it loads, or, where nothing loops, from the bytes that it stores. Loads of one number a row do not count
there: they lie outside of loops.

A kernel goes through its rows in sweeps, each a loop of its own that may be followed by one with fewer elements for the
last tiles. What is conditional is counted by the cheapest way that loads and stores as much as any: the whole tile's,
not the masked one's.

The costs are held against `pins.json`. Triton 3.6 and 3.7 (`KIN`) make the same arithmetic, loads and stores of each
loop, and of a tile of products: these are compared exactly, an element, and all instructions within `TOTAL`. A kernel
without a loop is compared as a whole, and what it does once a row differs by an instruction between releases (`SLACK`).
Registers, shared memory, barriers and the order of things differ, and are compared only under the release that the pins
were made with, or not at all. Of another release (3.9 folds signs into additions, and selects more) no more is compared
than what it cannot choose: exponentials, products, and how much each access moves.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.aot.sass import ARITHMETIC, LOADS, STORES, WIDE_COMPARE, Flow, Instruction, Loop, Score, counted

# What a part does. A "rest" is the loop over a row's last tiles, "once" what is outside of all loops, a "tile" a whole
# program without one; an "epilogue" is what becomes of a product.
READS, WRITES, REST, ONCE, TILE, PRODUCT, EPILOGUE = "reads", "writes", "rest", "once", "tile", "product", "epilogue"
WARP_GROUP = 128  # threads that share an HGMMA


@dataclass(frozen=True)
class Part:
    """A round of a loop, or what runs once.

    `elements` are those that a thread handles in it: of what runs once those of the masked tiles that are apart, 0 if
    none is; of a product 1024 multiplications each.
    """

    does: str
    elements: int
    instructions: int
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """Bytes of an element in memory, as a kernel's launch has it."""

    loaded: int  # logits, bias if there is one, and the teacher's
    stored: int  # 0 where nothing is


def parts_of(instructions: list[Instruction], layout: Layout, sweeps: int, programs: int = 1) -> list[Part]:
    """The main loops of a kernel in order, with what else it runs.

    Args:
        programs: how many share a row. The last tile is masked in one of them.
        sweeps: how many times it goes over a row; what looks like a further one is for rare rows, and left out.
    """
    flow = Flow(instructions)
    if any(x.name == "HGMMA" for x in instructions):
        return _of_products(flow)
    loops = _innermost(flow, lambda x: x.name in LOADS)
    if not loops:
        return [_tile(flow, layout)]
    rounds = [_round(flow, loop, layout) for loop in loops]
    kept, place = [], 0
    for i, part in enumerate(rounds):
        is_rest = i > 0 and part.does == rounds[place].does and part.elements < rounds[place].elements
        place = place if is_rest else i
        kept.append(replace(part, does=REST) if is_rest else part)
    starts = [i for i, part in enumerate(kept) if part.does != REST]
    if len(starts) < sweeps:
        raise ValueError(f"expected {sweeps} loops over a row, got {len(starts)}")
    end = starts[sweeps] if sweeps < len(starts) else len(kept)
    return [*kept[:end], _once(flow, loops, kept[:end], layout, has_tail=programs == 1)]


def _innermost(flow: Flow, works: Callable[[Instruction], bool]) -> list[Loop]:
    """The loops that do work and have no loop inside that does, in order."""
    working = [loop for loop in flow.loops if any(map(works, flow.instructions(loop.blocks)))]
    return [a for a in working if not any(b.blocks < a.blocks for b in working)]


def _round(flow: Flow, loop: Loop, layout: Layout) -> Part:
    taken = flow.instructions(flow.best_path(_by_work(flow, loop.blocks), loop.header, loop.latches, loop.blocks))
    loaded, stored = _moved(taken, LOADS), _at_widest(taken, STORES)
    elements = loaded // layout.loaded
    if loaded % layout.loaded or (stored and stored != elements * layout.stored):
        raise ValueError(
            f"a round loads {loaded} bytes at {layout.loaded} an element, stores {stored} at {layout.stored}"
        )
    return Part(WRITES if stored else READS, elements, len(taken), counted(taken))


def _tile(flow: Flow, layout: Layout) -> Part:
    """All of a kernel without a loop, by what it stores: the way of a whole tile."""
    taken = flow.instructions(flow.best_path(_by_work(flow, flow.order)))
    return Part(TILE, _at_widest(taken, STORES) // layout.stored, len(taken), counted(taken))


def _once(flow: Flow, loops: list[Loop], kept: list[Part], layout: Layout, *, has_tail: bool) -> Part:
    """What a program does besides its loops, of which it runs the first, those `kept`.

    Where the code for the last, masked tile is apart, it is on the way if the program `has_tail`: but not that of the
    loops for rare rows, which come after.
    """
    inside = frozenset[int]().union(*(loop.blocks for loop in loops))
    rare = frozenset[int]().union(*(loop.blocks for loop in loops[len(kept) :]))
    usual = frozenset(x for x in flow.order if x < min(rare, default=len(flow.blocks)))
    short, long = (
        flow.instructions([x for x in flow.best_path(_by_work(flow, inside - rare, among)) if x not in inside])
        for among in (None, usual)
    )
    tail = sum(a.elements for a, b in zip(kept, [*kept[1:], None], strict=True) if b is None or b.does != REST)
    is_apart = has_tail and _moved(long, LOADS) - _moved(short, LOADS) >= tail * layout.loaded
    taken = long if has_tail else short
    return Part(ONCE, tail if is_apart else 0, len(taken), counted(taken))


def _of_products(flow: Flow) -> list[Part]:
    """A product's loop, and what its tile takes besides; both loops may be one."""
    loop = _innermost(flow, _is_product)[0]
    inner = flow.best_path(_by_work(flow, loop.blocks), loop.header, loop.latches, loop.blocks)
    taken = flow.instructions(inner)
    outer = max((x for x in flow.loops if loop.blocks <= x.blocks), key=lambda x: len(x.blocks))
    whole = flow.instructions(flow.best_path(_by_exponentials(flow), outer.header, outer.latches, outer.blocks))
    counts, product = counted(whole), counted(taken)
    tiles = {x.operands.split(",")[0]: x for x in taken if _is_product(x)}  # by the first register of a result
    epilogue = Part(
        EPILOGUE,
        sum(m * n // WARP_GROUP for m, n, _k in map(_shape, tiles.values())),
        len(whole) - len(taken),
        {k: n - product.get(k, 0) for k, n in counts.items() if n != product.get(k, 0)},
    )
    thousands = sum(m * n * k for m, n, k in map(_shape, filter(_is_product, taken))) // WARP_GROUP // 1024
    return [Part(PRODUCT, thousands, len(taken), product), epilogue]


def _is_product(x: Instruction) -> bool:
    return x.name == "HGMMA"


def _shape(x: Instruction) -> tuple[int, int, int]:
    m, n, k = map(int, x.code.split(".")[1].split("x"))
    return m, n, k


def _by_work(flow: Flow, body: Collection[int], among: Collection[int] | None = None) -> Callable[[int], Score]:
    """A score of blocks: products, bytes moved by the widest loads and stores of `body`, then few instructions.

    With `among`, all bytes moved in these blocks count: masked accesses may be narrower.
    """
    held = flow.instructions(body)
    widest = {names: max((x.bytes for x in held if x.name in names), default=0) for names in (LOADS, STORES)}

    def counts(place: int, x: Instruction) -> bool:
        if among is not None:
            return place in among
        return place in body and any(x.name in names and x.bytes == n for names, n in widest.items())

    def score(place: int) -> Score:
        block = flow.blocks[place]
        return sum(map(_is_product, block)), sum(x.bytes for x in block if counts(place, x)), -len(block)

    return score


def _by_exponentials(flow: Flow) -> Callable[[int], Score]:
    """A score of blocks that leads through a tile's product and its sums, and not around them."""
    return lambda place: (
        sum(map(_is_product, flow.blocks[place])),
        sum(x.name == "MUFU" for x in flow.blocks[place]),
        -len(flow.blocks[place]),
    )


def _moved(instructions: list[Instruction], names: tuple[str, ...]) -> int:
    return sum(x.bytes for x in instructions if x.name in names)


def _at_widest(instructions: list[Instruction], names: tuple[str, ...]) -> int:
    """Bytes moved by the widest; a narrower one is for the target's element."""
    of = [x.bytes for x in instructions if x.name in names]
    return sum(n for n in of if n == max(of))


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
