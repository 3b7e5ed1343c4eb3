"""Every advantage estimator on one kind of batch: `ESTIMATORS`, which tests/advantages/test_properties.py goes through.

A new estimator is an entry here, and one for each variant that has code of its own; the words before the comma are the
function's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from grpo_kernels import advantages as adv

FLOAT = torch.float64


def batch(
    seed: int, *, holes: bool = False, rows: int = 13, length: int = 7, levels: bool = False
) -> SimpleNamespace:
    """Groups of unequal size in any order, one of one row, one of equal rewards; token numbers of a softmax."""
    gen = torch.Generator().manual_seed(seed)
    ids = torch.cat([torch.randint(3, (rows - 4,), generator=gen), torch.tensor([3, 4, 4, 4])])
    rewards = torch.randn(rows, 2, generator=gen, dtype=FLOAT)
    if levels:
        rewards = (rewards > 0).to(FLOAT)
    rewards[ids == 4] = torch.tensor([0.7, 0.3], dtype=FLOAT)
    lengths = torch.randint(1, length + 1, (rows,), generator=gen)
    mask = torch.arange(length) < lengths[:, None]
    if holes:
        mask = torch.rand(rows, length, generator=gen) < 0.6
        mask[0], mask[1] = False, True
    logits = 3 * torch.randn(rows, length, 11, generator=gen, dtype=FLOAT)
    logps = torch.log_softmax(logits, dim=-1)
    order = torch.randperm(rows, generator=gen)
    return SimpleNamespace(
        rewards=rewards[order],
        ids=ids[order] * 1000 - 5,
        mask=mask,
        token_rewards=torch.randn(rows, length, generator=gen, dtype=FLOAT),
        logps=logps[..., 0],
        squares=logps.exp().square().sum(-1),
        ratio=0.5 + torch.rand(rows, length, generator=gen, dtype=FLOAT),
        baselines=torch.randn(rows, generator=gen, dtype=FLOAT),
        ends=torch.arange(2 * rows).view(-1, 2) % 4,
    )


PER_TOKEN = ("mask", "token_rewards", "logps", "squares", "ratio")


def part(
    data: SimpleNamespace, rows: slice | Tensor, columns: int | None = None
) -> SimpleNamespace:
    """These rows of a batch, padded to so many columns only."""
    cut = {
        name: x[rows, :columns] if name in PER_TOKEN else x[rows] for name, x in vars(data).items()
    }
    return SimpleNamespace(**cut)


@dataclass(frozen=True)
class Estimator:
    """One way to call a function of `grpo_kernels.advantages`, and which properties it has."""

    call: Callable[
        [SimpleNamespace, Any], Tensor
    ]  # a batch, a process group -> advantages (B,) or (B, T)
    centred: bool = False  # a group of equal rewards gets exactly 0
    shifts: bool = False  # a constant added to all rewards changes nothing
    degree: int | None = None  # k: rewards times 2 give advantages times 2^k
    unscored: bool = (
        True  # a row whose reward is NaN gets 0, and the other rows what they get without it
    )


def groups(d: SimpleNamespace, process_group: Any) -> dict[str, Any]:
    return {"group_ids": d.ids, "process_group": process_group}


def of_group(scale: str, aggregation: str, epsilon: float) -> Estimator:
    options: dict[str, Any] = {"scale": scale, "aggregation": aggregation, "epsilon": epsilon}
    by_sum = aggregation == "sum_then_normalize"
    return Estimator(
        lambda d, pg: adv.group_advantages(d.rewards, **options, **groups(d, pg)),
        centred=True,
        shifts=scale != "mean" or not by_sum,
        degree=1 if by_sum and scale == "none" else None if epsilon else 0,
    )


def token_baseline(d: SimpleNamespace, rewards: Tensor, pg: Any, **options: Any) -> Tensor:
    return adv.optimal_token_baseline(
        rewards, d.mask, d.logps, d.squares, **options, **groups(d, pg)
    )


def last_value(d: SimpleNamespace) -> Tensor:
    """Not read in rows where nothing counts."""
    return torch.where(d.mask.any(1), d.baselines, math.nan)


ESTIMATORS = {
    **{
        f"group_advantages, {scale}, {aggregation}, {epsilon}": of_group(scale, aggregation, epsilon)
        for scale, aggregation, epsilon in product(
            ("group", "batch", "mean", "none"), ("sum_then_normalize", "normalize_then_sum"), (0.0, 1e-4)
        )
    },
    "rloo_advantages": Estimator(lambda d, pg: adv.rloo_advantages(d.rewards, **groups(d, pg)), True, True, 1),
    "rloo_advantages, normalised": Estimator(
        lambda d, pg: adv.rloo_advantages(d.rewards, normalize=True, epsilon=0.0, **groups(d, pg)), True, True, 0
    ),
    "passk_advantages": Estimator(lambda d, pg: adv.passk_advantages(d.rewards, **groups(d, pg)), True, True),
    "passk_advantages, none": Estimator(
        lambda d, pg: adv.passk_advantages(d.rewards, scale="none", std="population", **groups(d, pg)), True, True, 1
    ),
    "opo_advantages": Estimator(lambda d, pg: adv.opo_advantages(d.rewards, d.mask, **groups(d, pg)), True, True, 1),
    "gpg_advantages": Estimator(
        lambda d, pg: adv.gpg_advantages(d.rewards, reward_weights=[0.5, 2.0], **groups(d, pg)), True, True, 1
    ),
    "gdpo_advantages": Estimator(lambda d, pg: adv.gdpo_advantages(d.rewards, d.mask, **groups(d, pg)), shifts=True),
    "optimal_token_baseline": Estimator(lambda d, pg: token_baseline(d, d.rewards[:, 0], pg), degree=1),
    "optimal_token_baseline, no tail": Estimator(
        lambda d, pg: token_baseline(d, d.rewards[:, 0], pg, handle_zero_tail=False), True, True, 1
    ),
    "optimal_token_baseline, of tokens": Estimator(
        lambda d, pg: token_baseline(
            d, d.token_rewards, pg, importance_sampling_ratio=d.ratio, handle_zero_tail=False
        ),
        degree=1,
    ),
    "process_advantages": Estimator(
        lambda d, pg: adv.process_advantages(d.rewards, d.ends, completion_mask=d.mask, epsilon=0.0, **groups(d, pg)),
        True, True, 0,
    ),
    "process_advantages, length": Estimator(
        lambda d, pg: adv.process_advantages(d.rewards, d.ends, length=d.mask.shape[1], **groups(d, pg)), True, True
    ),
    "gae": Estimator(
        lambda d, pg: adv.gae(d.token_rewards, d.logps, d.mask, 0.9, 0.9, last_value(d))[0], unscored=False
    ),
    "gae, returns": Estimator(
        lambda d, pg: adv.gae(d.token_rewards, d.token_rewards, d.mask, 0.9)[1], degree=1, unscored=False
    ),
    "gae, whitened": Estimator(
        lambda d, pg: adv.gae(
            d.token_rewards, -d.token_rewards, d.mask, whiten_advantages=True, process_group=pg
        )[0],
        unscored=False,
    ),
    "reinforce_plus_plus": Estimator(
        lambda d, pg: adv.reinforce_plus_plus(d.rewards, d.mask, epsilon=0.0, process_group=pg), degree=0
    ),
    "reinforce_plus_plus, baseline": Estimator(
        lambda d, pg: adv.reinforce_plus_plus(d.rewards, d.mask, **groups(d, pg)), shifts=True
    ),
    "reinforce_plus_plus, penalty": Estimator(
        lambda d, pg: adv.reinforce_plus_plus(d.rewards, d.mask, per_token_kl=d.ratio, beta=0.2, **groups(d, pg))
    ),
    "whiten": Estimator(
        lambda d, pg: adv.whiten(d.token_rewards, d.mask, epsilon=0.0, process_group=pg), degree=0, unscored=False
    ),
    "remax_advantages": Estimator(lambda d, pg: adv.remax_advantages(d.rewards[:, 0], d.baselines, d.mask)),
    "remax_advantages, of tokens": Estimator(lambda d, pg: adv.remax_advantages(d.token_rewards, d.baselines, d.mask)),
    "rejection_sampling_advantages": Estimator(lambda d, pg: adv.rejection_sampling_advantages(d.rewards, 0.5)),
    "distillation_advantages": Estimator(
        lambda d, pg: adv.distillation_advantages(d.logps, d.token_rewards, d.mask), unscored=False
    ),
}  # fmt: skip
