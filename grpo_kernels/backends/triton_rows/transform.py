"""From the raw projection x to the scaled logits z = softcap(scale * round(x + bias)) / T, on the fly, and d z / d x.

The constants of a row are folded into two factors (`LogitTransform.factors`): z = x * inner, or with a soft-cap
z = tanh(x * inner) * outer.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from grpo_kernels.backends.interface import Chunk, LogitTransform
from grpo_kernels.backends.triton_rows.mathfn import quarter_tanh_slope, tanh

# Arguments with one number per row. Each is read once, so that its alignment is not worth a variant of the kernel.
PER_ROW = [
    *(
        "ids_ptr",
        "inv_t_ptr",
        "logps_ptr",
        "max_logit_ptr",
        "log_sum_ptr",
        "entropies_ptr",
        "log_sum_sq_probs_ptr",
    ),
    *(
        "mean_logits_ptr",
        "is_top1_ptr",
        "d_logp_ptr",
        "d_entropy_ptr",
        "loss_ptr",
        "log_ratio_ptr",
        "kl_ptr",
    ),
    *("advantages_ptr", "d_policy_ptr", "weights_ptr", "old_ptr", "ref_ptr", "gate_ptr"),
    *(
        "teacher_inv_t_ptr",
        "teacher_max_logit_ptr",
        "teacher_log_sum_ptr",
        "value_ptr",
        "sum_k_ptr",
        "d_divergence_ptr",
    ),
]
ROUNDINGS = {None: None, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def arguments(transform: LogitTransform) -> dict[str, Any]:
    """Kernel arguments that describe `transform`."""
    inv_t = transform.inv_temperature
    inner, outer = transform.factors()
    return {
        "bias_ptr": transform.bias,
        "inv_t_ptr": inv_t.reshape(-1) if isinstance(inv_t, Tensor) else None,
        "inner": inner,
        "outer": outer,
        "HAS_SOFTCAP": transform.softcap is not None,
        "ROUNDED_TO": ROUNDINGS[transform.rounded_to],
    }


def head_arguments(logits: Tensor, transform: LogitTransform) -> dict[str, Any]:
    """Kernel arguments that describe one head's logits (n, V)."""
    return {"logits_ptr": logits, "stride_n": logits.stride(0), **arguments(transform)}


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
def head_rows(logits_ptr, stride_n, rows, inv_t_ptr, inner, outer, HAS_SOFTCAP: tl.constexpr):
    """Return pointers (R, 1) to the starts of a head's `rows` (R,), and (inner, outer) as `row_factors` returns them.

    A head travels as one tuple, `head`: (row pointers, bias pointer, inner, outer). Each kernel puts the bias pointer
    between these itself: in Triton 3.6 no function can return a tuple that holds None. HAS_SOFTCAP and ROUNDED_TO
    travel by themselves: Triton makes run-time numbers of flags in a tuple, and a tuple cannot hold a dtype.
    """
    inner, outer = row_factors(inv_t_ptr, rows[:, None], inner, outer, HAS_SOFTCAP)
    return logits_ptr + rows.to(tl.int64)[:, None] * stride_n, inner, outer


@triton.jit
def row_factors(inv_t_ptr, rows, inner, outer, HAS_SOFTCAP: tl.constexpr):
    """Return (inner, outer) in fp32: numbers, or (R, 1) where each of the rows (R, 1) has its own temperature."""
    inner = tl.cast(inner, tl.float32)
    outer = tl.cast(outer, tl.float32)
    if inv_t_ptr is not None:
        inv_t = tl.load(inv_t_ptr + rows)
        if HAS_SOFTCAP:
            outer = outer * inv_t
        else:
            inner = inner * inv_t
    return inner, outer


@triton.jit
def load_projection(x_ptrs, bias_ptr, columns, mask, ROUNDED_TO: tl.constexpr):
    """The raw projection at `x_ptrs`, in the vocabulary's `columns`, with the bias, rounded; 0 outside of `mask`.

    A mask of None means all of them.
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
def scaled(x, head, HAS_SOFTCAP: tl.constexpr):
    """The scaled logits z of a head's projection x."""
    _row_ptrs, _bias_ptr, inner, outer = head
    z = x * inner
    if HAS_SOFTCAP:
        z = tanh(z) * outer
    return z


@triton.jit
def row_slope(head, HAS_SOFTCAP: tl.constexpr):
    """The factor of d z / d x that all elements of a row share; with a soft-cap `bend` is the other."""
    _row_ptrs, _bias_ptr, inner, outer = head
    if HAS_SOFTCAP:
        return 4.0 * inner * outer
    else:
        return inner


@triton.jit
def bend(x, head):
    """The element's own factor of d z / d x with a soft-cap, `row_slope` being the other."""
    _row_ptrs, _bias_ptr, inner, _outer = head
    return quarter_tanh_slope(x * inner)
