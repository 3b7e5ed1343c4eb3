"""Tensor helpers: records, sums, quantiles, ratios, sequences of a batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from grpo_kernels.base.checks import check_tensor

R = TypeVar("R")
# Maximum number of elements for torch.quantile and torch.nanquantile: up to torch 2.13, they keep
# indices in fp32, which cannot hold larger ones.
MOST = 2**24


def accumulator_of(operand_dtype: torch.dtype) -> torch.dtype:
    """Dtype of logits, statistics, and gradients before their one rounding."""
    return torch.float64 if operand_dtype == torch.float64 else torch.float32


def map_tensors(change: Callable[[Tensor], Any], x: Any) -> Any:
    """Copy the record `x`, applying `change` to each tensor in it, in the order of the fields."""
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    if isinstance(x, Tensor):
        return change(x)
    if hasattr(x, "__dataclass_fields__") and not isinstance(x, type):
        copy = object.__new__(type(x))  # skips the checks: every call makes dozens of copies
        for name in x.__dataclass_fields__:
            value = getattr(x, name)
            copy.__dict__[name] = None if value is None else map_tensors(change, value)
        return copy
    if isinstance(x, dict):
        return {name: map_tensors(change, value) for name, value in x.items()}
    if isinstance(x, tuple):
        values = [map_tensors(change, value) for value in x]
        return type(x)(*values) if hasattr(x, "_fields") else tuple(values)
    return x


def take(record: R, index: Tensor | slice) -> R:
    """Select the rows at `index` (m,) of every tensor of `record`, each (n, ...)."""
    rows: R = map_tensors(lambda x: x[index], record)
    return rows


def spread(x: Tensor, index: Tensor, n: int) -> Tensor:
    """Put `x` (m, ...) into increasing rows `index` of zeros (n, ...); `x` itself if m = n.

    `index` is (m,), or (n,) bool that marks the rows.
    """
    if x.shape[0] == n:
        return x
    full = x.new_zeros(n, *x.shape[1:])
    full[index] = x
    return full


def scatter(x: Tensor, index: Tensor, n: int) -> Tensor:
    """`spread`, but always a copy."""
    full = spread(x, index, n)
    return x.clone() if full is x else full


def is_nonzero(coefficient: Tensor) -> Tensor:
    """Mark, (n,) bool, the tokens at which a coefficient (n,) or (n, K) is not 0."""
    return coefficient != 0 if coefficient.dim() == 1 else (coefficient != 0).any(dim=1)


def discounted_sums(x: Tensor, discount: float) -> Tensor:
    """y_t = sum_k discount^k x_(t+k) along dim 1 of (B, T).

    The algorithm doubles: if y holds the sums of `span` terms, y_t + discount^span y_(t+span) holds
    the sums of 2 span terms. It takes log2(T) passes.
    """
    y, span = x.clone(), 1
    while span < x.shape[1]:
        y[:, :-span] += discount**span * y[:, span:]
        span *= 2
    return y


def sequence_means(x: Tensor, mask: Tensor) -> Tensor:
    """(B, T) -> (B, 1): the mean over the counted positions of each row; 0 in a row without any."""
    counts = mask.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(mask, x, 0.0).sum(dim=1, keepdim=True) / counts


def counted_first(mask: Tensor) -> Tensor:
    """Order (B, T) that puts each row's counted positions first, in their order."""
    return (~mask).to(torch.uint8).argsort(dim=1, stable=True)


def last_counted(mask: Tensor) -> Tensor:
    """Mark, (B, T) bool, the last counted position of each row."""
    return mask & (mask.cumsum(dim=1) == mask.sum(dim=1, keepdim=True))


def widen(x: Tensor) -> Tensor:
    """Convert to float64, or to float32 on a device without float64."""
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)


def quantile(x: Tensor, q: float) -> Tensor:
    """`torch.quantile` of `x` (n,), n > 0, for any n. It does not wait for the device.

    It interpolates linearly between values; NaN if any value is NaN.
    """
    if x.numel() <= MOST:
        return torch.quantile(x, q)
    ranked, place = x.sort().values, q * (x.numel() - 1)
    below = int(place)
    value = torch.lerp(ranked[below], ranked[min(below + 1, x.numel() - 1)], place - below)
    return torch.where(torch.isnan(ranked[-1]), ranked[-1], value)


def quantile_of_numbers(x: Tensor, q: float) -> Tensor:
    """The lower `q`-quantile of `x` (n,), ignoring NaN. It does not wait for the device.

    It is NaN if all values are NaN, or if there are none.
    """
    if x.numel() == 0:
        return x.new_full((), torch.nan)
    if x.numel() <= MOST:
        return torch.nanquantile(x, q, interpolation="lower")
    last = x.isnan().logical_not().sum() - 1
    place = (q * last.clamp(min=0).double()).floor().long()
    return x.sort().values.gather(0, place[None])[0]  # NaN comes last


def scored_difference(logps: Tensor, sampling_logps: Tensor) -> Tensor:
    """``logps - sampling_logps``, detached; 0 if the sampler could not score the token (NaN)."""
    return torch.nan_to_num(logps.detach() - sampling_logps, nan=0.0)


def bounded(ratio: Tensor, low: float | None, high: float | None, *, truncates: bool) -> Tensor:
    """Clamp ratios to [`low`, `high`] if `truncates`, else set those outside to 0.

    None means no bound.
    """
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    if truncates:
        return ratio.clamp(low, high)
    return torch.where((ratio < low) | (ratio > high), 0.0, ratio)


def sequences_of(
    of_tokens: Tensor, cu_seqlens: Any
) -> tuple[int, int, Callable[[Tensor], tuple[Tensor, Tensor]]]:
    """Find B, the longest length, and a function that locates tokens.

    The function maps positions (n,) in the flattened batch to (sequences, indices within them).
    `of_tokens` is (B, T), or (N,) with `cu_seqlens` (B + 1,).
    """
    if cu_seqlens is None:
        batch, columns = of_tokens.shape
        width = max(columns, 1)
        return batch, columns, lambda positions: (positions // width, positions % width)
    check_tensor("cu_seqlens", cu_seqlens)
    kind, shape = cu_seqlens.dtype, tuple(cu_seqlens.shape)
    if kind not in (torch.int64, torch.int32) or len(shape) != 1 or shape[0] < 1:
        wanted = "int32 or int64 of shape (B + 1,)"
        raise ValueError(f"cu_seqlens: expected {wanted}, got {kind} {shape}")
    bounds, n = cu_seqlens.tolist(), of_tokens.shape[0]
    lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
    if bounds[0] != 0 or bounds[-1] != n or min(lengths, default=0) < 0:
        hint = "; of lengths, pass the sums, beginning with 0" if sum(bounds) == n else ""
        raise ValueError(f"cu_seqlens: expected to rise from 0 to N = {n}, got {bounds}{hint}")
    on_device = cu_seqlens.to(of_tokens.device, torch.long, non_blocking=True)

    def locate(positions: Tensor) -> tuple[Tensor, Tensor]:
        sequence = torch.repeat_interleave(on_device.diff(), output_size=n)[positions]
        return sequence, positions - on_device[sequence]

    return len(lengths), max(lengths, default=0), locate


def extreme(x: Tensor, *, largest: bool) -> Tensor:
    """The largest or smallest value of `x` that is not NaN; NaN if there is none."""
    if x.numel() == 0:
        return x.new_full((), torch.nan)
    missing = torch.isnan(x)
    filled = x.masked_fill(missing, -torch.inf if largest else torch.inf)
    return (filled.amax() if largest else filled.amin()).masked_fill(missing.all(), torch.nan)
