"""Arithmetic, bits and comparisons. ``ex2``, ``rsqrt`` and ``div.full`` are rounded once, where a
GPU's are off by a few units in the last place; ``fma`` is rounded to double precision first."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.emulator.instructions import FTZ, INTEGER, each, known
from tests.emulator.lanes import Lanes
from tests.emulator.ptx import Values

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
