"""What a stored gradient lacks: the upstream gradient minus the expected one.

A caller of scores may say what gradient it expects (``expected=``), so that one pass computes it.
The backward then writes upstream = s * expected + remainder: it scales the stored gradient by s,
and a second pass computes the gradient of the remainder, in the rows that have one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels.backends import Coefficients
from grpo_kernels.base.tensors import quantile_of_numbers

# remainder over upstream; beyond this, more than three bits would cancel in d weight
FAR_TOO_LARGE = 8.0


def split_off(upstream: Coefficients, expected: Coefficients) -> tuple[Tensor, Coefficients]:
    """Compute the median ratio s, and the remainders (n,), `upstream` - s * `expected`.

    A remainder is 0 if it is only rounding, and None if both inputs are None. The median ratio fits
    most rows if any value of s does. A row fits if s times its expectation equals its upstream
    gradient up to rounding: eight units in the last place of the largest of three numbers, which
    are the upstream gradient, s times the expectation, and the upper quartile of the upstream
    gradients. (A trainer's gradient of a token is a sum of terms that may nearly cancel.)
    Non-finite values never fit.
    """
    pairs = list(zip(upstream, expected, strict=True))
    # nan or inf if y = 0
    ratios = torch.cat([x / y for x, y in pairs if x is not None and y is not None])
    finite_ratios = torch.where(torch.isfinite(ratios), ratios, torch.nan)
    s = torch.nan_to_num(quantile_of_numbers(finite_ratios, 0.5), nan=0.0)

    def remainder(x: Tensor, y: Tensor) -> Tensor:
        fit, eps = s * y, torch.finfo(x.dtype).eps
        finite, size = torch.isfinite(x), x.abs()
        sizes = torch.where(finite & (size > 0), size, torch.nan)
        typical = torch.nan_to_num(quantile_of_numbers(sizes, 0.75), nan=0.0)
        rounding = 8 * eps * torch.maximum(torch.maximum(size, fit.abs()), typical)
        return torch.where(finite & ((x - fit).abs() <= rounding), 0.0, x - fit)

    def remainder_or_none(x: Tensor | None, y: Tensor | None) -> Tensor | None:
        if x is None and y is None:
            return None
        zeros = torch.zeros_like(ratios[: len(x if x is not None else y)])  # type: ignore[arg-type]
        return remainder(zeros if x is None else x, zeros if y is None else y)

    return s, Coefficients(*(remainder_or_none(x, y) for x, y in pairs))


def check_remainder(remainder: Coefficients, upstream: Coefficients) -> tuple[bool, bool]:
    """Check if a remainder is left to compute, and if it far exceeds the upstream gradients.

    Waits for the device.
    """
    parts = [x for x in remainder if x is not None]
    wanted = torch.stack([_largest(x) for x in upstream if x is not None]).amax()
    largest = torch.stack([_largest(x) for x in parts]).amax()
    nonzero = torch.stack([(x != 0).any() for x in parts]).any()
    any_left, far = torch.stack([nonzero, largest > FAR_TOO_LARGE * wanted]).tolist()
    return any_left, far


def ratio_at(upstream: Coefficients, remainder: Coefficients, indices: Tensor) -> Tensor:
    """Upstream over remainder, (m,) at `indices`; NaN in rows with several coefficients."""
    both = zip(upstream, remainder, strict=True)
    pairs = [(torch.zeros_like(y) if x is None else x, y) for x, y in both if y is not None]
    x, y = (torch.stack(column)[:, indices] for column in zip(*pairs, strict=True))  # (k, m)
    is_one = ((x != 0) | (y != 0)).sum(dim=0) == 1
    return torch.where(is_one, x.sum(dim=0) / y.sum(dim=0), torch.nan)


def _largest(x: Tensor) -> Tensor:
    # of finite elements only: non-finite ones never fit, so they reach the gradient anyway
    return torch.cat([torch.where(torch.isfinite(x), x.abs(), 0.0), x.new_zeros(1)]).amax()
