"""Arithmetic, bits and comparisons.

``ex2`` and ``rsqrt`` are exact up to their one rounding, where a GPU's are off by a few units in
the last place, and so is ``div.full``. ``fma`` rounds once, as a GPU does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

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
    lanes.put(
        d,
        flushed({"add": operator.add, "sub": operator.sub, "mul": operator.mul}[name](x, y), flush),
    )


@known(r"fma\.rn(\.ftz)?\.f32")
def _fma(lanes: Lanes, flush: str | None, d: str, a: str, b: str, c: str) -> None:
    x, y, z = (flushed(lanes.get(operand, "f32"), flush) for operand in (a, b, c))
    lanes.put(d, flushed(fused_multiply_add(x, y, z), flush))


def fused_multiply_add(x: Floats, y: Floats, z: Floats) -> Floats:
    """x y + z, rounded once.

    The product is exact in double precision, and the sum is rounded there. To round it again is
    wrong where it was rounded to the middle between two floats, or where floats have fewer bits:
    there the sum is made odd first.
    """
    product, addend = x.astype(np.float64) * y, z.astype(np.float64)
    total = np.asarray(product + addend)
    found = total.astype(np.float32)
    bits = total.view(np.int64)
    unsure = ((bits & 0x1FFFFFFF) == 0x10000000) | ((np.abs(found) <= SMALLEST) & (total != 0))
    if unsure.any():
        part = total - product
        error = (product - (total - part)) + (addend - part)
        away = np.where(error != 0, np.where((error > 0) == (total > 0), 1, -1), 0)
        odd = np.where(
            (bits & 1) == 0, bits + np.where(away < 0, -1, np.minimum(away, 1)), bits
        ).view(np.float64)
        found = np.where(unsure, odd, total).astype(np.float32)
    return found


@known(r"(min|max)(\.ftz)?(\.NaN)?\.f32")
def _float_extreme(
    lanes: Lanes, name: str, flush: str | None, keeps_nan: str | None, d: str, a: str, b: str
) -> None:
    x, y = (flushed(lanes.get(operand, "f32"), flush) for operand in (a, b))
    keep = {"min": np.minimum, "max": np.maximum} if keeps_nan else {"min": np.fmin, "max": np.fmax}
    lanes.put(d, keep[name](x, y))


@known(r"(ex2\.approx|rsqrt\.approx|rcp\.(?:approx|rn)|sqrt\.(?:approx|rn)|abs|neg)(\.ftz)?\.f32")
def _of_one(lanes: Lanes, name: str, flush: str | None, d: str, a: str) -> None:
    functions: dict[str, Callable[[Any], Any]] = {
        "ex2": np.exp2, "rsqrt": lambda x: 1 / np.sqrt(x), "rcp": lambda x: 1 / x, "sqrt": np.sqrt,
        "abs": np.abs,
        "neg": np.negative,
    }  # fmt: skip
    x = flushed(lanes.get(a, "f32"), flush).astype(np.float64)
    lanes.put(d, flushed(functions[name.split(".")[0]](x).astype(np.float32), flush))


@known(r"div\.(?:full|approx|rn)(\.ftz)?\.f32")
def _divide(lanes: Lanes, flush: str | None, d: str, a: str, b: str) -> None:
    x, y = (flushed(lanes.get(operand, "f32"), flush) for operand in (a, b))
    lanes.put(d, flushed(x / y, flush))


@known(rf"(add|sub|min|max)\.{INTEGER}")
@known(rf"(mul)\.lo\.{INTEGER}")
def _integer(lanes: Lanes, name: str, kind: str, d: str, a: str, b: str) -> None:
    functions = {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "min": np.minimum,
        "max": np.maximum,
    }
    lanes.put(d, functions[name](lanes.get(a, kind), lanes.get(b, kind)))


@known(r"mul\.hi\.([su]32)")
def _high_product(lanes: Lanes, kind: str, d: str, a: str, b: str) -> None:
    wide = TYPES[WIDE[kind]]
    product = lanes.get(a, kind).astype(wide) * lanes.get(b, kind).astype(wide)
    lanes.put(d, (product >> wide.type(32)).astype(TYPES[kind]))


@known(r"mul\.wide\.([su](?:16|32))")
def _wide_product(lanes: Lanes, kind: str, d: str, a: str, b: str) -> None:
    wide = TYPES[WIDE[kind]]
    lanes.put(d, lanes.get(a, kind).astype(wide) * lanes.get(b, kind).astype(wide))


@known(r"mad\.(lo|wide)\.([su](?:16|32|64))")
def _product_and_sum(lanes: Lanes, name: str, kind: str, d: str, a: str, b: str, c: str) -> None:
    wide = WIDE[kind] if name == "wide" else kind
    x, y = (lanes.get(operand, kind).astype(TYPES[wide]) for operand in (a, b))
    lanes.put(d, x * y + lanes.get(c, wide))


@known(r"(div|rem)\.([su](?:32|64))")
def _integer_division(lanes: Lanes, name: str, kind: str, d: str, a: str, b: str) -> None:
    x, y = lanes.get(a, kind), lanes.get(b, kind)
    y = np.where(y == 0, TYPES[kind].type(1), y)  # of no meaning on a GPU
    rest = np.fmod(x, y)
    lanes.put(d, rest if name == "rem" else (x - rest) // y)


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


@known(r"bfe\.([su]32)")
def _bit_field(lanes: Lanes, kind: str, d: str, a: str, start: str, length: str) -> None:
    x, start_at, bits = lanes.get(a, "u32"), lanes.get(start, "u32"), lanes.get(length, "u32")
    if kind == "s32":
        up = (32 - start_at - bits).astype(np.uint32)
        lanes.put(d, (x << up).view(np.int32) >> (32 - bits).astype(np.int32))
    else:
        lanes.put(
            d,
            (x >> start_at)
            & ((np.uint64(1) << bits.astype(np.uint64)) - np.uint64(1)).astype(np.uint32),
        )


@known(r"lop3\.b32")
def _table(lanes: Lanes, d: str, a: str, b: str, c: str, table: str) -> None:
    x, y, z = (lanes.get(operand, "b32") for operand in (a, b, c))
    found = np.zeros(lanes.count, np.uint32)
    for row in range(8):
        if int(table, 0) >> row & 1:
            found |= (x if row & 4 else ~x) & (y if row & 2 else ~y) & (z if row & 1 else ~z)
    lanes.put(d, found)


COMPARISONS = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


@known(r"setp\.(eq|ne|lt|le|gt|ge|lo|ls|hi|hs)(?:\.(and|or|xor))?\.([sub](?:16|32|64))")
def _compare(
    lanes: Lanes, name: str, join: str | None, kind: str, d: str, a: str, b: str, c: str = "1"
) -> None:
    _put_joined(lanes, d, COMPARISONS[name](lanes.get(a, kind), lanes.get(b, kind)), join, c)


@known(r"setp\.(eq|ne|lt|le|gt|ge)(u?)(?:\.(and|or|xor))?(\.ftz)?\.f32")
def _compare_floats(
    lanes: Lanes, name: str, unordered: str, join: str | None, flush: str | None,
    d: str, a: str, b: str, c: str = "1",
) -> None:  # fmt: skip
    x, y = (flushed(lanes.get(operand, "f32"), flush) for operand in (a, b))
    odd = np.isnan(x) | np.isnan(y)
    found = COMPARISONS[name](x, y)
    _put_joined(lanes, d, found | odd if unordered else found & ~odd, join, c)


@known(r"setp\.(num|nan)(?:\.(and|or|xor))?(?:\.ftz)?\.f32")
def _compare_with_nan(
    lanes: Lanes, name: str, join: str | None, d: str, a: str, b: str, c: str = "1"
) -> None:
    odd = np.isnan(lanes.get(a, "f32")) | np.isnan(lanes.get(b, "f32"))
    _put_joined(lanes, d, odd if name == "nan" else ~odd, join, c)


def _put_joined(
    lanes: Lanes, d: str, found: NDArray[np.bool_], join: str | None, other: str
) -> None:
    functions = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
    lanes.put(d, functions[join](found, lanes.predicate(other)) if join else found)
