"""Inputs of an engine: the head's tensors, the rows to project, the projection's settings, the gradients wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels.backends.interface import Chunk, DivergenceStats, LogitTransform, RowBackend, RowStats, Teacher
from grpo_kernels.base.distributed import gather_stacked
from grpo_kernels.engine.memory import AMPLE, Room
from grpo_kernels.engine.products import Products, accumulator_of, converted_dtype
from grpo_kernels.engine.top_k import TopKTeacher
from grpo_kernels.engine.vocab_parallel import Shard

SLICE_BYTES = 32 * 2**20  # of the weight converted at a time; the same for all budgets but small ones

Index = Tensor | slice  # of rows


class Coefficients(NamedTuple):
    """Coefficients of a row's logit gradient, (m,) each; None means 0."""

    a: Tensor | None = None  # d loss / d logp
    b: Tensor | None = None  # d loss / d entropy
    c: Tensor | None = None  # d loss / d divergence

    def at(self, index: Index) -> Coefficients:
        """Select the rows at `index`."""
        return Coefficients(*(None if x is None else x[index] for x in self))


CoefficientsOf = Callable[[Tensor, RowStats], Coefficients]  # of the rows at an index (m,), given their statistics


@dataclass(frozen=True)
class Head:
    """The tensors that may want a gradient; the raw projection is ``hidden @ weight.T + lora_u @ lora_b.T + bias``.

    And those of the teacher's head, constants, where a divergence from it is wanted.
    """

    hidden: Tensor  # (N, H)
    weight: Tensor  # (V, H)
    bias: Tensor | None = None  # (V,)
    lora_u: Tensor | None = None  # (N, r), the hidden states times the adapter's first factor
    lora_b: Tensor | None = None  # (V, r)
    teacher_hidden: Tensor | None = None  # (N, H'), of the same positions
    teacher_weight: Tensor | None = None  # (V, H')
    teacher_bias: Tensor | None = None  # (V,)

    def __iter__(self) -> Iterator[Tensor | None]:
        own = (self.hidden, self.weight, self.bias, self.lora_u, self.lora_b)
        return iter((*own, self.teacher_hidden, self.teacher_weight, self.teacher_bias))

    def factors(self) -> list[tuple[Tensor, Tensor]]:
        """Return the pairs (N, K), (V, K) whose products add up to the projection."""
        adapter = [] if self.lora_u is None or self.lora_b is None else [(self.lora_u, self.lora_b)]
        return [(self.hidden, self.weight), *adapter]

    def row_bias(self, dtype: torch.dtype) -> Tensor | None:
        """The bias as row backends read it."""
        return _row_bias(self.bias, dtype)

    def teacher(self) -> Head:
        """The teacher's tensors as a head of their own."""
        assert self.teacher_hidden is not None
        assert self.teacher_weight is not None
        return Head(self.teacher_hidden, self.teacher_weight, self.teacher_bias)

    def alone(self) -> Head:
        """Without the teacher."""
        return Head(self.hidden, self.weight, self.bias, self.lora_u, self.lora_b)


def _row_bias(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.detach().to(dtype).contiguous()


@dataclass(frozen=True)
class Rows:
    """The positions to be projected: copies, so that nothing the caller does to its tensors later matters."""

    positions: Tensor  # (n,) int64, indices into `hidden`
    ids: Tensor  # (n,) int64, in [0, V); of a sharded head counted from its first row, and outside where another has it
    inv_temperature: float | Tensor = 1.0  # a number, or (n, 1)
    invalid: Tensor | None = None  # (n,) bool: rows whose log-probability is NaN; None: none
    marked: Tensor | None = None  # (n,) the ids, -1 where invalid; None: none is
    top_k: TopKTeacher | None = None  # whom the divergence is from, where not from the head's own teacher

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
            None if self.top_k is None else self.top_k.at(index),
        )


