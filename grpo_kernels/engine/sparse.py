"""The backward products of d logits with few entries a row (`backends.sparse`): d hidden, and d weight where asked for.

What is certain of a row comes first: it says how long d hidden is, and with that how large an error is allowed. Whether
a row is thinned out depends on nothing that is drawn: else the mean would not be the exact gradient.

Of a sharded head every rank has its own columns of a row: the ranks agree on its largest number, its length and its
threshold, and each draws what is its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels.backends.interface import RowBackend
from grpo_kernels.backends.sparse import (
    Entries,
    SparseRowBackend,
    TorchSparse,
    error_at,
    largest_allowed,
    most_drawn,
    row_keys,
)
from grpo_kernels.base.distributed import gather_stacked
from grpo_kernels.engine.device import device_of
from grpo_kernels.engine.products import Products
from grpo_kernels.engine.thinning import Thinning
from grpo_kernels.engine.vocab_parallel import Shard

_TORCH_BYTES = 64  # of temporaries, for an element of a row that is thinned out in torch
_ROOM_BYTES = 12  # of an entry, of either dtype


class Split(NamedTuple):
    """The rows of a group: which are not thinned out, and the entries of the others, if d weight is made of them."""

    dense: Tensor  # indices of rows, rising
    rows: Tensor | None = None  # (k,) int64
    ids: Tensor | None = None  # (k,) int32
    values: Tensor | None = None  # (k,)


class _Part(NamedTuple):
    """Rows that are thinned out together: which are not, (m,) bool, and (row, id, value) of all entries, if wanted."""

    is_dense: Tensor
    entries: tuple[Tensor, ...]


class SparseProducts:
    """Those of one head's weight, for `sparse`; by `backend` where it can, else in torch."""

    def __init__(self, products: Products, backend: RowBackend, sparse: Thinning, shard: Shard | None) -> None:
        self._products, self._sparse, self._shard = products, sparse, shard
        self._backend: SparseRowBackend = backend if isinstance(backend, SparseRowBackend) else TorchSparse()
        self._norms = products.squared_norms()
        self._most = sparse.entries(products.weight.shape[0], products.weight.device)

    def d_hidden(self, d_logits: Tensor, positions: Tensor, out: Tensor) -> Split:
        """``out`` (m, H) from `d_logits` (m, V), of the rows at `positions` (m,). Waits for the device.

        The rows that stay dense are moved to the front of `d_logits`, over what is not needed any more.
        """
        step = max(1, _together(self._products, self._shard, len(out)))
        parts = []
        for start in range(0, len(out), step):
            some = slice(start, start + step)
            parts.append(self._thinned_out(d_logits[some], positions[some], out[some], start))
        is_dense = torch.cat([x.is_dense for x in parts])
        dense = is_dense.nonzero()[:, 0]
        if len(dense) > 0:
            _to_front(d_logits, dense)
            exact = torch.empty_like(out[: len(dense)])
            self._products.d_hidden(d_logits[: len(dense)], exact)
            out[dense] = exact
        return Split(dense, *(torch.cat(x) for x in zip(*(part.entries for part in parts), strict=True)))

    def _thinned_out(self, d_logits: Tensor, positions: Tensor, out: Tensor, start: int) -> _Part:
        """`d_hidden` of rows that are thinned out together, the first of which is `start` of its group."""
        backend = self._backend
        top = self._largest(backend.largest(d_logits))
        certain = backend.certain(d_logits, top, self._most)
        no_unit = ~torch.isfinite(1.0 / top) & (top != 0)  # NaN, or too small a number
        too_many = (certain.counts > self._most) | no_unit
        if self._shard is None and bool(too_many.all()):  # flat rows are not read again
            self._note(too_many, torch.zeros_like(certain.counts), torch.zeros_like(top, dtype=torch.float64))
            nothing = certain.without(too_many).flat() if self._sparse.of_weight else ()
            return _Part(too_many, nothing)
        certain = certain.without(too_many)
        out.zero_()
        self._add_rows(certain, out)
        size, errors, too_many = self._agreed(out, backend.errors(d_logits, self._norms, top), too_many)
        # in double: what is small is small all over
        unit = top.double().square().clamp(min=torch.finfo(torch.float64).tiny)
        k = largest_allowed(errors, self._sparse.tolerance**2 * size / unit)
        too_many |= (k == 0) & (top != 0)
        k = k.masked_fill(too_many | (top == 0), 0)
        first_id = 0 if self._shard is None else self._shard.start
        keys = row_keys(self._sparse.seed, positions)
        drawn = backend.thin(d_logits, top, k, keys, most_drawn(self._most), first_id)
        is_dense = too_many | (certain.counts + drawn.expected > self._most)
        is_dense |= drawn.entries.counts > most_drawn(self._most)  # never but by a chance of 1e-12
        certain, entries = certain.without(is_dense), drawn.entries.without(is_dense)
        out.masked_fill_(is_dense[:, None], 0.0)
        self._add_rows(entries, out)
        self._note(is_dense, certain.counts + entries.counts, error_at(errors, k).double() * unit / size)
        if not self._sparse.of_weight:
            return _Part(is_dense, ())
        flat = [x.flat() for x in (certain, entries)]
        self._note_weight(flat[0], drawn.spread.double() * unit)
        rows, ids, values = (torch.cat(x) for x in zip(*flat, strict=True))
        return _Part(is_dense, (rows + start, ids, values))

    def _add_rows(self, entries: Entries, out: Tensor) -> None:
        """``out[i] += sum of values * weight[ids]``, the weight rounded to the compute dtype: only what is needed."""
        weight, dtype = self._products.weight, self._products.compute_dtype
        if weight.dtype != dtype or weight.stride(1) != 1:
            used = entries.flat()[1].unique()
            weight = weight[used].to(dtype)
            place = torch.searchsorted(used, entries.ids).clamp(max=max(0, len(used) - 1))
            entries = entries._replace(ids=place.int())
        self._backend.combine(entries, weight, out)

    def d_weight(self, split: Split, d_logits: Tensor, hidden: Tensor, out: Tensor) -> None:
        """``out`` (V, H) ``+= d_logits.T @ hidden`` of the rows of `split`, as `d_hidden` left `d_logits` (m, V)."""
        assert split.rows is not None
        assert split.ids is not None
        assert split.values is not None
        order = split.ids.argsort(stable=True)
        found, counts = split.ids[order].unique_consecutive(return_counts=True)
        by_id = Entries(counts.cumsum(0) - counts, counts, split.rows[order].int(), split.values[order])
        self._backend.combine(by_id, hidden.contiguous(), out, found.long())
        k = len(split.dense)
        if k > 0:
            self._products.d_weight(d_logits[:k], hidden[split.dense], out, first=False)

    def _largest(self, top: Tensor) -> Tensor:
        """`top` (m,) of all ranks, NaN where one is."""
        return top if self._shard is None else gather_stacked(top, self._shard.process_group).amax(dim=0)

    def _agreed(self, kept: Tensor, errors: Tensor, too_many: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """|d hidden|^2 (m,) in double of what is certain, `kept` (m, H); the errors; whether that is too much."""
        if self._shard is not None:
            kept = self._shard.sum_(kept.clone())
            sums = self._shard.sum_(torch.cat([errors, too_many[:, None].to(errors.dtype)], dim=1))
            errors, too_many = sums[:, :-1], sums[:, -1] > 0
        return torch.linalg.vector_norm(kept, dim=1, dtype=torch.float64).square(), errors, too_many

    def _note(self, is_dense: Tensor, entries: Tensor, error: Tensor) -> None:
        """What rows (m,) have cost: of each its entries, and the square of the predicted error, if it is not dense."""
        error = error.masked_fill(is_dense, 0.0).nan_to_num().sqrt()  # of a row of zeros there is none
        every, dense = torch.ones_like(is_dense).sum(), is_dense.sum()
        self._sparse.note(
            rows=every, dense=dense, sparse=every - dense, entries=entries.sum(), d_hidden_error=error.sum()
        )

    def _note_weight(self, certain: tuple[Tensor, Tensor, Tensor], variance: Tensor) -> None:
        """The `variance` (m,) of rows, 0 where dense, relative to what is `certain` of them: (row, id, value)."""
        rows, _, values = certain
        size = torch.zeros_like(variance).index_add_(0, rows, values.double().square())
        self._sparse.note(d_weight_error=(variance / size).masked_fill(size == 0, 0.0).sqrt().sum())


def thinning_bytes(sparse: Thinning, products: Products, backend: RowBackend, shard: Shard | None, rows: int) -> int:
    """What thinning out a group of so many rows of d logits takes besides them."""
    vocab, device = products.weight.shape[0], products.weight.device
    together = _together(products, shard, rows)
    if not isinstance(backend, SparseRowBackend):
        return _TORCH_BYTES * vocab * together
    most = sparse.entries(vocab, device)
    return _ROOM_BYTES * (most + most_drawn(most)) * together


def _together(products: Products, shard: Shard | None, rows: int) -> int:
    """How many of the rows of a group are thinned out at a time; with other ranks all of them."""
    row_bytes = products.weight.shape[0] * products.gradient_dtype.itemsize
    return rows if shard is not None else min(rows, device_of(products.weight.device).sparse_rows(rows, row_bytes))


def _to_front(x: Tensor, rows: Tensor) -> None:
    """``x[i] = x[rows[i]]`` in place; `rows` rise, so that none is overwritten before it has been read."""
    step = max(1, len(x) // 16)  # rows of a temporary
    for start in range(0, len(rows), step):
        some = rows[start : start + step]
        x[start : start + len(some)] = x[some]
