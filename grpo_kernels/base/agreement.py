"""Agreement of a group's ranks before a call: all of them make it, with the same options, and none refuses.

Each rank says the same number of integers, whatever it was called with, so that two different calls meet as well: which
call it is, how many went before it in this group, whether it refuses and why, and a number for everything that has to
be alike. What one rank refuses, and what differs, then raises on all of them, before any other collective.

A rank that never calls cannot be told from a slow one: the others wait for it as long as the group's timeout lasts.
"""

from __future__ import annotations

import struct
import weakref
import zlib
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_kernels.base.distributed import check_group, gather_stacked, group_device

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FIELDS, TEXT_BYTES = 160, 240  # numbers that a rank has room for, and of its refusal
TOLERANCE = 1e-5  # of a tensor's sum of sizes, for its weighted sum: ranks that made the same may have rounded apart
SHOWN = 3  # differences in a message
PARTS = ("", ": its zeros", ": what is not finite", ": its size")  # of what is said of a float tensor

_HEADER = 4  # which call, how many before it, whether it is refused, what it speaks of
_calls: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()


class Agreement:
    """``with Agreement("process_group", group, "grpo_loss") as ranks:`` around all that may raise on one rank alone.

    Inside, `same` and `say` collect; at the end all ranks are told, a collective on which the host waits, and `every`
    has it. An Exception inside is raised on every rank: here as it is, elsewhere as a ValueError that quotes it.
    Without a group (None) nothing is sent, and nothing has to be collected: the object is then false.

    Args:
        argument: which argument of the call the group is; errors name it.
        call: what is called.
        own: as for `same`.

    Raises:
        TypeError: `group` is no process group.
    """

    def __init__(self, argument: str, group: ProcessGroup | None, call: str, **own: Any) -> None:
        check_group(argument, group)
        self.every: dict[str, list[int]] = {}  # what was said -> the numbers of all ranks
        self._argument, self.group, self._call = argument, group, call
        self._own: dict[str, Any] = own
        self._may_differ: set[str] = set()
        self._on_device: list[tuple[tuple[str, ...], Tensor]] = []
        self._before = 0

    def __bool__(self) -> bool:
        return self.group is not None

    def same(self, own: Mapping[str, Any]) -> None:
        """Collect values that must be equal on all ranks, by name; they are compared by their repr."""
        self._own |= own

    def say(self, own: Mapping[str, int]) -> None:
        """Integers that may differ, for the other ranks to know."""
        self._own |= own
        self._may_differ |= own.keys()

    def same_bits(self, name: str, *columns: Tensor) -> None:
        """Integer tensors (n,) that have to be alike, taken together, row by row."""
        self._on_device.append(((name,), _checksum(columns)[None]))

    def same_values(self, inputs: Mapping[str, Tensor | None]) -> None:
        """Float tensors (n,) that have to be alike but for their rounding; None: not given, and said by `same`."""
        given = {name: x for name, x in inputs.items() if x is not None}
        if given:
            names = tuple(name + part for name in given for part in PARTS)
            self._on_device.append((names, _sketches(torch.stack([*given.values()])).reshape(-1)))

    def __enter__(self) -> Agreement:
        if self.group is not None:
            self._before = _calls.get(self.group, 0)
            _calls[self.group] = self._before + 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.group is None or (error is not None and not isinstance(error, Exception)):
            return
        table = self._exchanged(error)
        if error is None:
            self._compare(table)

    def _exchanged(self, error: Exception | None) -> Tensor:
        """(R, numbers) on the CPU: what every rank says."""
        assert self.group is not None
        device = group_device(self.group)
        numbers, on_device, text = [], [], b""
        if error is None:
            numbers = [_number(x) for x in self._own.values()]
            on_device = [x.to(device) for _, x in self._on_device]
        else:
            text = f"{type(error).__name__}: {error}".encode()[:TEXT_BYTES]
        filled = _HEADER + len(numbers)
        room = FIELDS - len(numbers) - sum(map(len, on_device))
        assert room >= 0, "more fields than there is room for"
        about = _number([*self._own]) if error is None else 0
        said = [_number(self._call + self._argument), self._before, int(error is not None), about]
        said += [*numbers, *[0] * room]
        said += struct.unpack(f"{TEXT_BYTES // 8}q", text.ljust(TEXT_BYTES, b"\0"))
        own = torch.tensor(said, device=device)
        own = torch.cat([own[:filled], *on_device, own[filled:]])
        return gather_stacked(own, self.group).cpu()

    def _compare(self, table: Tensor) -> None:
        """Raises on every rank if anything differs; else `every`."""
        import torch.distributed as dist

        rank = dist.get_rank(self.group)
        calls, before, refused, about = table[:, :_HEADER].T.tolist()
        others = _others(calls, rank)
        if others:
            raise self._error(f"{self._call} here, on rank {rank}, and another call on {_ranks(others)}")
        if any(refused):
            first = refused.index(1)
            text = struct.pack(f"{TEXT_BYTES // 8}q", *table[first, -TEXT_BYTES // 8 :].tolist())
            said = text.rstrip(b"\0").decode(errors="ignore")
            raise ValueError(f"{self._argument}: rank {first} refuses the call of {self._call}: {said}")
        if len(set(before)) > 1:
            raise self._error(f"calls out of step: as many before this one as {before}; a rank left one half-done")
        if others := _others(about, rank):
            raise self._error(f"other inputs of {self._call} on {_ranks(others)} than on rank {rank}")
        columns = table[:, _HEADER : -TEXT_BYTES // 8].T
        self._compare_named([*self._own], columns, rank)
        on_device = [name for names, _ in self._on_device for name in names]  # the same, now that all else is
        self._compare_named(on_device, columns[len(self._own) :], rank)

    def _compare_named(self, names: list[str], columns: Tensor, rank: int) -> None:
        """Raises on every rank if one of `columns` (>= names, R) differs that must not; else `every` has them."""
        columns = columns[: len(names)]
        every = dict(zip(names, columns.tolist(), strict=True))
        self._settle_values(every, columns)
        self.every |= every
        differ = {name: _others(x, rank) for name, x in every.items() if name not in self._may_differ}
        found = [self._difference(name, others, rank) for name, others in differ.items() if others]
        if found:
            more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            raise self._error("; ".join(found[:SHOWN]) + more)

    @staticmethod
    def _settle_values(every: dict[str, list[int]], columns: Tensor) -> None:
        """Sums that differ by no more than rounding become the same."""
        places = {name: i for i, name in enumerate(every)}
        for name in places:
            size_name = name + PARTS[-1]
            if size_name in places:
                sums, sizes = (columns[places[x]].view(torch.float64) for x in (name, size_name))
                close = (sums - sums[0]).abs() <= TOLERANCE * sizes.max()
                every[name], every[size_name] = (~close).long().tolist(), [0] * len(sizes)

    def _difference(self, name: str, others: list[int], rank: int) -> str:
        """One difference, in words."""
        if name not in self._own:
            return f"{name} with other numbers on {_ranks(others)} than on rank {rank}"
        own = self._own[name]
        if isinstance(own, int):
            return f"{name} {self.every[name]}"
        return f"{name} = {own} on rank {rank}, another on {_ranks(others)}"

    def _error(self, got: str) -> ValueError:
        return ValueError(f"{self._argument}: expected the same call on every rank, got {got}")


def described(x: Any, *, own: Iterable[int] = ()) -> str:
    """Dtype and shape of a tensor, without the sizes of the dimensions in `own`, which each rank has for itself."""
    if not isinstance(x, Tensor):
        return repr(x)
    sizes = [str(size) for size in x.shape]
    for dim in own:
        if -x.dim() <= dim < x.dim():
            sizes[dim] = "*"
    return f"{x.dtype} ({', '.join(sizes)})"


def _number(x: Any) -> int:
    """An integer of 64 bits as it is, 1.0 like 1, of anything else a checksum of its repr."""
    if isinstance(x, float) and x.is_integer():
        x = int(x)
    if isinstance(x, int) and -(2**63) <= x < 2**63:
        return int(x)
    return zlib.crc32(repr(x).encode())


def _checksum(columns: Iterable[Tensor]) -> Tensor:
    """() int64 of integer tensors (n,): any other rows, or the same at other places, have another, but by accident."""
    total: Tensor | None = None
    for column in columns:
        x = column.to(torch.int64) if total is None else total * 0x2545F4914F6CDD1D + column
        x = (x + 1) * 0x1E3779B97F4A7C15
        total = x ^ (x >> 29)
    assert total is not None
    places = 2 * torch.arange(total.shape[0], device=total.device) + 1
    return (total * places).sum()


def _sketches(x: Tensor) -> Tensor:
    """(k, n) -> (k, 4) int64: a sum with a weight of its own for every place, and the three other `PARTS`."""
    places = torch.arange(1, x.shape[1] + 1, device=x.device)
    finite = torch.isfinite(x)
    kinds = torch.where(torch.isnan(x), 1, torch.where(x > 0, 2, 3))  # of what is not finite
    values = torch.where(finite, x, 0.0).double()
    weights = 0.5 + (places * 40503 % 65536).double() / 65536  # Fibonacci hashing: no two neighbours weigh alike
    sums = torch.stack([(values * weights).sum(dim=1), values.abs().sum(dim=1)]).view(torch.int64)
    zeros, others = ((places * flags).sum(dim=1) for flags in (x == 0, torch.where(finite, 0, kinds)))
    return torch.stack([sums[0], zeros, others, sums[1]], dim=1)


def _others(numbers: list[int], rank: int) -> list[int]:
    """The ranks that have another number than this one."""
    return [other for other, x in enumerate(numbers) if x != numbers[rank]]


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if ranks[1:] else ''} {', '.join(map(str, ranks))}"
