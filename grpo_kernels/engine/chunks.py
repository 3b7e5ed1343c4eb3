"""Division of a sweep's rows into groups and chunks, so that a workspace is not exceeded and the products are large.

A group is rows whose d logits enter one backward product. A chunk is rows of a group whose logits exist at one time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from grpo_kernels.engine.device import CPU, Device, device_of
from grpo_kernels.engine.head_plan import HeadPlan
from grpo_kernels.engine.memory import CHUNKS_OF_A_GROUP, LARGE_CHUNK_ROWS, LEAST_CHUNK_ROWS
from grpo_kernels.engine.records import NeedsGrad, Operands, Rows
from grpo_kernels.engine.vocab_parallel import widest_part


@dataclass(frozen=True)
class Group:
    """The rows [start, stop) of a sweep, whose d logits enter one backward product."""

    start: int
    stop: int
    rows: int  # stop - start, padded
    chunks: tuple[slice, ...]  # of those rows

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def chunk_rows(self) -> int:
        """Rows of the largest chunk."""
        return max((chunk.stop - chunk.start for chunk in self.chunks), default=0)


@dataclass(frozen=True)
class Costs:
    """Bytes that the rows of a sweep need.

    Attributes:
        chunk_row_bytes: for a row of a chunk, as long as the chunk lasts.
        group_row_bytes: for a row of a group, as long as the group lasts.
        grouped: True if several chunks may share a backward product; else a group is one chunk. Each product for d
            weight reads and writes all of its accumulator, so fewer are better.
        scratch_bytes: further bytes for a chunk with the given number of rows; not decreasing.
    """

    chunk_row_bytes: int
    group_row_bytes: int
    grouped: bool
    scratch_bytes: Callable[[int], int]

    def taken(self, group: Group) -> int:
        """Return the bytes of the largest chunk of a group, and of the group around it."""
        rows = group.chunk_rows
        return (
            rows * self.chunk_row_bytes
            + group.rows * self.group_row_bytes
            + self.scratch_bytes(rows)
        )


def plan_groups(
    rows: Rows, head: Operands, plan: HeadPlan, needs_grad: NeedsGrad | None
) -> list[Group]:
    """Return the groups of a sweep over `rows`."""
    costs, device = costs_of(rows, head, plan, needs_grad), device_of(head.weight.device)
    return divide(len(rows), plan.workspace_bytes, costs, device)


def planned_bytes(rows: Rows, head: Operands, plan: HeadPlan, needs_grad: NeedsGrad | None) -> int:
    """Return the peak bytes of a sweep's chunks: at most `HeadPlan.workspace_bytes`, if that is enough for a chunk of
    `Device.fewest_rows`. Works on meta tensors too.
    """
    costs = costs_of(rows, head, plan, needs_grad)
    return max(
        (costs.taken(group) for group in plan_groups(rows, head, plan, needs_grad)), default=0
    )


def costs_of(rows: Rows, head: Operands, plan: HeadPlan, needs_grad: NeedsGrad | None) -> Costs:
    """Return the costs of a sweep: a chunk's logits; a group's operands, and its d logits if of another dtype."""
    products, device = (
        plan.products(widest_part(head.weight, plan.shard)),
        device_of(head.weight.device),
    )
    vocab = products.weight.shape[0]
    width = device.row_width(vocab)
    row_bytes = width * plan.accumulator.itemsize
    separate = needs_grad is not None and products.gradient_dtype != plan.accumulator
    chunk_row_bytes, slice_bytes, with_teacher = (
        row_bytes,
        products.slice_bytes,
        plan.teacher is not None,
    )
    if rows.top_k is not None:
        chunk_row_bytes += rows.top_k.row_bytes()
    if plan.teacher is not None and head.teacher is not None:
        other = plan.teacher.products(widest_part(head.teacher.weight, plan.shard))
        chunk_row_bytes, slice_bytes = (
            2 * row_bytes + other.hidden_bytes(),
            max(slice_bytes, other.slice_bytes),
        )

    group_row_bytes = products.hidden_bytes() + (
        width * products.gradient_dtype.itemsize if separate else 0
    )

    def scratch_bytes(m: int) -> int:  # products and row work never run at the same time
        return max(
            slice_bytes, plan.backend.scratch_rows(m, vocab, teacher=with_teacher) * row_bytes
        )

    grouped = (
        separate and needs_grad is not None and needs_grad.weight and not products.scales_gradient
    )
    return Costs(chunk_row_bytes, group_row_bytes, grouped, scratch_bytes)


def divide(n: int, workspace_bytes: int, costs: Costs, device: Device = CPU) -> list[Group]:
    """Divide `n` rows into groups whose workspace stays within `workspace_bytes`, if that allows
    `Device.fewest_rows`.

    Groups differ by at most one row (or by one `Device.row_multiple`), so that none is much smaller than the others.
    """

    def rows_of_chunk(per_group: int) -> int:
        row_bytes = costs.chunk_row_bytes + per_group * costs.group_row_bytes
        return most_rows(row_bytes, workspace_bytes, costs.scratch_bytes, device.fewest_rows)

    sizes = {
        per_group: rows_of_chunk(per_group)
        for per_group in (CHUNKS_OF_A_GROUP if costs.grouped else ())
    }
    choices = (
        (per_group, least) for least in (LARGE_CHUNK_ROWS, LEAST_CHUNK_ROWS) for per_group in sizes
    )
    per_group = next((per_group for per_group, least in choices if sizes[per_group] >= least), 1)
    most = sizes.get(per_group) or rows_of_chunk(per_group)
    multiple = device.row_multiple
    most -= most % multiple  # to which a chunk's rows are padded
    groups = []
    for start, stop in _even_parts(n, per_group * most, multiple):
        rows = device.padded_rows(stop - start)
        parts = [(0, rows)] if per_group == 1 else _even_parts(rows, most, multiple)
        groups.append(Group(start, stop, rows, tuple(slice(*part) for part in parts)))
    return groups


def _even_parts(n: int, most: int, multiple: int) -> list[tuple[int, int]]:
    """Return [0, n) in the fewest parts of at most `most`; each part starts at a multiple of `multiple`."""
    count = -(-n // most)
    bounds = (
        [min(n, -(-(n * i // count) // multiple) * multiple) for i in range(count + 1)]
        if count
        else []
    )
    return list(itertools.pairwise(bounds))


def most_rows(
    row_bytes: int, workspace_bytes: int, scratch_bytes: Callable[[int], int], least: int
) -> int:
    """Return the most rows a chunk may have so that the workspace stays within `workspace_bytes`.

    Args:
        row_bytes: bytes for a row of a chunk, with the group that it belongs to.
        workspace_bytes: the budget.
        scratch_bytes: further bytes for a chunk with the given number of rows; not decreasing.
        least: the result, where the budget allows fewer: they would be padded to that.
    """
    low, high = least, max(least, workspace_bytes // row_bytes)
    while low < high:
        middle = (low + high + 1) // 2
        if middle * row_bytes + scratch_bytes(middle) <= workspace_bytes:
            low = middle
        else:
            high = middle - 1
    return low
