"""Uninitialised results for the ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_kernels.engine.products import accumulator_of


class Empty:
    """Factory of uninitialised results in the accumulator's dtype, of 0 elements if not wanted."""

    def __init__(self, like: Tensor, dtype: torch.dtype) -> None:
        """`dtype` is that of the products' operands."""
        self._like, self._dtype = like, accumulator_of(dtype)

    def __call__(self, shape: Any = (0,), *, wanted: bool = True) -> Tensor:
        return self._like.new_empty(shape if wanted else (0,), dtype=self._dtype)
