"""Arithmetic, bits and comparisons. ``ex2``, ``rsqrt`` and ``div.full`` are rounded once, where a
GPU's are off by a few units in the last place; ``fma`` is rounded to double precision first."""

from __future__ import annotations

import operator

import numpy as np
from numpy.typing import NDArray

from tests.emulator.instructions import known
from tests.emulator.lanes import Lanes
from tests.emulator.ptx import TYPES

INTEGER = "([sub](?:16|32|64))"
WIDE = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}
SMALLEST = np.float32(2.0**-126)  # normal number
Floats = NDArray[np.float32]


def flushed(x: Floats, flush: str | None) -> Floats:
    """Zero for numbers below the smallest normal one, where the instruction has ``.ftz``."""
    return np.where(np.abs(x) < SMALLEST, np.copysign(np.float32(0), x), x) if flush else x


@known(r"(add|sub|mul)(?:\.rn)?(\.ftz)?\.f32")
def _float(lanes: Lanes, name: str, flush: str | None, d: str, a: str, b: str) -> None:
    x, y = (flushed(lanes.get(operand, "f32"), flush) for operand in (a, b))
    functions = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}
    lanes.put(d, flushed(functions[name](x, y), flush))


@known(r"fma\.rn(\.ftz)?\.f32")
def _fma(lanes: Lanes, flush: str | None, d: str, a: str, b: str, c: str) -> None:
    x, y, z = (flushed(lanes.get(operand, "f32"), flush) for operand in (a, b, c))
    lanes.put(d, flushed((x.astype(np.float64) * y + z).astype(np.float32), flush))


@known(r"(min|max)(\.ftz)?(\.NaN)?\.f32")
def _float_extreme(
    lanes: Lanes, name: str, flush: str | None, keeps_nan: str | None, d: str, a: str, b: str
) -> None:
    x, y = (flushed(lanes.get(operand, "f32"), flush) for operand in (a, b))
    keep = {"min": np.minimum, "max": np.maximum} if keeps_nan else {"min": np.fmin, "max": np.fmax}
    lanes.put(d, keep[name](x, y))


@known(r"(ex2\.approx|rsqrt\.approx|abs|neg)(\.ftz)?\.f32")
def _of_one(lanes: Lanes, name: str, flush: str | None, d: str, a: str) -> None:
    functions = {"ex2.approx": np.exp2, "abs": np.abs, "neg": np.negative}
    x = flushed(lanes.get(a, "f32"), flush).astype(np.float64)
    found = 1 / np.sqrt(x) if name == "rsqrt.approx" else functions[name](x)
    lanes.put(d, flushed(found.astype(np.float32), flush))


@known(r"div\.(?:full|approx|rn)(\.ftz)?\.f32")
def _divide(lanes: Lanes, flush: str | None, d: str, a: str, b: str) -> None:
    x, y = (flushed(lanes.get(operand, "f32"), flush) for operand in (a, b))
    lanes.put(d, flushed(x / y, flush))


@known(rf"(add|sub|min|max)\.{INTEGER}")
@known(rf"(mul)\.lo\.{INTEGER}")
def _integer(lanes: Lanes, name: str, kind: str, d: str, a: str, b: str) -> None:
    functions = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
    functions |= {"min": np.minimum, "max": np.maximum}
    lanes.put(d, functions[name](lanes.get(a, kind), lanes.get(b, kind)))


@known(r"mul\.wide\.([su](?:16|32))")
def _wide_product(lanes: Lanes, kind: str, d: str, a: str, b: str) -> None:
    wide = TYPES[WIDE[kind]]
    lanes.put(d, lanes.get(a, kind).astype(wide) * lanes.get(b, kind).astype(wide))


@known(r"mad\.(lo|wide)\.([su](?:16|32|64))")
def _product_and_sum(lanes: Lanes, name: str, kind: str, d: str, a: str, b: str, c: str) -> None:
    wide = WIDE[kind] if name == "wide" else kind
    x, y = (lanes.get(operand, kind).astype(TYPES[wide]) for operand in (a, b))
    lanes.put(d, x * y + lanes.get(c, wide))


@known(r"div\.([su](?:32|64))")
def _integer_division(lanes: Lanes, kind: str, d: str, a: str, b: str) -> None:
    x, y = lanes.get(a, kind), lanes.get(b, kind)
    y = np.where(y == 0, TYPES[kind].type(1), y)  # of no meaning on a GPU
    lanes.put(d, (x - np.fmod(x, y)) // y)


@known(rf"(neg|abs)\.{INTEGER}")
def _integer_sign(lanes: Lanes, name: str, kind: str, d: str, a: str) -> None:
    lanes.put(d, {"neg": np.negative, "abs": np.abs}[name](lanes.get(a, kind)))


@known(rf"(and|or|xor)\.(?:{INTEGER}|pred)")
def _bits(lanes: Lanes, name: str, kind: str | None, d: str, a: str, b: str) -> None:
    functions = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    read = lanes.predicate if kind is None else lambda operand: lanes.get(operand, kind)
    lanes.put(d, functions[name](read(a), read(b)))


@known(rf"not\.(?:{INTEGER}|pred)")
def _complement(lanes: Lanes, kind: str | None, d: str, a: str) -> None:
    lanes.put(d, ~(lanes.predicate(a) if kind is None else lanes.get(a, kind)))


@known(rf"(shl|shr)\.{INTEGER}")
def _shift(lanes: Lanes, name: str, kind: str, d: str, a: str, b: str) -> None:
    x, by = lanes.get(a, kind), lanes.get(b, "u32")
    most = 8 * x.itemsize - 1
    near = np.minimum(by, most).astype(x.dtype)
    found = x << near if name == "shl" else x >> near
    if name == "shl" or kind[0] != "s":
        found = np.where(by > most, x.dtype.type(0), found)
    lanes.put(d, found)


@known(r"bfe\.u32")
def _bit_field(lanes: Lanes, d: str, a: str, start: str, length: str) -> None:
    x, at, bits = (lanes.get(operand, "u32").astype(np.uint64) for operand in (a, start, length))
    one = np.uint64(1)
    lanes.put(d, (x >> at & ((one << bits) - one)).astype(np.uint32))


COMPARISONS = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


@known(r"setp\.(eq|ne|lt|le|gt|ge|lo|ls|hi|hs)\.([sub](?:16|32|64))")
def _compare(lanes: Lanes, name: str, kind: str, d: str, a: str, b: str) -> None:
    lanes.put(d, COMPARISONS[name](lanes.get(a, kind), lanes.get(b, kind)))


@known(r"setp\.(eq|ne|lt|le|gt|ge|num|nan)(\.ftz)?\.f32")
def _compare_floats(lanes: Lanes, name: str, flush: str | None, d: str, a: str, b: str) -> None:
    x, y = (flushed(lanes.get(operand, "f32"), flush) for operand in (a, b))
    odd = np.isnan(x) | np.isnan(y)
    found = odd if name == "nan" else ~odd
    lanes.put(d, found & COMPARISONS[name](x, y) if name in COMPARISONS else found)
