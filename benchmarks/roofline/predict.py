"""From instructions and bytes to milliseconds: predictions, never measurements.

    issue = instructions / (128 a clock, an SM);   special = MUFU / (16 a clock, an SM);   dram = bytes / its rate
    predicted = the largest of the three + an eighth of the second largest

The fraction is chosen: programs overlap what bounds them, but not wholly. A second read of a row counts as DRAM's, also
where the cache has it. `dot`, which computes products itself: their time at the library's rate, and the issue of its
epilogue twice, since the two warps of a scheduler do not hide each other; a lower bound.

All comes from counts kept in `pins.json`: nothing is compiled here, and neither Triton nor a GPU is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.roofline.devices import DEVICES, ISSUED, MUFU, Device
from benchmarks.roofline.parts import EPILOGUE, ONCE, PRODUCT, READS, REST, TILE, WRITES, Part
from benchmarks.roofline.pins import Taken, read

SECOND = 1 / 8
DOT_EPILOGUE = 2.0
SWEEPS = (READS, WRITES, TILE)
pins = functools.cache(read)


@dataclass(frozen=True)
class Times:
    """Milliseconds."""

    issue: float
    special: float
    dram: float
    predicted: float


def predicted_ms(
    kernel: str,
    variant: str,
    rows: int,
    vocab: int,
    out_bytes: float | None = None,
    device: str = "H200",
    *,
    width: int = 4096,
) -> float:
    """Of one launch over logits (rows, vocab), without what the host takes, nor the last wave's idle SMs.

    Args:
        kernel, variant: as in docs/roofline.md.
        out_bytes: what is written of an element; without, what the pinned case writes.
        device: one of `DEVICES`.
        width: of the hidden states; only `dot` asks for it.
    """
    return times(pins().find(kernel, variant), rows, vocab, DEVICES[device], out_bytes=out_bytes, width=width).predicted


def products_ms(rows: int, vocab: int, width: int, device: Device) -> float:
    """One matrix product of (rows, width) and (width, vocab)."""
    return 2e3 * rows * vocab * width / device.products


def times(
    taken: Taken, rows: int, vocab: int, device: Device, *, out_bytes: float | None = None, width: int = 4096
) -> Times:
    """What `predicted_ms` comes from."""
    clocks = rows * vocab / (device.sms * device.clock) * 1e3
    issue = instructions(taken, vocab) * clocks / ISSUED
    special = specials(taken, vocab) * clocks / MUFU
    if _part(taken, PRODUCT):
        return Times(issue, special, 0.0, products_ms(rows, vocab, width, device) + DOT_EPILOGUE * issue)
    loaded, stored = moved(taken)
    dram = (loaded + (stored if out_bytes is None else out_bytes)) * rows * vocab / device.dram * 1e3
    *_, second, largest = sorted((issue, special, dram))
    return Times(issue, special, dram, largest + SECOND * second)


def loops(taken: Taken) -> list[float]:
    """Instructions an element of each main loop."""
    return [p.instructions / p.elements for p in taken.parts if p.does in (*SWEEPS, EPILOGUE)]


def instructions(taken: Taken, vocab: int) -> float:
    """An element, with all that a row of `vocab` elements takes besides its loops."""
    return _of_row(taken, vocab, lambda part: part.instructions)


def specials(taken: Taken, vocab: int) -> float:
    """MUFU an element."""
    return _of_row(taken, vocab, lambda part: part.counts.get("MUFU", 0))


def moved(taken: Taken) -> tuple[int, int]:
    """Bytes an element, loaded and stored."""
    sweeps = [p.does for p in taken.parts if p.does in SWEEPS]
    return taken.loaded * len(sweeps), taken.stored * sum(does != READS for does in sweeps)


def _of_row(taken: Taken, vocab: int, count: Callable[[Part], int]) -> float:
    """A count of a thread through a row, an element. A loop leaves what is less than a round of it to the one after."""
    programs = -(-taken.programs * vocab // taken.vocab)
    has_tail = any(part.does == ONCE and part.elements for part in taken.parts)
    total, left = 0, 0
    for place, part in enumerate(taken.parts):
        if part.does in (ONCE, TILE):
            total += programs * count(part)
        elif part.does != PRODUCT:
            left = left if part.does == REST else vocab
            per_round = part.elements * taken.threads
            goes_on = has_tail or (place + 1 < len(taken.parts) and taken.parts[place + 1].does == REST)
            rounds = left // per_round if goes_on else -(-left // per_round)
            if part.does == EPILOGUE:  # a tile has many rows
                return count(part) / part.elements
            total += rounds * count(part)
            left -= rounds * per_round
    return total * taken.threads / vocab


def _part(taken: Taken, does: str) -> Part | None:
    return next((p for p in taken.parts if p.does == does), None)
