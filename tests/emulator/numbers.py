"""Types of PTX, and the constants in its text."""

from __future__ import annotations

import functools
import re
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[Any]

UNSIGNED = {bits: np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)}
TYPES = {
    f"{kind}{bits}": np.dtype(f"{'iu'[kind != 's']}{bits // 8}")
    for kind in "sub"
    for bits in UNSIGNED
}
TYPES |= {
    "f16": np.dtype("f2"),
    "f32": np.dtype("f4"),
    "f64": np.dtype("f8"),
    "bf16": np.dtype("u2"),
}


@functools.cache
def constant(operand: str, kind: str) -> Values:
    """A number of PTX: ``3``, ``-1``, ``0f3F800000``; the address of a name is 0, where shared memory begins."""
    dtype = TYPES[kind]
    if re.fullmatch(r"0[fFdD][0-9A-Fa-f]+", operand):
        form = "<f" if operand[1] in "fF" else "<d"
        bits = bytes.fromhex(operand[2:])[::-1]
        return (
            np.asarray(struct.unpack(form, bits)[0], "f4" if form == "<f" else "f8")
            .view(UNSIGNED[8 * len(bits)])
            .view(dtype)
        )
    number = 0 if operand == "global_smem" else int(operand, 0)
    return np.asarray(number & ((1 << 8 * dtype.itemsize) - 1), UNSIGNED[8 * dtype.itemsize]).view(
        dtype
    )
