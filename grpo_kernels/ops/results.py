"""What the ops' results are made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_kernels.engine.sweep import accumulator_of


class Empty:
    """Makes uninitialised results, in the accumulator's dtype; without elements where they are not wanted."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        """`dtype` is that of the products' operands."""
        self._like, self._dtype = like, accumulator_of(dtype)

    def __call__(self, shape: Any = (0,), *, wanted: bool = True) -> Tensor:
        return self._like.new_empty(shape if wanted else (0,), dtype=self._dtype)


def all_rows(x: Tensor, positions: Tensor, n: int) -> Tensor:
    """(m, H), the rows at `positions`, which rise -> (n, H), 0 elsewhere."""
    if x.shape[0] == n:
        return x
    full = x.new_zeros(n, x.shape[1])
    full[positions] = x
    return full
