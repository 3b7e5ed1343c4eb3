"""Scoring straight from hidden states: a matrix product with the softmax folded into its epilogue.

    x = hidden @ weight.T (fp32 accumulators);   z = softcap(scale * round(x + bias)) / T
    per row and part of the vocabulary: the running sum (m, rest, t) of `reduce`, and z of the target if it lies there
    then over the parts of a row:       logp, max z, log sum e^(z - max), entropy

No logits are stored: memory is 3 numbers per row and part. The parts ("splits") and the tiles follow from (H, V, dtype,
device) alone, never from n, so that a row's bits are the same in any batch. Programs that run at the same time
have the same `GROUP` blocks of rows, so that they share each tile of the weight while it is in the cache.

Operands are loaded by tensor descriptors (TMA) if the device has them and the addresses are aligned, else by pointers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from grpo_kernels.backends.interface import LogitTransform, RowStats
from grpo_kernels.backends.triton_rows.combine import launch_combine
from grpo_kernels.backends.triton_rows.configs import DotConfig, dot_config
from grpo_kernels.backends.triton_rows.device import arch_of, on
from grpo_kernels.backends.triton_rows.mathfn import exp_term
from grpo_kernels.backends.triton_rows.reduce import LOWEST, join
from grpo_kernels.backends.triton_rows.transform import arguments, row_factors, scaled

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GROUP = 16
MOST_STRIDE = 2**23  # elements: offsets within a tile of 256 rows fit in 32 bits

FLOOR = tl.constexpr(
    -3.4028234663852886e38
)  # the lowest finite number, for logits; LOWEST is for exponents


def score_dot(
    hidden: Tensor,  # (n, H)
    weight: Tensor,  # (V, H)
    ids: Tensor,  # (n,) int64; outside of [0, V) the log-probability is NaN
    transform: LogitTransform,
    *,
    entropy: bool,
    config: DotConfig | None = None,
) -> RowStats:
    """The statistics of ``hidden @ weight.T``, whose logits are never in memory.

    Args:
        config: the tiles; chosen by `dot_config` if None.

    Raises:
        ValueError: operands that the kernel cannot take. The engine "score", which stores logits, takes them.
    """
    if hidden.dtype not in DTYPES:
        raise ValueError(
            f"hidden: expected float32, bfloat16 or float16, got {hidden.dtype}; engine='score' takes it"
        )
    if weight.dtype != hidden.dtype:
        raise ValueError(
            f"weight: expected the dtype of hidden, {hidden.dtype}, got {weight.dtype}"
        )
    if not hidden.is_cuda and isinstance(dot_kernel, triton.JITFunction):
        raise ValueError(
            "backend: 'triton' expected tensors on a GPU (or TRITON_INTERPRET=1 before Triton is imported), "
            f"got {hidden.device.type} tensors"
        )
    if config is None:
        arch, (vocab, width), has_softcap = (
            arch_of(hidden.device),
            weight.shape,
            transform.softcap is not None,
        )
        config = dot_config(
            width, vocab, hidden.dtype, arch, softcap=has_softcap, aligned=is_aligned(weight)
        )
    with on(hidden.device):
        return launch_dot(hidden, weight, ids, transform, config, entropy=entropy)


def launch_dot(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    transform: LogitTransform,
    config: DotConfig,
    *,
    entropy: bool,
) -> RowStats:
    """Do `score_dot` by the tiles of `config`, without checks, on the current device."""
    (n, width), vocab = hidden.shape, weight.shape[0]
    target = hidden.new_empty(n, dtype=torch.float32)
    maxima, rests, ts = hidden.new_empty(3, n, config.splits, dtype=torch.float32)
    if n == 0:
        return launch_combine(maxima, rests, ts, target, ids, vocab, entropy=entropy)
    weight, stride_wv = _with_stride(weight)
    hidden, stride_hn = _with_stride(
        hidden, copies=is_aligned(weight) and not is_aligned(hidden)
    )  # for wide loads
    use_tma = config.use_tma and is_aligned(weight)
    h: Any = hidden
    w: Any = weight
    if use_tma:
        h = TensorDescriptor(hidden, [n, width], [stride_hn, 1], [config.block_n, config.block_h])
        w = TensorDescriptor(
            weight, [vocab, width], [stride_wv, 1], [config.block_v, config.block_h]
        )
    dot_kernel[(triton.cdiv(n, config.block_n) * config.splits,)](
        # data
        hidden=h,
        weight=w,
        ids_ptr=ids,
        # results
        max_ptr=maxima,
        rest_ptr=rests,
        t_ptr=ts,
        target_ptr=target,
        # sizes and strides
        n=n,
        V=vocab,
        H=width,
        splits=config.splits,
        tiles_per_split=config.tiles_per_split(vocab),
        stride_hn=stride_hn,
        stride_wv=stride_wv,
        # the transform
        **arguments(transform),
        # the tile
        USE_TMA=use_tma,
        EVEN_H=width % config.block_h == 0,
        UPCAST=not isinstance(
            dot_kernel, triton.JITFunction
        ),  # the interpreter takes bf16 for integers
        BLOCK_N=config.block_n,
        BLOCK_V=config.block_v,
        BLOCK_H=config.block_h,
        GROUP=GROUP,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        enable_fp_fusion=False,
    )
    return launch_combine(maxima, rests, ts, target, ids, vocab, entropy=entropy)


def _with_stride(x: Tensor, *, copies: bool = False) -> tuple[Tensor, int]:
    """Return x (r, H) with contiguous rows, copied if need be or if `copies`, and the stride between the rows."""
    width = x.shape[1]
    apart = x.stride(0)
    if copies or (width > 1 and x.stride(1) != 1) or not width <= apart < MOST_STRIDE:
        x, apart = x.clone(memory_format=torch.contiguous_format), width
    return x, apart


def is_aligned(x: Tensor) -> bool:
    """Return True if rows of x (r, H) start and end at multiples of 16 elements, and x at one of 16 bytes.

    Wide loads by pointers need that; a tensor descriptor would do with less.
    """
    return (
        x.numel() > 0 and x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0 and x.shape[1] % 16 == 0
    )


@triton.jit(do_not_specialize=["n", "V", "splits", "tiles_per_split"])
def dot_kernel(
    hidden,
    weight,
    ids_ptr,
    max_ptr,
    rest_ptr,
    t_ptr,
    target_ptr,
    n,
    V,
    H,
    splits,
    tiles_per_split,
    stride_hn,
    stride_wv,
    bias_ptr,
    inv_t_ptr,
    inner,
    outer,
    HAS_SOFTCAP: tl.constexpr,
    ROUNDED_TO: tl.constexpr,
    USE_TMA: tl.constexpr,
    EVEN_H: tl.constexpr,
    UPCAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_H: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The running sums of `BLOCK_N` rows over one part of the vocabulary; `hidden`, `weight`: descriptors or pointers.

    A tile takes half of a thread's registers or more. So few values may live through the inner loop, and columns are
    constants that are compared with scalars.
    """
    # The rows of a group vary fastest, then the parts, then the groups.
    place = tl.program_id(0) % (GROUP * splits)
    first_block = tl.program_id(0) // (GROUP * splits) * GROUP
    in_group = tl.minimum(tl.cdiv(n, BLOCK_N) - first_block, GROUP)
    first_row = (first_block + place % in_group) * BLOCK_N
    split = place // in_group

    offs_n = tl.minimum(
        tl.arange(0, BLOCK_N), n - 1 - first_row
    )  # past the end, the last row again
    rows = first_row.to(tl.int64) + offs_n
    ids = tl.load(ids_ptr + rows).to(tl.int32)
    inner, outer = row_factors(inv_t_ptr, rows[:, None], inner, outer, HAS_SOFTCAP)
    head = (None, bias_ptr, inner, outer)  # no pointers: its logits are not in memory
    offs_v = tl.arange(0, BLOCK_V)
    offs_h = tl.arange(0, BLOCK_H)
    m = tl.full([BLOCK_N], FLOOR, tl.float32)
    rest = tl.full([BLOCK_N], -1.0, tl.float32)
    t = tl.zeros([BLOCK_N], tl.float32)
    target = tl.zeros([BLOCK_N], tl.float32)
    first_tile = split * tiles_per_split
    last_tile = tl.minimum(first_tile + tiles_per_split, tl.cdiv(V, BLOCK_V))
    for tile in range(first_tile, last_tile):
        first_id = tile * BLOCK_V
        x = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
        if USE_TMA:
            for k in range(0, H, BLOCK_H):
                x = dot(hidden.load([first_row, k]), weight.load([first_id, k]).T, x, UPCAST)
        else:
            h_ptr = hidden + first_row.to(tl.int64) * stride_hn
            w_ptr = weight + first_id.to(tl.int64) * stride_wv
            h_offs = offs_n[:, None] * stride_hn + offs_h[None, :]
            columns = tl.minimum(offs_v, V - 1 - first_id)  # past the end, the last id again
            w_offs = columns[None, :] * stride_wv + offs_h[:, None]
            for k in range(0, H, BLOCK_H):
                if EVEN_H:
                    x = dot(tl.load(h_ptr + h_offs), tl.load(w_ptr + w_offs), x, UPCAST)
                else:
                    h = tl.load(h_ptr + h_offs, mask=offs_h[None, :] < H - k, other=0.0)
                    w = tl.load(w_ptr + w_offs, mask=offs_h[:, None] < H - k, other=0.0)
                    x = dot(h, w, x, UPCAST)
                h_ptr += BLOCK_H
                w_ptr += BLOCK_H
        if bias_ptr is not None:
            x += tl.load(bias_ptr + first_id + offs_v, mask=offs_v < V - first_id, other=0.0)[
                None, :
            ]
        if ROUNDED_TO is not None:
            x = x.to(ROUNDED_TO).to(tl.float32)
        z = scaled(x, head, HAS_SOFTCAP)
        offs_y = ids - first_id
        has_target = tl.max(((offs_y >= 0) & (offs_y < BLOCK_V)).to(tl.int32), axis=0) > 0
        if has_target | (
            first_id + BLOCK_V > V
        ):  # few tiles; the others need neither mask nor search
            z = tl.where(offs_v[None, :] < V - first_id, z, float("-inf"))
            target += tl.sum(tl.where(offs_y[:, None] == offs_v[None, :], z, 0.0), axis=1)
        tile_m, tile_rest, tile_t = tile_sums(z)
        m, rest, t = join(m, rest, t, tile_m, tile_rest, tile_t)

    is_empty = (m == FLOOR) & (rest < 0.0)
    # Made anew, now with rows past the end: what lives through the loop takes registers.
    offs_all = tl.arange(0, BLOCK_N)
    all_rows = first_row.to(tl.int64) + offs_all
    mask_n = first_row + offs_all < n
    all_ids = tl.load(ids_ptr + all_rows, mask=mask_n, other=-1)
    at = all_rows * splits + split
    m = tl.where(rest == rest, m, float("nan"))  # a NaN shows in rest alone
    tl.store(max_ptr + at, tl.where(is_empty, float("-inf"), m), mask=mask_n)
    tl.store(rest_ptr + at, rest, mask=mask_n)
    tl.store(t_ptr + at, t, mask=mask_n)
    is_here = (all_ids >= first_tile * BLOCK_V) & (all_ids < last_tile * BLOCK_V)
    tl.store(target_ptr + all_rows, target, mask=mask_n & is_here)


@triton.jit
def dot(h, w, x, UPCAST: tl.constexpr):
    """``x + h @ w`` of (N, H) and (H, W), in fp32; fp32 operands are taken as they are, not as TF32."""
    if UPCAST:
        h = h.to(tl.float32)
        w = w.to(tl.float32)
    return tl.dot(h, w, x, input_precision="ieee", out_dtype=tl.float32)


@triton.jit
def tile_sums(z):
    """The running sum (m, rest, t) of each row of z (R, W); see `reduce`. A NaN makes rest NaN.

    The instances of the largest are counted, so that exactly one is left out. A row of only -inf gives (FLOOR, -1, 0):
    the whole sum, 1 + rest, is then 0 as well, and a finite m is simpler to subtract.
    """
    m = tl.maximum(tl.max(z, axis=1), FLOOR)
    is_top = z == m[:, None]
    below = tl.where(is_top, float("-inf"), z)
    a = tl.maximum(below - m[:, None], LOWEST, propagate_nan=tl.PropagateNan.ALL)
    e = exp_term(a)
    tops = tl.sum(tl.where(is_top, 1.0, 0.0), axis=1)
    return m, tl.sum(e, axis=1) + (tops - 1.0), tl.sum(e * a, axis=1)
