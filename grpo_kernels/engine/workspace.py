"""How many rows to take at a time: kinds of devices, available memory, groups and chunks.

A group holds the rows whose d logits enter one backward product. A chunk holds the rows of a group
whose logits exist at the same time. Both are as large as the workspace allows, so that products are
large. What differs between kinds of devices in products and memory is said here alone.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels.base.tensors import accumulator_of
from grpo_kernels.head import HeadTensors

MIB = 2**20
# chunks of a group, in order of preference: first with at least `LARGE_CHUNK_ROWS` rows each, then
# with at least `LEAST_CHUNK_ROWS`
CHUNKS_OF_A_GROUP = (8, 4, 2)
LARGE_CHUNK_ROWS, LEAST_CHUNK_ROWS = 1024, 256


@dataclass(frozen=True)
class Device:
    """A kind of device.

    Attributes:
        fewest_rows: minimum rows of a product; fewer are padded.
        row_multiple: a product's rows are padded to a multiple of this.
        width_multiple: rows of logits start at multiples of this many elements.
        mixed_products: True if 16-bit operands have products with fp32 results (`gemm.mixed_mm`).
        fp32_rows: rows of an fp32 product: one tile, so that a row's bits do not depend on other
            rows. None means all rows.
        casts_into: True if ``x * factor`` is rounded to 16 bits in one pass, without a temporary.
        workspaces: default budgets of chunks in bytes, increasing; more free memory allows a larger
            one.
        free: function that returns the free bytes, if they are fewer than asked for with those that
            torch's allocator could give back; None means never ask the driver.
        is_capturing: function that returns True within a CUDA graph, where nothing may wait for the
            device or depend on its free memory.
    """

    fewest_rows: int
    row_multiple: int
    width_multiple: int
    mixed_products: bool
    fp32_rows: int | None
    casts_into: bool
    workspaces: tuple[int, ...]
    free: Callable[[torch.device, int], int] | None
    is_capturing: Callable[[], bool]

    def padded_rows(self, n: int) -> int:
        """Number of rows that the products of `n` rows are padded to.

        The vendor library chooses its kernel by the number of rows, but a row's bits must not
        depend on how many other rows there are. On a CPU the kernel changes only below
        `fewest_rows`. On a GPU a whole tile costs no more than a part of it.
        """
        return max(self.fewest_rows, -(-n // self.row_multiple) * self.row_multiple) if n > 0 else 0

    def row_width(self, vocab: int) -> int:
        """Distance between rows of logits, in elements.

        On a GPU, rows start at multiples of 128 bytes, including rows of 16-bit d logits. Otherwise
        the vendor library's products are several times slower, and the row kernels must work
        element by element.
        """
        return -(-vocab // self.width_multiple) * self.width_multiple


def _free(device: torch.device, wanted: int) -> int:
    free = 0
    with suppress(RuntimeError):
        free = int(torch.cuda.mem_get_info(device)[0])
    if free < wanted:  # ask the allocator only if needed, since that takes longer
        with suppress(RuntimeError):
            stats = torch.cuda.memory_stats_as_nested_dict(device)
            # only entirely free blocks: it cannot give back the free part of a block in use
            kinds = ("reserved", "active", "inactive_split")
            reserved, active, fragments = (stats[f"{x}_bytes"]["all"]["current"] for x in kinds)
            free += int(reserved - active - fragments)
    return free


CPU = Device(
    fewest_rows=16,
    row_multiple=1,
    width_multiple=1,
    mixed_products=False,
    fp32_rows=None,
    casts_into=False,
    workspaces=(512 * MIB,),
    free=None,
    is_capturing=lambda: False,
)
CUDA = Device(
    fewest_rows=128,
    row_multiple=128,
    width_multiple=64,
    mixed_products=True,
    fp32_rows=128,
    casts_into=True,
    workspaces=(512 * MIB, 768 * MIB, 1024 * MIB, 1536 * MIB, 2048 * MIB, 3072 * MIB),
    free=_free,
    # looked up at each call, since tests replace it
    is_capturing=lambda: torch.cuda.is_current_stream_capturing(),
)
ROCM = replace(CUDA, mixed_products=False)  # not all releases of ROCm have such products
_KINDS = {"cpu": CPU, "cuda": CUDA, "meta": CPU}  # a new kind of device gets an entry here


@contextmanager
def meta_tensors_of(kind: Device) -> Iterator[None]:
    """Context in which plans treat tensors on torch's "meta" device as tensors of `kind`."""
    before, _KINDS["meta"] = _KINDS["meta"], kind
    try:
        yield
    finally:
        _KINDS["meta"] = before


def device_of(device: torch.device) -> Device:
    """The kind of `device`; devices without an entry are treated as a CPU."""
    if device.type == "cuda" and torch.version.hip is not None:
        return ROCM
    return _KINDS.get(device.type, CPU)


def needs_conversion(weight: Tensor, operand_dtype: torch.dtype) -> bool:
    """True if the whole weight must be converted to the 16-bit dtype of its products.

    A weight that is converted to 32 bits is never converted as a whole.
    """
    mixed = operand_dtype.itemsize == 2 and device_of(weight.device).mixed_products
    return mixed and weight.dtype != operand_dtype


class Memory(NamedTuple):
    """Decisions based on a device's free memory, after the gradients have taken theirs."""

    tight: bool  # too little memory for an accumulator of d weight: `lean` serves
    converts: bool  # enough memory for a copy of the weight in the operands' dtype
    workspace: int  # bytes that chunks may take by default: one of `Device.workspaces`


AMPLE = Memory(tight=False, converts=True, workspace=max(CUDA.workspaces))


