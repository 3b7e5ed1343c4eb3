"""Advantages from rewards: group baselines, leave-one-out, process supervision, GAE, REINFORCE++.

All functions compute in float64 (float32 on devices without float64) and without gradient. Results
have the dtype of the float inputs, or float32 for integer rewards.

Pass ``process_group`` if the samples of a group are spread over several ranks. Each rank passes its
own rows with the same options, and gets the advantages of these rows. Ranks may have different
numbers of rows. Ranks exchange group ids and per-group statistics, never rewards. With ``None``,
ranks do not communicate, even if ``torch.distributed`` is initialized.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from grpo_kernels.base import AdvantageScale, AdvantageStd, RewardAggregation
from grpo_kernels.base.checks import (
    check_choice,
    check_number,
    check_tensor,
    hints_names,
    only_public,
    read_mask,
    warn_once,
)
from grpo_kernels.base.distributed import all_reduce, check_group, gather_stacked, gather_uneven
from grpo_kernels.base.tensors import counted_first, discounted_sums, last_counted, widen

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "gae",
    "group_advantages",
    "process_advantages",
    "reinforce_plus_plus",
    "rloo_advantages",
    "whiten",
]

only_public(__name__)


@hints_names
@torch.no_grad()
def group_advantages(
    rewards: Tensor,  # (B,) or (B, F)
    num_generations: int | None = None,
    *,
    group_ids: Tensor | Sequence[int] | None = None,  # (B,)
    reward_weights: Tensor | Sequence[float] | None = None,  # (F,)
    scale_rewards: AdvantageScale = "group",
    std: AdvantageStd = "sample",
    multi_objective_aggregation: RewardAggregation = "sum_then_normalize",
    eps: float = 1e-4,
    process_group: ProcessGroup | None = None,
) -> Tensor:
    """Compute group-relative advantages, A_i = (r_i - group mean) / (std + eps).

    ::

        advantages = group_advantages(rewards, num_generations=8)  # (B,), TRL's defaults

    Advantages are exactly 0 in a group whose rewards are all equal or that has a single scored row.

    Args:
        rewards: (B,), or (B, F) from F reward functions. NaN means unscored and is left out of
            every sum, mean and std; a row without any score gets advantage 0. If F equals
            `num_generations`, pass `reward_weights`: otherwise, the call cannot tell (B, F) from
            (prompts, num_generations).
        num_generations: number of completions per prompt. A group consists of `num_generations`
            consecutive rows; with `process_group`, rows are numbered across ranks.
        group_ids: (B,) integers, an alternative to `num_generations`. Rows with equal ids form a
            group; rows may come in any order, and groups may have any size.
        reward_weights: (F,), one weight per reward function; by default, all weights are 1.
        scale_rewards: ``"group"`` or ``"batch"``: divide by the std of the group or of the batch.
            ``"none"``: only subtract the mean. ``"mean"``: divide by the group's mean instead of a
            std, as in MaxRL, for rewards of at least 0; a group gets advantages of 0 unless its
            mean is above 0. prime-rl uses ``eps=0``.
        std: ``"sample"`` divides by n - 1, ``"population"`` by n.
        multi_objective_aggregation: ``"sum_then_normalize"``: r = sum_f w_f r_f.
            ``"normalize_then_sum"``: each reward becomes a z-score within its group, and the
            weighted sum of the z-scores is divided by its std over the batch; `scale_rewards` is
            then ignored.
        eps: added to the std, or to the mean with ``scale_rewards="mean"``.
        process_group: the ranks over which the groups and the batch are spread.

    Returns:
        (B,) advantages, in the dtype of the rewards (float32 for integers).

    Raises:
        TypeError, ValueError: an invalid argument, such as infinite rewards; the message names it.

    Sources: https://arxiv.org/abs/2402.03300 (section 4.1.2), https://arxiv.org/abs/2503.20783
    ("none"), https://arxiv.org/abs/2602.02710 ("mean"), https://arxiv.org/abs/2601.05242
    ("normalize_then_sum").
    """
    hint = "; True is 'group', False 'none'" if isinstance(scale_rewards, bool) else ""
    check_choice("scale_rewards", scale_rewards, get_args(AdvantageScale), hint)
    allowed = get_args(RewardAggregation)
    check_choice("multi_objective_aggregation", multi_objective_aggregation, allowed)
    correction = _correction(std, "scale_rewards='none'")
    check_number("eps", eps, lowest=0, inclusive=True)
    table, weights = _reward_table(rewards, reward_weights, num_generations)
    groups = _groups(table, num_generations, group_ids, process_group)
    batch = _one_group(table, process_group)

    if multi_objective_aggregation == "sum_then_normalize":
        total, error = _weighted_sum(table, weights)
        if scale_rewards == "mean" and bool((total < 0).any()):
            warn_once(
                "rewards: expected rewards of at least 0 with scale_rewards='mean', which divides "
                "by a group's mean, got negative ones; a group gets advantages of 0 unless its "
                "mean is above 0"
            )
        result, spread, count = _moments(total, groups, correction, error)
        if scale_rewards == "batch":
            _, spread, _ = _moments(total, batch, correction)
        if scale_rewards == "mean":
            sums = _group_sums(total.nan_to_num(nan=0.0), groups)[groups.of_row]
            spread = sums / count.clamp(min=1)
            result = torch.where(spread > 0, result, 0.0)
        if scale_rewards != "none":
            result = _divide(result, spread + eps)
    else:
        if scale_rewards != "group":
            warn_once(
                f"scale_rewards: {scale_rewards!r} is not used by multi_objective_aggregation = "
                "'normalize_then_sum'; leave it out"
            )
        centered, spread, _ = _moments(table, groups, correction)
        total, _ = _weighted_sum(_divide(centered, spread + eps), weights)
        # z-scores sum to 0 in every group, so their mean over the batch is only rounding error
        _, spread, _ = _moments(total, batch, correction)
        result = _divide(total, spread + eps)
    return result[:, 0].nan_to_num(nan=0.0).to(_float_dtype(rewards))


@hints_names
@torch.no_grad()
def rloo_advantages(
    rewards: Tensor,  # (B,) or (B, F)
    num_generations: int | None = None,
    *,
    group_ids: Tensor | Sequence[int] | None = None,  # (B,)
    reward_weights: Tensor | Sequence[float] | None = None,  # (F,)
    normalize_advantages: bool = False,
    eps: float = 1e-4,
    process_group: ProcessGroup | None = None,
) -> Tensor:
    """Compute leave-one-out advantages, A_i = r_i - mean of the group's other scored rewards.

    A row gets advantage 0 if it is the only scored row of its group.

    Args:
        rewards, num_generations, group_ids, reward_weights, process_group: as in
            `group_advantages`.
        normalize_advantages: divide the advantages by (their sample std over the batch + `eps`).
        eps: added to the std.

    Returns:
        (B,) advantages, in the dtype of the rewards (float32 for integers).

    Raises:
        TypeError, ValueError: as `group_advantages`.

    Source: https://arxiv.org/abs/2402.14740
    """
    check_number("eps", eps, lowest=0, inclusive=True)
    table, weights = _reward_table(rewards, reward_weights, num_generations)
    groups = _groups(table, num_generations, group_ids, process_group)
    total, error = _weighted_sum(table, weights)
    centered, _, n = _moments(total, groups, 0, error)
    result = centered * n / (n - 1)  # where n = 1, 0 / 0 = NaN marks the row as unscored
    if normalize_advantages:
        _, spread, _ = _moments(result, _one_group(table, process_group), 1)
        result = _divide(result, spread + eps)
    return result[:, 0].nan_to_num(nan=0.0).to(_float_dtype(rewards))


@hints_names
@torch.no_grad()
def process_advantages(
    step_rewards: Tensor | Sequence[Sequence[float | None]],  # (B, S)
    step_ends: Tensor | Sequence[Sequence[int]],  # (B, S)
    num_generations: int | None = None,
    *,
    completion_mask: Tensor,  # (B, T)
    group_ids: Tensor | Sequence[int] | None = None,  # (B,)
    std: AdvantageStd = "sample",
    eps: float = 1e-4,
    process_group: ProcessGroup | None = None,
) -> Tensor:
    """Compute advantages of tokens from rewards of steps.

    ::

        advantages = process_advantages(
            [[0.1, 0.9], [0.5]], [[3, 7], [5]], num_generations=2, completion_mask=completion_mask
        )  # (B, T)

    Each reward is normalized over all steps of its group: (r - mean) / (std + eps). Each token gets
    the sum of the normalized rewards of its own step and all later steps.

    Args:
        step_rewards: (B, S), or a list of numbers per completion, on any device. NaN or None marks
            an unscored step, which is ignored.
        step_ends: (B, S), or a list per completion: the column of each step's last token. Columns
            are in [0, T) and increase from step to step; ends of unscored steps are ignored. Let
            the last step end at the last counted token, since later tokens get 0.
        num_generations, group_ids, std, eps, process_group: as in `group_advantages`.
        completion_mask: (B, T); masked positions get 0.

    Returns:
        (B, T) advantages on the mask's device, 0 after the last step. The result is exactly 0 for a
        step at its group's mean, and for steps that cancel each other.

    Raises:
        TypeError, ValueError: as in `group_advantages`; also if a step end is outside [0, T), or is
            not above the ends of all earlier steps.

    Source: https://arxiv.org/abs/2402.03300 (section 4.1.3)
    """
    correction = _correction(std)
    check_number("eps", eps, lowest=0, inclusive=True)
    table, ends = _step_table(step_rewards, step_ends)
    mask = _bool_mask(completion_mask)
    columns = mask.shape[1]
    check_tensor("completion_mask", mask, ("(B, T)", (len(table), columns)))
    x = table.to(widen(mask[:0]).dtype).to(mask.device)  # the device may lack the table's dtype
    ends = ends.to(mask.device, torch.int64)
    scored = ~x.isnan()
    _require_all(~x.isinf(), x, "step_rewards", "finite values, or NaN for an unscored step")
    in_range = ~scored | ((ends >= 0) & (ends < columns))
    hint = "; mark padding by NaN in step_rewards"
    _require_all(in_range, ends, "step_ends", f"indices in [0, T) = [0, {columns})", hint)
    before = pad(torch.where(scored, ends, -1), (1, 0), value=-1).cummax(dim=1).values[:, :-1]
    rising = "each above those of earlier scored steps (columns, not a mask)"
    _require_all(~scored | (ends > before), ends, "step_ends", rising)
    row, step = scored.nonzero(as_tuple=True)
    x, end = x[row, step], ends[row, step]  # (M,), of the scored steps
    if mask.device.type == "cpu" and not mask[row, end].all():
        warn_once(
            "step_ends: a step ends in a masked column; expected columns of the "
            "completion_mask that count, of the last token of each step"
        )
    groups = _groups(mask, num_generations, group_ids, process_group, fewest=1)
    by_step = groups._replace(of_row=groups.of_row[row])
    centered, spread, _ = (y[:, 0] for y in _moments(x[:, None], by_step, correction))
    is_float64 = not table.is_floating_point() or table.dtype == torch.float64  # integers are exact
    rounding = torch.finfo(x.dtype if is_float64 else torch.float32).eps
    # of the centered numbers, and of the rewards themselves
    error = rounding * spread + torch.finfo(x.dtype).eps * x.abs()
    normalized = _divide(_unless_rounding(centered, error), spread + eps)
    at_ends = x.new_zeros(mask.shape).index_put((row, end), normalized)
    sums = _unless_rounding(
        discounted_sums(at_ends, 1.0), rounding * discounted_sums(at_ends.abs(), 1.0)
    )
    dtype = _float_dtype(table) if isinstance(step_rewards, Tensor) else torch.float32
    return torch.where(mask, sums, 0.0).to(dtype)


@hints_names
@torch.no_grad()
def gae(
    rewards: Tensor,  # (B, T), or (B,): a reward at each row's last counted token
    values: Tensor,  # (B, T)
    completion_mask: Tensor,  # (B, T)
    gamma: float = 1.0,
    lam: float = 0.95,
    last_value: Tensor | None = None,  # (B,)
    *,
    whiten_advantages: bool = False,
    std: AdvantageStd = "sample",
    process_group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute advantages and returns by generalized advantage estimation.

    delta_t = r_t + gamma V_(t+1) - V_t,  A_t = delta_t + gamma lam A_(t+1),  return_t = A_t + V_t,
    where t + 1 is the next counted position. Padding and tool output are skipped and never read.

    Args:
        rewards: (B, T), or (B,) with one reward per row, which goes to the row's last counted
            token.
        values: (B, T), the value V of each position.
        completion_mask: (B, T), nonzero where a token counts.
        gamma, lam: discount and trace decay, in [0, 1].
        last_value: (B,), V after a row's last counted token; None means 0, for an episode that has
            ended.
        whiten_advantages: if True, `whiten` the advantages with `std` over all ranks of
            `process_group`. The returns keep their scale.
        std, process_group: as in `whiten`.

    Returns:
        (advantages, returns), both (B, T) and 0 where masked.

    Raises:
        TypeError, ValueError: an invalid argument, such as NaN at a counted position.

    Source: https://arxiv.org/abs/1506.02438
    """
    check_number("gamma", gamma, lowest=0, inclusive=True, highest=1)
    check_number("lam", lam, lowest=0, inclusive=True, highest=1)
    _correction(std, "whiten_advantages=False")
    mask = _bool_mask(completion_mask)
    check_tensor("rewards", rewards)
    r = (_counted_values if rewards.dim() == 2 else _at_last)("rewards", rewards, mask)
    if isinstance(values, Tensor) and values.shape == (len(mask), mask.shape[1] + 1):
        expected = f"expected shape (B, T) = {tuple(mask.shape)}, got {tuple(values.shape)}"
        raise ValueError(f"values: {expected}; pass V after a row's last token as last_value=")
    v = _counted_values("values", values, mask)
    if values.eq(values != 0).all() and not completion_mask.eq(mask).all():
        expected = "expected the values, then the mask; the values are all 0 or 1"
        raise ValueError(f"values, completion_mask: {expected} and the mask is not: swapped?")
    next_v = _over_counted(lambda x: pad(x, (0, 1))[:, 1:], v, mask)
    if last_value is not None:
        next_v = next_v + _at_last("last_value", last_value, mask)
    delta = r + gamma * next_v - v  # 0 where masked, like its terms
    advantages = _over_counted(lambda x: discounted_sums(x, gamma * lam), delta, mask)
    returns = advantages + v  # both are 0 where masked
    if whiten_advantages:
        advantages = whiten(advantages, mask, std=std, process_group=process_group)
    dtype = torch.promote_types(_float_dtype(rewards), _float_dtype(values))
    return advantages.to(dtype), returns.to(dtype)


