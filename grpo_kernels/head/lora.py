"""A low-rank adapter on the head itself (LoRA, https://arxiv.org/abs/2106.09685), kept in its low-rank form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.base.checks import check_number, check_shape, check_tensor


@dataclass(frozen=True)
class LoRA:
    """Adds ``scaling * x @ a.T @ b.T`` to the head's raw projection, x being `input` or the hidden states.

    The V x H product of the two is never made; they cost r (H + V) multiplications per token. Both factors, `input` and
    the hidden states get exact gradients. Pass several adapters as one: concatenate their factors along r.

    Args:
        a: (r, H), PEFT's ``lora_A.weight``.
        b: (V, r), PEFT's ``lora_B.weight``; with a sharded head the same rows as the weight.
        scaling: a finite number, PEFT's ``scaling``.
        input: (..., H), the input of `a` instead of the hidden states, such as the hidden states after dropout.
    """

    a: Tensor
    b: Tensor
    scaling: float = 1.0
    input: Tensor | None = None

    def project(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """Return u = scaling * x @ a.T, (N, r), for the N positions of `hidden` (..., H); 0 except at `positions` (n,).

        Other positions are not read: NaN there would reach the gradient of `a`, even times 0. The dtype is the promoted
        dtype of x and a; within autocast, autocast's, as in PEFT.
        """
        x = (hidden if self.input is None else self.input).reshape(-1, hidden.shape[-1])
        n = x.shape[0]
        x = x if len(positions) == n else x.index_select(0, positions)
        dtype = torch.promote_types(x.dtype, self.a.dtype)
        u = self.scaling * (x.to(dtype) @ self.a.to(dtype).t())
        return u if len(positions) == n else u.new_zeros(n, u.shape[1]).index_copy(0, positions, u)


def check_kind(lora: Any) -> None:
    """Raise TypeError unless `lora` is a `LoRA`."""
    if not isinstance(lora, LoRA):
        raise TypeError(f"lora: expected a LoRA, got {type(lora).__name__}")


def check_lora(lora: LoRA, hidden: Tensor, weight: Tensor) -> None:
    """Raise unless the adapter's tensors fit hidden states (..., H) and weight (V, H).

    Raises:
        TypeError, ValueError: the message names the argument.
    """
    check_kind(lora)
    check_tensor("lora.a", lora.a, like=hidden, floating=True)
    check_tensor("lora.b", lora.b, like=hidden, floating=True)
    check_number("lora.scaling", lora.scaling)
    rank = lora.a.shape[0] if lora.a.dim() else 0
    check_shape("lora.a", lora.a, ("(r, H)", (rank, hidden.shape[-1])))
    check_shape("lora.b", lora.b, ("(V, r)", (weight.shape[0], rank)))
    if rank == 0:
        raise ValueError(f"lora.a: expected shape (r, H) with r > 0, got {tuple(lora.a.shape)}")
    if lora.input is not None:
        check_tensor("lora.input", lora.input, like=hidden, floating=True)
        check_shape("lora.input", lora.input, ("that of hidden", tuple(hidden.shape)))
