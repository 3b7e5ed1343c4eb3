"""Quantiles of any number of values. torch's, up to 2.13, take at most 2^24: fp32 lacks larger indices."""

from __future__ import annotations

import torch
from torch import Tensor

MOST = 2**24  # elements that torch.quantile and torch.nanquantile take in every release


def quantile(x: Tensor, q: float) -> Tensor:
    """`torch.quantile` of `x` (n,), n > 0: linear between values; NaN if any is. Does not wait for the device."""
    if x.numel() <= MOST:
        return torch.quantile(x, q)
    ranked, place = x.sort().values, q * (x.numel() - 1)
    below = int(place)
    value = torch.lerp(ranked[below], ranked[min(below + 1, x.numel() - 1)], place - below)
    return torch.where(torch.isnan(ranked[-1]), ranked[-1], value)


def quantile_of_numbers(x: Tensor, q: float) -> Tensor:
    """Return the lower `q`-quantile of `x` (n,), ignoring NaN; NaN if nothing is left. Does not wait for the device."""
    if x.numel() == 0:
        return x.new_full((), torch.nan)
    if x.numel() <= MOST:
        return torch.nanquantile(x, q, interpolation="lower")
    last = x.isnan().logical_not().sum() - 1
    place = (q * last.clamp(min=0).double()).floor().long()
    return x.sort().values.gather(0, place[None])[0]  # NaN comes last
