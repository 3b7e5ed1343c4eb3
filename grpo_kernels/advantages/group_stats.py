"""Building blocks of the advantage estimators: checked inputs, group statistics that skip NaN, discounted sums.

Checks come first, within `check_same`, so that every rank raises where one has to, and none is left
waiting in a collective.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels.base.agreement import Each
from grpo_kernels.base.checks import check_mask_values
from grpo_kernels.base.choices import AdvantageStd, choices
from grpo_kernels.base.distributed import all_reduce, gather_uneven

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NAN = float("nan")


class Groups(NamedTuple):
    """Which of ``number`` groups (over all ranks) each of this rank's rows belongs to."""

    of_row: Tensor  # (N,) int64
    number: int
    process_group: ProcessGroup | None


class Moments(NamedTuple):
    """Per row and column; ``std`` and ``scored`` are the group's. ``centred`` is NaN where the entry is unscored."""

    centred: Tensor  # (N, F)
    std: Tensor  # (N, F)
    scored: Tensor  # (N, F), the number of scored entries


def group_sums(x: Tensor, groups: Groups) -> Tensor:
    """(N, F) -> (groups, F): each group's sum, over all ranks."""
    sums = x.new_zeros(groups.number, x.shape[1]).index_add(0, groups.of_row, x)
    return all_reduce(sums, "sum", groups.process_group)


def group_extremes(x: Tensor, groups: Groups, op: str) -> Tensor:
    """(N, F) -> (groups, F): each group's "min" or "max" over the non-NaN entries of all ranks; inf or -inf if none."""
    nothing = math.inf if op == "min" else -math.inf
    rows = groups.of_row[:, None].expand_as(x)
    found = x.new_full((groups.number, x.shape[1]), nothing)
    found = found.scatter_reduce(0, rows, torch.where(x.isnan(), nothing, x), f"a{op}")
    return all_reduce(found, op, groups.process_group)


def deviations(x: Tensor, groups: Groups, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x - its group's mean over the non-NaN entries, (N, F), NaN where unscored; and the weights' sums, (groups, F).

    The mean is weighted by `weights` (N, F), at least 0; None: all weigh 1. Entries are shifted by their group's
    smallest first: equal ones become exact zeros and stay so, whatever their size, where x - mean(x) would leave the
    mean's rounding error.
    """
    scored = ~x.isnan()
    weights = scored.to(x.dtype) if weights is None else torch.where(scored, weights, 0.0)
    shifted = torch.where(scored, x - group_extremes(x, groups, "min")[groups.of_row], 0.0)
    total = group_sums(weights, groups)
    mean = group_sums(weights * shifted, groups) / torch.where(total > 0, total, 1.0)
    return torch.where(scored, shifted - mean[groups.of_row], NAN), total


def moments(x: Tensor, groups: Groups, correction: int) -> Moments:
    """Deviations from the group's mean and sqrt(sum of their squares / (n - correction)), over the non-NaN entries.

    The std of fewer than correction + 1 entries is 0.
    """
    centred, count = deviations(x, groups)
    squares = group_sums(centred.nan_to_num(nan=0.0).square(), groups)
    std = (squares / (count - correction).clamp(min=1)).sqrt()
    return Moments(centred, std[groups.of_row], count[groups.of_row])


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient, with 0 / 0 = 0."""
    return torch.where(numerator == 0, 0.0, numerator / denominator)


def weighted_sum(table: Tensor, weights: Tensor) -> Tensor:
    """(N, F) -> (N, 1): sum_f w_f r_f over the scored entries, NaN for a row without any."""
    unscored = table.isnan().all(dim=1, keepdim=True)
    return torch.where(unscored, NAN, (table * weights).nansum(dim=1, keepdim=True))


def summed_z_scores(table: Tensor, weights: Tensor, groups: Groups, correction: int, epsilon: float) -> Tensor:
    """(N, F) -> (N, 1): the weighted sum of each column's (x - mean) / (std + epsilon), NaN where all is unscored."""
    own = moments(table, groups, correction)
    return weighted_sum(divide(own.centred, own.std + epsilon), weights)


def discounted_sums(x: Tensor, discount: float) -> Tensor:
    """y_t = sum_k discount^k x_(t+k) along dim 1 of (B, T).

    By doubling: once y holds the sums of s terms, y_t + discount^s y_(t+s) holds those of 2s. log2(T) passes.
    """
    y, span = x.clone(), 1
    while span < x.shape[1]:
        y[:, :-span] += discount**span * y[:, span:]
        span *= 2
    return y


def counted_first(mask: Tensor) -> tuple[Tensor, Tensor]:
    """For (B, T): the order that moves each row's counted positions to its front, and where they then are."""
    order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)
    return order, mask.gather(1, order)


def last_counted(mask: Tensor) -> Tensor:
    """(B, T) bool, true at each row's last counted position."""
    return mask & (mask.cumsum(dim=1) == mask.sum(dim=1, keepdim=True))


