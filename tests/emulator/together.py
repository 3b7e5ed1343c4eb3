"""Instructions that the lanes of a warp take together, and those that order memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tests.emulator.instructions import known
from tests.emulator.lanes import Lanes
from tests.emulator.ptx import Fault
from tests.emulator.races import WARP

ALL_LANES = 0xFFFFFFFF


@known(r"shfl\.sync\.(bfly|up|down|idx)\.b32")
def _shuffle(lanes: Lanes, mode: str, d: str, a: str, b: str, clamp: str, members: str) -> None:
    """The value of another lane of the segment that `clamp` describes, or one's own beyond it."""
    _whole(lanes, members)
    values, by = lanes.everywhere(lanes.get(a, "b32")), lanes.get(b, "u32").astype(np.int64)
    bounds = lanes.get(clamp, "u32").astype(np.int64)
    lane, segment = lanes.lane % WARP, bounds >> 8 & 31
    least, most = lane & segment, (lane & segment) | (bounds & 31 & ~segment)
    to = {"bfly": lane ^ by, "up": lane - by, "down": lane + by, "idx": least | (by & ~segment)}[
        mode
    ]
    inside = to >= most if mode == "up" else to <= most
    destination, *inside_of = d.split("|")
    lanes.put(destination, values[lanes.lane - lane + np.where(inside, to, lane)])
    for predicate in inside_of:
        lanes.put(predicate, lanes.everywhere(inside))


@known(r"redux\.sync\.(add|min|max|and|or|xor)\.([sub]32)")
def _reduce(lanes: Lanes, name: str, kind: str, d: str, a: str, members: str) -> None:
    _whole(lanes, members)
    functions = {
        "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }  # fmt: skip
    values = lanes.everywhere(lanes.get(a, kind))
    lanes.put(
        d,
        functions[name].reduce(values.reshape(-1, WARP), axis=1).astype(values.dtype).repeat(WARP),
    )


@known(r"vote\.sync\.(any|all)\.pred")
def _vote(lanes: Lanes, name: str, d: str, a: str, members: str) -> None:
    _whole(lanes, members)
    of_warps: NDArray[np.bool_] = lanes.everywhere(lanes.predicate(a)).reshape(-1, WARP)
    lanes.put(d, (of_warps.any(1) if name == "any" else of_warps.all(1)).repeat(WARP))


@known(r"bar\.warp\.sync")
def _warp_barrier(lanes: Lanes, members: str) -> None:
    _whole(lanes, members)
    lanes.warp_epoch[np.unique(lanes.warp[lanes.chosen()])] += 1


@known(r"membar\.\w+|fence\.(?:acq_rel|sc)\.\w+")
def _fence(lanes: Lanes) -> None:
    """An order for others to see, which no barrier is."""


@known(r"trap")
def _trap(lanes: Lanes) -> None:
    raise Fault("trap")


def _whole(lanes: Lanes, members: str) -> None:
    lanes.whole_warps()
    if (lanes.everywhere(lanes.get(members, "u32"))[lanes.chosen()] != ALL_LANES).any():
        raise Fault("expected all lanes of a warp to be members, got some")
