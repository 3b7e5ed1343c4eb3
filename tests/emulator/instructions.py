"""The meaning of each instruction: a function of numbers (`each`), or of the lanes (`known`).

An opcode that matches no pattern is an error that names it. ``ex2``, ``rsqrt`` and ``div.full`` are
rounded once, where a GPU's are off by a few units in the last place; ``fma`` is rounded to double
precision first.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.emulator.memory import WARP, Space
from tests.emulator.ptx import (
    TYPES,
    Fault,
    Instruction,
    UnknownInstruction,
    Values,
    address,
    elements,
)

if TYPE_CHECKING:
    from tests.emulator.lanes import Lanes

SMALLEST = np.float32(2.0**-126)  # normal number
INTEGER, FTZ = "(?P<kind>[sub](?:8|16|32|64))", r"(?P<ftz>\.ftz)?"
Step = Callable[..., None]
_KNOWN: list[tuple[re.Pattern[str], Callable[[re.Match[str]], Step]]] = []


def known(pattern: str) -> Callable[[Step], Step]:
    """Enter a function of the lanes, the pattern's groups, and an instruction's operands."""

    def enter(function: Step) -> Step:
        def step_of(found: re.Match[str]) -> Step:
            return lambda lanes, *operands: function(lanes, *found.groups(), *operands)

        _KNOWN.append((re.compile(pattern), step_of))
        return function

    return enter


def each(pattern: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function of the operands' numbers, which gives the target's, for every lane.

    The group `kind` is the type of all operands (f32 where there is none), `ftz` flushes; other
    groups go to the function first.
    """

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        def step_of(found: re.Match[str]) -> Step:
            named = found.groupdict()
            kind, flush = named.get("kind", "f32"), named.get("ftz") is not None
            numbers = {*range(1, found.re.groups + 1)} - {*found.re.groupindex.values()}
            names = [found[i] for i in sorted(numbers)]

            def step(lanes: Lanes, target: str, *operands: str) -> None:
                values = (flushed(lanes.get(operand, kind), flush) for operand in operands)
                lanes.put(target, flushed(function(*names, *values), flush))

            return step

        _KNOWN.append((re.compile(pattern), step_of))
        return function

    return enter


def flushed(x: Values, flush: bool) -> Values:
    """Zero for numbers below the smallest normal one."""
    if not flush or x.dtype.kind != "f":
        return x
    return np.where(np.abs(x) < SMALLEST, np.copysign(np.float32(0), x), x)


def execute(lanes: Lanes, step: Instruction) -> None:
    """Have the active lanes of `lanes` take one step."""
    meaning(step.opcode)(lanes, *step.operands)


@functools.cache
def meaning(opcode: str) -> Step:
    for pattern, step_of in _KNOWN:
        found = pattern.fullmatch(opcode)
        if found:
            return step_of(found)
    raise UnknownInstruction(f"expected an instruction that the emulator knows, got {opcode}")


OPERATIONS: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "mul.lo": np.multiply,
    "neg": np.negative, "abs": np.abs, "min": np.minimum, "max": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal, "lo": np.less, "ls": np.less_equal, "hi": np.greater,
    "hs": np.greater_equal,
}  # fmt: skip


@each(rf"(add|sub|mul)(?:\.rn)?{FTZ}\.f32")
@each(rf"(neg|abs){FTZ}\.f32")
@each(rf"(add|sub|min|max|mul\.lo|neg|abs|and|or|xor|not)\.{INTEGER}")
def _plain(name: str, *values: Values) -> Values:
    return OPERATIONS[name](*values)


@known(r"(and|or|xor|not)\.pred")
def _of_predicates(lanes: Lanes, name: str, d: str, *operands: str) -> None:
    lanes.put(d, OPERATIONS[name](*map(lanes.predicate, operands)))


@each(rf"(min|max){FTZ}(\.NaN)?\.f32")
def _float_extreme(name: str, keeps_nan: str | None, x: Values, y: Values) -> Values:
    ignoring = {"min": np.fmin, "max": np.fmax}
    return (OPERATIONS if keeps_nan else ignoring)[name](x, y)


@each(rf"fma\.rn{FTZ}\.f32")
def _fma(x: Values, y: Values, z: Values) -> Values:
    return (x.astype(np.float64) * y + z).astype(np.float32)


@each(rf"(ex2|rsqrt)\.approx{FTZ}\.f32")
def _approximate(name: str, x: Values) -> Values:
    x = x.astype(np.float64)
    return (np.exp2(x) if name == "ex2" else 1 / np.sqrt(x)).astype(np.float32)


@each(rf"div\.(?:full|approx|rn){FTZ}\.f32")
def _divide(x: Values, y: Values) -> Values:
    return x / y


def _widened(x: Values) -> Values:
    return x.astype(f"{x.dtype.kind}{2 * x.itemsize}")


@each(rf"mul\.wide\.{INTEGER}")
def _wide_product(x: Values, y: Values) -> Values:
    return _widened(x) * _widened(y)


@known(r"mad\.(lo|wide)\.([su])(16|32|64)")
def _product_and_sum(
    lanes: Lanes, name: str, sign: str, bits: str, d: str, a: str, b: str, c: str
) -> None:
    x, y = (lanes.get(operand, sign + bits) for operand in (a, b))
    if name == "wide":
        x, y, bits = _widened(x), _widened(y), str(2 * int(bits))
    lanes.put(d, x * y + lanes.get(c, sign + bits))


@each(rf"div\.{INTEGER}")
def _integer_division(x: Values, y: Values) -> Values:
    y = np.where(y == 0, y.dtype.type(1), y)  # of no meaning on a GPU
    return (x - np.fmod(x, y)) // y


@known(r"(shl|shr)\.([sub](?:16|32|64))")
def _shift(lanes: Lanes, name: str, kind: str, d: str, a: str, b: str) -> None:
    x, by = lanes.get(a, kind), lanes.get(b, "u32")
    most = 8 * x.itemsize - 1
    near = np.minimum(by, most).astype(x.dtype)
    found = x << near if name == "shl" else x >> near
    if name == "shl" or kind[0] != "s":
        found = np.where(by > most, x.dtype.type(0), found)
    lanes.put(d, found)


@each(r"bfe\.(?P<kind>u32)")
def _bit_field(x: Values, start: Values, length: Values) -> Values:
    x, start, length = (value.astype(np.uint64) for value in (x, start, length))
    one = np.uint64(1)
    return (x >> start & ((one << length) - one)).astype(np.uint32)


@each(rf"setp\.(eq|ne|lt|le|gt|ge|lo|ls|hi|hs)\.{INTEGER}")
@each(rf"setp\.(eq|ne|lt|le|gt|ge|num|nan){FTZ}\.f32")
def _compare(name: str, x: Values, y: Values) -> Values:
    """Nothing compares with NaN, not even as different."""
    odd = (x != x) | (y != y)
    if name in ("num", "nan"):
        return odd if name == "nan" else ~odd
    return OPERATIONS[name](x, y) & ~odd


# Moves, conversions, loads and stores, and what the lanes of a warp do together

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
