"""The smallest batch that a loss takes."""

from __future__ import annotations

import torch


def small_batch() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "hidden": torch.randn(2, 5, 4),
        "weight": torch.randn(9, 4),
        "completion_ids": torch.randint(9, (2, 5)),
        "completion_mask": torch.ones(2, 5),
        "advantages": torch.tensor([1.0, -1.0]),
    }
