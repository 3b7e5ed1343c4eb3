"""Agreement of a group's ranks before a call: all of them make it, with the same values, and none refuses.

Each rank sends the same number of integers, whatever the call, so that different calls meet as well. The integers are:
the call, the number of calls before it in this group, the reason if the rank refuses, and a number for every value that
must be the same. A refusal on one rank, or a difference, then raises on all ranks, before any other collective.

A rank that never calls cannot be told from a slow one: the others wait for it as long as the group's timeout lasts.
"""

from __future__ import annotations

import struct
import weakref
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_kernels.base.distributed import check_group, gather_stacked, group_device

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FIELDS, TEXT_BYTES = 160, 240  # most numbers that a rank sends, and most bytes of its refusal
TOLERANCE = 1e-5  # of a weighted sum, relative to the sum of |x|: ranks may round the same numbers differently
SHOWN = 3  # differences in a message

_TEXT = struct.Struct(f"{TEXT_BYTES // 8}q")
_HEADER = 4  # the call, calls before it, checksums of its values' names and of its tensors' names; then the refusal
_START = _HEADER + TEXT_BYTES // 8  # of the values
_calls: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()


class Each(int):
    """An integer that may differ between ranks, and that all ranks get to know; see `check_same`."""


@contextmanager
def check_same(
    argument: str, group: ProcessGroup | None, call: str, /, **values: Any
) -> Iterator[dict[str, Any]]:
    """Check that all ranks of `group` make the same call. The block holds all code that may raise on one rank alone.

        with check_same("process_group", group, "f", scale=scale) as values:
            values["rows"] = Each(len(x))
        total = sum(values["rows"])  # of all ranks

    At the block's end the ranks compare `values`, with those that the block added, in one collective, and the host
    waits: integer tensors by a checksum, floating tensors up to rounding, anything else by its repr. An `Each` is not
    compared; it becomes the list of all ranks' integers. An Exception in the block is raised on every rank: here as it
    is, elsewhere as a ValueError that quotes it. Without a group nothing is sent.

    Args:
        argument: name of the argument that is the group, for errors.
        call: name of the function that is called.

    Raises:
        TypeError: `group` is no process group.
        ValueError: on all ranks: one of them refuses the call, or has other values.
    """
    check_group(argument, group)
    if group is None:
        yield values
        values |= {name: [int(x)] for name, x in values.items() if isinstance(x, Each)}
        return
    before = _calls.get(group, 0)
    _calls[group] = before + 1
    called, device = [_number(call + argument), before], group_device(group)
    try:
        yield values
        tensors = {name: x for name, x in values.items() if isinstance(x, Tensor)}
        plain = {name: x for name, x in values.items() if name not in tensors}
        kinds = {name: x.is_floating_point() for name, x in tensors.items()}
        numbers = [
            *called,
            _number([*plain]),
            _number(kinds),
            *_packed(""),
            *map(_number, plain.values()),
        ]
        sent = _filled(numbers, [x.to(device) for x in _digests(tensors.values())], device)
    except Exception as error:
        refusal = _packed(f"{type(error).__name__}: {error}")
        gather_stacked(_filled([*called, 0, 0, *refusal], [], device), group)
        raise
    table = gather_stacked(sent, group).cpu()
    got = _mismatch(call, table, plain, tensors, torch.distributed.get_rank(group))
    if got:
        raise ValueError(f"{argument}: {got}")
    for i, (name, x) in enumerate(plain.items(), _START):
        if isinstance(x, Each):
            values[name] = table[:, i].tolist()


def described(x: Any, *, varying: Iterable[int] = ()) -> str:
    """Return dtype and shape of a tensor, with "*" for the sizes of dimensions `varying`; else the repr of `x`."""
    if not isinstance(x, Tensor):
        return repr(x)
    sizes = [str(size) for size in x.shape]
    for dim in varying:
        if -x.dim() <= dim < x.dim():
            sizes[dim] = "*"
    return f"{x.dtype} ({', '.join(sizes)})"


def _filled(numbers: list[int], digests: list[Tensor], device: torch.device) -> Tensor:
    """Return the numbers that a rank sends, padded to one length."""
    padding = _START + FIELDS - len(numbers) - sum(map(len, digests))
    assert padding >= 0, "more values than there is room for"
    plain = torch.tensor([*numbers, *[0] * padding], device=device)
    return torch.cat([plain[: len(numbers)], *digests, plain[len(numbers) :]])


