"""Probe of a GPU's library: does it multiply 16-bit operands into fp32 results? Tried once with a small product.

torch has ``mm(..., out_dtype=)`` in its ROCm builds too; whether it is implemented there depends on the release. Where
it is missing or wrong, operands are converted to fp32 first, which takes several times as long.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

import torch
from torch import Tensor

M, N, K = (
    16,
    24,
    512,
)  # sums of small integers up to 512 * 15 * 15: exact in fp32, mostly inexact in 16 bits

_logger = logging.getLogger(__name__)
_works: dict[torch.dtype, bool] = {}


def multiplies(dtype: torch.dtype, mixed_mm: Callable[..., None]) -> bool:
    """Return True if `mixed_mm` (left, right, out, *, add) works and is right for `dtype` on the current GPU.

    The first call for a dtype waits for the device, and logs the answer. While a CUDA graph is captured nothing can
    wait: the answer is then no, if it is not known yet.
    """
    if dtype not in _works:
        if torch.cuda.is_current_stream_capturing():
            return False
        trouble = _trouble(dtype, mixed_mm)
        _works[dtype] = trouble is None
        _logger.info(
            "products of %s operands with float32 results: %s",
            dtype,
            "used"
            if trouble is None
            else f"not used, operands are converted to float32 ({trouble})",
        )
    return _works[dtype]


def _trouble(dtype: torch.dtype, mixed_mm: Callable[..., None]) -> str | None:
    """Return why `mixed_mm` cannot be used for operands of `dtype`; None if it can."""
    with torch.no_grad(), torch.autocast("cuda", enabled=False):
        left, right = (_integers(rows, columns).to("cuda") for rows, columns in ((M, K), (K, N)))
        want = left @ right
        for of_left, of_right, add in itertools.product(
            (_rows, _columns), (_rows, _columns), (False, True)
        ):
            out = torch.ones_like(want)
            try:
                mixed_mm(of_left(left.to(dtype)), of_right(right.to(dtype)), out, add=add)
            except RuntimeError as error:
                return str(error).splitlines()[0]
            if not torch.equal(out, want + 1.0 if add else want):
                return f"a product of integers is off by up to {float((out - want - float(add)).abs().max()):g}"
    return None


def _integers(rows: int, columns: int) -> Tensor:
    """Integers from 0 to 15 without a pattern, (rows, columns) in fp32."""
    place = torch.arange(rows * columns, dtype=torch.int64)
    return ((place * 2654435761 >> 13) % 16).to(torch.float32).view(rows, columns)


def _rows(x: Tensor) -> Tensor:
    """Return `x`, whose rows are contiguous."""
    return x


def _columns(x: Tensor) -> Tensor:
    """Return the same numbers with contiguous columns."""
    return x.t().contiguous().t()
