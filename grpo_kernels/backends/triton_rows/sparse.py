"""Rows of d logits with few entries: `backends.sparse` says what is computed, here as there, entries bit by bit.

One program owns whole rows, and goes through them tile by tile. Entries are put in their places by the sums of what is
chosen before them in the tile, after those of the tiles before: ids rise, and nothing is added up out of order. The
bits of a sum follow from the width of the tile alone, as in `reduce`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.backends.sparse import Entries, Thinned
from grpo_kernels.backends.triton_rows.configs import RowConfig
from grpo_kernels.backends.triton_rows.reduce import sum_lanes
from grpo_kernels.backends.triton_rows.sparse_tiles import (
    BITS,
    CERTAIN_STEP,
    CHANCES,
    STEPS,
    add_errors,
    inverse_of,
    lanes,
    larger_or_nan,
    load_tile,
    power_of_2,
    put_certain,
    put_drawn,
)
from grpo_kernels.backends.triton_rows.steps import row_block

PER_ROW = ["top_ptr", "k_ptr", "keys_ptr", "counts_ptr", "expected_ptr", "spread_ptr", "out_ptr"]


def launch_largest(d_logits: Tensor, config: RowConfig) -> Tensor:
    """The largest |g| of each row, NaN where a number is not finite."""
    top = _per_row(d_logits)
    largest_kernel[_grid(d_logits, config)](**_rows(d_logits), top_ptr=top, **config.arguments())
    return top


def launch_certain(d_logits: Tensor, top: Tensor, most: int, config: RowConfig) -> Entries:
    """The entries of r >= 2^-CERTAIN, in rooms of `most` each."""
    entries, room = _room(top, most)
    certain_kernel[_grid(d_logits, config)](**_rows(d_logits), top_ptr=top, **room, **config.arguments())
    return entries


def launch_errors(d_logits: Tensor, norms: Tensor, top: Tensor, config: RowConfig) -> Tensor:
    """The error with each threshold, (m, STEPS)."""
    out = top.new_empty(len(top), STEPS.value)
    errors_kernel[_grid(d_logits, config)](
        **_rows(d_logits), norms_ptr=norms, top_ptr=top, out_ptr=out, **config.arguments()
    )
    return out


def launch_thin(
    d_logits: Tensor, top: Tensor, k: Tensor, keys: Tensor, most: int, first_id: int, config: RowConfig
) -> Thinned:
    """The entries of r < 2^-CERTAIN as the threshold 2^-k leaves them, in rooms of `most` each."""
    entries, room = _room(top, most)
    found = Thinned(entries, torch.empty_like(top), torch.empty_like(top))
    thin_kernel[_grid(d_logits, config)](
        **_rows(d_logits),
        top_ptr=top,
        k_ptr=k,
        keys_ptr=keys,
        first_id=first_id,
        expected_ptr=found.expected,
        spread_ptr=found.spread,
        **room,
        **config.arguments(),
    )
    return found


def _per_row(d_logits: Tensor) -> Tensor:
    return d_logits.new_empty(len(d_logits), dtype=torch.float32)


def _grid(d_logits: Tensor, config: RowConfig) -> tuple[int]:
    return (triton.cdiv(len(d_logits), config.block_n),)


def _rows(d_logits: Tensor) -> dict[str, Any]:
    n, vocab = d_logits.shape
    return {"d_logits_ptr": d_logits, "n": n, "V": vocab, "stride_n": d_logits.stride(0)}


def _room(like: Tensor, most: int) -> tuple[Entries, dict[str, Any]]:
    """Uninitialised entries of as many rows as `like` has, and where a kernel writes them to."""
    m = len(like)
    ids, values = like.new_empty(m, most, dtype=torch.int32), like.new_empty(m, most)
    counts = like.new_empty(m, dtype=torch.int64)
    starts = torch.arange(m, device=like.device) * most
    entries = Entries(starts, counts, ids.view(-1), values.view(-1))
    return entries, {"counts_ptr": counts, "ids_ptr": ids, "values_ptr": values, "most": most}


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=PER_ROW)
def largest_kernel(
    d_logits_ptr,  # (n, V)
    top_ptr,  # (n,)
    n,
    V,
    stride_n,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """The largest |g| of `BLOCK_N` rows."""
    rows, counts = row_block(tl.program_id(0), n, BLOCK_N)
    row_ptrs = d_logits_ptr + rows.to(tl.int64)[:, None] * stride_n
    tops = tl.zeros((BLOCK_N, BLOCK_V), tl.float32)
    whole = V // BLOCK_V * BLOCK_V
    for start in tl.range(0, whole, BLOCK_V, num_stages=NUM_STAGES):
        tops = larger_or_nan(tops, load_tile(row_ptrs, start, None, BLOCK_V))
    if whole < V:
        tops = larger_or_nan(tops, load_tile(row_ptrs, whole, V, BLOCK_V))
    top = tl.max(tops, axis=1)
    top = tl.where(tl.max((tops != tops).to(tl.int32), axis=1) > 0, float("nan"), top)
    tl.store(top_ptr + rows, top + 0.0 * top, mask=counts)  # inf is not finite either


@triton.jit(do_not_specialize=["n", "most"], do_not_specialize_on_alignment=PER_ROW)
def certain_kernel(
    d_logits_ptr,  # (n, V)
    top_ptr,  # (n,)
    # results: (n,), (n, most), (n, most)
    counts_ptr,
    ids_ptr,
    values_ptr,
    n,
    V,
    most,
    stride_n,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """The certain entries of `BLOCK_N` rows."""
    rows, counts = row_block(tl.program_id(0), n, BLOCK_N)
    row_ptrs = d_logits_ptr + rows.to(tl.int64)[:, None] * stride_n
    inverse = inverse_of(tl.load(top_ptr + rows))[:, None]
    room = (ids_ptr, values_ptr, rows, counts, most)
    found = tl.zeros((BLOCK_N,), tl.int32)
    whole = V // BLOCK_V * BLOCK_V
    for start in tl.range(0, whole, BLOCK_V, num_stages=NUM_STAGES):
        found = put_certain(found, row_ptrs, start, None, inverse, room, BLOCK_V)
    if whole < V:
        found = put_certain(found, row_ptrs, whole, V, inverse, room, BLOCK_V)
    tl.store(counts_ptr + rows, found.to(tl.int64), mask=counts)


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=PER_ROW)
def errors_kernel(
    d_logits_ptr,  # (n, V)
    norms_ptr,  # (V,)
    top_ptr,  # (n,)
    out_ptr,  # (n, STEPS)
    n,
    V,
    stride_n,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """The errors of `BLOCK_N` rows with all thresholds."""
    rows, counts = row_block(tl.program_id(0), n, BLOCK_N)
    row_ptrs = d_logits_ptr + rows.to(tl.int64)[:, None] * stride_n
    inverse = inverse_of(tl.load(top_ptr + rows))[:, None]
    norm_ptrs = norms_ptr + tl.zeros((BLOCK_N, 1), tl.int32)
    sums = (lanes(BLOCK_N, BLOCK_V),) * STEPS
    whole = V // BLOCK_V * BLOCK_V
    for start in tl.range(0, whole, BLOCK_V, num_stages=NUM_STAGES):
        sums = add_errors(sums, row_ptrs, norm_ptrs, start, None, inverse, BLOCK_V)
    if whole < V:
        sums = add_errors(sums, row_ptrs, norm_ptrs, whole, V, inverse, BLOCK_V)
    for i in tl.static_range(STEPS):
        tau = CERTAIN_STEP / (1 << i)
        tl.store(out_ptr + rows.to(tl.int64) * STEPS + i, sum_lanes(sums[i]) * tau, mask=counts)


@triton.jit(do_not_specialize=["n", "most", "first_id"], do_not_specialize_on_alignment=PER_ROW)
def thin_kernel(
    d_logits_ptr,  # (n, V)
    # of the rows: (n,)
    top_ptr,
    k_ptr,
    keys_ptr,
    # results: (n,), (n,), (n,), (n, most), (n, most)
    expected_ptr,
    spread_ptr,
    counts_ptr,
    ids_ptr,
    values_ptr,
    n,
    V,
    most,
    first_id,
    stride_n,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """What is drawn of `BLOCK_N` rows; of those where k is 0 nothing."""
    rows, counts = row_block(tl.program_id(0), n, BLOCK_N)
    row_ptrs = d_logits_ptr + rows.to(tl.int64)[:, None] * stride_n
    top = tl.load(top_ptr + rows)[:, None]
    k = tl.load(k_ptr + rows).to(tl.int32)[:, None]
    key = tl.load(keys_ptr + rows)[:, None]
    inverse = tl.where(k > 0, inverse_of(top), float("nan"))  # with which r is no number, and passed over
    tau = power_of_2(-k)
    of_row = (inverse, tau, top * tau)
    draw = (power_of_2(k + BITS), key.to(tl.uint32), (key >> 32).to(tl.uint32))
    room = (ids_ptr, values_ptr, rows, counts, most)
    found = tl.zeros((BLOCK_N,), tl.int32)
    sums = (lanes(BLOCK_N, BLOCK_V), lanes(BLOCK_N, BLOCK_V))
    if tl.max(tl.reshape(k, (BLOCK_N,)), axis=0) > 0:
        whole = V // BLOCK_V * BLOCK_V
        for start in tl.range(0, whole, BLOCK_V, num_stages=NUM_STAGES):
            found, sums = put_drawn(found, sums, row_ptrs, start, None, first_id, of_row, draw, room, BLOCK_V)
        if whole < V:
            found, sums = put_drawn(found, sums, row_ptrs, whole, V, first_id, of_row, draw, room, BLOCK_V)
    expected, spread = sums
    tl.store(counts_ptr + rows, found.to(tl.int64), mask=counts)
    tl.store(expected_ptr + rows, sum_lanes(expected) / CHANCES, mask=counts)
    tl.store(spread_ptr + rows, sum_lanes(spread) * tl.reshape(tau, (BLOCK_N,)), mask=counts)
