"""In which chunks an engine goes over its rows, so that a workspace is kept and the products are large."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from grpo_kernels.engine.device import CPU, Device

CHUNKS_OF_A_GROUP = (8, 4, 2)  # as many as have rows enough: `LARGE_CHUNK_ROWS` each, or at least so many
LARGE_CHUNK_ROWS, LEAST_CHUNK_ROWS = 1024, 256


@dataclass(frozen=True)
class Group:
    """Rows whose d logits enter one backward product: the rows [start, stop), projected in chunks."""

    start: int
    stop: int
    rows: int  # stop - start, padded
    chunks: tuple[slice, ...]  # of those rows

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Costs:
    """Bytes that one row of a chunk and of a group need; passed to `plan_groups`."""

    chunk_row_bytes: int
    group_row_bytes: int
    grouped: bool
    scratch_bytes: Callable[[int], int]

    def taken(self, group: Group) -> int:
        """By the largest chunk of a group, and the group around it."""
        rows = max((chunk.stop - chunk.start for chunk in group.chunks), default=0)
        return rows * self.chunk_row_bytes + group.rows * self.group_row_bytes + self.scratch_bytes(rows)


def plan_groups(
    n: int,
    workspace_bytes: int,
    *,
    chunk_row_bytes: int,
    group_row_bytes: int,
    grouped: bool,
    scratch_bytes: Callable[[int], int],
    device: Device = CPU,
) -> list[Group]:
    """The groups of `n` rows whose workspace stays within `workspace_bytes`, if that allows `Device.fewest_rows`.

    Groups differ by at most one row (or by one multiple of the device's), so that none is much smaller than the others.

    Args:
        chunk_row_bytes: what a row of a chunk takes, as long as the chunk lasts.
        group_row_bytes: what a row of a group takes, as long as the group lasts.
        grouped: whether several chunks may share a backward product; else a group is one chunk. Each product with d
            weight reads and writes all of its accumulator, so fewer are better.
        scratch_bytes: what a chunk of so many rows takes besides; not decreasing.
    """

    def most_rows(per_group: int) -> int:
        return chunk_rows(chunk_row_bytes + per_group * group_row_bytes, workspace_bytes, scratch_bytes, device)

    sizes = {per_group: most_rows(per_group) for per_group in (CHUNKS_OF_A_GROUP if grouped else ())}
    choices = ((per_group, least) for least in (LARGE_CHUNK_ROWS, LEAST_CHUNK_ROWS) for per_group in sizes)
    per_group = next((per_group for per_group, least in choices if sizes[per_group] >= least), 1)
    most = sizes.get(per_group) or most_rows(per_group)
    multiple = device.row_multiple
    most -= most % multiple
    groups = []
    for start, stop in _even_parts(n, per_group * most, multiple):
        rows = device.padded_rows(stop - start)
        parts = [(0, rows)] if per_group == 1 else _even_parts(rows, most, multiple)
        groups.append(Group(start, stop, rows, tuple(slice(*part) for part in parts)))
    return groups


def _even_parts(n: int, most: int, multiple: int) -> list[tuple[int, int]]:
    """[0, n) in as few parts as hold at most `most` each, which start at multiples of `multiple`."""
    count = -(-n // most)
    bounds = [min(n, -(-(n * i // count) // multiple) * multiple) for i in range(count + 1)] if count else []
    return list(itertools.pairwise(bounds))


def chunk_rows(row_bytes: int, workspace_bytes: int, scratch_bytes: Callable[[int], int], device: Device = CPU) -> int:
    """The most rows a chunk may have so that the workspace stays within `workspace_bytes`; at least `fewest_rows`,
    whatever the budget: to fewer, padding would be added.

    Args:
        row_bytes: what a row takes: its logits and its hidden state.
        workspace_bytes: the budget.
        scratch_bytes: what a chunk of so many rows takes besides; not decreasing.
    """
    least = device.fewest_rows
    low, high = least, max(least, workspace_bytes // row_bytes)
    while low < high:
        middle = (low + high + 1) // 2
        rows = device.padded_rows(middle)
        if rows * row_bytes + scratch_bytes(rows) <= workspace_bytes:
            low = middle
        else:
            high = middle - 1
    return low
