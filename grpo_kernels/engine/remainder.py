"""The factor between an expected gradient and the upstream gradient, and the remainder that it does not explain."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels.base.quantile import quantile_of_numbers
from grpo_kernels.token_loss.record import Coefficients

FAR_TOO_LARGE = (
    8.0  # remainder over upstream; beyond, more than three bits would cancel in d weight
)


def check_remainder(remainder: Coefficients, upstream: Coefficients) -> tuple[bool, bool]:
    """Return two flags: there is a remainder to compute; it is far larger than all upstream gradients.

    Waits for the device.
    """
    parts = [x for x in remainder if x is not None]
    wanted = torch.stack([_largest(x) for x in upstream if x is not None]).amax()
    largest = torch.stack([_largest(x) for x in parts]).amax()
    nonzero = torch.stack([(x != 0).any() for x in parts]).any()
    any_left, far = torch.stack([nonzero, largest > FAR_TOO_LARGE * wanted]).tolist()
    return any_left, far


def split_off(upstream: Coefficients, expected: Coefficients) -> tuple[Tensor, Coefficients]:
    """Return s, and the remainders (n,), `upstream` less s times `expected`: 0 where that is only rounding, None where
    both are None.

    s is the median ratio, which fits most rows if any does. A row fits if s times its expectation is its upstream
    gradient up to rounding: eight units in the last place of the largest of both and of the rows' upper quartile.
    (A trainer's gradient of a token is a sum of terms that may nearly cancel.) Non-finite values never fit.
    """
    pairs = list(zip(upstream, expected, strict=True))
    ratios = torch.cat(
        [x / y for x, y in pairs if x is not None and y is not None]
    )  # nan or inf where y = 0
    s = torch.nan_to_num(
        quantile_of_numbers(torch.where(torch.isfinite(ratios), ratios, torch.nan), 0.5), nan=0.0
    )

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


def _largest(x: Tensor) -> Tensor:
    """Return the largest magnitude of a finite element. Others count as 0: they never fit, and reach the gradient."""
    return torch.cat([torch.where(torch.isfinite(x), x.abs(), 0.0), x.new_zeros(1)]).amax()
