"""The memory that a launch sees: its arguments, nothing around them, and shared memory.

An access names places (bytes); what is known of memory is known by cell: an element of an argument,
or as many bytes of shared memory as the kernel's smallest access has.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.emulator.ptx import Fault

BASE = 1 << 32  # the first address
GAP = 4096  # bytes between arguments, at least
PAGE = 256  # arguments begin as far from a multiple of it as they do in truth
Places = NDArray[np.int64]
Programs = NDArray[np.int64]  # the program of each access


class Space:
    """Bytes, and what is known of their cells."""

    name: str

    def __init__(self, size: int, cells: int, threads: int) -> None:
        self.data = np.full(size, 0xA5, np.uint8)
        self.written = np.zeros(cells, bool)
        self.trace = Trace(cells, threads)

    def locate(self, addresses: Places, width: int, programs: Programs) -> tuple[Places, Places]:
        """Places (k,) of accesses of `width` bytes, and their cells (k, w)."""
        raise NotImplementedError

    def load(
        self, addresses: Places, size: int, count: int, programs: Programs, who: Who
    ) -> NDArray:
        """`count` neighbors of `size` bytes from each address, (k, count), as whole numbers."""
        places, cells = self._access(addresses, size * count, programs)
        unwritten = ~self.written[cells]
        if unwritten.any():
            where = self._where(addresses, unwritten.any(1))
            raise Fault(f"reads {self.name} memory that nobody wrote, {where}")
        self.trace.read(cells, who)
        return self._elements(size)[(places // size)[:, None] + np.arange(count)]

    def store(self, addresses: Places, values: NDArray, programs: Programs, who: Who) -> None:
        """The opposite: `values` (k, count)."""
        size, count = values.dtype.itemsize, values.shape[1]
        places, cells = self._access(addresses, size * count, programs)
        self.trace.write(cells, who)
        at = (places // size)[:, None] + np.arange(count)
        self._elements(size)[at] = values
        other = (self._elements(size)[at] != values).any(1)
        if other.any():
            where = f"{self.name} memory at once, {self._where(addresses, other)}"
            raise Fault(f"race: lanes write different values to {where}")
        self.written[cells] = True

    def _access(self, addresses: Places, width: int, programs: Programs) -> tuple[Places, Places]:
        misaligned = addresses % width != 0
        if misaligned.any():
            where = self._where(addresses, misaligned)
            raise Fault(f"misaligned: {width} bytes of {self.name} memory {where}")
        return self.locate(addresses, width, programs)

    def _elements(self, size: int) -> NDArray:
        return self.data.view(f"u{size}")

    def _where(self, addresses: Places, wrong: NDArray[np.bool_]) -> str:
        return f"at {hex(int(addresses[wrong][0]))}, and {int(wrong.sum()) - 1} more such lanes"


class Shared(Space):
    """What each of some programs has for itself."""

    name = "shared"

    def __init__(self, programs: int, size: int, cell: int, threads: int) -> None:
        self._size, self._cell = -(-max(size, 16) // 16) * 16, cell
        super().__init__(programs * self._size, programs * self._size // cell, threads)

    def locate(self, addresses: Places, width: int, programs: Programs) -> tuple[Places, Places]:
        outside = (addresses < 0) | (addresses + width > self._size)
        if outside.any():
            where = f"shared memory that a program has, {self._where(addresses, outside)}"
            raise Fault(f"outside of the {self._size} bytes of {where}")
        places = addresses + programs * self._size
        return places, (places // self._cell)[:, None] + np.arange(max(1, width // self._cell))


@dataclass(frozen=True)
class Region:
    """Arguments that overlap in memory, as a gradient that replaces the logits does."""

    names: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    first: int  # address in truth, with those after it
    last: int
    place: int = 0  # in `Global.data`
    cell: int = 0  # the first one

    @functools.cached_property
    def size(self) -> int:
        """Bytes of a cell: the smallest element."""
        return min(x.element_size() for x in self.tensors)

    @functools.cached_property
    def cells(self) -> int:
        return (self.last - self.first) // self.size

    def indices(self, x: Tensor) -> tuple[NDArray[np.int64], int]:
        """The first cell of each element of `x`, and how many an element has."""
        at = np.zeros((), np.int64)
        for size, stride in zip(x.shape, x.stride(), strict=True):
            at = at[..., None] + np.arange(size) * stride
        each = x.element_size() // self.size
        return (x.data_ptr() - self.first) // self.size + at.reshape(-1) * each, each


class Global(Space):
    """The arguments of a launch, by name."""

    name = "global"

    def __init__(self, tensors: dict[str, Tensor], threads: int) -> None:
        self.regions: list[Region] = []
        size, cells = GAP, 0
        for names, first, last in _overlapping(tensors):
            place = -(-size // PAGE) * PAGE + first % PAGE
            of_region = tuple(tensors[name] for name in names)
            region = Region(names, of_region, first, last, place, cells)
            self.regions.append(region)
            size, cells = place + last - first + GAP, cells + region.cells
        super().__init__(-(-size // PAGE) * PAGE, cells, threads)
        self._is_element = np.zeros(cells, bool)
        self._places = np.array([region.place for region in self.regions])
        self._pointers = {}
        for region in self.regions:
            for name, x in zip(region.names, region.tensors, strict=True):
                self._pointers[name] = BASE + region.place + x.data_ptr() - region.first
                at, each = region.indices(x)
                known = is_written(x).reshape(-1).numpy()
                for i in range(each):
                    self._is_element[region.cell + at + i] = True
                    self.written[region.cell + at + i] = known
            self.data[region.place : region.place + region.last - region.first] = _bytes(region)

    def pointer(self, name: str) -> int:
        """The address of an argument's first element; some address if it has none."""
        return self._pointers.get(name, BASE)

    def copy_back(self) -> None:
        """What is in memory now goes to the tensors."""
        for region in self.regions:
            end = region.place + region.last - region.first
            _bytes(region)[...] = self.data[region.place : end]

    def locate(self, addresses: Places, width: int, programs: Programs) -> tuple[Places, Places]:
        places = addresses - BASE
        index = int(np.searchsorted(self._places, places[0], "right")) - 1
        if index < 0:
            where = self._where(addresses, addresses == addresses[0])
            raise Fault(f"outside of every argument, {where}")
        region = self.regions[index]
        inside = places - region.place
        outside = (inside < 0) | (inside + width > region.last - region.first)
        if not outside.any():
            first = region.cell + inside // region.size
            cells = first[:, None] + np.arange(max(1, width // region.size))
            outside = ~self._is_element[cells].all(1)
        if outside.any():
            byte = f"byte {int(inside[outside][0])} of {region.last - region.first}"
            raise Fault(f"outside of the elements of {' and '.join(region.names)}: {byte}")
        return places, cells


def _overlapping(tensors: dict[str, Tensor]) -> list[tuple[tuple[str, ...], int, int]]:
    """Names, first address and last of arguments that lie across one another."""
    extents = []
    for name, x in tensors.items():
        if x.numel() > 0:
            ends = ((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
            extents.append((x.data_ptr(), x.data_ptr() + (sum(ends) + 1) * x.itemsize, name))
    found: list[tuple[tuple[str, ...], int, int]] = []
    for first, last, name in sorted(extents):
        if found and first < found[-1][2]:
            names, begin, end = found.pop()
            found.append(((*names, name), begin, max(end, last)))
        else:
            found.append(((name,), first, last))
    return found


def _bytes(region: Region) -> NDArray[np.uint8]:
    """The bytes of the region's tensors, not a copy."""
    storage = region.tensors[0].untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,)).numpy()
    return whole[region.first - storage.data_ptr() : region.last - storage.data_ptr()]


# Memory that nobody wrote yet: new tensors come full of a pattern, a NaN of an odd payload, by
# which a read of it shows. Arithmetic hands the payload on. Types of 8 bits have no pattern to
# spare.
PATTERNS = {
    torch.float64: (torch.int64, 0x7FF8DEAD_DEADDEAD),
    torch.float32: (torch.int32, 0x7FC0DEAD),
    torch.float16: (torch.int16, 0x7EAD),
    torch.bfloat16: (torch.int16, 0x7FED),
    torch.int64: (torch.int64, 0x5EADDEAD_DEADDEAD),
    torch.int32: (torch.int32, 0x5EADDEAD),
}
MAKERS = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty"))


def is_written(x: Tensor) -> Tensor:
    """Which elements of `x` do not hold the pattern of their type."""
    if x.dtype not in PATTERNS:
        return torch.ones_like(x, dtype=torch.bool)
    integer, pattern = PATTERNS[x.dtype]
    return x.view(integer) != pattern


@contextmanager
def marked() -> Iterator[None]:
    """Inside, `MAKERS` fill new CPU tensors with the patterns."""

    def filling(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            x = make(*args, **kwargs)
            if x.dtype in PATTERNS and x.device.type == "cpu" and "out" not in kwargs:
                integer, pattern = PATTERNS[x.dtype]
                x.detach().view(integer).fill_(pattern)
            return x

        return made

    with ExitStack() as stack:
        for owner, name in MAKERS:
            stack.enter_context(mock.patch.object(owner, name, filling(getattr(owner, name))))
        yield


# Races: two lanes at one place in memory, one of them writing, with nothing that orders them. Two
# lanes of a program are ordered by bar.sync between them, lanes of two programs by nothing. A cell
# remembers its last writer and its readers since, as the lowest and the highest lane; an epoch
# counts a program's barriers.
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
