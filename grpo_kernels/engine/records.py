"""Records that every engine handles: the tensors of a head, and the rows to project."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from grpo_kernels.backends.interface import RowStats
from grpo_kernels.engine.top_k import TopKLogps, TopKTeacher
from grpo_kernels.token_loss.record import Coefficients

T = TypeVar("T")
S = TypeVar("S")
Index = Tensor | slice  # index of rows: (m,) int64, or a slice
# coefficients of the rows at an index (m,), from their statistics
CoefficientsOf = Callable[[Tensor, RowStats], Coefficients]


@dataclass(frozen=True)
class HeadTensors(Generic[T]):
    """One value per trainable tensor of a head: the tensor, its gradient, or True if it needs one.

    The raw projection is ``hidden @ weight.T + lora_u @ lora_b.T + bias``.
    """

    hidden: T  # (N, H)
    weight: T  # (V, H)
    bias: T | None = None  # (V,)
    lora_u: T | None = None  # (N, r), the hidden states times the adapter's first factor
    lora_b: T | None = None  # (V, r)

    def __iter__(self) -> Iterator[T | None]:
        return iter((self.hidden, self.weight, self.bias, self.lora_u, self.lora_b))

    def map(self, change: Callable[[T], S]) -> HeadTensors[S]:
        """Return `change` of each value; None stays None."""
        return HeadTensors(*(None if x is None else change(x) for x in self))  # type: ignore[arg-type]

    def factors(self) -> list[tuple[T, T]]:
        """Return the values of the pairs (N, K), (V, K) whose products add up to the projection."""
        adapter = [] if self.lora_u is None or self.lora_b is None else [(self.lora_u, self.lora_b)]
        return [(self.hidden, self.weight), *adapter]

    @staticmethod
    def of_factors(rows: Sequence[S], matrices: Sequence[S], bias: S | None) -> HeadTensors[S]:
        """Return the record whose `factors` are the pairs of `rows` and `matrices`."""
        (hidden, *lora_u), (weight, *lora_b) = rows, matrices
        return HeadTensors(hidden, weight, bias, *lora_u, *lora_b)


# Gradients from the rows of a sweep, in the accumulator's dtype (of `lean` d weight and d lora_b in
# their own); None where not wanted.
Gradients = HeadTensors[Tensor | None]


@dataclass(frozen=True)
class NeedsGrad(HeadTensors[bool]):
    """True for each tensor of a head that needs a gradient."""

    hidden: bool = False
    weight: bool = False
    bias: bool = False
    lora_u: bool = False
    lora_b: bool = False

    @property
    def head(self) -> bool:
        """True if the head, or an adapter on it, trains."""
        return self.weight or self.bias or self.lora_u or self.lora_b


@dataclass(frozen=True)
class Operands(HeadTensors[Tensor]):
    """The tensors to project with; for a divergence from a teacher, the teacher's as constants."""

    # hidden (N, H') of the same positions, weight (V, H'), bias (V,)
    teacher: HeadTensors[Tensor] | None = None


def row_bias(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the bias as row backends read it."""
    return None if bias is None else bias.detach().to(dtype).contiguous()


@dataclass(frozen=True)
class Rows:
    """The positions to project, as copies: later changes of the caller's tensors have no effect.

    Attributes:
        positions: (n,) int64, indices into `hidden`.
        ids: (n,) int64 in [0, V); on a shard counted from its first row, out of range on another's.
        inv_temperature: a number, or (n, 1).
        invalid: (n,) bool, rows whose log-probability is NaN; None: none.
        marked: (n,) the ids, -1 where invalid; None: all are valid.
        top_k: teacher of the divergence, in place of the head's teacher; or more ids to score.
    """

    positions: Tensor
    ids: Tensor
    inv_temperature: float | Tensor = 1.0
    invalid: Tensor | None = None
    marked: Tensor | None = None
    top_k: TopKTeacher | TopKLogps | None = None

    def __len__(self) -> int:
        return self.positions.shape[0]