@hints_names
@torch.no_grad()
def reinforce_plus_plus(
    rewards: Tensor,  # (B,) or (B, F)
    completion_mask: Tensor,  # (B, T)
    *,
    per_token_kl: Tensor | None = None,  # (B, T)
    beta: float = 0.01,
    gamma: float = 1.0,
    num_generations: int | None = None,
    group_ids: Tensor | Sequence[int] | None = None,  # (B,)
    reward_weights: Tensor | Sequence[float] | None = None,  # (F,)
    std: AdvantageStd = "sample",
    eps: float = 1e-8,
    process_group: ProcessGroup | None = None,
) -> Tensor:
    """Compute REINFORCE++ advantages: discounted returns, whitened over the batch.

    The returns are A_t = sum_(k >= t) gamma^(k - t) r_k, where r_k is -beta KL_k, plus the reward
    at the last counted token. The result is (A - mean) / (std + eps), with mean and std over all
    counted tokens of the batch on all ranks. Masked positions are skipped. Rows without a score get
    0, and do not enter mean and std.

    Args:
        rewards, reward_weights, process_group: as in `group_advantages`.
        completion_mask: (B, T), nonzero where a token counts.
        per_token_kl: (B, T), the KL_k above; each token's penalty is `beta` times this. None: no
            penalty.
        beta: weight of the KL penalty.
        gamma: discount, in [0, 1].
        num_generations, group_ids: pass one of these two for the baseline variant, which first
            subtracts the group's mean reward.
        std, eps: as in `whiten`; OpenRLHF uses the std ``"population"``, and verl ``"sample"``.

    Returns:
        (B, T) advantages, 0 where masked.

    Raises:
        TypeError, ValueError: as `group_advantages`.

    Source: https://arxiv.org/abs/2501.03262
    """
    check_number("gamma", gamma, lowest=0, inclusive=True, highest=1)
    check_number("eps", eps, lowest=0, inclusive=True)
    check_number("beta", beta)
    mask = _bool_mask(completion_mask)
    table, weights = _reward_table(rewards, reward_weights, num_generations)
    check_tensor("rewards", rewards, ("(B,) or (B, F)", (len(mask), *rewards.shape[1:])))
    if reward_weights is None and rewards.shape == mask.shape and mask.shape[1] > 1:
        raise ValueError(
            "rewards: expected (B,), or (B, F) with a column per reward function, got the shape "
            f"of completion_mask, {tuple(mask.shape)}. If these are rewards of tokens, pass "
            "rewards (B,), and per_token_kl= for the penalty; if each column is a reward function, "
            "pass reward_weights"
        )
    if per_token_kl is None and beta not in (0.0, 0.01):  # neither off nor the default
        warn_once("beta: not used without per_token_kl; pass it, or leave beta out")
    total, error = _weighted_sum(table, weights)
    scored = mask & ~total.isnan()
    if num_generations is not None or group_ids is not None:
        groups = _groups(table, num_generations, group_ids, process_group)
        total, _, _ = _moments(total, groups, 0, error)
    x = torch.where(last_counted(scored), total, 0.0)
    if per_token_kl is not None:
        x = x - beta * _counted_values("per_token_kl", per_token_kl, scored)
    returns = _over_counted(lambda x: discounted_sums(x, gamma), x, scored)
    result = whiten(returns, scored, std=std, eps=eps, process_group=process_group)
    return result.to(_float_dtype(rewards))


