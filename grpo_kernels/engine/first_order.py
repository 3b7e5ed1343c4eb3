"""Functions whose gradients cannot be differentiated again, and raise if they are.

``torch.autograd.function.once_differentiable`` raises only if an upstream gradient itself requires grad: a gradient
penalty on ``loss.backward(create_graph=True)`` would pass through it as a constant, silently. And autograd visits only
nodes that lead to the tensors it differentiates in: an error at any other node is never reached. So the error is tied
to everything that the gradient depends on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=type[torch.autograd.Function])


def first_order(function: F) -> F:
    """Decorate a Function: differentiating its gradients in any tensor raises RuntimeError."""
    forward: Callable[..., Any] = function.forward
    backward: Callable[..., tuple[Tensor | None, ...]] = function.backward

    @functools.wraps(forward)
    def tied(ctx: Any, *inputs: Any) -> Any:
        wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
        with torch.enable_grad():
            ctx.tie = _Tie.apply(*wanted) if wanted else None
        return forward(ctx, *inputs)

    @functools.wraps(backward)
    def once(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
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
        ties = [x for x in (ctx.tie, *upstream) if x is not None and x.requires_grad]
        return tuple(None if x is None else _Refusal.apply(x, *ties) for x in gradients)

    function.forward, function.backward = staticmethod(tied), staticmethod(once)  # type: ignore[method-assign]
    return function


class _Tie(torch.autograd.Function):
    """Empty tensor tied to a forward's inputs, without keeping their memory; its backward raises."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, *others: Tensor) -> Tensor:
        return first.new_empty(0)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return _refuse()


def _is_batched(x: Tensor) -> bool:
    """Return True if `x` is batched by one of torch's two vmaps."""
    return bool(
        torch._C._functorch.is_legacy_batchedtensor(x) or torch._C._functorch.is_batchedtensor(x)
    )


class _Refusal(torch.autograd.Function):
    """Identity on a gradient, whose backward raises; `ties` are the tensors that the gradient depends on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *ties: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return _refuse()


def _refuse() -> tuple[Tensor | None, ...]:
    raise RuntimeError("grpo_kernels: differentiating twice is not supported")
