"""Races: two lanes at one place in memory, one of them writing, with nothing that orders them.

Two lanes of a program are ordered by ``bar.sync`` between them, lanes of two programs by nothing.
A cell remembers its last writer and its readers since, as the lowest and the highest lane; an epoch
counts a program's barriers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.emulator.ptx import Fault

NOBODY = -1
WARP = 32
Numbers = NDArray[np.int32]


@dataclass(frozen=True)
class Who:
    """The lanes of an access: their numbers in the launch and their epochs, (k, 1) each."""

    lane: Numbers
    epoch: Numbers


class Seen:
    """One side of the past of every cell: the lanes there from `low` to `high`, and their epoch."""

    def __init__(self, cells: int) -> None:
        self.low, self.high = np.full((2, cells), NOBODY, np.int32)
        self.epoch = np.zeros(cells, np.int32)


class Trace:
    """The past of the cells of one memory during a launch of programs of so many `threads`."""

    def __init__(self, cells: int, threads: int) -> None:
        self._threads = threads
        self._written, self._read = Seen(cells), Seen(cells)

    def read(self, cells: Numbers, who: Who) -> None:
        """Lanes read their `cells` (k, w)."""
        self._refuse(self._written, cells, who, "reads what {} wrote")
        seen = self._read
        # those that a barrier separates from now on can be forgotten
        alone = cells[(seen.low[cells] == NOBODY) | self._ordered(seen, cells, who)]
        seen.low[alone], seen.high[alone] = np.iinfo(np.int32).max, NOBODY
        np.minimum.at(seen.low, cells, who.lane)
        np.maximum.at(seen.high, cells, who.lane)
        seen.epoch[cells] = who.epoch

    def write(self, cells: Numbers, who: Who) -> None:
        """Lanes write their `cells` (k, w)."""
        self._refuse(self._written, cells, who, "writes where {} wrote")
        self._refuse(self._read, cells, who, "writes what {} read")
        seen = self._written
        seen.low[cells] = seen.high[cells] = who.lane
        seen.epoch[cells] = who.epoch

    def _refuse(self, seen: Seen, cells: Numbers, who: Who, what: str) -> None:
        low, high = seen.low[cells], seen.high[cells]
        others = (low != NOBODY) & ((low != who.lane) | (high != who.lane))
        if not others.any():
            return
        clash = others & ~self._ordered(seen, cells, who)
        if clash.any():
            row, column = np.argwhere(clash)[0]
            lane = int(who.lane[row, 0])
            other = next(int(x[row, column]) for x in (low, high) if x[row, column] != lane)
            raise Fault(
                f"race: {self._name(lane)} {what.format(self._name(other))}, "
                "and no barrier is between them"
            )

    def _ordered(self, seen: Seen, cells: Numbers, who: Who) -> NDArray[np.bool_]:
        """True where a barrier lies between all lanes that were there and `who`."""
        program, (low, high) = who.lane // self._threads, (seen.low[cells], seen.high[cells])
        alike = (low // self._threads == program) & (high // self._threads == program)
        return alike & (seen.epoch[cells] < who.epoch)

    def _name(self, lane: int) -> str:
        return f"thread {lane % self._threads} of program {lane // self._threads}"
