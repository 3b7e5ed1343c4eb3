"""Differences between kinds of devices, for the engines: one entry for each kind; no other file asks for the kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

MIB = 2**20


@dataclass(frozen=True)
class Device:
    """A kind of device."""

    fewest_rows: int  # of a product; fewer are padded
    row_multiple: int  # a product's rows are padded to a multiple of this
    width_multiple: int  # rows of logits start at multiples of this many elements
    mixed_products: bool  # True if 16-bit operands have products with fp32 results, `mixed_mm`
    slow_fp32: bool  # True if fp32 products are much slower than 16-bit ones
    fp32_rows: (
        int | None
    )  # of an fp32 product: one tile, so that a row's bits do not depend on other rows; None: all
    casts_into: (
        bool  # True if ``x * factor`` is rounded to 16 bits in one pass, without a temporary
    )
    workspaces: tuple[
        int, ...
    ]  # default budgets of chunks in bytes, few, rising; more free memory, larger budget
    free: Callable[[torch.device], int] | None  # bytes that the driver has free; None: never asked
    unused: Callable[
        [torch.device], int
    ]  # unused bytes in torch's allocator that it could give back
    is_capturing: Callable[
        [], bool
    ]  # a CUDA graph: nothing may wait for the device, or depend on its free memory

    def padded_rows(self, n: int) -> int:
        """Return the number of rows that the products of `n` rows are padded to.

        The vendor library picks its kernel by the number of rows, and the bits of a row must not depend on how many
        others there are. On a CPU the choice matters below `fewest_rows`. On a GPU a whole tile costs no more than a
        part of it.
        """
        return max(self.fewest_rows, -(-n // self.row_multiple) * self.row_multiple) if n > 0 else 0

    def row_width(self, vocab: int) -> int:
        """Return the distance between rows of logits, in elements.

        On a GPU rows start at multiples of 128 bytes, also those of 16-bit d logits. Otherwise the vendor library's
        products are several times slower, and the row kernels have to go element by element.
        """
        return -(-vocab // self.width_multiple) * self.width_multiple


def _asked(query: Callable[[torch.device], int]) -> Callable[[torch.device], int]:
    """Return `query`, but with 0 for an answer where the driver or the allocator raises."""

    def ask(device: torch.device) -> int:
        try:
            return int(query(device))
        except RuntimeError:
            return 0

    return ask


def _unused(device: torch.device) -> int:
    """Return the bytes of the allocator's wholly free blocks; it cannot give back the free part of a block in use."""
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    reserved, active, fragments = (
        stats[f"{name}_bytes"]["all"]["current"]
        for name in ("reserved", "active", "inactive_split")
    )
    return int(reserved - active - fragments)


CPU = Device(
    fewest_rows=16,
    row_multiple=1,
    width_multiple=1,
    mixed_products=False,
    slow_fp32=False,
    fp32_rows=None,
    casts_into=False,
    workspaces=(512 * MIB,),
    free=None,
    unused=lambda device: 0,
    is_capturing=lambda: False,
)
CUDA = Device(
    fewest_rows=128,
    row_multiple=128,
    width_multiple=64,
    mixed_products=True,
    slow_fp32=True,
    fp32_rows=128,
    casts_into=True,
    workspaces=(512 * MIB, 768 * MIB, 1024 * MIB, 1536 * MIB, 2048 * MIB, 3072 * MIB),
    free=_asked(lambda device: torch.cuda.mem_get_info(device)[0]),
    unused=_asked(_unused),
    is_capturing=lambda: (
        torch.cuda.is_current_stream_capturing()
    ),  # looked up when asked: tests replace it
)
ROCM = replace(CUDA, mixed_products=False)  # not all of its releases have `mixed_mm`
_KINDS = {"cpu": CPU, "cuda": CUDA, "meta": CPU}  # a new kind of device gets an entry here


@contextmanager
def meta_tensors_of(kind: Device) -> Iterator[None]:
    """Context in which tensors without data, on torch's "meta" device, are planned for as tensors of `kind`."""
    before, _KINDS["meta"] = _KINDS["meta"], kind
    try:
        yield
    finally:
        _KINDS["meta"] = before


def device_of(device: torch.device) -> Device:
    """The kind of `device`; kinds without an entry are taken for a CPU."""
    return (
        ROCM
        if device.type == "cuda" and torch.version.hip is not None
        else _KINDS.get(device.type, CPU)
    )
