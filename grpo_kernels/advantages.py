"""Advantages from rewards: group baselines, process supervision, leave-one-out, GAE and REINFORCE++.

Every estimator is made of two pieces of ``group_stats``: ``moments``, the deviations from the group's mean and their
std over the scored entries, and ``discounted_sums``, y_t = sum_k discount^k x_(t+k). They run in float64 (float32 where
the device has none) and without gradient; results have the dtype of the float inputs, float32 for integer rewards.

``process_group`` is for groups whose samples lie on several ranks: each rank passes its own rows (their number may
differ) and gets the advantages of its own rows. Rewards never travel, only group ids and per-group statistics. ``None``
means no communication at all, also where ``torch.distributed`` is initialised.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_kernels import group_stats as stats

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["gae", "group_advantages", "process_advantages", "reinforce_plus_plus", "rloo_advantages", "whiten"]


@torch.no_grad()
def group_advantages(
    rewards: Tensor,  # (B,) or (B, F)
    num_generations: int | None = None,
    *,
    group_ids: Tensor | Sequence[int] | None = None,  # (B,)
    reward_weights: Tensor | Sequence[float] | None = None,  # (F,)
    scale: str = "group",
    std: str = "sample",
    aggregation: str = "sum_then_normalize",
    epsilon: float = 1e-4,
    process_group: ProcessGroup | None = None,
) -> Tensor:
    """Group-relative advantages (B,): A_i = (r_i - mean of its group) / (std + epsilon).

    The defaults are TRL's. Groups are ``num_generations`` consecutive rows (counted over all ranks) or the rows of
    equal integer id in ``group_ids``, in any order and of any sizes; exactly one of the two is given.
    A NaN reward is unscored: it enters no sum, no mean and no std, and a row without any score has advantage 0. A group
    of equal rewards, or with one scored row, has advantages of exactly 0.

    ``aggregation`` of F rewards: "sum_then_normalize" takes r = sum_f w_f r_f; "normalize_then_sum" takes the weighted
    sum of each reward's own z-score in its group and divides by its std over the batch (``scale`` has no say then).
    ``scale``: what std is taken over, "group" or "batch", or "none" for the bare difference from the mean.
    ``std``: "sample" divides by n - 1, "population" by n.

    Sources: https://arxiv.org/abs/2402.03300 (section 4.1.2), https://arxiv.org/abs/2503.20783 (scale "none"),
    https://arxiv.org/abs/2601.05242 ("normalize_then_sum").
    Raises ValueError for infinite rewards and for arguments out of range, TypeError for wrong types.
    """
    stats.one_of("scale", scale, ("group", "batch", "none"))
    stats.one_of("aggregation", aggregation, ("sum_then_normalize", "normalize_then_sum"))
    correction = stats.std_correction(std)
    stats.in_interval("epsilon", epsilon)
    table, weights = stats.reward_table(rewards, reward_weights, process_group)
    groups = stats.sample_groups(len(table), num_generations, group_ids, table.device, process_group)
    batch = stats.one_group(len(table), table.device, process_group)

    if aggregation == "sum_then_normalize":
        total = stats.weighted_sum(table, weights)
        moments = stats.moments(total, groups, correction)
        result = moments.centred
        if scale != "none":
            spread = moments.std if scale == "group" else stats.moments(total, batch, correction).std
            result = stats.divide(result, spread + epsilon)
    else:
        moments = stats.moments(table, groups, correction)
        total = stats.weighted_sum(stats.divide(moments.centred, moments.std + epsilon), weights)
        # z-scores sum to 0 in every group, hence in the batch: subtracting their mean would add rounding noise only.
        result = stats.divide(total, stats.moments(total, batch, correction).std + epsilon)
    return result[:, 0].nan_to_num(nan=0.0).to(stats.float_dtype(rewards))


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
    stats.in_interval("epsilon", epsilon)
    table, weights = stats.reward_table(rewards, reward_weights, process_group)
    groups = stats.sample_groups(len(table), num_generations, group_ids, table.device, process_group)
    moments = stats.moments(stats.weighted_sum(table, weights), groups, 0)
    result = moments.centred * moments.scored / (moments.scored - 1)  # 0 / 0 = NaN, unscored, where n = 1
    if normalize:
        batch = stats.one_group(len(table), table.device, process_group)
        result = stats.divide(result, stats.moments(result, batch, 1).std + epsilon)
    return result[:, 0].nan_to_num(nan=0.0).to(stats.float_dtype(rewards))


@torch.no_grad()
def process_advantages(
    step_rewards: Tensor | Sequence[Sequence[float | None]],  # (B, S)
    step_ends: Tensor | Sequence[Sequence[int]],  # (B, S)
    num_generations: int | None = None,
    *,
    group_ids: Tensor | Sequence[int] | None = None,  # (B,)
    completion_mask: Tensor | None = None,  # (B, T)
    length: int | None = None,  # T
    std: str = "population",
    epsilon: float = 1e-4,
    process_group: ProcessGroup | None = None,
) -> Tensor:
    """Process supervision (B, T): A_t = sum of the normalised rewards of the steps that end at or after token t.

    Rewards are normalised over all steps of all outputs of a group: (r - mean) / (std + ``epsilon``). ``step_rewards``
    is padded with NaN (an unscored step, which counts for nothing), ``step_ends`` holds the index in [0, T) of each
    step's last token and is not read where the reward is NaN; both may be ragged lists. T comes from ``length`` or from
    ``completion_mask``, exactly one of which is given; masked positions get 0, as do tokens after the last step.
    Groups as in ``group_advantages``. Source: https://arxiv.org/abs/2402.03300 (section 4.1.3)
    Raises ValueError for infinite rewards, ends out of range and shapes that disagree.
    """
    correction = stats.std_correction(std)
    stats.in_interval("epsilon", epsilon)
    given, ends = stats.step_table(step_rewards, step_ends)
    batch_size, steps = given.shape
    mask = _process_mask(completion_mask, length, batch_size, given.device)
    x = stats.wide(given)
    stats.require_all(~x.isinf(), x, "step_rewards", "finite values, or NaN for an unscored step", process_group)
    in_range = x.isnan() | ((ends >= 0) & (ends < mask.shape[1]))
    stats.require_all(in_range, ends, "step_ends", f"indices in [0, T) = [0, {mask.shape[1]})", process_group)

    groups = stats.sample_groups(batch_size, num_generations, group_ids, x.device, process_group)
    by_step = groups._replace(of_row=groups.of_row.repeat_interleave(steps))
    moments = stats.moments(x.reshape(-1, 1), by_step, correction)
    normalised = stats.divide(moments.centred, moments.std + epsilon).nan_to_num(nan=0.0).view(batch_size, steps)
    at_ends = x.new_zeros(mask.shape)
    if mask.shape[1]:
        at_ends.scatter_add_(1, torch.where(x.isnan(), 0, ends), normalised)
    return torch.where(mask, stats.discounted_sums(at_ends, 1.0), 0.0).to(stats.float_dtype(given))


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
    process_group: ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: (advantages, returns), both (B, T) and 0 where masked.

    delta_t = r_t + gamma V_(t+1) - V_t,  A_t = delta_t + gamma lam A_(t+1),  return_t = A_t + V_t, where t + 1 is the
    next counted position: the recursion jumps over masked ones (padding, tool output), whose contents are never used.
    After a row's last counted token V is ``last_value`` (0 by default: the episode has ended). ``whiten_advantages``
    applies ``whiten``, over all ranks of ``process_group``; the returns keep their scale.
    Source: https://arxiv.org/abs/1506.02438. Raises ValueError for non-finite numbers at counted positions.
    """
    stats.in_interval("gamma", gamma, 1)
    stats.in_interval("lam", lam, 1)
    mask = stats.bool_mask(completion_mask)
    stats.expect_shape("values", values, mask.shape, "(B, T)")
    r = stats.token_rewards(rewards, mask, process_group)
    v = stats.counted_values("values", values, mask, process_group)
    order, inside = stats.counted_first(mask)
    v_packed = v.gather(1, order)
    next_v = torch.cat([v_packed[:, 1:], v.new_zeros(len(v), min(v.shape[1], 1))], dim=1)
    if last_value is not None:
        stats.expect_shape("last_value", last_value, mask.shape[:1], "(B,)")
        is_last = stats.last_counted(mask).gather(1, order)
        finite = last_value.isfinite() | ~mask.any(dim=1)
        stats.require_all(finite, last_value, "last_value", "finite values", process_group)
        next_v = torch.where(is_last, stats.wide(last_value)[:, None], next_v)
    delta = torch.where(inside, r.gather(1, order) + gamma * next_v - v_packed, 0.0)
    advantages = torch.zeros_like(v).scatter(1, order, stats.discounted_sums(delta, gamma * lam))
    returns = advantages + v  # both are 0 where masked
    if whiten_advantages:
        advantages = whiten(advantages, mask, process_group=process_group)
    dtype = torch.promote_types(stats.float_dtype(rewards), stats.float_dtype(values))
    return advantages.to(dtype), returns.to(dtype)


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
    epsilon: float = 1e-8,
    process_group: ProcessGroup | None = None,
) -> Tensor:
    """REINFORCE++ (B, T): discounted returns of a terminal reward and a KL penalty per token, whitened over the batch.

    A_t = sum_(k >= t) gamma^(k - t) (r [k is the last counted token] - beta KL_k), then (A - mean) / (std + epsilon)
    over all counted tokens of the batch (of all ranks). Without ``per_token_kl`` there is no penalty. With
    ``num_generations`` or ``group_ids`` it is the baseline variant: the group's mean reward is subtracted first. Rows
    without a score get 0 and are left out of mean and std. Masked positions are jumped over.
    Source: https://arxiv.org/abs/2501.03262
    """
    stats.in_interval("gamma", gamma, 1)
    stats.in_interval("epsilon", epsilon)
    if not math.isfinite(beta):
        raise ValueError(f"beta: expected a finite number, got {beta}")
    mask = stats.bool_mask(completion_mask)
    table, weights = stats.reward_table(rewards, reward_weights, process_group)
    stats.expect_shape("rewards", rewards, (len(mask), *rewards.shape[1:]), "(B,) or (B, F)")
    total = stats.weighted_sum(table, weights)
    if num_generations is not None or group_ids is not None:
        groups = stats.sample_groups(len(table), num_generations, group_ids, table.device, process_group)
        total = stats.moments(total, groups, 0).centred
    mask = mask & ~total.isnan()
    x = torch.where(stats.last_counted(mask), total, 0.0)
    if per_token_kl is not None:
        stats.expect_shape("per_token_kl", per_token_kl, mask.shape, "(B, T)")
        x = x - beta * stats.counted_values("per_token_kl", per_token_kl, mask, process_group)
    order, _ = stats.counted_first(mask)
    returns = torch.zeros_like(x).scatter(1, order, stats.discounted_sums(x.gather(1, order), gamma))
    return whiten(returns, mask, epsilon=epsilon, process_group=process_group).to(stats.float_dtype(rewards))