def wide(x: Tensor) -> Tensor:
    """float64, or float32 on a device that has no float64."""
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)


def float_dtype(x: Tensor) -> torch.dtype:
    """x's own dtype if it is a float, else float32."""
    return x.dtype if x.is_floating_point() else torch.float32


def one_group(rows: int, device: torch.device, process_group: ProcessGroup | None) -> Groups:
    """All rows of all ranks as one group."""
    return Groups(torch.zeros(rows, dtype=torch.int64, device=device), 1, process_group)


class Grouping(NamedTuple):
    """Assignment of this rank's rows to groups: by ids, or by a number of consecutive rows."""

    rows: int
    device: torch.device
    ids: Tensor | None  # (rows,) int64
    num_generations: int | None


def describe_grouping(rows: int, num_generations: Any, group_ids: Any) -> dict[str, Any]:
    """Return how many rows there are and what their groups go by, if they have any, for the ranks to compare."""
    forms = {"num_generations": num_generations, "whether there are group_ids": group_ids is not None}
    return {"rows": Each(rows), **forms}


def check_grouping(
    rows: int,
    num_generations: int | None,
    group_ids: Tensor | Sequence[int] | None,  # (rows,)
    device: torch.device,
    values: dict[str, Any],
    *,
    fewest: int = 2,
) -> Grouping:
    """Checked: groups of ``num_generations`` consecutive rows over all ranks, or of the rows of equal ``group_ids``.

    What the ranks have to compare of it is added to `values`. `fewest` is the least ``num_generations``: what is
    compared with a group's other rows is 0 in a group of one.
    """
    values |= describe_grouping(rows, num_generations, group_ids)
    if (num_generations is None) == (group_ids is None):
        given = "neither" if group_ids is None else "both"
        raise ValueError(f"num_generations, group_ids: expected exactly one of the two, got {given}")
    if group_ids is not None:
        ids = torch.as_tensor(group_ids, device=device) if rows else torch.zeros(0, dtype=torch.int64, device=device)
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise TypeError(f"group_ids: expected integers, got {ids.dtype}")
        expect_shape("group_ids", ids, (rows,), "(B,)")
        return Grouping(rows, device, ids.to(torch.int64), None)
    if isinstance(num_generations, bool) or not isinstance(num_generations, int):
        raise TypeError(f"num_generations: expected an int, got {type(num_generations).__name__}")
    if num_generations < fewest:
        why = " completions of a prompt: alone each has advantage 0, and nothing trains" if num_generations == 1 else ""
        raise ValueError(f"num_generations: expected at least {fewest}{why}, got {num_generations}")
    return Grouping(rows, device, None, num_generations)


