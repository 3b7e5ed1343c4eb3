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
        if any(x is not None and _is_batched(x) for x in upstream):
            raise RuntimeError(
                "grpo_kernels: several gradients at once (is_grads_batched=True, vectorize=True, vmap over a backward) "
                "are not supported: ask for one after the other"
            )
        differentiable = torch.is_grad_enabled()  # create_graph=True
        with torch.no_grad():
            gradients = backward(ctx, *upstream)
        if not differentiable:
            return gradients
        return tuple(None if x is None else _Refusal.apply(x.requires_grad_()) for x in gradients)

    return wrapper


def _is_batched(x: Tensor) -> bool:
    """Whether vmap, which torch has two of, is looking at one of many."""
    return bool(torch._C._functorch.is_legacy_batchedtensor(x) or torch._C._functorch.is_batchedtensor(x))


class _Refusal(torch.autograd.Function):
    """The identity, whose derivative is an error."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None]:
        raise RuntimeError("grpo_kernels: differentiating twice is not supported")
