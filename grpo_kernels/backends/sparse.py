"""d logits with few entries a row, on average what they were: stochastic rounding on a grid with the row's own step.

For a row g (V,) with a threshold tau an entry of |g_j| >= tau stays as it is, and a smaller one becomes sign(g_j) tau
with probability |g_j| / tau, else 0. Its mean is g_j; the entries are drawn independently, so that of
d hidden = sum_j g_j w_j the error has mean 0 and

    E |error|^2 = sum over |g_j| < tau of |g_j| (tau - |g_j|) |w_j|^2,

which is known while the row is in hand (`errors`): the largest tau is taken that keeps it within a tolerance. A draw
depends on the seed, the row and the column alone (`draws`), so that it does not matter which rows are computed
together, nor which rank has the column.

Thresholds are 2^-k of the row's largest |g|, its top, and all that is said of a row is in units of that:
r_j = |g_j| (1 / top). Backends follow the functions here; `TorchSparse` is them, as they are.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

CERTAIN = 8  # entries from 2^-CERTAIN of the row's largest on always stay: what they give says how long d hidden is
LEAST = 18  # the lowest threshold is 2^-LEAST of it: a row that needs a lower one would have thousands of entries
STEPS = LEAST + 1 - CERTAIN  # thresholds
BITS = 30  # of a draw: what is kept with a probability below 2^-BITS is never kept
_LOW = 0xFFFFFFFF


class Entries(NamedTuple):
    """Some entries of each row of a matrix; row i has `counts[i]` of them, from `starts[i]` on."""

    starts: Tensor  # (m,) int64
    counts: Tensor  # (m,) int64
    ids: Tensor  # (k,) int32, rising within a row
    values: Tensor  # (k,)

    def without(self, rows: Tensor) -> Entries:
        """Those of the rows that are not among `rows` (m,) bool."""
        return self._replace(counts=self.counts.masked_fill(rows, 0))

    def flat(self) -> tuple[Tensor, Tensor, Tensor]:
        """(row, id, value) of all entries, row after row. Waits for the device."""
        rows = torch.arange(len(self.counts), device=self.counts.device).repeat_interleave(self.counts)
        before = self.counts.cumsum(0) - self.counts
        place = torch.arange(len(rows), device=rows.device) + (self.starts - before)[rows]
        return rows, self.ids[place], self.values[place]


class Thinned(NamedTuple):
    """What stands for the entries of a row that are not certain; (m,) each besides, in the accumulator's dtype."""

    entries: Entries
    expected: Tensor  # how many entries there are on average
    spread: Tensor  # sum over r < tau of r (tau - r): the variance of the row, in units of top^2


@runtime_checkable
class SparseRowBackend(Protocol):
    """One that can thin out rows of d logits (m, V)."""

    def largest(self, d_logits: Tensor) -> Tensor:
        """top (m,): the largest |g| of each row, in the accumulator's dtype; NaN where a number is not finite."""
        ...

    def certain(self, d_logits: Tensor, top: Tensor, most: int) -> Entries:
        """The entries of r >= 2^-CERTAIN.

        A row that has more than `most` has its true count, and of its entries the first `most`.
        """
        ...

    def errors(self, d_logits: Tensor, norms: Tensor, top: Tensor) -> Tensor:
        """E |error of d hidden|^2 / top^2 with each threshold 2^-k, CERTAIN <= k <= LEAST: (m, STEPS).

        `norms` (V,) are |w|^2 of the head's rows, in the accumulator's dtype.
        """
        ...

    def thin(self, d_logits: Tensor, top: Tensor, k: Tensor, keys: Tensor, most: int, first_id: int = 0) -> Thinned:
        """The entries of r < 2^-CERTAIN, as the threshold 2^-k leaves them.

        Args:
            k: (m,) int64; 0: the row has no entries, and expects none.
            keys: (m,) int64, see `row_keys`.
            most: as in `certain`.
            first_id: what the draws take the first column for.
        """
        ...

    def combine(self, entries: Entries, source: Tensor, out: Tensor, targets: Tensor | None = None) -> None:
        """``out[targets[i]] += sum of values * source[ids]`` of row i's entries; without `targets`, ``out[i]``.

        `source` (S, H) is of any floating dtype, `out` of the accumulator's; no two of `targets` are the same.
        """
        ...