def sample_groups(grouping: Grouping, values: Mapping[str, Any], process_group: ProcessGroup | None) -> Groups:
    """The groups of all ranks, once those agree on `values`. A collective where they go by ids.

    Raises:
        ValueError: on all ranks: the rows are not a multiple of ``num_generations``.
    """
    rows, device, ids, num_generations = grouping
    sizes = values["rows"]
    start = 0 if process_group is None else sum(sizes[: torch.distributed.get_rank(process_group)])
    if ids is not None:
        all_ids = ids if process_group is None else gather_uneven(ids, sizes, process_group)
        unique, index = all_ids.unique(return_inverse=True)
        return Groups(index[start : start + rows], len(unique), process_group)
    assert num_generations is not None
    if sum(sizes) % num_generations:
        raise ValueError(f"num_generations: expected a divisor of the {sum(sizes)} rewards, got {num_generations}")
    index = torch.arange(start, start + rows, device=device) // num_generations
    return Groups(index, sum(sizes) // num_generations, process_group)


def reward_table(
    rewards: Tensor,  # (B,) or (B, F)
    reward_weights: Tensor | Sequence[float] | None,  # (F,)
    values: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """Checked rewards as (B, F) and weights as (F,), both wide. What the ranks have to compare is added to `values`."""
    real_tensor("rewards", rewards)
    if rewards.dim() not in (1, 2) or rewards.shape[1:] == (0,):
        raise ValueError(f"rewards: expected shape (B,) or (B, F), got {tuple(rewards.shape)}")
    table = wide(rewards if rewards.dim() == 2 else rewards[:, None])
    require_all(~table.isinf(), table, "rewards", "finite values, or NaN for an unscored row")
    if reward_weights is None:
        weights = table.new_ones(table.shape[1])
    else:
        weights = wide(_numbers("reward_weights", reward_weights)).to(table.device)
        expect_shape("reward_weights", weights, table.shape[1:], "(F,)")
        require_all(weights.isfinite(), weights, "reward_weights", "finite values")
    values |= {"F of rewards": table.shape[1], "dtype of rewards": rewards.dtype, "reward_weights": weights}
    return table, weights


def _numbers(name: str, x: Tensor | Sequence[float]) -> Tensor:
    """`x` as a tensor; Python's numbers in float64, whatever torch's default dtype is."""
    if isinstance(x, Tensor):
        return x
    try:
        return torch.as_tensor(x, dtype=torch.float64)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{name}: expected a tensor or a list of numbers, got {x!r:.80}") from error


def step_table(
    step_rewards: Tensor | Sequence[Sequence[float | None]], step_ends: Tensor | Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """Both as (B, S) tensors; ragged lists are padded with NaN and -1."""
    if not isinstance(step_rewards, Tensor):
        rows = [[NAN if reward is None else reward for reward in row] for row in step_rewards]
        if not isinstance(step_ends, Tensor):
            wanted, got = [len(row) for row in rows], [len(row) for row in step_ends]
            if wanted != got:
                raise ValueError(f"step_ends: expected as many ends as step_rewards, {wanted} by row, got {got}")
        step_rewards = _padded(rows, NAN, torch.float32)
    if not isinstance(step_ends, Tensor):
        step_ends = _padded(step_ends, -1, torch.int64)
    real_tensor("step_rewards", step_rewards)
    if step_rewards.dim() != 2:
        raise ValueError(f"step_rewards: expected shape (B, S), got {tuple(step_rewards.shape)}")
    expect_shape("step_ends", step_ends, step_rewards.shape, "(B, S)")
    if step_ends.is_floating_point():
        raise TypeError(f"step_ends: expected integers, got {step_ends.dtype}")
    return step_rewards, step_ends.to(step_rewards.device, torch.int64)


def _padded(rows: Sequence[Sequence[float]], fill: float, dtype: torch.dtype) -> Tensor:
    width = max(map(len, rows), default=0)
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=dtype).view(len(rows), width)


def bool_mask(mask: Tensor) -> Tensor:
    """``completion_mask`` as (B, T) bool: non-zero counts. Raises for NaN; warns, once, of other numbers than 0 and 1.

    Integers on a GPU are not looked at, which would wait for it.
    """
    real_tensor("completion_mask", mask)
    if mask.dim() != 2:
        raise ValueError(f"completion_mask: expected shape (B, T), got {tuple(mask.shape)}")
    counts = mask != 0
    if (mask.is_floating_point() or mask.device.type == "cpu") and bool(mask.ne(counts).any()):
        check_mask_values("completion_mask", has_nan=bool(mask.isnan().any()))
    return counts


def counted_values(name: str, x: Tensor, mask: Tensor) -> Tensor:
    """(B, T), wide: ``x`` where the mask counts, 0 elsewhere. Raises for a number that counts and is not finite."""
    expect_shape(name, x, mask.shape, "(B, T)")
    require_all(x.isfinite() | ~mask, x, name, "finite values at counted positions")
    return torch.where(mask, wide(x), 0.0)


def token_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """(B, T), wide, 0 where masked: rewards (B, T) as they are, rewards (B,) at each row's last counted position."""
    real_tensor("rewards", rewards)
    if rewards.dim() == 2:
        return counted_values("rewards", rewards, mask)
    expect_shape("rewards", rewards, mask.shape[:1], "(B,)")
    return counted_values("rewards", rewards[:, None].expand(mask.shape), last_counted(mask))


def require_all(ok: Tensor, x: Tensor, name: str, expected: str) -> None:
    """ValueError if ``ok`` is not all true; it shows the first entry of ``x`` where it is not."""
    bad = (~ok).nonzero()
    if len(bad):
        first = tuple(bad[0].tolist())
        raise ValueError(f"{name}: expected {expected}, got {x[first].item()} at {first}")


def real_tensor(name: str, x: object) -> None:
    """TypeError unless ``x`` is a tensor of real numbers."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(x).__name__}")
    if x.is_complex():
        raise TypeError(f"{name}: expected real numbers, got {x.dtype}")


def expect_shape(name: str, x: Tensor, shape: Sequence[int], letters: str) -> None:
    """TypeError unless ``x`` is a real tensor, ValueError unless it has ``shape``; ``letters`` name it, as "(B, T)"."""
    real_tensor(name, x)
    if x.shape != tuple(shape):
        raise ValueError(f"{name}: expected shape {letters} = {tuple(shape)}, got {tuple(x.shape)}")


def one_of(name: str, value: str, names: tuple[str, ...]) -> None:
    """ValueError unless ``value`` is one of ``names``."""
    if value not in names:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, names))}, got {value!r}")


def in_interval(name: str, value: float, high: float = math.inf) -> None:
    """TypeError or ValueError unless ``value`` is a finite number in [0, high]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__}")
    if not (0 <= value <= high and math.isfinite(value)):
        bounds = "at least 0" if high == math.inf else f"in [0, {high:g}]"
        raise ValueError(f"{name}: expected a finite number {bounds}, got {value}")


def std_correction(std: str) -> int:
    """n - correction is what the std divides by."""
    one_of("std", std, choices(AdvantageStd))
    return 1 if std == "sample" else 0
