"""The teacher of a case of distillation: a policy near the student's, with a head of its own, perhaps a wider one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WORDS = {0.0: "forward KL", 1.0: "reverse KL"}


@dataclass(frozen=True)
class Teacher:
    """Constants, of the positions and for the ids of the student's."""

    hidden: Tensor  # (B, T, H')
    weight: Tensor  # (V, H')


def make_teacher(hidden: Tensor, weight: Tensor, width: int, drift: float, g: torch.Generator) -> Teacher:
    """A teacher of `width` H' >= H for hidden states (B, T, H) and weight (V, H).

    What it has of the student's hidden states is moved by `drift` of their standard deviation, 1, and what it has
    beside them has that size: its logits are off by `drift` times their spread, and by more the wider it is.
    """
    h, vocab = hidden.shape[-1], len(weight)
    own = drift * torch.randn((*hidden.shape[:-1], width), generator=g, device=hidden.device)
    own[..., :h] += hidden
    head = weight.new_empty(vocab, width)
    head[:, :h] = weight
    for start in range(h, width, h):  # the next row's, so that no direction says what another one does
        columns = head[:, start : start + h]
        columns[:-1], columns[-1] = weight[1:, : columns.shape[1]], weight[0, : columns.shape[1]]
    return Teacher(own.to(torch.bfloat16).to(hidden.dtype), head)


def words(divergence: float) -> str:
    """Which divergence it is, by TRL's `beta`."""
    return WORDS.get(divergence, f"JSD of beta {divergence:g}")
