"""Products of bf16 operands with an fp32 result, on a CPU; torch has them for GPUs alone.

The MKL that torch is built with has them, too: it takes the operands as they are, and returns the sums as accumulated,
in fp32. torch's own product of bf16 operands rounds the sums to bf16.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROW_MAJOR, AS_IT_IS, TRANSPOSED = 101, 111, 112  # CBLAS_LAYOUT, CBLAS_TRANSPOSE


def multiplies(dtype: torch.dtype) -> bool:
    """Return True if operands of `dtype` can be multiplied, and faster than in fp32.

    That takes AMX, which multiplies tiles. AVX512-BF16, which multiplies vectors, does only twice the work of fp32's
    instructions, and took longer than converting the operands (docs/design.md).
    """
    return dtype == torch.bfloat16 and _has_tiles() and _gemm() is not None


def mixed_mm(left: Tensor, right: Tensor, out: Tensor, *, add: bool = False) -> None:
    """``out = left @ right``, or ``+=``: (m, k) and (k, n) in bf16, rows or columns contiguous, to (m, n) in fp32."""
    torch.mm(left.to("meta"), right.to("meta"))  # no data: only for tools that count operations
    _compute(left, right, out, add)


@functools.cache
def _has_tiles() -> bool:
    ask = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return ask is not None and bool(ask())


@functools.cache
def _gemm() -> Callable[..., None] | None:
    """``cblas_gemm_bf16bf16f32``; None where torch was built without it."""
    libraries = Path(torch.__file__).parent / "lib"
    try:
        function: Any = ctypes.CDLL(str(libraries / "libtorch_cpu.so")).cblas_gemm_bf16bf16f32
    except (OSError, AttributeError):
        return None
    number, pointer, real = ctypes.c_int, ctypes.c_void_p, ctypes.c_float
    matrix = [pointer, number]
    function.argtypes = [*[number] * 6, real, *matrix, *matrix, real, *matrix]
    function.restype = None
    return function


def _compute(left: Tensor, right: Tensor, out: Tensor, add: bool) -> None:
    if not out.numel():
        return
    if not left.shape[1]:
        if not add:
            out.zero_()
        return
    gemm = _gemm()
    assert gemm is not None
    if out.stride(1) != 1:
        rows_first = torch.empty_like(out, memory_format=torch.contiguous_format).copy_(out)
        _compute(left, right, rows_first, add)
        out.copy_(rows_first)
        return
    (left, of_left, left_step), (right, of_right, right_step) = _operand(left), _operand(right)
    (m, k), n, beta = left.shape, right.shape[1], 1.0 if add else 0.0
    a, b = (left.data_ptr(), left_step), (right.data_ptr(), right_step)
    gemm(
        ROW_MAJOR,
        of_left,
        of_right,
        m,
        n,
        k,
        1.0,
        *a,
        *b,
        beta,
        out.data_ptr(),
        max(out.stride(0), n),
    )


def _operand(x: Tensor) -> tuple[Tensor, int, int]:
    """Return `x`, copied if need be, with CBLAS's transpose flag and leading dimension for it."""
    if x.stride(1) == 1 or x.shape[1] == 1 or x.stride(0) != 1:
        x = x if x.stride(1) == 1 else x.contiguous()
        return x, AS_IT_IS, max(x.stride(0), x.shape[1])
    return x, TRANSPOSED, max(x.stride(1), x.shape[0])
