"""Races: two lanes at one place in memory, one of them writing, with nothing that orders them.

Two lanes of a program are ordered by ``bar.sync`` between them, lanes of two programs by nothing.
A cell remembers its last writer and its last readers; an epoch counts a program's barriers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.emulator.ptx import Fault

NOBODY = -1
WARP = 32
LANE, OF_PROGRAM, OF_ALL = range(1, 4)  # among whom several readers are found
Numbers = NDArray[np.int32]


@dataclass(frozen=True)
class Who:
    """The lanes of an access: their numbers in the launch and their epochs, (k, 1) each."""

    lane: Numbers
    epoch: Numbers


class Seen:
    """One side of the past of every cell: the last lane there, and among whom the others are."""

    def __init__(self, cells: int) -> None:
        self.lane = np.full(cells, NOBODY, np.int32)
        self.epoch, self.breadth = np.zeros(cells, np.int32), np.zeros(cells, np.int8)

    def put(self, cells: Numbers, who: Who, breadth: NDArray[np.int8] | int) -> None:
        self.lane[cells], self.epoch[cells], self.breadth[cells] = who.lane, who.epoch, breadth


class Trace:
    """The past of the cells of one memory during a launch of programs of so many `threads`."""

    def __init__(self, cells: int, threads: int) -> None:
        self._threads = threads
        self._written, self._read = Seen(cells), Seen(cells)

    def read(self, cells: Numbers, who: Who) -> None:
        """Lanes read their `cells` (k, w)."""
        self._refuse(self._written, cells, who, "reads what {} wrote")
        seen, before = self._read, self._read.lane[cells]
        # those that a barrier separates from now on can be forgotten
        forgotten = (before == NOBODY) | self._ordered(seen, cells, who, before)
        known = np.maximum(seen.breadth[cells], self._relation(before, who.lane))
        seen.put(cells, who, np.where(forgotten, np.int8(LANE), known))
        last = seen.lane[cells]
        several = last != who.lane  # in this instruction
        if several.any():
            np.maximum.at(seen.breadth, cells[several], self._relation(last, who.lane)[several])

    def write(self, cells: Numbers, who: Who) -> None:
        """Lanes write their `cells` (k, w)."""
        self._refuse(self._written, cells, who, "writes where {} wrote")
        self._refuse(self._read, cells, who, "writes what {} read")
        self._written.put(cells, who, LANE)

    def _refuse(self, seen: Seen, cells: Numbers, who: Who, what: str) -> None:
        before = seen.lane[cells]
        there = before != NOBODY
        if not there.any():
            return
        same = (before == who.lane) & (seen.breadth[cells] == LANE)
        clash = there & ~same & ~self._ordered(seen, cells, who, before)
        if clash.any():
            row, column = np.argwhere(clash)[0]
            lane, other = int(who.lane[row, 0]), int(before[row, column])
            raise Fault(
                f"race: {self._name(lane)} {what.format(self._name(other))}, "
                "and no barrier is between them"
            )

    def _ordered(self, seen: Seen, cells: Numbers, who: Who, before: Numbers) -> NDArray[np.bool_]:
        """Whether a barrier lies between who was there `before` and `who`."""
        one_program = before // self._threads == who.lane // self._threads
        return one_program & (seen.breadth[cells] <= OF_PROGRAM) & (seen.epoch[cells] < who.epoch)

    def _relation(self, x: Numbers, y: Numbers) -> NDArray[np.int8]:
        """The smallest of `LANE` to `OF_ALL` that holds both lanes."""
        return LANE + (x != y).astype(np.int8) + (x // self._threads != y // self._threads)

    def _name(self, lane: int) -> str:
        return f"thread {lane % self._threads} of program {lane // self._threads}"