@hints_names
@torch.no_grad()
def whiten(
    x: Tensor,  # (B, T)
    completion_mask: Tensor,  # (B, T)
    *,
    shift_mean: bool = True,
    std: AdvantageStd = "sample",
    eps: float = 1e-8,
    process_group: ProcessGroup | None = None,
) -> Tensor:
    """Compute (x - mean) / (std + eps), with mean and std over all counted positions on all ranks.

    Args:
        x: (B, T).
        completion_mask: (B, T), nonzero where a token counts.
        shift_mean: True: subtract the mean; equal values then give exactly 0. False: only divide.
        std: ``"sample"`` divides by n - 1, ``"population"`` by n.
        eps: added to the std.
        process_group: the ranks over which the batch is spread.

    Returns:
        (B, T) in the dtype of `x`, 0 where masked.

    Raises:
        TypeError, ValueError: an invalid argument, such as NaN at a counted position.
    """
    correction = _correction(std)
    check_number("eps", eps, lowest=0, inclusive=True)
    mask = _bool_mask(completion_mask)
    flat = torch.where(mask, _counted_values("x", x, mask), math.nan).reshape(-1, 1)
    centered, spread, _ = _moments(flat, _one_group(flat, process_group), correction)
    result = _divide(centered if shift_mean else flat, spread + eps).view(mask.shape)
    return torch.where(mask, result, 0.0).to(_float_dtype(x))