def free_memory(
    weights: list[tuple[Tensor, torch.dtype]],
    hidden: Tensor,
    needs_grad: HeadTensors,
    workspace_bytes: int | None,
) -> Memory:
    """Ask the device for its free memory, and decide how to use it; on a CPU return `AMPLE`.

    Also return `AMPLE` while a CUDA graph is captured: a graph must not depend on the memory that
    is free at that time.

    Args:
        weights: the weights of the head and of the second head, with the dtypes of their products'
            operands.
        hidden: hidden states of all positions.
        workspace_bytes: the budget; None for the default.
    """
    weight, device = weights[0][0], device_of(hidden.device)
    if device.free is None or device.is_capturing():
        return AMPLE
    copies = sum(x.numel() * dtype.itemsize for x, dtype in weights if needs_conversion(x, dtype))
    gradients = sum(
        x.numel() * (accumulator_of(x.dtype).itemsize + x.element_size())
        for x, wanted in ((weight, needs_grad.weight), (hidden, needs_grad.hidden))
        if wanted
    )
    if workspace_bytes is not None:
        budgets = [workspace_bytes]
    else:
        large = large_workspace(weight, needs_grad, heads=len(weights))
        # the workspaces up to the first that is large enough
        budgets = [x for x in device.workspaces if x < large]
        budgets.append(device.workspaces[len(budgets)])
    free = device.free(weight.device, gradients + copies + budgets[-1])
    converts = gradients + copies + budgets[0] <= free
    held = gradients + (copies if converts else 0)
    return Memory(
        tight=needs_grad.weight and gradients + budgets[0] > free,
        converts=converts,
        workspace=max((x for x in budgets if held + x <= free), default=budgets[0]),
    )


def large_workspace(weight: Tensor, needs_grad: HeadTensors, heads: int = 1) -> int:
    """Bytes of chunks of `LARGE_CHUNK_ROWS` rows, within the device's `workspaces`.

    On a GPU, a product with fewer rows is bound by reading the weight. On a CPU, products are too
    slow for that to matter. `heads` is the number of heads whose logits exist at the same time.
    """
    device, (vocab, width) = device_of(weight.device), weight.shape
    # chunks whose d logits exist at the same time
    chunks = CHUNKS_OF_A_GROUP[0] if needs_grad.weight else 1
    d_logits = 2 * chunks if any(needs_grad) else 0
    row_bytes = device.row_width(vocab) * (4 * heads + d_logits) + width * 4 * chunks
    return min(max(device.workspaces[0], LARGE_CHUNK_ROWS * row_bytes), device.workspaces[-1])


class Group(NamedTuple):
    """The rows [start, stop) of a sweep, whose d logits enter one backward product."""

    start: int
    stop: int
    padded_rows: int  # stop - start, and padding
    chunks: tuple[slice, ...]  # of those rows
    chunk_rows: int  # of the largest chunk
    workspace: int  # bytes; more than the budget if that is too small for the fewest rows

    @property
    def n(self) -> int:
        """Rows without padding."""
        return self.stop - self.start


def divide(
    n: int,
    workspace_bytes: int,
    device: Device,
    *,
    chunk_row_bytes: int,
    group_row_bytes: int,
    grouped: bool,
    scratch_bytes: Callable[[int], int],
) -> list[Group]:
    """Divide `n` rows into groups whose workspace stays within `workspace_bytes`, if possible.

    Groups differ by at most one row (or one `Device.row_multiple`), so all are about equally large.
    A chunk has at least `Device.fewest_rows`.

    Args:
        chunk_row_bytes: bytes per row of a chunk, while the chunk lasts.
        group_row_bytes: bytes per row of a group, while the group lasts.
        grouped: True if several chunks may share a backward product; else a group is one chunk.
            Each product for d weight reads and writes its whole accumulator, so fewer products are
            better.
        scratch_bytes: further bytes for a chunk with the given number of rows; not decreasing.
    """

    multiple = device.row_multiple
    enough = max(LARGE_CHUNK_ROWS, -(-n // multiple) * multiple)  # more rows change nothing

    def rows_of_chunk(per_group: int) -> int:
        row_bytes, least = chunk_row_bytes + per_group * group_row_bytes, device.fewest_rows

        def taken(m: int) -> int:
            return m * row_bytes + scratch_bytes(m)

        if taken(enough) <= workspace_bytes:
            return enough
        rows = range(least + 1, workspace_bytes // row_bytes + 1)
        return least + bisect_right(rows, workspace_bytes, key=taken)

    sizes = {count: rows_of_chunk(count) for count in (CHUNKS_OF_A_GROUP if grouped else ())}
    choices = itertools.product((LARGE_CHUNK_ROWS, LEAST_CHUNK_ROWS), sizes)
    per_group = next((count for least, count in choices if sizes[count] >= least), 1)
    most = sizes.get(per_group) or rows_of_chunk(per_group)
    most -= most % multiple  # chunks are padded to this multiple
    groups = []
    for start, stop in _even_parts(n, per_group * most, multiple):
        rows = device.padded_rows(stop - start)
        parts = [(0, rows)] if per_group == 1 else _even_parts(rows, most, multiple)
        chunks = tuple(slice(*part) for part in parts)
        m = max(chunk.stop - chunk.start for chunk in chunks)
        taken = m * chunk_row_bytes + rows * group_row_bytes + scratch_bytes(m)
        groups.append(Group(start, stop, rows, chunks, m, taken))
    return groups


def _even_parts(n: int, most: int, multiple: int) -> list[tuple[int, int]]:
    """Divide [0, n) into the fewest parts of at most `most`, from multiples of `multiple`."""
    count = -(-n // most)
    if not count:
        return []
    bounds = (min(n, -(-(n * i // count) // multiple) * multiple) for i in range(count + 1))
    return list(itertools.pairwise(bounds))
