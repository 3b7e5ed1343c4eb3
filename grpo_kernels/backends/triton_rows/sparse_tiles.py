"""What `sparse` does to one tile of d logits: to some rows R and W columns."""

import triton
import triton.language as tl

from grpo_kernels.backends import sparse

CERTAIN_STEP = tl.constexpr(2.0**-sparse.CERTAIN)
STEPS = tl.constexpr(sparse.STEPS)
BITS = tl.constexpr(sparse.BITS)
CHANCES = tl.constexpr(2.0**sparse.BITS)
COLUMN = tl.constexpr(0x9E3779B1)  # a column's factor
UNUSED_BITS = tl.constexpr(32 - sparse.BITS)
BITS_A_LANE = tl.constexpr(8)  # a thread reads so many 16-bit numbers at a time
ONE_MORE = tl.constexpr(2**16)


@triton.jit
def inverse_of(top):
    """1 / top as torch has it: rounded to the nearest."""
    return tl.div_rn(tl.zeros_like(top) + 1.0, top)


@triton.jit
def load_tile(row_ptrs, start, end, W: tl.constexpr):
    """The numbers (R, W) from the column `start` on, 0 from `end` on where it is not None."""
    columns = start + tl.arange(0, W)[None, :]
    if end is None:
        g = tl.load(row_ptrs + columns)
    else:
        g = tl.load(row_ptrs + columns, mask=columns < end, other=0.0)
    return g.to(tl.float32)


@triton.jit
def larger_or_nan(tops, g):
    """The larger of `tops` and |g|, NaN where either is."""
    return tl.maximum(tops, tl.abs(g), propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def put(found, chosen, row_ptrs, start, of_row, room):
    """Write the entries of the columns that are `chosen` (R, W), of which `start` is the first.

    `found` (R,) are those of the columns before; returns how many there are by now. `of_row` is, (R, 1) each: 1 / top;
    tau; what is written, with its sign, of a number that is smaller.

    Few are chosen, and they are far apart: so neighbours share a lane, which says by a bit for each whether it is, and
    above these how many are. A lane writes one entry after the other, the number read anew.
    """
    ids_ptr, values_ptr, rows, counts, most = room
    inverse, tau, smallest = of_row
    R: tl.constexpr = chosen.shape[0]
    LANES: tl.constexpr = chosen.shape[1] // BITS_A_LANE
    marks = (1 << tl.arange(0, BITS_A_LANE)) + ONE_MORE
    marked = tl.reshape(chosen.to(tl.int32), (R, LANES, BITS_A_LANE)) * marks[None, None, :]
    lane = tl.sum(marked, axis=2)
    most_in_lane = tl.max(tl.max(lane, axis=1), axis=0) // ONE_MORE
    if most_in_lane > 0:
        several = lane // ONE_MORE
        place = (found[:, None] + tl.cumsum(several, axis=1)) - several
        found += tl.sum(several, axis=1)
        left = lane % ONE_MORE
        room_ptrs = rows.to(tl.int64)[:, None] * most
        for _ in range(most_in_lane):
            lowest = left & -left
            bit = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # of 2^bit
            column = start + tl.arange(0, LANES)[None, :] * BITS_A_LANE + bit
            has = left > 0
            g = tl.load(row_ptrs + column, mask=has, other=0.0).to(tl.float32)
            value = tl.where(shares(g, inverse) >= tau, g, tl.where(g < 0.0, -smallest, smallest))
            fits = has & (place < most) & counts[:, None]
            tl.store(ids_ptr + (room_ptrs + place), column, mask=fits)
            tl.store(values_ptr + (room_ptrs + place), value, mask=fits)
            place += has.to(tl.int32)
            left -= lowest
    return found


@triton.jit
def put_certain(found, row_ptrs, start, end, inverse, room, W: tl.constexpr):
    """Write the certain entries of the columns from `start` on, as `put` does."""
    chosen = shares(load_tile(row_ptrs, start, end, W), inverse) >= CERTAIN_STEP
    return put(found, chosen, row_ptrs, start, (inverse, 0.0, 0.0), room)


@triton.jit
def put_drawn(found, sums, row_ptrs, start, end, first_id, of_row, draw, room, W: tl.constexpr):
    """Write what is drawn of the columns from `start` on, as `put` does. A row has nothing whose 1 / top is NaN.

    `sums` are those of the chances, times `CHANCES`, and of r (1 - chance), in lanes; `draw` is `CHANCES` / tau, and
    the low and the high half of the key, (R, 1) each.
    """
    inverse = of_row[0]
    scale, low, high = draw
    expected, spread = sums
    r = shares(load_tile(row_ptrs, start, end, W), inverse)
    r = tl.where(r < CERTAIN_STEP, r, 0.0)
    chance = tl.minimum(r * scale, CHANCES)
    chosen = draws(first_id + start, low, high, W) < chance.to(tl.int32)
    found = put(found, chosen, row_ptrs, start, of_row, room)
    r0, r1, r2, r3 = quarters(r)
    c0, c1, c2, c3 = quarters(chance)
    spread = tl.fma(r0, tl.fma(c0, -1.0 / CHANCES, 1.0), spread)
    spread = tl.fma(r1, tl.fma(c1, -1.0 / CHANCES, 1.0), spread)
    spread = tl.fma(r2, tl.fma(c2, -1.0 / CHANCES, 1.0), spread)
    spread = tl.fma(r3, tl.fma(c3, -1.0 / CHANCES, 1.0), spread)
    return found, (expected + ((c0 + c1) + (c2 + c3)), spread)


@triton.jit
def draws(first, low, high, W: tl.constexpr):
    """As `backends.sparse` has them, (R, W), of the columns from `first` on and the halves of keys (R, 1)."""
    steps = tl.arange(0, W).to(tl.uint32) * COLUMN
    x = (first.to(tl.uint32) * COLUMN + steps)[None, :] ^ low
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) ^ high
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return ((x ^ (x >> 16)) >> UNUSED_BITS).to(tl.int32)


