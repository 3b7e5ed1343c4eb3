"""One advantage per completion, from its reward and the rewards of its group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from grpo_kernels.advantages import checks
from grpo_kernels.advantages import group_stats as stats
from grpo_kernels.base.agreement import check_same
from grpo_kernels.base.choices import AdvantageScale, AdvantageStd, RewardAggregation, choices

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@torch.no_grad()
def group_advantages(
    rewards: Tensor,  # (B,) or (B, F)
    num_generations: int | None = None,
    *,
    group_ids: Tensor | Sequence[int] | None = None,  # (B,)
    reward_weights: Tensor | Sequence[float] | None = None,  # (F,)
    scale: AdvantageScale = "group",
    std: AdvantageStd = "sample",
    aggregation: RewardAggregation = "sum_then_normalize",
    epsilon: float = 1e-4,
    process_group: ProcessGroup | None = None,
) -> Tensor:
    """Group-relative advantages (B,): A_i = (r_i - mean of its group) / (std + epsilon).

    The defaults are TRL's. Groups are ``num_generations`` consecutive rows (counted over all ranks) or the rows of
    equal integer id in ``group_ids``, in any order and of any sizes; exactly one of the two is given.
    A NaN reward is unscored: it enters no sum, no mean and no std, and a row without any score has advantage 0. A group
    of equal rewards, or with one scored row, has advantages of exactly 0.

    ``aggregation`` of F rewards: "sum_then_normalize" takes r = sum_f w_f r_f; "normalize_then_sum" takes the weighted
    sum of each reward's own z-score in its group and divides by its std over the batch (``scale`` is then ignored).
    ``scale``: std is that of the "group" or of the "batch"; "none" returns the difference from the mean; "mean" divides
    by the group's mean in place of a std (MaxRL, for rewards of at least 0; prime-rl's with ``epsilon=0``), and gives a
    group whose mean is not above 0 advantages of 0.
    ``std``: "sample" divides by n - 1, "population" by n.

    Sources: https://arxiv.org/abs/2402.03300 (section 4.1.2), https://arxiv.org/abs/2503.20783 (scale "none"),
    https://arxiv.org/abs/2602.02710 (scale "mean"), https://arxiv.org/abs/2601.05242 ("normalize_then_sum").
    Raises ValueError for infinite rewards and for arguments out of range, TypeError for wrong types.
    """
    options = {"scale": scale, "std": std, "aggregation": aggregation, "epsilon": epsilon}
    with check_same("process_group", process_group, "group_advantages", **options) as values:
        checks.one_of("scale", scale, choices(AdvantageScale))
        checks.one_of("aggregation", aggregation, choices(RewardAggregation))
        correction = checks.std_correction(std)
        checks.in_interval("epsilon", epsilon)
        table, weights = checks.reward_table(rewards, reward_weights, values)
        ids = stats.check_grouping(len(table), num_generations, group_ids, table.device, values)
    groups = stats.groups_of_samples(ids, num_generations, values, process_group)
    batch = stats.one_group(len(table), table.device, process_group)

    if aggregation == "sum_then_normalize":
        total = stats.weighted_sum(table, weights)
        result, spread, count = stats.moments(total, groups, correction)
        if scale == "batch":
            _, spread, _ = stats.moments(total, batch, correction)
        if scale == "mean":
            spread = stats.group_sums(total.nan_to_num(nan=0.0), groups)[
                groups.of_row
            ] / count.clamp(min=1)
            result = torch.where(spread > 0, result, 0.0)
        if scale != "none":
            result = stats.divide(result, spread + epsilon)
    else:
        total = stats.summed_z_scores(table, weights, groups, correction, epsilon)
        # z-scores sum to 0 in every group, hence in the batch: subtracting their mean would add rounding noise only.
        _, spread, _ = stats.moments(total, batch, correction)
        result = stats.divide(total, spread + epsilon)
    return result[:, 0].nan_to_num(nan=0.0).to(checks.float_dtype(rewards))


@torch.no_grad()
def rloo_advantages(
    rewards: Tensor,  # (B,) or (B, F)
    num_generations: int | None = None,
    *,
    group_ids: Tensor | Sequence[int] | None = None,  # (B,)
    reward_weights: Tensor | Sequence[float] | None = None,  # (F,)
    normalize: bool = False,
    epsilon: float = 1e-4,
    process_group: ProcessGroup | None = None,
) -> Tensor:
    """Leave-one-out advantages (B,): A_i = r_i - mean of the other scored rewards of its group = n/(n-1) (r_i - mean).

    Groups, weights, NaN and errors as in ``group_advantages``; a row alone in its group has advantage 0. ``normalize``
    divides by (sample std over the batch + ``epsilon``). Source: https://arxiv.org/abs/2402.14740
    """
    options = {"normalize": normalize, "epsilon": epsilon}
    with check_same("process_group", process_group, "rloo_advantages", **options) as values:
        checks.in_interval("epsilon", epsilon)
        table, weights = checks.reward_table(rewards, reward_weights, values)
        ids = stats.check_grouping(len(table), num_generations, group_ids, table.device, values)
    groups = stats.groups_of_samples(ids, num_generations, values, process_group)
    centred, _, n = stats.moments(stats.weighted_sum(table, weights), groups, 0)
    result = centred * n / (n - 1)  # 0 / 0 = NaN, unscored, where n = 1
    if normalize:
        batch = stats.one_group(len(table), table.device, process_group)
        _, spread, _ = stats.moments(result, batch, 1)
        result = stats.divide(result, spread + epsilon)
    return result[:, 0].nan_to_num(nan=0.0).to(checks.float_dtype(rewards))


@torch.no_grad()
def passk_advantages(
    rewards: Tensor,  # (B,) or (B, F)
    num_generations: int | None = None,
    *,
    group_ids: Tensor | Sequence[int] | None = None,  # (B,)
    reward_weights: Tensor | Sequence[float] | None = None,  # (F,)
    scale: Literal["group", "none"] = "group",
    std: AdvantageStd = "sample",
    epsilon: float = 1e-6,
    process_group: ProcessGroup | None = None,
) -> Tensor:
    """Pass@k advantages (B,), k being the group's size: A_i = max_j r_j - max_(j != i) r_j, over (std + epsilon).

    A_i is what row i adds to the best of its group: r_max - r_second for the single best row, 0 for other rows, for
    all rows if several are best, and for a row alone. ``scale`` "none" leaves out the division. Groups, weights, NaN
    and errors as in ``group_advantages``. Source: https://arxiv.org/abs/2503.19595; verl's ``grpo_passk``, which
    refuses groups of one.
    """
    options = {"scale": scale, "std": std, "epsilon": epsilon}
    with check_same("process_group", process_group, "passk_advantages", **options) as values:
        checks.one_of("scale", scale, ("group", "none"))
        correction = checks.std_correction(std)
        checks.in_interval("epsilon", epsilon)
        table, weights = checks.reward_table(rewards, reward_weights, values)
        ids = stats.check_grouping(len(table), num_generations, group_ids, table.device, values)
    groups = stats.groups_of_samples(ids, num_generations, values, process_group)
    total = stats.weighted_sum(table, weights)
    is_best = total == stats.group_extremes(total, groups, "max")[groups.of_row]
    best = stats.group_sums(is_best.to(total.dtype), groups)[groups.of_row]
    second = stats.group_extremes(torch.where(is_best, stats.NAN, total), groups, "max")[
        groups.of_row
    ]
    result = torch.where(is_best & (best == 1) & second.isfinite(), total - second, 0.0)
    if scale == "group":
        _, spread, _ = stats.moments(total, groups, correction)
        result = stats.divide(result, spread + epsilon)
    return result[:, 0].to(checks.float_dtype(rewards))


@torch.no_grad()
def opo_advantages(
    rewards: Tensor,  # (B,) or (B, F)
    completion_mask: Tensor,  # (B, T)
    num_generations: int | None = None,
    *,
    group_ids: Tensor | Sequence[int] | None = None,  # (B,)
    reward_weights: Tensor | Sequence[float] | None = None,  # (F,)
    process_group: ProcessGroup | None = None,
) -> Tensor:
    """OPO's advantages (B,): A_i = r_i - sum_j l_j r_j / sum_j l_j over its group, l being the counted tokens.

    The baseline minimises the variance of the gradient if a completion's squared gradient grows with its length.
    Groups, weights, NaN and errors as in ``group_advantages``; a row alone in its group has advantage 0 (in verl: its
    reward). Source: https://arxiv.org/abs/2505.23585
    """
    with check_same("process_group", process_group, "opo_advantages") as values:
        mask = checks.bool_mask(completion_mask)
        table, weights = checks.reward_table(rewards, reward_weights, values)
        checks.expect_shape("rewards", rewards, (len(mask), *rewards.shape[1:]), "(B,) or (B, F)")
        ids = stats.check_grouping(len(table), num_generations, group_ids, table.device, values)
    groups = stats.groups_of_samples(ids, num_generations, values, process_group)
    lengths = mask.sum(dim=1, keepdim=True).to(table.dtype)
    result, _ = stats.deviations(stats.weighted_sum(table, weights), groups, lengths)
    return result[:, 0].nan_to_num(nan=0.0).to(checks.float_dtype(rewards))


@torch.no_grad()
def gpg_advantages(
    rewards: Tensor,  # (B,) or (B, F)
    num_generations: int | None = None,
    *,
    group_ids: Tensor | Sequence[int] | None = None,  # (B,)
    reward_weights: Tensor | Sequence[float] | None = None,  # (F,)
    process_group: ProcessGroup | None = None,
) -> Tensor:
    """GPG's advantages (B,): A_i = alpha (r_i - mean of its group), alpha = B / (B - M).

    M of the B scored rows (of all ranks) are in groups of equal rewards, which give no gradient; alpha makes up for
    them. (verl counts the rewards of 0 instead, so that its scale depends on which reward stands for a failure.)
    Groups, weights, NaN and errors as in ``group_advantages``. Source: https://arxiv.org/abs/2504.02546
    """
    with check_same("process_group", process_group, "gpg_advantages") as values:
        table, weights = checks.reward_table(rewards, reward_weights, values)
        ids = stats.check_grouping(len(table), num_generations, group_ids, table.device, values)
    groups = stats.groups_of_samples(ids, num_generations, values, process_group)
    centred, spread, _ = stats.moments(stats.weighted_sum(table, weights), groups, 0)
    scored = ~centred.isnan()
    counts = torch.cat([scored, scored & (spread > 0)], dim=1).to(table.dtype)
    counts = stats.group_sums(counts, stats.one_group(len(table), table.device, process_group))
    result = centred * (counts[:, :1] / counts[:, 1:].clamp(min=1))
    return result[:, 0].nan_to_num(nan=0.0).to(checks.float_dtype(rewards))