def _over_counted(change: Callable[[Tensor], Tensor], x: Tensor, mask: Tensor) -> Tensor:
    """`change` applied to ``x`` (B, T), 0 where masked, with each row's counted positions first."""
    order = counted_first(mask)
    return torch.zeros_like(x).scatter(1, order, change(x.gather(1, order)))


# Groups of rows, which may span ranks, and statistics of groups


class _Groups(NamedTuple):
    of_row: Tensor  # (N,) int64, group index of each of this rank's rows, in [0, n_groups)
    n_groups: int  # over all ranks
    process_group: ProcessGroup | None


def _one_group(x: Tensor, process_group: ProcessGroup | None) -> _Groups:
    check_group(process_group)
    return _Groups(torch.zeros(len(x), dtype=torch.int64, device=x.device), 1, process_group)


def _groups(
    table: Tensor,  # (B, ...), read for its length and device alone
    num_generations: Any,  # an int or None
    group_ids: Tensor | Sequence[int] | None,  # (B,)
    process_group: ProcessGroup | None,
    fewest: int = 2,  # in a group of one, no other row gives a baseline
) -> _Groups:
    check_group(process_group)
    rows, device = len(table), table.device
    if (num_generations is None) == (group_ids is None):
        neither = "neither; pass num_generations=, the completions per prompt"
        raise ValueError(
            "num_generations, group_ids: expected exactly one of the two, got "
            f"{neither if group_ids is None else 'both'}"
        )
    if num_generations is not None:
        if isinstance(num_generations, bool) or not isinstance(num_generations, Integral):
            are_ids = isinstance(num_generations, Tensor | list | tuple)
            hint = "; pass group ids as group_ids=" if are_ids else ""
            got = type(num_generations).__name__
            raise TypeError(f"num_generations: expected an int, got {got}{hint}")
        if num_generations < fewest:
            why = " completions per prompt, since a group of one has advantage 0 and nothing trains"
            expected = f"expected at least {fewest}{why if fewest > 1 else ''}"
            raise ValueError(f"num_generations: {expected}, got {num_generations}")
    sizes, start = [rows], 0
    if process_group is not None:
        sizes = gather_stacked(torch.tensor(rows, device=device), process_group).tolist()
        start = sum(sizes[: torch.distributed.get_rank(process_group)])
    if num_generations is not None:
        total = sum(sizes)
        if total % num_generations:
            expected = f"expected a divisor of {total}, the number of rewards"
            raise ValueError(f"num_generations: {expected}, got {num_generations}")
        of_row = torch.arange(start, start + rows, device=device) // num_generations
        return _Groups(of_row, total // num_generations, process_group)
    ids: Any = group_ids if rows else torch.zeros(0, dtype=torch.int64)
    try:
        ids = torch.as_tensor(ids, device=device)
    except (RuntimeError, TypeError, ValueError) as error:
        hint = ""
        if isinstance(ids, Iterable) and any(isinstance(x, str) for x in ids):
            hint = "; pass numpy.unique(group_ids, return_inverse=True)[1]"
            if process_group is not None:
                hint = "; number the prompts, each with the same number on all ranks"
        raise TypeError(f"group_ids: expected integers, got {group_ids!r:.80}{hint}") from error
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"group_ids: expected integers, got {ids.dtype}")
    check_tensor("group_ids", ids, ("(B,)", (rows,)))
    ids = ids.to(torch.int64)
    every = ids if process_group is None else gather_uneven(ids, sizes, process_group)
    unique, index = every.unique(return_inverse=True)
    if fewest > 1 and 0 < len(unique) == len(every):
        warn_once(
            "group_ids: each reward has a group of its own, so every advantage is 0; pass the same "
            "id for all completions of a prompt"
        )
    return _Groups(index[start : start + rows], len(unique), process_group)


