"""What each rank does for `test_liger.py`; by itself, so that ranks need not import Liger, which takes seconds."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels.integrations.liger import LigerFusedLinearGRPOLoss
from tests.support.case_builder import Case, make_case

ITEMS = (None, 31.0, torch.tensor(31))


def case_of_rank(rank: int, loss_type: str) -> Case:
    """Two sequences on the first rank, three on the second, of other lengths."""
    return make_case(f"liger/rank {rank}", b=2 + rank, t=7, h=8, v=17, mask="ragged", loss_type=loss_type)


def loss_of(case: Case) -> Tensor:
    """Ours."""
    loss_fn = LigerFusedLinearGRPOLoss(beta=0.0, loss_type=case.config["loss_type"])
    args = (case.hidden, case.weight, case.completion_ids, case.completion_mask, case.advantages)
    old, items = case.old_per_token_logps, case.num_items_in_batch
    return loss_fn(*args, old_per_token_logps=old, num_items_in_batch=items)[0]


def losses(rank: int, world_size: int) -> list[Tensor]:
    """Of dapo for each of `ITEMS`, then of grpo."""
    dapo, grpo = case_of_rank(rank, "dapo"), case_of_rank(rank, "grpo")
    return [*(loss_of(dapo.but(num_items_in_batch=items)) for items in ITEMS), loss_of(grpo)]
