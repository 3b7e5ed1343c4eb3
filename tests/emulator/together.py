"""Instructions that the lanes of a warp take together."""

from __future__ import annotations

import numpy as np

from tests.emulator.instructions import known
from tests.emulator.lanes import Lanes
from tests.emulator.ptx import Fault
from tests.emulator.races import WARP

ALL_LANES = 0xFFFFFFFF


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
