"""Groups of rows, which may lie on several ranks, and their statistics: what advantage estimators are built from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from grpo_kernels.advantages import checks
from grpo_kernels.base.agreement import Each
from grpo_kernels.base.distributed import all_reduce, gather_uneven

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NAN = float("nan")


class Groups(NamedTuple):
    """Assignment of this rank's rows to the groups of all ranks."""

    of_row: Tensor  # (N,) int64, each row's group, in [0, n_groups)
    n_groups: int
    process_group: ProcessGroup | None


def group_sums(x: Tensor, groups: Groups) -> Tensor:
    """(N, F) -> (groups, F): each group's sum, over all ranks; NaN if an entry is."""
    sums = x.new_zeros(groups.n_groups, x.shape[1]).index_add(0, groups.of_row, x)
    return all_reduce(sums, "sum", groups.process_group)


def group_extremes(x: Tensor, groups: Groups, op: Literal["min", "max"]) -> Tensor:
    """(N, F) -> (groups, F): each group's "min" or "max" over the non-NaN entries of all ranks; inf or -inf if none."""
    limit = math.inf if op == "min" else -math.inf
    rows = groups.of_row[:, None].expand_as(x)
    extremes = x.new_full((groups.n_groups, x.shape[1]), limit)
    extremes = extremes.scatter_reduce(0, rows, torch.where(x.isnan(), limit, x), f"a{op}")
    return all_reduce(extremes, op, groups.process_group)


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


def moments(x: Tensor, groups: Groups, correction: int) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean, std, n) of each entry's group, (N, F) each, over the n entries that are not NaN.

    std = sqrt(sum of (x - mean)^2 / (n - correction)), 0 for a single entry. x - mean is NaN where x is.

    Args:
        correction: 0 or 1.
    """
    centred, count = deviations(x, groups)
    squares = group_sums(centred.nan_to_num(nan=0.0).square(), groups)
    std = (squares / (count - correction).clamp(min=1)).sqrt()
    return centred, std[groups.of_row], count[groups.of_row]


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient, with 0 / 0 = 0."""
    return torch.where(numerator == 0, 0.0, numerator / denominator)


def weighted_sum(table: Tensor, weights: Tensor) -> Tensor:
    """(N, F), weights (F,) -> (N, 1): sum_f w_f r_f over the scored entries, NaN for a row without any."""
    unscored = table.isnan().all(dim=1, keepdim=True)
    return torch.where(unscored, NAN, (table * weights).nansum(dim=1, keepdim=True))


def summed_z_scores(
    table: Tensor, weights: Tensor, groups: Groups, correction: int, epsilon: float
) -> Tensor:
    """(N, F), weights (F,) -> (N, 1): the weighted sum of (x - mean) / (std + epsilon), NaN for an unscored row."""
    centred, std, _ = moments(table, groups, correction)
    return weighted_sum(divide(centred, std + epsilon), weights)


def one_group(rows: int, device: torch.device, process_group: ProcessGroup | None) -> Groups:
    """All rows of all ranks as one group."""
    return Groups(torch.zeros(rows, dtype=torch.int64, device=device), 1, process_group)


def describe_grouping(rows: int, num_generations: Any, group_ids: Any) -> dict[str, Any]:
    """Return the number of rows and the form of their groups, if they have any, for the ranks to compare."""
    forms = {
        "num_generations": num_generations,
        "whether there are group_ids": group_ids is not None,
    }
    return {"rows": Each(rows), **forms}


def check_grouping(
    rows: int,
    num_generations: int | None,
    group_ids: Tensor | Sequence[int] | None,  # (rows,)
    device: torch.device,
    values: dict[str, Any],
    *,
    fewest: int = 2,
) -> Tensor:
    """Check the arguments that name groups, add what the ranks have to compare to `values`, and make ids of the rows.

    The ids (rows,) int64, for `groups_of_samples`, are ``group_ids``, or, if a group is ``num_generations`` consecutive
    rows over all ranks, each row's index on this rank. `fewest` is the least ``num_generations``: 2 if rows are
    compared with the other rows of their group, since a group of one then gets 0.
    """
    values |= describe_grouping(rows, num_generations, group_ids)
    if (num_generations is None) == (group_ids is None):
        got = "neither" if group_ids is None else "both"
        raise ValueError(f"num_generations, group_ids: expected exactly one of the two, got {got}")
    if group_ids is not None:
        ids = (
            torch.as_tensor(group_ids, device=device)
            if rows
            else torch.zeros(0, dtype=torch.int64, device=device)
        )
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise TypeError(f"group_ids: expected integers, got {ids.dtype}")
        checks.expect_shape("group_ids", ids, (rows,), "(B,)")
        return ids.to(torch.int64)
    if isinstance(num_generations, bool) or not isinstance(num_generations, int):
        raise TypeError(f"num_generations: expected an int, got {type(num_generations).__name__}")
    if num_generations < fewest:
        reason = (
            " completions of a prompt: alone each has advantage 0, and nothing trains"
            if num_generations == 1
            else ""
        )
        raise ValueError(
            f"num_generations: expected at least {fewest}{reason}, got {num_generations}"
        )
    return torch.arange(rows, device=device)


def groups_of_samples(
    ids: Tensor,
    num_generations: int | None,
    values: Mapping[str, Any],
    process_group: ProcessGroup | None,
) -> Groups:
    """Return the groups of all ranks from the `ids` of `check_grouping`, after the ranks have agreed on `values`.

    `num_generations` is None if the ids are group ids; the ranks then gather them, which is a collective.

    Raises:
        ValueError: on all ranks: the rows are not a multiple of ``num_generations``.
    """
    rows, rows_by_rank = len(ids), values["rows"]  # which `check_same` made a list
    start = (
        0
        if process_group is None
        else sum(rows_by_rank[: torch.distributed.get_rank(process_group)])
    )
    if num_generations is None:
        all_ids = ids if process_group is None else gather_uneven(ids, rows_by_rank, process_group)
        unique, index = all_ids.unique(return_inverse=True)
        return Groups(index[start : start + rows], len(unique), process_group)
    total = sum(rows_by_rank)
    if total % num_generations:
        raise ValueError(
            f"num_generations: expected a divisor of the {total} rewards, got {num_generations}"
        )
    return Groups((start + ids) // num_generations, total // num_generations, process_group)
