"""A row in steps of four tiles side by side, folded into running sums, with a lane for each column of a tile.

Whole steps have no mask, so that loads are wide and nothing is compared. Only the rest of a row, less than a step, has
a mask.

The sums of a row or of a lane travel as one tuple, `sums`: (m, rest, t) of `reduce`, the sum of squares, the sum of z,
and the lowest id of the largest z. A second tuple, `wanted`, says which of (t, squares, total, top_id) are asked for,
each true or false when the kernel is compiled. A sum that is not asked for is an arbitrary number.
"""

import triton
import triton.language as tl

from grpo_kernels.backends.triton_rows.reduce import (
    fold,
    fold_squares,
    merge,
    merge_squares,
    sum_lanes,
)
from grpo_kernels.backends.triton_rows.transform import load_projection, scaled


@triton.jit
def row_block(block, n, BLOCK_N: tl.constexpr):
    """Return the rows (BLOCK_N,) of a block, and a mask: past the end, the last row is repeated and does not count."""
    rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
    return tl.minimum(rows, n - 1), rows < n


@triton.jit
def reduce_rows(
    head,
    V,
    HAS_SOFTCAP: tl.constexpr,
    ROUNDED_TO: tl.constexpr,
    wanted,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """The sums of whole rows, (BLOCK_N,)."""
    LANES: tl.constexpr = BLOCK_V // 4
    sums = no_logits(BLOCK_N, LANES)
    whole = V // BLOCK_V * BLOCK_V
    for start in tl.range(0, whole, BLOCK_V, num_stages=NUM_STAGES):
        sums = reduce_step(sums, head, start, None, HAS_SOFTCAP, ROUNDED_TO, wanted)
    if whole < V:
        sums = reduce_step(sums, head, whole, V, HAS_SOFTCAP, ROUNDED_TO, wanted)
    return merge_lanes(sums, V, wanted)


@triton.jit
def no_logits(R: tl.constexpr, LANES: tl.constexpr):
    """The sums (R, LANES) of `reduce_rows` before the first logit."""
    m = tl.full((R, LANES), float("-inf"), tl.float32)
    nothing = tl.zeros((R, LANES), tl.float32)
    return m, nothing, nothing, nothing, nothing, tl.zeros((R, LANES), tl.int32)


@triton.jit
def reduce_step(
    sums, head, start, end, HAS_SOFTCAP: tl.constexpr, ROUNDED_TO: tl.constexpr, wanted
):
    """Fold four logits into each lane of `sums` (R, W), from `load_logits`."""
    z0, z1, z2, z3, id0, id1, id2, id3 = load_logits(
        head, start, end, HAS_SOFTCAP, ROUNDED_TO, sums[0].shape[1]
    )
    return fold_step(sums, z0, z1, z2, z3, id0, id1, id2, id3, end, wanted)


@triton.jit
def fold_step(sums, z0, z1, z2, z3, id0, id1, id2, id3, end, wanted):
    """Fold four logits z (R, W), of the columns id (1, W), into the sums of each lane."""
    m, rest, t, squares, total, top_id = sums
    with_entropy, with_squares, with_total, with_top_id = wanted
    if with_total:
        total += (number(z0, id0, end) + number(z1, id1, end)) + (
            number(z2, id2, end) + number(z3, id3, end)
        )
    if with_top_id:
        top_id = first_top(m, top_id, z0, id0, z1, id1, z2, id2, z3, id3)
    m, rest, t_new, keep, e0, e1, e2, e3 = fold(m, rest, t, z0, z1, z2, z3)
    if with_entropy:
        t = t_new
    if with_squares:
        squares = fold_squares(squares, keep, e0, e1, e2, e3)
    return m, rest, t, squares, total, top_id


@triton.jit
def merge_lanes(sums, V, wanted):
    """Merge the sums of the lanes (R, W) into those of the rows (R,)."""
    m, rest, t, squares, total, top_id = sums
    _with_entropy, with_squares, with_total, with_top_id = wanted
    lane_m = m
    m, rest, t, e, is_first = merge(m, rest, t)
    squares_all = m
    if with_squares:
        squares_all = merge_squares(squares, e, is_first)
    total_all = m
    if with_total:
        total_all = sum_lanes(total)
    top_id_all = tl.full(m.shape, 0, tl.int32)
    if with_top_id:
        top_id_all = tl.min(tl.where(lane_m == m[:, None], top_id, V), axis=1)
    return m, rest, t, squares_all, total_all, top_id_all


@triton.jit
def load_logits(
    head, start, end, HAS_SOFTCAP: tl.constexpr, ROUNDED_TO: tl.constexpr, W: tl.constexpr
):
    """Four tiles (R, W) of scaled logits side by side, and the columns (1, W) of each, from `load_step`."""
    x0, x1, x2, x3, id0, id1, id2, id3 = load_step(head, start, end, ROUNDED_TO, W)
    z0 = logits(x0, id0, end, head, HAS_SOFTCAP)
    z1 = logits(x1, id1, end, head, HAS_SOFTCAP)
    z2 = logits(x2, id2, end, head, HAS_SOFTCAP)
    z3 = logits(x3, id3, end, head, HAS_SOFTCAP)
    return z0, z1, z2, z3, id0, id1, id2, id3


@triton.jit
def load_step(head, start, end, ROUNDED_TO: tl.constexpr, W: tl.constexpr):
    """Four tiles (R, W) of the projection side by side, and the columns (1, W) of each.

    They begin with the column `start`. `end` is where the vocabulary ends, None if it does not end in these tiles.
    """
    x0, columns0 = load_x(head, start, end, ROUNDED_TO, W)
    x1, columns1 = load_x(head, start + W, end, ROUNDED_TO, W)
    x2, columns2 = load_x(head, start + 2 * W, end, ROUNDED_TO, W)
    x3, columns3 = load_x(head, start + 3 * W, end, ROUNDED_TO, W)
    return x0, x1, x2, x3, columns0, columns1, columns2, columns3


@triton.jit
def load_x(head, start, end, ROUNDED_TO: tl.constexpr, W: tl.constexpr):
    """Return the projection (R, W) from column `start` on, 0 from `end` on if not None; and the columns (1, W)."""
    row_ptrs, bias_ptr, _inner, _outer = head
    columns = start + tl.arange(0, W)[None, :]
    here = None
    if end is not None:
        here = columns < end
    return load_projection(row_ptrs + columns, bias_ptr, columns, here, ROUNDED_TO), columns


@triton.jit
def logits(x, columns, end, head, HAS_SOFTCAP: tl.constexpr):
    """z of x, -inf beyond the vocabulary."""
    z = scaled(x, head, HAS_SOFTCAP)
    if end is not None:
        z = tl.where(
            columns < end, z, float("-inf")
        )  # after the transform, which would make -inf a number
    return z


@triton.jit
def number(z, columns, end):
    """z, but 0 beyond the vocabulary."""
    if end is not None:
        z = tl.where(columns < end, z, 0.0)
    return z


@triton.jit
def first_top(m, top_id, z0, id0, z1, id1, z2, id2, z3, id3):
    """The column of the largest z up to now, the first of equal ones."""
    top_id = tl.where(z0 > m, id0, top_id)
    m = tl.maximum(m, z0)
    top_id = tl.where(z1 > m, id1, top_id)
    m = tl.maximum(m, z1)
    top_id = tl.where(z2 > m, id2, top_id)
    m = tl.maximum(m, z2)
    return tl.where(z3 > m, id3, top_id)


@triton.jit
def load_at(head, ids, mask, ROUNDED_TO: tl.constexpr):
    """The projection (R, 1) at one column of each row, as from `load_x`; 0 where `mask` (R,) is not set."""
    row_ptrs, bias_ptr, _inner, _outer = head
    return load_projection(
        row_ptrs + ids[:, None], bias_ptr, ids[:, None], mask[:, None], ROUNDED_TO
    )
