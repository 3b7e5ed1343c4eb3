"""Loads and stores."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tests.emulator.instructions import known
from tests.emulator.lanes import Lanes
from tests.emulator.memory import Space
from tests.emulator.numbers import TYPES
from tests.emulator.ptx import address, elements

HINTS = r"(?:\.(?:L1::\w+|L2::\w+|ca|cg|cs|nc|wb|relaxed|volatile|weak))*"
KIND = r"(?:v[248]\.)?([busf](?:8|16|32|64))"


@known(r"ld\.param\.([busf](?:8|16|32|64))")
def _parameter(lanes: Lanes, kind: str, d: str, place: str) -> None:
    name, _ = address(place)
    size = TYPES[kind].itemsize
    bits = np.asarray(lanes.arguments[name] % 2 ** (8 * size), f"u{size}")
    lanes.put(d, bits.view(TYPES[kind]))


@known(rf"ld\.(global|shared)(?:::cta)?{HINTS}\.{KIND}")
def _load(lanes: Lanes, space: str, kind: str, registers: str, place: str) -> None:
    chosen, names = lanes.chosen(), elements(registers)
    memory, addresses, programs = _place(lanes, space, place, chosen)
    found = memory.load(addresses, TYPES[kind].itemsize, len(names), programs, lanes.who(chosen))
    for i, name in enumerate(names):
        values = np.zeros(lanes.count, found.dtype)
        values[chosen] = found[:, i]
        lanes.put(name, values.view(TYPES[kind]))


@known(rf"st\.(global|shared)(?:::cta)?{HINTS}\.{KIND}")
def _store(lanes: Lanes, space: str, kind: str, place: str, registers: str) -> None:
    chosen = lanes.chosen()
    memory, addresses, programs = _place(lanes, space, place, chosen)
    bits = f"b{8 * TYPES[kind].itemsize}"
    values = np.stack(
        [lanes.everywhere(lanes.get(name, bits))[chosen] for name in elements(registers)], axis=1
    )
    memory.store(addresses, values, programs, lanes.who(chosen))


@known(r"(ld|st)matrix\.sync\.aligned\.m8n8\.x([124])\.shared\.b16")
def _matrix(lanes: Lanes, name: str, count: str, first: str, second: str) -> None:
    """Lane 8 i + j of a warp has the address of row j of matrix i; its own elements are two of row lane / 4 of each."""
    lanes.whole_warps()
    registers, place = (first, second) if name == "ld" else (second, first)
    chosen = lanes.chosen()
    memory, addresses, programs = _place(lanes, "shared", place, lanes.lane)
    for i, register in enumerate(elements(registers)):
        of_row = chosen // 32 * 32 + 8 * i + chosen % 32 // 4
        at = addresses[of_row] + chosen % 4 * 4
        if (addresses[of_row] % 16).any():
            at = addresses[of_row] + 1  # rows must begin at multiples of 16: refused as misaligned
        if name == "ld":
            values = np.zeros(lanes.count, np.uint32)
            values[chosen] = memory.load(at, 4, 1, programs[chosen], lanes.who(chosen))[:, 0]
            lanes.put(register, values)
        else:
            memory.store(
                at, lanes.get(register, "b32")[chosen, None], programs[chosen], lanes.who(chosen)
            )


def _place(
    lanes: Lanes, space: str, place: str, chosen: NDArray[np.int64]
) -> tuple[Space, NDArray, NDArray]:
    """The memory, and the addresses and programs of the lanes that are `chosen`."""
    base, offset = address(place)
    kind = "u64" if space == "global" else "u32"
    addresses = lanes.everywhere(lanes.get(base, kind))[chosen].astype(np.int64) + offset
    return (lanes.memory if space == "global" else lanes.shared), addresses, lanes.program[chosen]
