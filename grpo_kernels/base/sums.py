"""Sums and means along sequences, their counted positions, and the precision of statistics."""

from __future__ import annotations

import torch
from torch import Tensor


def discounted_sums(x: Tensor, discount: float) -> Tensor:
    """y_t = sum_k discount^k x_(t+k) along dim 1 of (B, T).

    By doubling: once y holds the sums of `span` terms, y_t + discount^span y_(t+span) holds those of 2 span.
    log2(T) passes.
    """
    y, span = x.clone(), 1
    while span < x.shape[1]:
        y[:, :-span] += discount**span * y[:, span:]
        span *= 2
    return y


def sequence_means(x: Tensor, mask: Tensor) -> Tensor:
    """(B, T) -> (B, 1): the mean over each row's counted positions, 0 in a row without any."""
    return torch.where(mask, x, 0.0).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(
        min=1
    )


def counted_first(mask: Tensor) -> tuple[Tensor, Tensor]:
    """(B, T) each: the order that moves a row's counted positions to its front, and the mask in that order."""
    order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)
    return order, mask.gather(1, order)


def last_counted(mask: Tensor) -> Tensor:
    """(B, T) bool, true at each row's last counted position."""
    return mask & (mask.cumsum(dim=1) == mask.sum(dim=1, keepdim=True))


def widen(x: Tensor) -> Tensor:
    """Convert to float64, or to float32 on a device that has no float64."""
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)
