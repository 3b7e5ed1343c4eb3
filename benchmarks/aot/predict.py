"""From instructions and bytes to milliseconds: predictions, never measurements.

    issue = instructions / (128 a clock, an SM);   special = MUFU / (16 a clock, an SM);   dram = bytes / its rate
    predicted = the largest of the three + an eighth of the second largest

The fraction is chosen: programs overlap what bounds them, but not wholly. A second read of a row counts as DRAM's, also
where the cache has it. `dot`, which computes products itself: their time at the library's rate, and the issue of its
epilogue twice, since the two warps of a scheduler do not hide each other; a lower bound.

All comes from counts kept in `pins.json`: nothing is compiled here, and neither Triton nor a GPU is needed.

Sources: SMs, DRAM and matrix rates are NVIDIA's data sheets (H100 SXM: 3.35 TB/s, 989 TF/s dense bf16; H200: 4.8 TB/s,
the same chip; HGX B200: 148 SMs, 7.7 TB/s, 2250 TF/s). 4 warp instructions a clock (one a scheduler), 16 results of the
special function unit a clock: CUDA programming guide, throughput of arithmetic instructions, 9.0 and 10.0. Clocks are
what is sustained, not the boost clock: 1.755 GHz on Hopper; for B200 that is an assumption. What is reached of the data
sheet: others measured 770-788 TF/s of bf16 products on an H200 (0.787 of it) and 4.2-4.3 TB/s (0.885). The same shares
are assumed for the other two.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.aot.costs import EPILOGUE, ONCE, PRODUCT, READS, REST, TILE, WRITES, Part, Taken, read

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


PRODUCTS_REACHED, DRAM_REACHED = 0.787, 0.885
ISSUED = 128  # thread instructions a clock, an SM: 4 warps of 32
MUFU = 16  # results a clock, an SM

# Of one SM of sm_90 and sm_100.
REGISTERS, REGISTER_UNIT = 65536, 256  # 32-bit; a warp's are rounded up to a multiple of the unit
PARTITIONS = 4  # a warp's registers lie in one of them
THREADS, PROGRAMS, WARP = 2048, 32, 32
SHARED, SHARED_UNIT, SHARED_RESERVED = 228 * 1024, 128, 1024  # bytes; the system takes 1 KiB a program


@dataclass(frozen=True)
class Device:
    """Rates of the data sheet."""

    name: str
    sms: int
    clock: float  # Hz
    dram_sheet: float  # bytes / s
    products_sheet: float  # operations / s, dense bf16

    @property
    def dram(self) -> float:
        return DRAM_REACHED * self.dram_sheet

    @property
    def products(self) -> float:
        return PRODUCTS_REACHED * self.products_sheet


DEVICES = {
    d.name: d
    for d in (
        Device("H100", 132, 1.755e9, 3.35e12, 989e12),
        Device("H200", 132, 1.755e9, 4.8e12, 989e12),
        Device("B200", 148, 1.755e9, 7.7e12, 2250e12),
    )
}


def ctas_per_sm(registers: int, threads: int, shared: int) -> int:
    """How many programs of so many registers a thread, threads and bytes of shared memory an SM holds at once."""
    warps = -(-threads // WARP)
    of_warp = _up(registers * WARP, REGISTER_UNIT)
    by_registers = REGISTERS // PARTITIONS // of_warp * PARTITIONS // warps
    by_shared = SHARED // (_up(shared, SHARED_UNIT) + SHARED_RESERVED)
    return min(by_registers, THREADS // (WARP * warps), by_shared, PROGRAMS)


def _up(x: int, unit: int) -> int:
    return -(-x // unit) * unit
