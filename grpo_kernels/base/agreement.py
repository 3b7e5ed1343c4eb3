"""A call that the ranks of a group make together: they compare it before its other collectives."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.base.distributed import check_group, gather_stacked, group_device

MOST_VALUES = 96


class Each(int):
    """An integer that may differ between ranks: `check_same` replaces it by the list of all ranks'."""


@contextmanager
def check_same(argument: str, group: Any, call: str, /, **values: Any) -> Iterator[dict[str, Any]]:
    """Compare `values`, with those that the block adds, over the ranks; of tensors, dtype and shape.

    The block holds all code that may raise on one rank alone. If it does, or if values differ, every
    rank raises: each sends the same number of integers, whatever its call. Without a group, none do.
    """
    check_group(argument, group)
    if group is None:
        yield values
        return

    def exchanged(*numbers: int) -> list[list[int]]:
        sent = torch.tensor([*numbers, *[0] * (MOST_VALUES + 2 - len(numbers))])
        return [*map(list, gather_stacked(sent.to(group_device(group)), group).T.tolist())]

    try:
        yield values
        numbers = [x if isinstance(x, Each) else _checksum(x) for x in values.values()]
    except Exception:
        exchanged(1)
        raise
    refused, calls, *columns = exchanged(0, _checksum((call, *values)), *numbers)
    of_ranks = dict(zip(values, columns, strict=False))
    differ = [x for x in values if not isinstance(values[x], Each) and len({*of_ranks[x]}) > 1]
    if any(refused):
        raise ValueError(f"{argument}: rank {refused.index(1)} refuses the call of {call}")
    if len({*calls}) > 1 or differ:
        what = f"{', '.join(differ)} of {call}" if len({*calls}) == 1 else f"call, {call} here,"
        raise ValueError(f"{argument}: expected the same {what} on every rank")
    values |= {name: of_ranks[name] for name, x in values.items() if isinstance(x, Each)}


def _checksum(x: Any) -> int:
    return zlib.crc32(repr(_comparable(x)).encode())


def _comparable(x: Any) -> Any:
    if isinstance(x, Tensor):
        return str(x.dtype), *x.shape
    if is_dataclass(x):
        x = [getattr(x, field.name) for field in fields(x)]
    if isinstance(x, (list, tuple)):
        return [_comparable(y) for y in x]
    if isinstance(x, Real):
        return float(x)  # 1 and 1.0 are the same
    plain = x is None or isinstance(x, (str, torch.dtype))
    return x if plain else getattr(x, "__qualname__", type(x).__qualname__)