def _group_sums(x: Tensor, groups: _Groups) -> Tensor:
    """Sum x (N, F) by group, over all ranks, into (n_groups, F); NaN if an entry is NaN."""
    sums = x.new_zeros(groups.n_groups, x.shape[1]).index_add(0, groups.of_row, x)
    return all_reduce(sums, "sum", groups.process_group)


def _moments(
    x: Tensor, groups: _Groups, correction: int, error: Tensor | float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """(x - mean, std, n) for each entry's group, (N, F) each; NaN entries are left out.

    std = sqrt(sum of (x - mean)^2 / (n - correction)), or 0 for a single entry. Each entry is first
    shifted by its group's minimum, so equal entries become exact zeros; x - mean(x) would keep the
    mean's rounding error. Entries up to `error` above the minimum count as equal to it.
    """
    scored = ~x.isnan()
    rows = groups.of_row[:, None].expand_as(x)
    least = x.new_full((groups.n_groups, x.shape[1]), math.inf)
    least = least.scatter_reduce(0, rows, torch.where(scored, x, math.inf), "amin")
    least = all_reduce(least, "min", groups.process_group)
    shifted = _unless_rounding(torch.where(scored, x - least[groups.of_row], 0.0), error)
    count = _group_sums(scored.to(x.dtype), groups)
    mean = _group_sums(shifted, groups) / count.clamp(min=1)
    centered = torch.where(scored, shifted - mean[groups.of_row], math.nan)
    squares = _group_sums(centered.nan_to_num(nan=0.0).square(), groups)
    std = (squares / (count - correction).clamp(min=1)).sqrt()
    return centered, std[groups.of_row], count[groups.of_row]


def _unless_rounding(x: Tensor, error: Tensor | float) -> Tensor:
    """`x`, or 0 where it does not exceed `error`, the rounding error of the numbers behind it."""
    return torch.where(x.abs() <= error, 0.0, x)


def _divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Divide, with 0 / 0 = 0."""
    return torch.where(numerator == 0, 0.0, numerator / denominator)


def _weighted_sum(table: Tensor, weights: Tensor) -> tuple[Tensor, Tensor | float]:
    """sum_f w_f r_f (N, 1) over the scored entries, NaN for a row without any; and its rounding.

    The rounding, as in 0.1 + 0.2 - 0.3, is a bound (N, 1): products, weights and partial sums are
    rounded. It is 0 for a single column.
    """
    products, columns = table * weights, table.shape[1]
    unscored = table.isnan().all(dim=1, keepdim=True)
    total = torch.where(unscored, math.nan, products.nansum(dim=1, keepdim=True))
    if columns == 1:
        return total, 0.0
    sizes = products.abs().nansum(dim=1, keepdim=True)
    return total, 2 * (columns + 2) * torch.finfo(table.dtype).eps * sizes


# Arguments


def _reward_table(
    rewards: Tensor,
    reward_weights: Tensor | Sequence[float] | None,
    num_generations: int | None,
) -> tuple[Tensor, Tensor]:
    """(rewards (B, F), weights (F,)), both widened."""
    check_tensor("rewards", rewards)
    if rewards.dim() not in (1, 2) or rewards.shape[1:] == (0,):
        raise ValueError(f"rewards: expected shape (B,) or (B, F), got {tuple(rewards.shape)}")
    # `_groups` refuses other types of num_generations
    columns = num_generations if isinstance(num_generations, Integral) else 1
    if reward_weights is None and rewards.shape[1:] == (columns,) != (1,):
        raise ValueError(
            "rewards: expected (B,), or (B, F) with a column per reward function, got shape "
            f"{tuple(rewards.shape)} with num_generations columns. If each row holds one prompt's "
            "completions, pass rewards.flatten(); if each column is a reward function, pass "
            "reward_weights"
        )
    table = widen(rewards if rewards.dim() == 2 else rewards[:, None])
    _require_all(~table.isinf(), table, "rewards", "finite values, or NaN for an unscored row")
    if reward_weights is None:
        return table, table.new_ones(table.shape[1])
    if not isinstance(reward_weights, Tensor):
        try:  # always in float64, since torch's default dtype may be smaller
            reward_weights = torch.as_tensor(reward_weights, dtype=torch.float64)
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            expected = "expected a tensor or a list of numbers"
            raise TypeError(f"reward_weights: {expected}, got {reward_weights!r:.80}") from error
    weights = widen(reward_weights).to(table.device)
    check_tensor("reward_weights", weights, ("(F,)", table.shape[1:]))
    _require_all(weights.isfinite(), weights, "reward_weights", "finite values")
    return table, weights


def _step_table(step_rewards: Any, step_ends: Any) -> tuple[Tensor, Tensor]:
    """(rewards, ends) as (B, S) tensors; ragged lists are padded with NaN and -1."""
    rewards, ends = _lists("step_rewards", step_rewards), _lists("step_ends", step_ends)
    if isinstance(rewards, list) and isinstance(ends, list):
        wanted, got = [len(row) for row in rewards], [len(row) for row in ends]
        if wanted != got:
            expected = f"expected as many ends as step_rewards, {wanted} by row"
            raise ValueError(f"step_ends: {expected}, got {got}")
    if isinstance(rewards, list):
        rewards = [[math.nan if x is None else x for x in row] for row in rewards]
        kinds = {type(x).__name__ for row in rewards for x in row if not hasattr(x, "__float__")}
        if kinds:
            expected = "expected numbers or None in the lists"
            raise TypeError(f"step_rewards: {expected}, got {', '.join(sorted(kinds))}")
        rewards = _padded(rewards, math.nan, torch.float64)
    if isinstance(ends, list):
        odd = [x for row in ends for x in row if isinstance(x, bool) or not isinstance(x, Integral)]
        if odd:
            raise TypeError(
                "step_ends: expected integers, the column of each step's last token, got "
                f"{odd[0]}; are step_rewards and step_ends swapped?"
            )
        ends = _padded(ends, -1, torch.int64)
    check_tensor("step_rewards", rewards, ("(B, S)", (None, None)))
    check_tensor("step_ends", ends, ("(B, S)", rewards.shape))
    if ends.is_floating_point():
        raise TypeError(f"step_ends: expected integers, got {ends.dtype}")
    return rewards, ends


def _lists(name: str, value: Any) -> Tensor | list[Any]:
    """A tensor as it is; anything else as a list of lists, one per completion."""
    if isinstance(value, Tensor):
        return value
    if hasattr(value, "tolist"):  # numpy arrays
        value = value.tolist()
    several = isinstance(value, Sequence)
    rows = [x.tolist() if hasattr(x, "tolist") else x for x in (value if several else [value])]
    for row in rows:
        if not hasattr(row, "__len__"):
            got = type(row).__name__ + (" in it" if several else "")
            if name == "step_ends" and isinstance(value, int):
                got += "; pass the group's size as num_generations="
            expected = "a tensor (B, S), or a list for each completion"
            raise TypeError(f"{name}: expected {expected}, got {got}")
    return rows


def _padded(rows: list[Any], fill: float, dtype: torch.dtype) -> Tensor:
    width = max(map(len, rows), default=0)
    table = [[*row, *[fill] * (width - len(row))] for row in rows]
    return torch.tensor(table, dtype=dtype).view(len(rows), width)


def _bool_mask(mask: Any) -> Tensor:
    """``completion_mask`` as (B, T) bool."""
    check_tensor("completion_mask", mask, ("(B, T)", (None, None)))
    return read_mask(mask)


def _counted_values(name: str, x: Tensor, mask: Tensor) -> Tensor:
    """``x`` (B, T), widened, with 0 where masked; raise if a counted value is not finite."""
    check_tensor(name, x, ("(B, T)", mask.shape))
    _require_all(x.isfinite() | ~mask, x, name, "finite values at counted positions")
    return torch.where(mask, widen(x), 0.0)


def _at_last(name: str, x: Tensor, mask: Tensor) -> Tensor:
    """``x`` (B,) at each row's last counted position of (B, T), widened, and 0 elsewhere."""
    check_tensor(name, x, ("(B,)", mask.shape[:1]))
    return _counted_values(name, x[:, None].expand(mask.shape), last_counted(mask))


def _require_all(ok: Tensor, x: Tensor, name: str, expected: str, if_negative: str = "") -> None:
    bad = (~ok).nonzero()
    if len(bad):
        first = tuple(bad[0].tolist())
        got, hint = x[first].item(), if_negative if x[first] < 0 else ""
        raise ValueError(f"{name}: expected {expected}, got {got} at {first}{hint}")


def _correction(std: str, off: str = "") -> int:
    """The correction c of `std`, which divides by n - c.

    `off` names the argument that turns the division off, for the error.
    """
    hint = f"; {off} turns the division off" if off and not std else ""
    check_choice("std", std, get_args(AdvantageStd), hint)
    return 1 if std == "sample" else 0


def _float_dtype(x: Tensor) -> torch.dtype:
    return x.dtype if x.is_floating_point() else torch.float32
