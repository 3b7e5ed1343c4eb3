"""Load the rows of a head: from raw logits to scaled logits z, on the fly, and d z / d x.

z = softcap(scale * x) / T, where x = round(raw logits + bias) (`load_biased`). The constants of a
row are folded into two factors (`LogitTransform.inner_outer`): z = x * inner, or with a soft-cap
z = tanh(x * inner) * outer.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.backends import Chunk, LogitTransform
from grpo_kernels.backends.triton_rows.mathfn import quarter_tanh_slope, tanh

# Arguments with one number per row. Each is read once: alignment is not worth a kernel variant.
PER_ROW = [
    "ids_ptr", "inv_t_ptr",
    "logps_ptr", "max_logit_ptr", "log_sum_ptr", "entropies_ptr",
    "log_sum_sq_probs_ptr", "mean_logits_ptr", "is_top1_ptr",
    "d_logp_ptr", "d_entropy_ptr", "d_divergence_ptr",
    "loss_ptr", "log_ratio_ptr", "kl_ptr",
    "advantages_ptr", "d_policy_ptr", "weights_ptr", "old_ptr", "ref_ptr", "gate_ptr",
    "reference_inv_t_ptr", "reference_max_logit_ptr", "reference_log_sum_ptr",
    "value_ptr", "sum_k_ptr",
]  # fmt: skip
ROUNDINGS = {None: None, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def head_arguments(logits: Tensor, transform: LogitTransform) -> dict[str, Any]:
    """Kernel arguments that describe one head's logits (n, V)."""
    inv_t = transform.inv_temperature
    inner, outer = transform.inner_outer()
    return {
        "logits_ptr": logits,
        "stride_n": logits.stride(0),
        "bias_ptr": transform.bias,
        "inv_t_ptr": inv_t.reshape(-1) if isinstance(inv_t, Tensor) else None,
        "inner": inner,
        "outer": outer,
        "HAS_SOFTCAP": transform.softcap is not None,
        "ROUNDED_TO": ROUNDINGS[transform.rounded_to],
    }


def chunk_arguments(chunk: Chunk) -> dict[str, Any]:
    """Kernel arguments that describe `chunk`."""
    n, vocab = chunk.logits.shape
    return {
        "ids_ptr": chunk.ids,
        "n": n,
        "V": vocab,
        **head_arguments(chunk.logits, chunk.transform),
    }


@triton.jit
def row_block(block, n, BLOCK_N: tl.constexpr):
    """The rows (BLOCK_N,) of a block, and which count: past the end, the last row is repeated."""
    rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
    return tl.minimum(rows, n - 1), rows < n


@triton.jit
def row_pointers(logits_ptr, stride_n, rows, inv_t_ptr, inner, outer, HAS_SOFTCAP: tl.constexpr):
    """Pointers (R, 1) to the starts of a head's `rows` (R,), and (inner, outer) in fp32.

    Each factor is a number, or (R, 1) if it includes per-row temperatures.

    Functions pass a head's rows as one tuple, `source`: (row pointers, bias pointer, inner, outer).
    Each kernel builds that tuple itself: in Triton 3.6 no function can return a tuple that holds
    None, and the bias pointer may be None. HAS_SOFTCAP and ROUNDED_TO are separate arguments:
    Triton turns flags in a tuple into run-time numbers, and a tuple cannot hold a dtype.
    """
    inner = tl.cast(inner, tl.float32)
    outer = tl.cast(outer, tl.float32)
    if inv_t_ptr is not None:
        inv_t = tl.load(inv_t_ptr + rows[:, None])
        if HAS_SOFTCAP:
            outer = outer * inv_t
        else:
            inner = inner * inv_t
    return logits_ptr + rows.to(tl.int64)[:, None] * stride_n, inner, outer


@triton.jit
def load_biased(x_ptrs, bias_ptr, columns, mask, ROUNDED_TO: tl.constexpr):
    """The raw logits at `x_ptrs`, plus the bias at the vocabulary's `columns`, rounded.

    0 outside `mask`; without a mask all columns count.
    """
    x = _load(x_ptrs, mask)
    if bias_ptr is not None:
        x += _load(bias_ptr + columns, mask)
    if ROUNDED_TO is not None:
        x = x.to(ROUNDED_TO).to(tl.float32)
    return x


