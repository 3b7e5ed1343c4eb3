"""What a call of an engine works on: the head's tensors, the rows to project, how, and the gradients wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from grpo_kernels.backends.interface import Chunk, LogitTransform, RowBackend, RowStats
from grpo_kernels.engine.memory import AMPLE, Room
from grpo_kernels.engine.products import Products, accumulator_of, converted_dtype
from grpo_kernels.engine.vocab_parallel import Shard

SLICE_BYTES = 32 * 2**20  # of the weight converted at a time; the same for all budgets but small ones

Coefficients = tuple[Tensor, Tensor | None]  # a = d loss / d logp and b = d loss / d entropy, (m,) each
CoefficientsOf = Callable[[Tensor, RowStats], Coefficients]  # of the rows at an index (m,), given their statistics
Index = Tensor | slice  # of rows


@dataclass(frozen=True)
class Head:
    """The tensors that may want a gradient; the raw projection is ``hidden @ weight.T + lora_u @ lora_b.T + bias``."""

    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None = None  # (V,)
    lora_u: Tensor | None = None  # (N, r), the hidden states times the adapter's first factor
    lora_b: Tensor | None = None  # (V, r)

    def __iter__(self) -> Iterator[Tensor | None]:
        return iter((self.hidden, self.weight, self.bias, self.lora_u, self.lora_b))

    def factors(self) -> list[tuple[Tensor, Tensor]]:
        """What the projection is a sum of products of: (N, K) and (V, K)."""
        adapter = [] if self.lora_u is None or self.lora_b is None else [(self.lora_u, self.lora_b)]
        return [(self.hidden, self.weight), *adapter]

    def row_bias(self, dtype: torch.dtype) -> Tensor | None:
        """The bias as row backends read it."""
        return None if self.bias is None else self.bias.detach().to(dtype).contiguous()


@dataclass(frozen=True)
class Rows:
    """The positions to be projected: copies, so that nothing the caller does to its tensors later matters."""

    positions: Tensor  # (n,) int64, indices into `hidden`
    ids: Tensor  # (n,) int64, in [0, V); of a sharded head counted from its first row, and outside where another has it
    inv_temperature: float | Tensor = 1.0  # a number, or (n, 1)
    invalid: Tensor | None = None  # (n,) bool: rows whose log-probability is NaN; None: none
    marked: Tensor | None = None  # (n,) the ids, -1 where invalid; None: none is

    def __len__(self) -> int:
        return self.positions.shape[0]

    def at(self, index: Index) -> Rows:
        """The rows at `index` (m,)."""
        inv_t = self.inv_temperature
        return Rows(
            self.positions[index],
            self.ids[index],
            inv_t[index] if isinstance(inv_t, Tensor) else inv_t,
            None if self.invalid is None else self.invalid[index],
            None if self.marked is None else self.marked[index],
        )


@dataclass(frozen=True)
class HeadConfig:
    """How rows are projected: what stays the same through all sweeps of one call."""

    backend: RowBackend
    compute_dtype: torch.dtype  # of the products' operands
    workspace_bytes: int
    scale: float = 1.0
    softcap: float | None = None
    round_logits: bool = False  # to the compute dtype
    shard: Shard | None = None  # where the head's rows are divided among ranks
    room: Room = AMPLE

    @property
    def accumulator(self) -> torch.dtype:
        return accumulator_of(self.compute_dtype)

    def products(self, weight: Tensor) -> Products:
        """Those of `weight`, which may be a part of the head."""
        return Products(weight, self.compute_dtype, self.accumulator, self._slice_bytes)

    def all_products(self, head: Head, columns: slice = slice(None)) -> list[Products]:
        """Those of `Head.factors`, in their order; an adapter is multiplied in its own precision."""
        first, *adapter = head.factors()
        products = [self.products(first[1][columns])]
        for lora_u, lora_b in adapter:
            dtype = torch.promote_types(lora_u.dtype, lora_b.dtype)
            products.append(Products(lora_b[columns], dtype, self.accumulator, self._slice_bytes))
        return products

    def converted(self, head: Head) -> Head:
        """`head` with its weight as 16-bit products take it, converted once, if there is room for that.

        Else each product converts what it needs, slice by slice.
        """
        dtype = converted_dtype(head.weight, self.compute_dtype)
        if dtype is None or not self.room.ample:
            return head
        return replace(head, weight=head.weight.to(dtype))

    @property
    def _slice_bytes(self) -> int:
        return min(SLICE_BYTES, self.workspace_bytes // 8)

    def stats(self, chunk: Chunk, invalid: Tensor | None, *, entropy: bool, extras: tuple[str, ...]) -> RowStats:
        """The backend's statistics, the log-probability NaN in the rows that are `invalid` (n,)."""
        if self.shard is None:
            found = self.backend.stats(chunk, entropy=entropy, extras=extras)
        else:
            found = self.shard.stats(self.backend, chunk, entropy=entropy, extras=extras)
        if invalid is not None:
            found.logps.masked_fill_(invalid, torch.nan)
        return found

    def transform(self, bias: Tensor | None, inv_temperature: float | Tensor) -> LogitTransform:
        """How the raw projection of rows becomes their logits; `bias` as `Head.row_bias` gives it."""
        rounded_to = self.compute_dtype if self.round_logits else None
        return LogitTransform(self.scale, self.softcap, inv_temperature, bias, rounded_to)