def _mismatch(
    call: str, table: Tensor, plain: Mapping[str, Any], tensors: Mapping[str, Tensor], rank: int
) -> str | None:
    """Return the message about a difference in `table` (R, numbers) of all ranks; None if there is none."""
    expected = "expected the same call on every rank, got"
    calls, before, names, kinds = table[:, :_HEADER].T.tolist()
    if others := _others(calls, rank):
        return f"{expected} {call} here, on rank {rank}, and another call on {_ranks(others)}"
    refusals = [
        _TEXT.pack(*x).rstrip(b"\0").decode(errors="ignore")
        for x in table[:, _HEADER:_START].tolist()
    ]
    for other, refusal in enumerate(refusals):
        if refusal:
            return f"rank {other} refuses the call of {call}: {refusal}"
    if len(set(before)) > 1:
        return f"{expected} calls out of step: as many before this one as {before}; a rank left one half-done"
    if others := _others(names, rank):
        return f"{expected} other inputs of {call} on {_ranks(others)} than on rank {rank}"
    columns = table[:, _START:].T
    differences = []
    for (name, value), every in zip(plain.items(), columns.tolist(), strict=False):
        others = [] if isinstance(value, Each) else _others(every, rank)
        if others and isinstance(value, int):
            differences.append(f"{name} {every}")
        elif others:
            differences.append(f"{name} = {value} on rank {rank}, another on {_ranks(others)}")
    if not differences:
        if others := _others(kinds, rank):
            return f"{expected} other tensors of {call} on {_ranks(others)} than on rank {rank}"
        for name, every in _compared(tensors, columns[len(plain) :]):
            if others := _others(every, rank):
                differences.append(
                    f"{name} with other numbers on {_ranks(others)} than on rank {rank}"
                )
    more = f"; and {len(differences) - SHOWN} more" if len(differences) > SHOWN else ""
    return f"{expected} {'; '.join(differences[:SHOWN])}{more}" if differences else None


def _compared(tensors: Mapping[str, Tensor], columns: Tensor) -> Iterator[tuple[str, list[int]]]:
    """Yield names and one number per rank, for each tensor; sums that differ only by rounding get the same number."""
    column = iter(columns)
    for name, x in tensors.items():
        if not x.is_floating_point():
            yield name, next(column).tolist()
            continue
        sums, zeros, not_finite, sizes = (next(column) for _ in range(4))
        sums, sizes = sums.view(torch.float64), sizes.view(torch.float64)
        yield name, ((sums - sums[0]).abs() <= TOLERANCE * sizes.max()).tolist()
        yield f"{name}: its zeros", zeros.tolist()
        yield f"{name}: what is not finite", not_finite.tolist()


def _number(x: Any) -> int:
    """Return an integer of 64 bits as it is (1.0 is 1); for anything else, a checksum of its repr."""
    if isinstance(x, float) and x.is_integer():
        x = int(x)
    if isinstance(x, int) and -(2**63) <= x < 2**63:
        return int(x)
    return zlib.crc32(repr(x).encode())


def _packed(text: str) -> tuple[int, ...]:
    """Return the first bytes of a text as integers."""
    return _TEXT.unpack(text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0"))


def _digests(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield int64 digests of the tensors; neighbours of one kind, length and device are computed together."""
    for _, alike in groupby(tensors, lambda x: (x.is_floating_point(), x.numel(), x.device)):
        rows = torch.stack([x.detach().reshape(-1) for x in alike])
        yield (_sketches(rows) if rows.is_floating_point() else _checksums(rows)).reshape(-1)


def _checksums(x: Tensor) -> Tensor:
    """(k, n) integers -> (k,) checksums, which depend on the numbers and on their order."""
    x = (x.to(torch.int64) + 1) * 0x1E3779B97F4A7C15
    places = 2 * torch.arange(x.shape[1], device=x.device) + 1
    return ((x ^ (x >> 29)) * places).sum(dim=1)


def _sketches(x: Tensor) -> Tensor:
    """(k, n) floats -> (k, 4): a sum weighted by place, checksums of the places of zeros and of numbers that are not
    finite, and the sum of |x|. Both sums are the bits of a float64.
    """
    places = torch.arange(1, x.shape[1] + 1, device=x.device)
    finite = torch.isfinite(x)
    kinds = torch.where(
        torch.isnan(x), 1, torch.where(x > 0, 2, 3)
    )  # of numbers that are not finite
    values = torch.where(finite, x, 0.0).double()
    weights = (
        0.5 + (places * 40503 % 65536).double() / 65536
    )  # Fibonacci hashing: no two neighbours weigh alike
    sums = torch.stack([(values * weights).sum(dim=1), values.abs().sum(dim=1)]).view(torch.int64)
    zeros, others = (
        (places * flags).sum(dim=1) for flags in (x == 0, torch.where(finite, 0, kinds))
    )
    return torch.stack([sums[0], zeros, others, sums[1]], dim=1)


def _others(numbers: list[int], rank: int) -> list[int]:
    """Return the ranks whose number differs from that of `rank`."""
    return [other for other, x in enumerate(numbers) if x != numbers[rank]]


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if ranks[1:] else ''} {', '.join(map(str, ranks))}"