@triton.jit
def _load(ptrs, mask):
    if mask is None:
        return tl.load(ptrs).to(tl.float32)
    else:
        return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def scaled(x, source, HAS_SOFTCAP: tl.constexpr):
    """The scaled logits z of x."""
    _row_ptrs, _bias_ptr, inner, outer = source
    z = x * inner
    if HAS_SOFTCAP:
        z = tanh(z) * outer
    return z


@triton.jit
def row_slope(source, HAS_SOFTCAP: tl.constexpr):
    """The factor of d z / d x that a row shares; with a soft-cap, `bend` is the other factor."""
    _row_ptrs, _bias_ptr, inner, outer = source
    if HAS_SOFTCAP:
        return 4.0 * inner * outer
    else:
        return inner


@triton.jit
def bend(x, source):
    """The factor of d z / d x that differs by element with a soft-cap; see `row_slope`."""
    _row_ptrs, _bias_ptr, inner, _outer = source
    return quarter_tanh_slope(x * inner)


@triton.jit
def load_scaled(
    source, start, end, HAS_SOFTCAP: tl.constexpr, ROUNDED_TO: tl.constexpr, W: tl.constexpr
):
    """A tile of scaled logits as four quarters (R, W), and the columns (1, W) of each."""
    x0, x1, x2, x3, id0, id1, id2, id3 = load_tile(source, start, end, ROUNDED_TO, W)
    z0 = scaled_within(x0, id0, end, source, HAS_SOFTCAP)
    z1 = scaled_within(x1, id1, end, source, HAS_SOFTCAP)
    z2 = scaled_within(x2, id2, end, source, HAS_SOFTCAP)
    z3 = scaled_within(x3, id3, end, source, HAS_SOFTCAP)
    return z0, z1, z2, z3, id0, id1, id2, id3


@triton.jit
def load_tile(source, start, end, ROUNDED_TO: tl.constexpr, W: tl.constexpr):
    """A tile of x as four quarters (R, W), and the columns (1, W) of each.

    The tile starts at column `start`. `end` is the end of the vocabulary, or None if it is beyond
    this tile.
    """
    x0, columns0 = load_x(source, start, end, ROUNDED_TO, W)
    x1, columns1 = load_x(source, start + W, end, ROUNDED_TO, W)
    x2, columns2 = load_x(source, start + 2 * W, end, ROUNDED_TO, W)
    x3, columns3 = load_x(source, start + 3 * W, end, ROUNDED_TO, W)
    return x0, x1, x2, x3, columns0, columns1, columns2, columns3


@triton.jit
def load_x(source, start, end, ROUNDED_TO: tl.constexpr, W: tl.constexpr):
    """x (R, W) from column `start` on, 0 from `end` on; and its columns (1, W)."""
    row_ptrs, bias_ptr, _inner, _outer = source
    columns = start + tl.arange(0, W)[None, :]
    here = None
    if end is not None:
        here = columns < end
    return load_biased(row_ptrs + columns, bias_ptr, columns, here, ROUNDED_TO), columns


@triton.jit
def load_at(source, ids, mask, ROUNDED_TO: tl.constexpr):
    """x (R, 1) at one column of each row; 0 where `mask` (R,) is False."""
    row_ptrs, bias_ptr, _inner, _outer = source
    at = ids[:, None]
    return load_biased(row_ptrs + at, bias_ptr, at, mask[:, None], ROUNDED_TO)


@triton.jit
def scaled_within(x, columns, end, source, HAS_SOFTCAP: tl.constexpr):
    """Scaled logits z of x, -inf beyond the vocabulary."""
    z = scaled(x, source, HAS_SOFTCAP)
    if end is not None:
        # after the transform, since a soft-cap turns -inf into a number
        z = tl.where(columns < end, z, float("-inf"))
    return z
