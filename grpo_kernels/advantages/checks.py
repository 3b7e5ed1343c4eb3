"""Checks of the advantage estimators' arguments: rewards, masks, values of tokens, options; and conversions of dtype.

They come first in every estimator, within `check_same`: if one rank has to raise, all do, and none is left waiting in a
collective.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.base.checks import check_mask_values
from grpo_kernels.base.choices import AdvantageStd, choices
from grpo_kernels.base.sums import widen


def reward_table(
    rewards: Tensor,  # (B,) or (B, F)
    reward_weights: Tensor | Sequence[float] | None,  # (F,)
    values: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Check the arguments; return rewards as (B, F) and weights as (F,), both as `widen` returns them.

    Add to `values` the entries that the ranks have to compare.
    """
    real_tensor("rewards", rewards)
    if rewards.dim() not in (1, 2) or rewards.shape[1:] == (0,):
        raise ValueError(f"rewards: expected shape (B,) or (B, F), got {tuple(rewards.shape)}")
    table = widen(rewards if rewards.dim() == 2 else rewards[:, None])
    require_all(~table.isinf(), table, "rewards", "finite values, or NaN for an unscored row")
    if reward_weights is None:
        weights = table.new_ones(table.shape[1])
    else:
        weights = widen(_numbers("reward_weights", reward_weights)).to(table.device)
        expect_shape("reward_weights", weights, table.shape[1:], "(F,)")
        require_all(weights.isfinite(), weights, "reward_weights", "finite values")
    values |= {
        "F of rewards": table.shape[1],
        "dtype of rewards": rewards.dtype,
        "reward_weights": weights,
    }
    return table, weights


def _numbers(name: str, x: Tensor | Sequence[float]) -> Tensor:
    """`x` as a tensor; Python's numbers in float64, whatever torch's default dtype is."""
    if isinstance(x, Tensor):
        return x
    try:
        return torch.as_tensor(x, dtype=torch.float64)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{name}: expected a tensor or a list of numbers, got {x!r:.80}") from error


def bool_mask(mask: Tensor) -> Tensor:
    """``completion_mask`` as (B, T) bool: non-zero counts. Raises for NaN; warns once of numbers other than 0 and 1.

    Integers on a GPU are not checked: that would wait for the device.
    """
    real_tensor("completion_mask", mask)
    if mask.dim() != 2:
        raise ValueError(f"completion_mask: expected shape (B, T), got {tuple(mask.shape)}")
    counts = mask != 0
    if (mask.is_floating_point() or mask.device.type == "cpu") and bool(mask.ne(counts).any()):
        check_mask_values("completion_mask", has_nan=bool(mask.isnan().any()))
    return counts


def counted_values(name: str, x: Tensor, mask: Tensor) -> Tensor:
    """(B, T), widened: ``x`` where the mask counts, 0 elsewhere. Raises for a counted number that is not finite."""
    expect_shape(name, x, mask.shape, "(B, T)")
    require_all(x.isfinite() | ~mask, x, name, "finite values at counted positions")
    return torch.where(mask, widen(x), 0.0)


def require_all(ok: Tensor, x: Tensor, name: str, expected: str) -> None:
    """Raise ValueError unless ``ok`` is all true; the message shows the first entry of ``x`` where it is false."""
    bad = (~ok).nonzero()
    if len(bad):
        first = tuple(bad[0].tolist())
        raise ValueError(f"{name}: expected {expected}, got {x[first].item()} at {first}")


def real_tensor(name: str, x: object) -> None:
    """Raise TypeError unless ``x`` is a tensor of real numbers."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    if x.is_complex():
        raise TypeError(f"{name}: expected real numbers, got {x.dtype}")


def expect_shape(name: str, x: Tensor, shape: Sequence[int], letters: str) -> None:
    """Raise TypeError unless ``x`` is a real tensor, ValueError unless it has ``shape`` (``letters`` in messages)."""
    real_tensor(name, x)
    if x.shape != tuple(shape):
        raise ValueError(f"{name}: expected shape {letters} = {tuple(shape)}, got {tuple(x.shape)}")


def one_of(name: str, value: str, names: tuple[str, ...]) -> None:
    """Raise ValueError unless ``value`` is one of ``names``."""
    if value not in names:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, names))}, got {value!r}")


def in_interval(name: str, value: float, high: float = math.inf) -> None:
    """Raise TypeError or ValueError unless ``value`` is a finite number in [0, high]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    if not (0 <= value <= high and math.isfinite(value)):
        bounds = "at least 0" if high == math.inf else f"in [0, {high:g}]"
        raise ValueError(f"{name}: expected a finite number {bounds}, got {value}")


def std_correction(std: str) -> int:
    """Return the correction of `std`, which divides by n - correction."""
    one_of("std", std, choices(AdvantageStd))
    return 1 if std == "sample" else 0


def float_dtype(x: Tensor) -> torch.dtype:
    """The dtype of x if it is a float, else float32."""
    return x.dtype if x.is_floating_point() else torch.float32