class TorchSparse:
    """In torch, on any device: the definition of what the others compute."""

    def largest(self, d_logits: Tensor) -> Tensor:
        top = d_logits.to(torch.promote_types(d_logits.dtype, torch.float32)).abs().amax(dim=1)
        return top + 0.0 * top  # inf is not finite either

    def certain(self, d_logits: Tensor, top: Tensor, most: int) -> Entries:
        g = d_logits.to(top.dtype)
        return _entries(_shares(g, top) >= 2.0**-CERTAIN, g)

    def errors(self, d_logits: Tensor, norms: Tensor, top: Tensor) -> Tensor:
        r = _shares(d_logits.to(top.dtype), top)
        weighted = r * norms
        return torch.stack([(weighted * (tau - r).clamp(min=0.0)).sum(dim=1) for tau in thresholds()], dim=1)

    def thin(self, d_logits: Tensor, top: Tensor, k: Tensor, keys: Tensor, most: int, first_id: int = 0) -> Thinned:
        g = d_logits.to(top.dtype)
        r = _shares(g, top)
        r = r.masked_fill(~(r < 2.0**-CERTAIN) | (k == 0)[:, None], 0.0)
        tau = torch.exp2(-k.to(top.dtype))[:, None]
        chance = (r / tau).clamp(max=1.0)  # from tau on an entry stays
        columns = torch.arange(g.shape[1], device=g.device) + first_id
        chosen = draws(keys, columns) < (chance * 2.0**BITS).long()
        values = torch.where(r >= tau, g, torch.copysign(top[:, None] * tau, g))
        return Thinned(_entries(chosen, values), chance.sum(dim=1), (r * (1.0 - chance)).sum(dim=1) * tau[:, 0])

    def combine(self, entries: Entries, source: Tensor, out: Tensor, targets: Tensor | None = None) -> None:
        step = max(1, 2**22 // source.shape[1])  # entries at a time
        rows, ids, values = entries.flat()
        for first in range(0, len(rows), step):
            some = slice(first, first + step)
            owner, own = rows[some].unique_consecutive(return_inverse=True)
            used, place = ids[some].unique(return_inverse=True)
            starts = torch.searchsorted(own, torch.arange(len(owner), device=own.device))
            found = torch.nn.functional.embedding_bag(
                place, source[used].to(out.dtype), starts, mode="sum", per_sample_weights=values[some]
            )
            out.index_add_(0, owner if targets is None else targets[owner], found)


def thresholds() -> list[float]:
    """2^-k, CERTAIN <= k <= LEAST."""
    return [2.0**-k for k in range(CERTAIN, LEAST + 1)]


def largest_allowed(errors: Tensor, allowed: Tensor) -> Tensor:
    """k (m,) of the largest threshold whose error, of `errors` (m, STEPS), is `allowed` (m,); 0 where none is."""
    fits = errors.to(allowed.dtype) <= allowed[:, None]
    return torch.where(fits.any(dim=1), CERTAIN + fits.to(torch.uint8).argmax(dim=1), 0)


def error_at(errors: Tensor, k: Tensor) -> Tensor:
    """(m,) those of the thresholds 2^-k; what stands where k is 0 means nothing."""
    return errors.gather(1, (k - CERTAIN).clamp(min=0)[:, None])[:, 0]


def _shares(g: Tensor, top: Tensor) -> Tensor:
    """r (m, V)."""
    return g.abs() * (1.0 / top)[:, None]


def _entries(chosen: Tensor, values: Tensor) -> Entries:
    """Those of `values` (m, V) that are `chosen`."""
    rows, ids = chosen.nonzero().unbind(1)
    counts = chosen.sum(dim=1)
    return Entries(counts.cumsum(0) - counts, counts, ids.int(), values[rows, ids])


def most_drawn(most: int) -> int:
    """Room for the entries of a row that has `most` on average: with more the chance is below 1e-12."""
    return most + 8 * math.isqrt(most) + 32


def row_keys(seed: int, rows: Tensor) -> Tensor:
    """(m,) int64: what the draws of `rows` (m,), which are positions in the call, are made from. (splitmix64)"""
    x = rows * -7046029254386353131 + _signed(seed)
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = (x ^ _shifted(x, shift)) * factor
    return x ^ _shifted(x, 31)


def draws(keys: Tensor, columns: Tensor) -> Tensor:
    """Numbers in [0, 2^BITS), (m, n) int64, alike likely: of the rows with `keys` (m,) at `columns` (n,).

    murmur3's finaliser of 32 bits, the second half of the key coming in on the way.
    """
    low, high = (keys & _LOW)[:, None], _shifted(keys, 32)[:, None]
    x = ((columns * 0x9E3779B1) & _LOW)[None] ^ low
    x = (((x ^ (x >> 16)) * 0x85EBCA6B) & _LOW) ^ high
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _LOW
    return (x ^ (x >> 16)) >> (32 - BITS)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """int64 `x` shifted right, 0 coming in."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    return (x + 2**63) % 2**64 - 2**63