@dataclass(frozen=True)
class HeadConfig:
    """Settings of the projection, the same through all sweeps of one call."""

    backend: RowBackend
    compute_dtype: torch.dtype  # of the products' operands
    workspace_bytes: int
    scale: float = 1.0
    softcap: float | None = None
    round_logits: bool = False  # to the compute dtype
    shard: Shard | None = None  # where the head's rows are divided among ranks
    room: Room = AMPLE
    teacher: HeadConfig | None = None  # how the teacher's rows are projected, of the same accumulator
    beta: float = 1.0  # which divergence from the teacher, see `Teacher`

    @property
    def accumulator(self) -> torch.dtype:
        return accumulator_of(self.compute_dtype)

    def products(self, weight: Tensor) -> Products:
        """Return the products with `weight`, which may be a part of the head."""
        return Products(weight, self.compute_dtype, self.accumulator, self._slice_bytes)

    def all_products(self, head: Head, columns: slice = slice(None)) -> list[Products]:
        """Return the products of `Head.factors`, in their order; an adapter is multiplied in its own precision."""
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
        if not self.room.converts:
            return head
        dtype = converted_dtype(head.weight, self.compute_dtype)
        if dtype is not None:
            head = replace(head, weight=head.weight.to(dtype))
        if self.teacher is not None and head.teacher_weight is not None:
            dtype = converted_dtype(head.teacher_weight, self.teacher.compute_dtype)
            if dtype is not None:
                head = replace(head, teacher_weight=head.teacher_weight.to(dtype))
        return head

    @property
    def _slice_bytes(self) -> int:
        return min(SLICE_BYTES, self.workspace_bytes // 8)

    def stats(self, chunk: Chunk, invalid: Tensor | None, *, entropy: bool, extras: tuple[str, ...]) -> RowStats:
        """The backend's statistics, the log-probability NaN in the rows that are `invalid` (n,).

        Of a chunk with a teacher with the divergence, which takes both heads' statistics first.
        """
        found = self._reduced(chunk, entropy=entropy, extras=extras)
        if chunk.teacher is not None:
            teacher = self._reduced(chunk.of_teacher(), entropy=False, extras=())
            value, sum_k = self.backend.diverge(chunk, found, teacher)
            if self.shard is not None:
                parts = gather_stacked(torch.stack([value, sum_k]), self.shard.process_group)
                value, sum_k = parts.sum(dim=0).unbind()
            found = replace(found, divergence=DivergenceStats(value, sum_k, teacher.max_logit, teacher.log_sum))
        if invalid is not None:
            found.logps.masked_fill_(invalid, torch.nan)
        return found

    def _reduced(self, chunk: Chunk, *, entropy: bool, extras: tuple[str, ...]) -> RowStats:
        if self.shard is None:
            return self.backend.stats(chunk, entropy=entropy, extras=extras)
        return self.shard.stats(self.backend, chunk, entropy=entropy, extras=extras)

    def grad(
        self, chunk: Chunk, rows: Rows, stats: RowStats, coefficients: Coefficients, out: Tensor, z: Tensor | None
    ) -> None:
        """``out = d loss / d (raw projection)``, the backend's, and where the rows have one their `TopKTeacher`'s.

        Args:
            z: (n, K) what that one gathered; its divergence is then all that may have a coefficient.
        """
        a, b, c = coefficients
        assert a is not None
        if rows.top_k is None or z is None:
            self.backend.grad(chunk, stats, a, b, out, c)
            return
        assert b is None
        assert c is not None
        rows.top_k.grad(self.backend, chunk, stats, c, out, z)

    def transform(self, bias: Tensor | None, inv_temperature: float | Tensor) -> LogitTransform:
        """Return the transform of the raw projection of rows into logits; `bias` as `Head.row_bias` gives it."""
        rounded_to = self.compute_dtype if self.round_logits else None
        return LogitTransform(self.scale, self.softcap, inv_temperature, bias, rounded_to)

    def logits_of_teacher(self, head: Head, columns: slice = slice(None)) -> TeacherLogits | None:
        """Return the projection of the teacher's rows on some columns of the vocabulary; None without a teacher."""
        return None if self.teacher is None else TeacherLogits(head.teacher(), self.teacher, self.beta, columns)

    def without_teacher(self) -> HeadConfig:
        """For a gradient that the divergence has no part in."""
        return replace(self, teacher=None)


class TeacherLogits:
    """The teacher's logits of some columns, chunk after chunk.

    Attributes:
        hidden: (N, H'), its hidden states.
    """

    def __init__(self, head: Head, config: HeadConfig, beta: float, columns: slice) -> None:
        bias = head.row_bias(config.accumulator)
        self._config, self._beta, self._bias = config, beta, None if bias is None else bias[columns]
        self.hidden, self._products = head.hidden, config.products(head.weight[columns])

    def project(self, hidden: Tensor, out: Tensor, inv_temperature: float | Tensor) -> Teacher:
        """``out`` (m, V), the logits of some rows of `hidden` (m, H'), as a chunk's teacher has them."""
        self._products.logits(self._products.operand(hidden), out)
        transform = self._config.transform(self._bias, inv_temperature)
        self._config.backend.prepare_(out, transform)
        return Teacher(out, transform, self._beta)
