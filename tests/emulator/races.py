"""Races: two lanes at one place in memory, one of them writing, with nothing that orders them.

Two lanes of a warp are ordered by ``bar.warp.sync`` between them, two lanes of a program by
``bar.sync``, and lanes of two programs by nothing. A cell remembers its last writer and its last
readers. An epoch counts a program's barriers, a warp's epoch those of the warp.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.emulator.ptx import Fault

NOBODY = -1
WARP = 32
LANE, OF_WARP, OF_PROGRAM, OF_ALL = range(1, 5)  # among whom several readers are found
Numbers = NDArray[np.int32]


@dataclass(frozen=True)
class Who:
    """The lanes of an access: their numbers in the launch and their epochs, (k, 1) each."""

    lane: Numbers
    epoch: Numbers
    warp_epoch: Numbers


class Seen:
    """One side of the past of every cell: the last lane there, and among whom the others are."""

    def __init__(self, cells: int) -> None:
        self.lane = np.full(cells, NOBODY, np.int32)
        self.epoch, self.warp_epoch = np.zeros(cells, np.int32), np.zeros(cells, np.int32)
        self.breadth = np.zeros(cells, np.int8)

    def put(self, cells: Numbers, who: Who, breadth: NDArray[np.int8] | int) -> None:
        """`who` was at `cells` (k, w) last."""
        self.lane[cells], self.breadth[cells] = who.lane, breadth
        self.epoch[cells], self.warp_epoch[cells] = who.epoch, who.warp_epoch


class Trace:
    """The past of the cells of one memory during a launch of programs of so many `threads`."""

    def __init__(self, cells: int, threads: int) -> None:
        self._threads = threads
        self._written, self._read = Seen(cells), Seen(cells)

    def read(self, cells: Numbers, who: Who) -> None:
        """Lanes read their `cells` (k, w)."""
        self._refuse(self._written, cells, who, "reads what {} wrote")
        seen, breadth = self._read, np.full(cells.shape, LANE, np.int8)
        before = seen.lane[cells]
        if (before != NOBODY).any():  # those that a barrier separates from now on can be forgotten
            forgotten = (before == NOBODY) | self._ordered(seen, cells, who, before)
            breadth = np.where(
                forgotten,
                breadth,
                np.maximum(seen.breadth[cells], self._relation(before, who.lane)),
            ).astype(np.int8)
        seen.put(cells, who, breadth)
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
        breadth = seen.breadth[cells]
        by_program = (before // self._threads == who.lane // self._threads) & (
            breadth <= OF_PROGRAM
        )
        by_warp = (before // WARP == who.lane // WARP) & (breadth <= OF_WARP)
        return (by_program & (seen.epoch[cells] < who.epoch)) | (
            by_warp & (seen.warp_epoch[cells] < who.warp_epoch)
        )

    def _relation(self, x: Numbers, y: Numbers) -> NDArray[np.int8]:
        """The smallest of `LANE` to `OF_ALL` that holds both lanes."""
        apart = (
            (x != y).astype(np.int8)
            + (x // WARP != y // WARP)
            + (x // self._threads != y // self._threads)
        )
        return (LANE + apart).astype(np.int8)

    def _name(self, lane: int) -> str:
        return f"thread {lane % self._threads} of program {lane // self._threads}"
