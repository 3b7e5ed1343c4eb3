"""Backwards that are not differentiable themselves, and say so.

``torch.autograd.function.once_differentiable`` raises only if an upstream gradient itself requires grad; a gradient
penalty on ``loss.backward(create_graph=True)`` would pass through it as a constant, silently.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., tuple[Tensor | None, ...]]


def first_order(backward: Backward) -> Backward:
    """Mark a Function's backward: its results raise when they are differentiated."""

    @functools.wraps(backward)
    def wrapper(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        differentiable = torch.is_grad_enabled()  # create_graph=True
        with torch.no_grad():
            gradients = backward(ctx, *upstream)
        if not differentiable:
            return gradients
        return tuple(None if x is None else _Refusal.apply(x.requires_grad_()) for x in gradients)

    return wrapper


class _Refusal(torch.autograd.Function):
    """The identity, whose derivative is an error."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None]:
        raise RuntimeError("grpo_kernels: differentiating twice is not supported")