@torch.no_grad()
def whiten(
    x: Tensor,  # (B, T)
    completion_mask: Tensor,  # (B, T)
    *,
    shift_mean: bool = True,
    std: str = "population",
    epsilon: float = 1e-8,
    process_group: ProcessGroup | None = None,
) -> Tensor:
    """(x - mean) / (std + ``epsilon``) over all counted positions (of all ranks), (B, T) in x's dtype, 0 where masked.

    ``shift_mean=False`` divides only. Equal numbers give exactly 0 (with ``shift_mean``).
    """
    correction = stats.std_correction(std)
    stats.in_interval("epsilon", epsilon)
    mask = stats.bool_mask(completion_mask)
    stats.expect_shape("x", x, mask.shape, "(B, T)")
    counted = stats.counted_values("x", x, mask, process_group)
    flat = torch.where(mask, counted, stats.NAN).reshape(-1, 1)
    moments = stats.moments(flat, stats.one_group(len(flat), x.device, process_group), correction)
    numerator = moments.centred if shift_mean else flat
    result = stats.divide(numerator, moments.std + epsilon).view(mask.shape)
    return torch.where(mask, result, 0.0).to(stats.float_dtype(x))


def _process_mask(completion_mask: Tensor | None, length: int | None, rows: int, device: torch.device) -> Tensor:
    """(B, T) bool from whichever of the two is given."""
    if (completion_mask is None) == (length is None):
        given = "neither" if length is None else "both"
        raise ValueError(f"completion_mask, length: expected exactly one of the two, got {given}")
    if completion_mask is not None:
        mask = stats.bool_mask(completion_mask)
        stats.expect_shape("completion_mask", mask, (rows, mask.shape[1]), "(B, T)")
        return mask
    if isinstance(length, bool) or not isinstance(length, int):
        raise TypeError(f"length: expected an int, got {type(length).__name__}")
    if length < 0:
        raise ValueError(f"length: expected at least 0, got {length}")
    return torch.ones(rows, length, dtype=torch.bool, device=device)
