"""Every normaliser as one weight per token: ``loss = sum(weight * per_token_loss)``.

With m the mask, n_b the counted tokens of sequence b (at least 1), B the number of sequences:

============= ===============================================
sequence_mean m / (n_b B)
token_mean    m / sum m
max_length    m / (B max_completion_length)
num_items     m / num_items_in_batch (absent: m / sum m)
sequence_sum  m / B
============= ===============================================

`losses` has the normaliser of each loss type.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_kernels.base.checks import check_number, check_tensor
from grpo_kernels.batch.tokens import Layout
from grpo_kernels.objective.config import LossConfig
from grpo_kernels.objective.losses import loss_of


def token_weights(
    config: LossConfig,
    layout: Layout,
    num_items_in_batch: float | Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return each counted token's weight (n,). `num_items_in_batch`: a number, tensor () or None; below 1 it is 1."""
    batch, device = max(layout.batch, 1), layout.positions.device
    normaliser = loss_of(config).normaliser

    def one_over(x: float) -> Tensor:  # rounded once, as the quotient of two numbers of `dtype` is
        return torch.full((layout.positions.shape[0],), 1 / x, dtype=dtype, device=device)

    if normaliser == "sequence_mean":
        return one_over(1) / (layout.lengths.to(dtype)[layout.sequence] * batch)
    if normaliser == "max_length":
        return one_over(batch * config.max_completion_length)
    if normaliser == "sequence_sum":
        return one_over(batch)
    if normaliser == "token_mean" or num_items_in_batch is None:
        return one_over(max(layout.total, 1))
    if isinstance(num_items_in_batch, Tensor):
        if (
            num_items_in_batch.device.type == "cpu"
        ):  # a copy to the device would wait for the device
            return one_over(max(float(num_items_in_batch.item()), 1.0))
        return one_over(1) / num_items_in_batch.detach().reshape(()).to(device, dtype).clamp(
            min=1.0
        )
    return one_over(max(float(num_items_in_batch), 1.0))


def averaged_over(config: LossConfig, *, num_items: bool) -> str:
    """Return "sequences" or "tokens" if a call's policy loss is a mean over those of the call, else "nothing".

    `num_items` is True if ``num_items_in_batch`` was given: the losses of a batch's calls then add up.
    """
    normaliser = loss_of(config).normaliser
    if normaliser == "num_items" and num_items:
        return "nothing"
    return "tokens" if normaliser in ("num_items", "token_mean") else "sequences"


def check_num_items(num_items_in_batch: Any) -> None:
    """Raise unless `num_items_in_batch` is None, a finite number >= 0 or a tensor of one element."""
    if isinstance(num_items_in_batch, Tensor):
        if num_items_in_batch.numel() != 1:
            raise ValueError(
                f"num_items_in_batch: expected one number, got a tensor of shape {tuple(num_items_in_batch.shape)}"
            )
        check_tensor("num_items_in_batch", num_items_in_batch)
        if num_items_in_batch.device.type != "cpu":
            return  # looking at it would wait for the device
        num_items_in_batch = num_items_in_batch.item()
    if num_items_in_batch is not None:
        check_number("num_items_in_batch", num_items_in_batch, 0.0, True)
