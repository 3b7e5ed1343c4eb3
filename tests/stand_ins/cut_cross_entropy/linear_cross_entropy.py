"""The module of 25.1.1 in plain torch operations of our own, whatever is asked for."""

from __future__ import annotations

import enum

import torch


class LinearCrossEntropyImpl(enum.IntEnum):
    CCE = enum.auto()
    TORCH_COMPILE = enum.auto()


LCE_IMPL_DEFAULT = LinearCrossEntropyImpl.CCE


def linear_cross_entropy(hidden, weight, ids, *, ignore_index, softcap, reduction, impl):
    """-logp (B, T), 0 where the id is `ignore_index`."""
    assert reduction == "none" and isinstance(impl, LinearCrossEntropyImpl)
    logits = hidden.float() @ weight.float().T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    counted = ids != ignore_index
    found = logits.log_softmax(-1).gather(-1, torch.where(counted, ids, 0)[..., None])[..., 0]
    return torch.where(counted, -found, 0)
