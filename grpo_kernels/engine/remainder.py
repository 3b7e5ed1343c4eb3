"""An expected gradient against the one that came: the scale between them, and what it does not explain."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kernels.base.quantile import quantile_of_numbers
from grpo_kernels.engine.operands import Coefficients

FAR_TOO_LARGE = 64.0  # times what came: more than six bits of what is stored would cancel


@dataclass(frozen=True)
class Remainder:
    """g - c a and h - c b, (n,) each, exactly 0 where that is only rounding."""

    a: Tensor
    b: Tensor | None

    def size(self, g: Tensor, h: Tensor | None) -> tuple[bool, bool]:
        """Whether anything is left to compute, and whether some of it is far larger than all that came: (g, h).

        Waits for the device.
        """
        pairs = [(self.a, g)] if self.b is None else [(self.a, g), (self.b, torch.zeros_like(g) if h is None else h)]
        wanted = torch.stack([_largest(upstream) for _, upstream in pairs]).amax()
        left = torch.stack([_largest(rest) for rest, _ in pairs]).amax()
        some = torch.stack([(rest != 0).any() for rest, _ in pairs]).any()
        any_left, far = torch.stack([some, left > FAR_TOO_LARGE * wanted]).tolist()
        return any_left, far


def split_off(g: Tensor, h: Tensor | None, expected: Coefficients) -> tuple[Tensor, Remainder]:
    """(c, remainder) of the upstream gradients (n,) of logps and entropies, given their expectation (a, b).

    c is the ratio that fits most rows. A row fits if c times its expectation is what came up to rounding: eight units
    in the last place of the largest of the two and of the upper quartile of the rows, since a trainer's gradient of a
    token is a sum of terms that may nearly cancel. What is not finite never fits.
    """
    a, b = expected
    ratios = torch.cat([g / a, *([] if h is None or b is None else [h / b])])  # nan or inf where a = 0
    c = torch.nan_to_num(quantile_of_numbers(torch.where(torch.isfinite(ratios), ratios, torch.nan), 0.5), nan=0.0)

    def remainder(upstream: Tensor, coefficient: Tensor) -> Tensor:
        fit, eps = c * coefficient, torch.finfo(upstream.dtype).eps
        finite, size = torch.isfinite(upstream), upstream.abs()
        sizes = torch.where(finite & (size > 0), size, torch.nan)
        typical = torch.nan_to_num(quantile_of_numbers(sizes, 0.75), nan=0.0)
        rounding = 8 * eps * torch.maximum(torch.maximum(size, fit.abs()), typical)
        return torch.where(finite & ((upstream - fit).abs() <= rounding), 0.0, upstream - fit)

    if h is None and b is None:
        return c, Remainder(remainder(g, a), None)
    zeros = torch.zeros_like(g)
    return c, Remainder(remainder(g, a), remainder(zeros if h is None else h, zeros if b is None else b))


def _largest(x: Tensor) -> Tensor:
    """The largest size of a finite element; infinity counts as 0 here, since it never fits and surfaces by itself."""
    return torch.cat([torch.where(torch.isfinite(x), x.abs(), 0.0), x.new_zeros(1)]).amax()
