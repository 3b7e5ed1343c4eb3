"""One advantage per token, whitened over the tokens of the batch: GAE, REINFORCE++ and verl's GDPO."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_kernels.advantages import checks
from grpo_kernels.advantages import group_stats as stats
from grpo_kernels.base.agreement import check_same
from grpo_kernels.base.choices import AdvantageStd
from grpo_kernels.base.sums import counted_first, discounted_sums, last_counted, widen

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
    options: dict[str, Any] = {"gamma": gamma, "lam": lam, "whiten_advantages": whiten_advantages}
    options["whether there is last_value"] = last_value is not None
    with check_same("process_group", process_group, "gae", **options):
        checks.in_interval("gamma", gamma, 1)
        checks.in_interval("lam", lam, 1)
        mask = checks.bool_mask(completion_mask)
        checks.expect_shape("values", values, mask.shape, "(B, T)")
        r = _token_rewards(rewards, mask)
        v = checks.counted_values("values", values, mask)
        if last_value is not None:
            checks.expect_shape("last_value", last_value, mask.shape[:1], "(B,)")
            finite = last_value.isfinite() | ~mask.any(dim=1)
            checks.require_all(finite, last_value, "last_value", "finite values")
    order, inside = counted_first(mask)
    v_packed = v.gather(1, order)
    next_v = torch.cat([v_packed[:, 1:], v.new_zeros(len(v), min(v.shape[1], 1))], dim=1)
    if last_value is not None:
        is_last = last_counted(mask).gather(1, order)
        next_v = torch.where(is_last, widen(last_value)[:, None], next_v)
    delta = torch.where(inside, r.gather(1, order) + gamma * next_v - v_packed, 0.0)
    advantages = torch.zeros_like(v).scatter(1, order, discounted_sums(delta, gamma * lam))
    returns = advantages + v  # both are 0 where masked
    if whiten_advantages:
        advantages = _whitened(advantages, mask, process_group)
    dtype = torch.promote_types(checks.float_dtype(rewards), checks.float_dtype(values))
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
    options = {"gamma": gamma, "beta": beta, "epsilon": epsilon}
    options["whether there is per_token_kl"] = per_token_kl is not None
    ids = None
    with check_same("process_group", process_group, "reinforce_plus_plus", **options) as values:
        checks.in_interval("gamma", gamma, 1)
        checks.in_interval("epsilon", epsilon)
        if not math.isfinite(beta):
            raise ValueError(f"beta: expected a finite number, got {beta}")
        mask = checks.bool_mask(completion_mask)
        table, weights = checks.reward_table(rewards, reward_weights, values)
        checks.expect_shape("rewards", rewards, (len(mask), *rewards.shape[1:]), "(B,) or (B, F)")
        total = stats.weighted_sum(table, weights)
        scored = mask & ~total.isnan()
        penalty = (
            0.0
            if per_token_kl is None
            else beta * checks.counted_values("per_token_kl", per_token_kl, scored)
        )
        if num_generations is None and group_ids is None:
            values |= stats.describe_grouping(len(table), None, None)
        else:
            ids = stats.check_grouping(len(table), num_generations, group_ids, table.device, values)
    if ids is not None:
        total, _, _ = stats.moments(
            total, stats.groups_of_samples(ids, num_generations, values, process_group), 0
        )
    x = torch.where(last_counted(scored), total, 0.0) - penalty
    order, _ = counted_first(scored)
    returns = torch.zeros_like(x).scatter(1, order, discounted_sums(x.gather(1, order), gamma))
    return _whitened(returns, scored, process_group, epsilon=epsilon).to(
        checks.float_dtype(rewards)
    )


@torch.no_grad()
def gdpo_advantages(
    rewards: Tensor,  # (B, F) or (B,)
    completion_mask: Tensor,  # (B, T)
    num_generations: int | None = None,
    *,
    group_ids: Tensor | Sequence[int] | None = None,  # (B,)
    reward_weights: Tensor | Sequence[float] | None = None,  # (F,)
    epsilon: float = 1e-6,
    process_group: ProcessGroup | None = None,
) -> Tensor:
    """verl's GDPO (B, T): sum_f w_f (r_f - mean) / (std + ``epsilon``) in each group, whitened over the counted tokens.

    A completion's weight in the batch's mean and std is thus its length. The paper's version counts each completion
    once: ``group_advantages(aggregation="normalize_then_sum")``. Rows without a score get 0 and are left out of the
    batch's mean and std. Groups, weights, NaN and errors as there; both std, of group and batch, divide by n - 1.
    Source: https://arxiv.org/abs/2601.05242
    """
    with check_same("process_group", process_group, "gdpo_advantages", epsilon=epsilon) as values:
        checks.in_interval("epsilon", epsilon)
        mask = checks.bool_mask(completion_mask)
        table, weights = checks.reward_table(rewards, reward_weights, values)
        checks.expect_shape("rewards", rewards, (len(mask), *rewards.shape[1:]), "(B, F) or (B,)")
        ids = stats.check_grouping(len(table), num_generations, group_ids, table.device, values)
    groups = stats.groups_of_samples(ids, num_generations, values, process_group)
    total = stats.summed_z_scores(table, weights, groups, 1, epsilon)
    mask = mask & ~total.isnan()
    result = _whitened(total.expand(mask.shape), mask, process_group, correction=1)
    return result.to(checks.float_dtype(rewards))


@torch.no_grad()
def whiten(
    x: Tensor,  # (B, T)
    completion_mask: Tensor,  # (B, T)
    *,
    shift_mean: bool = True,
    std: AdvantageStd = "population",
    epsilon: float = 1e-8,
    process_group: ProcessGroup | None = None,
) -> Tensor:
    """(x - mean) / (std + ``epsilon``) over all counted positions (of all ranks), (B, T) in x's dtype, 0 where masked.

    ``shift_mean=False`` divides only. Equal numbers give exactly 0 (with ``shift_mean``).
    """
    options = {
        "shift_mean": shift_mean,
        "std": std,
        "epsilon": epsilon,
        "dtype of x": getattr(x, "dtype", None),
    }
    with check_same("process_group", process_group, "whiten", **options):
        correction = checks.std_correction(std)
        checks.in_interval("epsilon", epsilon)
        mask = checks.bool_mask(completion_mask)
        checks.expect_shape("x", x, mask.shape, "(B, T)")
        counted = checks.counted_values("x", x, mask)
    result = _whitened(
        counted, mask, process_group, correction=correction, epsilon=epsilon, shift_mean=shift_mean
    )
    return result.to(checks.float_dtype(x))


def _whitened(
    x: Tensor,  # (B, T), finite where the mask counts
    mask: Tensor,  # (B, T) bool
    process_group: ProcessGroup | None,
    *,
    correction: int = 0,
    epsilon: float = 1e-8,
    shift_mean: bool = True,
) -> Tensor:
    """`whiten` without its checks, in the dtype of `x`."""
    flat = torch.where(mask, x, stats.NAN).reshape(-1, 1)
    centred, spread, _ = stats.moments(
        flat, stats.one_group(len(flat), x.device, process_group), correction
    )
    result = stats.divide(centred if shift_mean else flat, spread + epsilon).view(mask.shape)
    return torch.where(mask, result, 0.0)


def _token_rewards(rewards: Tensor, mask: Tensor) -> Tensor:
    """(B, T), widened, 0 where masked: rewards (B, T) as they are, rewards (B,) at each row's last counted position."""
    checks.real_tensor("rewards", rewards)
    if rewards.dim() == 2:
        return checks.counted_values("rewards", rewards, mask)
    checks.expect_shape("rewards", rewards, mask.shape[:1], "(B,)")
    return checks.counted_values("rewards", rewards[:, None].expand(mask.shape), last_counted(mask))
