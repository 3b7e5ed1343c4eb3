"""Advantages from rewards (group baselines, process supervision, leave-one-out, GAE, REINFORCE++) or a teacher.

Estimators that compare completions of one prompt are in ``group``, step rewards in ``process``, estimators that whiten
over tokens in ``token``, other baselines in ``baseline``, rejection sampling in ``selection``, a teacher's
log-probabilities in ``distillation``. All are built from a few functions of ``group_stats``: ``deviations`` from a
group's mean, ``moments`` with their std, both over the scored entries, and ``base.sums.discounted_sums``. They run in
float64 (float32 where the device has none) and without gradient; results have the dtype of the float inputs, float32
for integer rewards.

``process_group`` is for groups whose samples lie on several ranks: each rank passes its own rows (their number may
differ) and gets the advantages of its own rows. Rewards never travel, only group ids and per-group statistics. ``None``
means no communication at all, also where ``torch.distributed`` is initialised.
"""

from __future__ import annotations

from grpo_kernels.advantages.baseline import optimal_token_baseline, remax_advantages
from grpo_kernels.advantages.distillation import distillation_advantages
from grpo_kernels.advantages.group import (
    gpg_advantages,
    group_advantages,
    opo_advantages,
    passk_advantages,
    rloo_advantages,
)
from grpo_kernels.advantages.process import process_advantages
from grpo_kernels.advantages.selection import rejection_sampling_advantages
from grpo_kernels.advantages.token import gae, gdpo_advantages, reinforce_plus_plus, whiten

__all__ = [
    "distillation_advantages",
    "gae",
    "gdpo_advantages",
    "gpg_advantages",
    "group_advantages",
    "opo_advantages",
    "optimal_token_baseline",
    "passk_advantages",
    "process_advantages",
    "reinforce_plus_plus",
    "rejection_sampling_advantages",
    "remax_advantages",
    "rloo_advantages",
    "whiten",
]
