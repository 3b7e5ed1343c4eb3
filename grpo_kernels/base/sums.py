"""Discounted sums along a sequence."""

from __future__ import annotations

from torch import Tensor


def discounted_sums(x: Tensor, discount: float) -> Tensor:
    """y_t = sum_k discount^k x_(t+k) along dim 1 of (B, T).

    By doubling: once y holds the sums of s terms, y_t + discount^s y_(t+s) holds those of 2s. log2(T) passes.
    """
    y, span = x.clone(), 1
    while span < x.shape[1]:
        y[:, :-span] += discount**span * y[:, span:]
        span *= 2
    return y
