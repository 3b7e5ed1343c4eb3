"""Loads and stores, moves, choices, conversions, and what the lanes of a warp do together."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from tests.emulator.instructions import FTZ, INTEGER, each, known
from tests.emulator.lanes import Lanes
from tests.emulator.memory import Space
from tests.emulator.ptx import TYPES, Fault, Values, address, elements
from tests.emulator.races import WARP

ALL_LANES = 0xFFFFFFFF


@known(r"mov\.([busf](?:16|32|64)|pred)")
def _move(lanes: Lanes, kind: str, d: str, a: str) -> None:
    if kind == "pred":
        lanes.put(d, lanes.predicate(a))
        return
    parts = elements(d if d[0] == "{" else a)
    if d[0] != "{" and a[0] != "{":
        lanes.put(d, lanes.get(a, kind))
        return
    bits = 8 * TYPES[kind].itemsize
    each, wide = bits // len(parts), TYPES[f"b{bits}"]
    shifts = [wide.type(each * i) for i in range(len(parts))]
    if d[0] == "{":
        whole = lanes.get(a, f"b{bits}")
        for part, shift in zip(parts, shifts, strict=True):
            lanes.put(part, (whole >> shift).astype(TYPES[f"b{each}"]))
    else:
        joined = np.zeros(lanes.count, wide)
        for part, shift in zip(parts, shifts, strict=True):
            joined |= lanes.get(part, f"b{each}").astype(wide) << shift
        lanes.put(d, joined)


@known(r"selp\.([busf](?:16|32|64))")
def _select(lanes: Lanes, kind: str, d: str, a: str, b: str, p: str) -> None:
    lanes.put(d, np.where(lanes.predicate(p), lanes.get(a, kind), lanes.get(b, kind)))


@each(r"cvt\.rn\.(bf16|f16)\.f32")
def to_16_bits(kind: str, x: Values) -> Values:
    if kind == "f16":
        return x.astype(np.float16)
    return torch.tensor(x).bfloat16().view(torch.uint16).numpy()


@each(r"cvt\.rn\.(bf16|f16)x2\.f32")
def _two_to_16_bits(kind: str, high: Values, low: Values) -> Values:
    top, bottom = (to_16_bits(kind, x).view(np.uint16).astype(np.uint32) for x in (high, low))
    return top << np.uint32(16) | bottom


@each(r"cvt\.f32\.(?P<kind>bf16|f16)")
def _from_16_bits(x: Values) -> Values:
    return x.astype(np.float32) if x.dtype.kind == "f" else x.astype(np.uint32) << np.uint32(16)


@each(rf"cvt\.(rmi|rni){FTZ}\.f32\.f32")
def _to_whole(rounding: str, x: Values) -> Values:
    return {"rmi": np.floor, "rni": np.rint}[rounding](x)


@each(rf"cvt\.rn\.(f32)\.{INTEGER}")
@each(rf"cvt\.([sub](?:8|16|32|64))\.{INTEGER}")
def _of_integer(to: str, x: Values) -> Values:
    return x.astype(TYPES[to])


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


@known(r"ldmatrix\.sync\.aligned\.m8n8\.x([124])\.shared\.b16")
def _matrix(lanes: Lanes, count: str, registers: str, place: str) -> None:
    """Lane 8 i + j has the address of row j of matrix i, and gets two elements of row lane / 4."""
    lanes.whole_warps()
    chosen = lanes.chosen()
    memory, addresses, programs = _place(lanes, "shared", place, lanes.lane)
    for i, register in enumerate(elements(registers)):
        of_row = chosen // 32 * 32 + 8 * i + chosen % 32 // 4
        at = addresses[of_row] + chosen % 4 * 4
        if (addresses[of_row] % 16).any():
            at = addresses[of_row] + 1  # rows must begin at multiples of 16: refused as misaligned
        values = np.zeros(lanes.count, np.uint32)
        values[chosen] = memory.load(at, 4, 1, programs[chosen], lanes.who(chosen))[:, 0]
        lanes.put(register, values)


def _place(
    lanes: Lanes, space: str, place: str, chosen: NDArray[np.int64]
) -> tuple[Space, NDArray, NDArray]:
    """The memory, and the addresses and programs of the lanes that are `chosen`."""
    base, offset = address(place)
    kind = "u64" if space == "global" else "u32"
    addresses = lanes.everywhere(lanes.get(base, kind))[chosen].astype(np.int64) + offset
    return (lanes.memory if space == "global" else lanes.shared), addresses, lanes.program[chosen]


@known(r"shfl\.sync\.bfly\.b32")
def _shuffle(lanes: Lanes, d: str, a: str, b: str, clamp: str, members: str) -> None:
    """The value of another lane of the segment that `clamp` describes, or one's own beyond it."""
    _whole(lanes, members)
    values, by = lanes.everywhere(lanes.get(a, "b32")), lanes.get(b, "u32").astype(np.int64)
    bounds, lane = lanes.get(clamp, "u32").astype(np.int64), lanes.lane % WARP
    segment = bounds >> 8 & 31
    to, most = lane ^ by, (lane & segment) | (bounds & 31 & ~segment)
    lanes.put(d, values[lanes.lane - lane + np.where(to <= most, to, lane)])


@known(r"redux\.sync\.(min|max)\.([su]32)")
def _reduce(lanes: Lanes, name: str, kind: str, d: str, a: str, members: str) -> None:
    _whole(lanes, members)
    values = lanes.everywhere(lanes.get(a, kind)).reshape(-1, WARP)
    lanes.put(d, (values.min(1) if name == "min" else values.max(1)).repeat(WARP))


def _whole(lanes: Lanes, members: str) -> None:
    lanes.whole_warps()
    if (lanes.everywhere(lanes.get(members, "u32"))[lanes.chosen()] != ALL_LANES).any():
        raise Fault("expected all lanes of a warp to be members, got some")
