"""Sequences of a batch, padded or packed."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.base.checks import check_tensor


def sequences_of(
    of_tokens: Tensor, cu_seqlens: Any
) -> tuple[int, int, Callable[[Tensor], tuple[Tensor, Tensor]]]:
    """Return B, the longest length, and a function: positions (n,) in the flattened batch -> sequence, index in it.

    Args:
        of_tokens: a tensor of the batch, (B, T), or (N,) if there are `cu_seqlens` (B + 1,).

    Raises:
        TypeError, ValueError: `cu_seqlens` are not bounds of N tokens.
    """
    device = of_tokens.device
    if cu_seqlens is None:
        batch, columns = of_tokens.shape
        width = max(columns, 1)
        return batch, columns, lambda positions: (positions // width, positions % width)
    check_tensor("cu_seqlens", cu_seqlens)
    if (
        cu_seqlens.dtype not in (torch.int64, torch.int32)
        or cu_seqlens.dim() != 1
        or cu_seqlens.numel() < 1
    ):
        raise ValueError(
            f"cu_seqlens: expected int32 or int64 of shape (B + 1,), got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        )
    bounds, n = cu_seqlens.tolist(), of_tokens.shape[0]
    lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
    if bounds[0] != 0 or bounds[-1] != n or min(lengths, default=0) < 0:
        raise ValueError(f"cu_seqlens: expected to rise from 0 to N = {n}, got {bounds}")
    on_device = cu_seqlens.to(device, torch.long, non_blocking=True)

    def locate(positions: Tensor) -> tuple[Tensor, Tensor]:
        sequence = torch.repeat_interleave(on_device.diff(), output_size=n)[positions]
        return sequence, positions - on_device[sequence]

    return len(lengths), max(lengths, default=0), locate
