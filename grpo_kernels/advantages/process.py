"""Process supervision: rewards of steps, spread over the tokens up to their ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grpo_kernels.advantages import checks
from grpo_kernels.advantages import group_stats as stats
from grpo_kernels.base.agreement import check_same
from grpo_kernels.base.choices import AdvantageStd
from grpo_kernels.base.sums import discounted_sums, widen

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@torch.no_grad()
def process_advantages(
    step_rewards: Tensor | Sequence[Sequence[float | None]],  # (B, S)
    step_ends: Tensor | Sequence[Sequence[int]],  # (B, S)
    num_generations: int | None = None,
    *,
    group_ids: Tensor | Sequence[int] | None = None,  # (B,)
    completion_mask: Tensor | None = None,  # (B, T)
    length: int | None = None,  # T
    std: AdvantageStd = "population",
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
    with check_same(
        "process_group", process_group, "process_advantages", std=std, epsilon=epsilon
    ) as values:
        correction = checks.std_correction(std)
        checks.in_interval("epsilon", epsilon)
        table, ends = _step_table(step_rewards, step_ends)
        batch_size, steps = table.shape
        mask = _process_mask(completion_mask, length, batch_size, table.device)
        x = widen(table)
        checks.require_all(
            ~x.isinf(), x, "step_rewards", "finite values, or NaN for an unscored step"
        )
        in_range = x.isnan() | ((ends >= 0) & (ends < mask.shape[1]))
        checks.require_all(in_range, ends, "step_ends", f"indices in [0, T) = [0, {mask.shape[1]})")
        values |= {"dtype of step_rewards": table.dtype}
        ids = stats.check_grouping(
            batch_size, num_generations, group_ids, x.device, values, fewest=1
        )
    groups = stats.groups_of_samples(ids, num_generations, values, process_group)
    by_step = groups._replace(of_row=groups.of_row.repeat_interleave(steps))
    centred, spread, _ = stats.moments(x.reshape(-1, 1), by_step, correction)
    normalised = stats.divide(centred, spread + epsilon).nan_to_num(nan=0.0).view(batch_size, steps)
    at_ends = x.new_zeros(mask.shape)
    if mask.shape[1]:
        at_ends.scatter_add_(1, torch.where(x.isnan(), 0, ends), normalised)
    return torch.where(mask, discounted_sums(at_ends, 1.0), 0.0).to(checks.float_dtype(table))


def _process_mask(
    completion_mask: Tensor | None, length: int | None, rows: int, device: torch.device
) -> Tensor:
    """Mask (B, T) bool, from `completion_mask` or `length`; exactly one is given."""
    if (completion_mask is None) == (length is None):
        got = "neither" if length is None else "both"
        raise ValueError(f"completion_mask, length: expected exactly one of the two, got {got}")
    if completion_mask is not None:
        mask = checks.bool_mask(completion_mask)
        checks.expect_shape("completion_mask", mask, (rows, mask.shape[1]), "(B, T)")
        return mask
    if isinstance(length, bool) or not isinstance(length, int):
        raise TypeError(f"length: expected an int, got {type(length).__name__}")
    if length < 0:
        raise ValueError(f"length: expected at least 0, got {length}")
    return torch.ones(rows, length, dtype=torch.bool, device=device)


def _step_table(
    step_rewards: Tensor | Sequence[Sequence[float | None]],
    step_ends: Tensor | Sequence[Sequence[int]],
) -> tuple[Tensor, Tensor]:
    """Rewards and ends as (B, S) tensors; ragged lists are padded with NaN and -1."""
    if not isinstance(step_rewards, Tensor):
        rows = [[stats.NAN if reward is None else reward for reward in row] for row in step_rewards]
        if not isinstance(step_ends, Tensor):
            wanted, got = [len(row) for row in rows], [len(row) for row in step_ends]
            if wanted != got:
                raise ValueError(
                    f"step_ends: expected as many ends as step_rewards, {wanted} by row, got {got}"
                )
        step_rewards = _padded(rows, stats.NAN, torch.float32)
    if not isinstance(step_ends, Tensor):
        step_ends = _padded(step_ends, -1, torch.int64)
    checks.real_tensor("step_rewards", step_rewards)
    if step_rewards.dim() != 2:
        raise ValueError(f"step_rewards: expected shape (B, S), got {tuple(step_rewards.shape)}")
    checks.expect_shape("step_ends", step_ends, step_rewards.shape, "(B, S)")
    if step_ends.is_floating_point():
        raise TypeError(f"step_ends: expected integers, got {step_ends.dtype}")
    return step_rewards, step_ends.to(step_rewards.device, torch.int64)


def _padded(rows: Sequence[Sequence[float]], fill: float, dtype: torch.dtype) -> Tensor:
    width = max(map(len, rows), default=0)
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=dtype).view(
        len(rows), width
    )
