"""Instructions that the lanes of a warp take together, and those that order memory."""

from __future__ import annotations

import numpy as np

from tests.emulator.instructions import known
from tests.emulator.lanes import Lanes
from tests.emulator.ptx import Fault
from tests.emulator.races import WARP

ALL_LANES = 0xFFFFFFFF


@known(r"shfl\.sync\.bfly\.b32")
def _shuffle(lanes: Lanes, d: str, a: str, b: str, clamp: str, members: str) -> None:
    """The value of the lane whose number differs by the bits of `b`."""
    _whole(lanes, members)
    assert int(clamp, 0) == WARP - 1, "expected a segment of a whole warp"
    values, by = lanes.everywhere(lanes.get(a, "b32")), lanes.get(b, "u32").astype(np.int64)
    destination, *inside_of = d.split("|")
    lanes.put(destination, values[lanes.lane ^ by])
    for predicate in inside_of:
        lanes.put(predicate, np.ones(lanes.count, bool))


@known(r"redux\.sync\.(min|max)\.([su]32)")
def _reduce(lanes: Lanes, name: str, kind: str, d: str, a: str, members: str) -> None:
    _whole(lanes, members)
    of_warps = lanes.everywhere(lanes.get(a, kind)).reshape(-1, WARP)
    lanes.put(d, {"min": np.min, "max": np.max}[name](of_warps, axis=1).repeat(WARP))


@known(r"bar\.warp\.sync")
def _warp_barrier(lanes: Lanes, members: str) -> None:
    _whole(lanes, members)
    lanes.warp_epoch[np.unique(lanes.warp[lanes.chosen()])] += 1


def _whole(lanes: Lanes, members: str) -> None:
    lanes.whole_warps()
    if (lanes.everywhere(lanes.get(members, "u32"))[lanes.chosen()] != ALL_LANES).any():
        raise Fault("expected all lanes of a warp to be members, got some")
