"""Sums of a matrix's rows over lists of entries: ``out[targets[i]] += sum of values * source[ids]`` of list i.

A program has one list and a block of columns. Its loop reads the rows of several entries at a time, which are then
added up in a fixed order: the bits of a sum follow from its list alone. All lists of one block of columns come first:
the part of `source` that is read again and again is then the smaller.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.backends.sparse import Entries


@dataclass(frozen=True)
class ListConfig:
    """A step takes `block_e` entries by `block_h` columns."""

    block_e: int
    block_h: int
    num_warps: int

    def arguments(self) -> dict[str, Any]:
        """What it is to a launch."""
        constants = {"BLOCK_E": self.block_e, "BLOCK_H": self.block_h}
        return {**constants, "num_warps": self.num_warps, "num_stages": 1, "enable_fp_fusion": False}


# By whether the rows are aligned: numbers that are read one by one take registers.
ON_GPU = {True: ListConfig(8, 1024, num_warps=4), False: ListConfig(4, 1024, num_warps=4)}
INTERPRETED = ListConfig(64, 64, num_warps=1)


def launch_combine_entries(
    entries: Entries, source: Tensor, out: Tensor, targets: Tensor | None, config: ListConfig
) -> None:
    """Add to `out`; `targets` differ from one another."""
    (m,), width = entries.counts.shape, source.shape[1]
    grid = (m * triton.cdiv(width, config.block_h),)
    combine_entries_kernel[grid](
        # the lists, and where they go
        starts_ptr=entries.starts,
        counts_ptr=entries.counts,
        ids_ptr=entries.ids,
        values_ptr=entries.values,
        targets_ptr=targets,
        # what is added up
        source_ptr=source,
        out_ptr=out,
        # shapes and strides
        m=m,
        H=width,
        stride_source_n=source.stride(0),
        stride_out_n=out.stride(0),
        **config.arguments(),
    )


@triton.jit(
    do_not_specialize=["m"],
    do_not_specialize_on_alignment=["starts_ptr", "counts_ptr", "ids_ptr", "values_ptr", "targets_ptr"],
)
def combine_entries_kernel(
    # the lists: (m,), (m,), (k,), (k,), (m,)
    starts_ptr,
    counts_ptr,
    ids_ptr,
    values_ptr,
    targets_ptr,
    # (S, H), (n, H)
    source_ptr,
    out_ptr,
    # shapes and strides
    m,
    H,
    stride_source_n,
    stride_out_n,
    # the tile
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """One list, `BLOCK_H` columns; without `targets_ptr` list i goes to row i."""
    row = tl.program_id(0) % m
    columns = (tl.program_id(0) // m) * BLOCK_H + tl.arange(0, BLOCK_H)
    here = columns < H
    count = tl.load(counts_ptr + row).to(tl.int32)
    if count > 0:
        start = tl.load(starts_ptr + row)
        place = tl.arange(0, BLOCK_E)
        total = tl.zeros((BLOCK_H,), tl.float32)
        for first in range(0, count, BLOCK_E):
            listed = first + place < count
            ids = tl.load(ids_ptr + start + first + place, mask=listed, other=0)
            values = tl.load(values_ptr + start + first + place, mask=listed, other=0.0)
            rows = source_ptr + ids.to(tl.int64)[:, None] * stride_source_n
            x = tl.load(rows + columns[None, :], mask=listed[:, None] & here[None, :], other=0.0)
            total += tl.sum(values[:, None] * x.to(tl.float32), axis=0)
        target = row.to(tl.int64)
        if targets_ptr is not None:
            target = tl.load(targets_ptr + row)
        out_ptrs = out_ptr + target * stride_out_n + columns
        tl.store(out_ptrs, tl.load(out_ptrs, mask=here, other=0.0) + total, mask=here)
