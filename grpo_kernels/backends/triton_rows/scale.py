"""A gradient times one number, rounded once to the dtype that is returned: one pass over memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK, NUM_WARPS = 4096, 8  # eight neighbours at a time for each thread: 16 bytes of 16-bit results


def launch_scale(x: Tensor, factor: Tensor, out: Tensor) -> None:
    """``out = x * factor``: x of any shape in fp32, factor (), out of the same shape, or x itself; both contiguous."""
    n = x.numel()
    if n > 0:
        scale_kernel[(triton.cdiv(n, BLOCK),)](
            x_ptr=x,
            factor_ptr=factor,
            out_ptr=out,
            n=n,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
            enable_fp_fusion=False,
        )


@triton.jit(do_not_specialize=["n"], do_not_specialize_on_alignment=["factor_ptr"])
def scale_kernel(x_ptr, factor_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """One block of the product; only the last one has a mask."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    offsets = first + tl.arange(0, BLOCK)
    factor = tl.load(factor_ptr)
    if first + BLOCK <= n:
        x = tl.load(x_ptr + offsets)
        tl.store(out_ptr + offsets, (x * factor).to(out_ptr.dtype.element_ty))
    else:
        x = tl.load(x_ptr + offsets, mask=offsets < n)
        tl.store(out_ptr + offsets, (x * factor).to(out_ptr.dtype.element_ty), mask=offsets < n)
