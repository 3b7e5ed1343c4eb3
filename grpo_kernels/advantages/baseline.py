"""Rewards from each token on minus a baseline: ReMax and the optimal token baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_kernels.advantages import checks
from grpo_kernels.advantages import group_stats as stats
from grpo_kernels.base.agreement import Each, check_same
from grpo_kernels.base.sums import counted_first, discounted_sums, last_counted, widen

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@torch.no_grad()
def remax_advantages(
    rewards: Tensor,  # (B,): one per completion, or (B, T)
    baselines: Tensor,  # (B,)
    completion_mask: Tensor,  # (B, T)
) -> Tensor:
    """ReMax (B, T): A_t = sum of the rewards from token t on - the reward of the prompt's greedy completion.

    0 where masked; rewards there are not read. A row whose baseline or any reward is NaN is unscored and gets 0.
    Rows stand alone, so that there is nothing to exchange between ranks. Source: https://arxiv.org/abs/2310.10505
    Raises ValueError for infinite numbers and shapes that disagree.
    """
    mask = checks.bool_mask(completion_mask)
    checks.expect_shape("baselines", baselines, mask.shape[:1], "(B,)")
    checks.require_all(
        ~baselines.isinf(), baselines, "baselines", "finite values, or NaN for an unscored row"
    )
    result = _rewards_to_go(rewards, mask) - widen(baselines)[:, None]
    dtype = torch.promote_types(checks.float_dtype(rewards), checks.float_dtype(baselines))
    return torch.where(mask, result.nan_to_num(nan=0.0), 0.0).to(dtype)


@torch.no_grad()
def optimal_token_baseline(
    rewards: Tensor,  # (B,): one per completion, or (B, T)
    completion_mask: Tensor,  # (B, T)
    old_per_token_logps: Tensor,  # (B, T)
    sum_pi_squared: Tensor,  # (B, T)
    num_generations: int | None = None,
    *,
    group_ids: Tensor | Sequence[int] | None = None,  # (B,)
    importance_sampling_ratio: Tensor | None = None,  # (B, T)
    handle_zero_tail: bool = True,
    process_group: ProcessGroup | None = None,
) -> Tensor:
    """Advantages (B, T): A_t = G_t - sum_j W_t,j G_t,j / sum_j W_t,j over the completions j of the group that reach t.

    G_t is the sum of the rewards from token t on; W_t = sum_(k <= t) w_k stands for the squared gradient up to t, with
    w_k = rho_k^2 (1 - 2 pi_k + sum_v pi_v^2), pi_k = exp(``old_per_token_logps``), ``sum_pi_squared`` over the
    vocabulary (the exp of `linear_logprob`'s extra ``"log_sum_sq_probs"``) and rho ``importance_sampling_ratio`` if
    given. t counts a row's counted tokens: masked ones (padding, tool output) are jumped over, and 0 in the result.
    Where only one completion of the group reaches t, A_t is G_t with ``handle_zero_tail`` (baseline 0), and 0 without.
    A row with a NaN reward is unscored: it gets 0 and enters no baseline. Groups and ranks as in ``group_advantages``.

    Source: https://arxiv.org/abs/2602.07078. It is verl's ``tir_optimal_token_baseline`` and, where the masks have no
    holes, its ``optimal_token_baseline``. Unlike there, w_k >= 0 whatever the rounding of pi near 1, nothing is added
    to the denominator (a sum of 0 means a baseline of 0), and a group of one has no rule of its own.
    Raises ValueError for infinite rewards, for counted numbers that are not finite, and for those that are wrong by
    more than rounding: log-probabilities above 0, sums of squared probabilities outside [0, 1].
    """
    with check_same(
        "process_group", process_group, "optimal_token_baseline", handle_zero_tail=handle_zero_tail
    ) as values:
        if not isinstance(handle_zero_tail, bool):
            raise TypeError(
                f"handle_zero_tail: expected a bool, got {type(handle_zero_tail).__name__}"
            )
        mask = checks.bool_mask(completion_mask)
        to_go = _rewards_to_go(rewards, mask)
        logps = checks.counted_values("old_per_token_logps", old_per_token_logps, mask)
        possible = logps <= _slack(old_per_token_logps)
        checks.require_all(possible, logps, "old_per_token_logps", "log-probabilities, at most 0")
        logps = logps.clamp(max=0.0)
        squares = checks.counted_values("sum_pi_squared", sum_pi_squared, mask)
        possible = (squares >= 0) & (squares <= 1 + _slack(sum_pi_squared))
        expected = "sums of squared probabilities, in [0, 1] (not their logarithms)"
        checks.require_all(possible, squares, "sum_pi_squared", expected)
        factor = importance_sampling_ratio
        if factor is not None:
            factor = checks.counted_values("importance_sampling_ratio", factor, mask).square()
        ids = stats.check_grouping(len(mask), num_generations, group_ids, mask.device, values)
        values |= {
            "whether there is importance_sampling_ratio": factor is not None,
            "columns": Each(mask.shape[1]),
        }
    groups = stats.groups_of_samples(ids, num_generations, values, process_group)
    others = (squares - torch.exp(2 * logps)).clamp(
        min=0.0
    )  # squared probabilities of the tokens not chosen
    energy = torch.where(mask, torch.expm1(logps).square() + others, 0.0)
    if factor is not None:
        energy = energy * factor

    order, inside = counted_first(mask)
    width = max(values["columns"])
    returns = _widened(torch.where(inside, to_go.gather(1, order), stats.NAN), width, stats.NAN)
    weights = _widened(energy.cumsum(dim=1).gather(1, order), width, 0.0)
    centred, total = stats.deviations(returns, groups, weights)
    no_baseline = total == 0
    if handle_zero_tail:
        no_baseline |= stats.group_sums((~returns.isnan()).to(weights.dtype), groups) == 1
    result = torch.where(no_baseline[groups.of_row], returns, centred).nan_to_num(nan=0.0)
    result = torch.zeros_like(to_go).scatter(1, order, result[:, : mask.shape[1]])
    return result.to(checks.float_dtype(rewards))


def _rewards_to_go(rewards: Tensor, mask: Tensor) -> Tensor:
    """(B, T), widened: the sum of a row's counted rewards from each position on; NaN everywhere in an unscored row."""
    checks.real_tensor("rewards", rewards)
    if rewards.dim() == 2:
        checks.expect_shape("rewards", rewards, mask.shape, "(B, T)")
        per_token = torch.where(mask, widen(rewards), 0.0)
    else:
        checks.expect_shape("rewards", rewards, mask.shape[:1], "(B,)")
        per_token = torch.where(last_counted(mask), widen(rewards)[:, None], 0.0)
    checks.require_all(
        ~per_token.isinf(), per_token, "rewards", "finite values, or NaN for an unscored row"
    )
    unscored = per_token.isnan().any(dim=1, keepdim=True)
    return torch.where(unscored, stats.NAN, discounted_sums(per_token.nan_to_num(nan=0.0), 1.0))


def _slack(x: Tensor) -> float:
    """Rounding error allowed beyond a bound of 0 or 1; 16-bit logits of 20 have steps of 1/8."""
    return 0.1 if x.dtype.itemsize == 2 else 1e-3


def _widened(x: Tensor, width: int, fill: float) -> Tensor:
    """(B, T) -> (B, width), for ranks that padded to different lengths."""
    return torch.cat([x, x.new_full((len(x), width - x.shape[1]), fill)], dim=1)