@triton.jit
def shares(g, inverse):
    """r of g (R, W). The sign goes last: of a 16-bit number it would go first, which takes more instructions."""
    return tl.abs(g * inverse)


@triton.jit
def add_errors(sums, row_ptrs, norm_ptrs, start, end, inverse, W: tl.constexpr):
    """`sums`, one of each threshold, with r |w|^2 max(1 - r 2^k, 0) of the columns from `start` on, in lanes."""
    r = shares(load_tile(row_ptrs, start, end, W), inverse)
    r0, r1, r2, r3 = quarters(r)
    w0, w1, w2, w3 = quarters(r * load_tile(norm_ptrs, start, end, W))
    grown = ()
    for i in tl.static_range(STEPS):
        scale = -(1 << i) / CERTAIN_STEP  # -2^k
        total = tl.fma(w0, tl.maximum(tl.fma(r0, scale, 1.0), 0.0), sums[i])
        total = tl.fma(w1, tl.maximum(tl.fma(r1, scale, 1.0), 0.0), total)
        total = tl.fma(w2, tl.maximum(tl.fma(r2, scale, 1.0), 0.0), total)
        total = tl.fma(w3, tl.maximum(tl.fma(r3, scale, 1.0), 0.0), total)
        # Triton has no starred tuples, and each round makes a longer one
        grown = grown + (total,)  # type: ignore[assignment]  # noqa: RUF005
    return grown


@triton.jit
def lanes(R: tl.constexpr, W: tl.constexpr):
    """Running sums of tiles (R, W): a thread that reads four neighbours at a time adds them to one."""
    return tl.zeros((R, W // 4), tl.float32)


@triton.jit
def quarters(x):
    """(R, W) -> four of (R, W / 4): of each four neighbours one goes to each."""
    R: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[1]
    even, odd = tl.split(tl.reshape(x, (R, W // 2, 2)))
    x0, x2 = tl.split(tl.reshape(even, (R, W // 4, 2)))
    x1, x3 = tl.split(tl.reshape(odd, (R, W // 4, 2)))
    return x0, x1, x2, x3


@triton.jit
def power_of_2(k):
    """2^k, exactly."""
    return ((127 + k) << 23).to(tl.float32, bitcast=True)
