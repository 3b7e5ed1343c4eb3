"""What a kernel's time goes to: the loops over a row, and what runs once, with how many elements one round handles.

How many elements a thread handles in a round follows from the code itself, not from the tile: from the bytes of logits
and bias that it loads, or, where nothing loops, from the bytes that it stores. Loads of one number a row do not count
there: they lie outside of loops.

A kernel goes through its rows in sweeps, each a loop of its own that may be followed by one with fewer elements for the
last tiles. What is conditional is counted by the cheapest way that loads and stores as much as any: the whole tile's,
not the masked one's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from benchmarks.roofline.flow import Flow, Loop, Score
from benchmarks.roofline.sass import LOADS, STORES, Instruction, counted

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
