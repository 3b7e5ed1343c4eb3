"""Rejection sampling: choose the completions to learn from, by a coefficient of 0 or 1."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_kernels.advantages import checks
from grpo_kernels.advantages import group_stats as stats
from grpo_kernels.base.sums import widen


@torch.no_grad()
def rejection_sampling_advantages(
    rewards: Tensor,  # (B,) or (B, F)
    threshold: float | Tensor,  # or (B,)
    *,
    reward_weights: Tensor | Sequence[float] | None = None,  # (F,)
) -> Tensor:
    """Rejection sampling (B,): A_i = 1 where r_i >= ``threshold``, accepted, and 0 elsewhere; never negative.

    It is the coefficient of rejection-sampling fine-tuning (RFT) if the samples are from the model before training, and
    of online RFT if they are from the current policy. On-policy with ``presets.REINFORCE`` the loss is

        sum_(i accepted, t) -log p(o_(i,t)) / number of counted tokens

    With ``completion_mask * advantages[:, None].bool()`` as the mask it is, in value and gradient, the cross entropy of
    the accepted completions, and rejected ones are not projected. With the whole mask rejected ones are projected once,
    for the metrics, and the mean is over their tokens too.

    ``threshold`` is one number, or one per row: the best reward of each row's group accepts its best completions.
    r = sum_f w_f r_f for F rewards, compared in the rewards' dtype. A row without any score (NaN) gets 0. Rows stand
    alone, so that there is nothing to exchange between ranks.

    Sources: https://arxiv.org/abs/2308.01825 (RFT), https://arxiv.org/abs/2402.03300 (section 5.2, as a coefficient).
    Raises ValueError for infinite rewards, a NaN threshold and shapes that disagree, TypeError for wrong types.
    """
    table, weights = checks.reward_table(rewards, reward_weights, {})
    total = stats.weighted_sum(table, weights)[:, 0]
    bound = _bound(threshold, total)
    dtype = rewards.dtype if rewards.is_floating_point() else total.dtype
    return (total.to(dtype) >= bound.to(dtype)).to(checks.float_dtype(rewards))


def _bound(threshold: float | Tensor, total: Tensor) -> Tensor:
    """Check `threshold` and expand it to `total` (B,), the rewards; infinity accepts all scored rows, or none."""
    if not isinstance(threshold, Tensor):
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)):
            raise TypeError(
                f"threshold: expected a number or a tensor, got {type(threshold).__name__}"
            )
        if math.isnan(threshold):
            raise ValueError("threshold: expected a number other than NaN, got nan")
        return total.new_full(total.shape, threshold)
    checks.real_tensor("threshold", threshold)
    if threshold.dim():
        checks.expect_shape("threshold", threshold, total.shape, "(B,)")
    bound = widen(threshold).to(total.device).expand(total.shape)
    checks.require_all(~bound.isnan() | total.isnan(), bound, "threshold", "numbers other than NaN")
    return bound
