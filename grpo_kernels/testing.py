"""Helpers for tests of your own."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.objective.custom import PerTokenLoss, TokenInputs

__all__ = ["check_token_level"]


def check_token_level(
    objective: PerTokenLoss, tokens: TokenInputs | None = None, *, tolerance: float = 1e-3
) -> None:
    """Check that `objective`'s loss of a token depends on that token alone, as
    `grpo_kernels.token_level` declares.

    The loss and its gradients of some tokens must be the same without the other tokens. ::

        def test_my_loss():
            check_token_level(my_loss)

    Args:
        objective: the function; a ``functools.partial`` of it will do.
        tokens: what it is evaluated on, at least two tokens. None: 99 random tokens of nine
            sequences that have all optional inputs. Give your own to a function that reads other
            tensors of a certain size.
        tolerance: largest difference allowed, relative to a number or to the mean size of all. The
            default is far above float32's rounding; raise it for 16-bit products.

    Raises:
        AssertionError: values or gradients differ, or all gradients are 0, which proves nothing.
    """
    if tokens is None:
        gen = torch.Generator().manual_seed(0)
        numbers = torch.randn(6, 99, generator=gen)
        logps = -numbers[0].abs() - 0.01
        places = torch.arange(99)
        tokens = TokenInputs(
            logps=logps,
            entropies=numbers[1].abs(),
            mask=torch.ones(99, dtype=torch.bool),
            advantages=numbers[2],
            old_per_token_logps=(logps + 0.3 * numbers[3]).clamp(max=0.0),
            ref_per_token_logps=(logps + 0.3 * numbers[4]).clamp(max=0.0),
            sampling_per_token_logps=(logps + 0.3 * numbers[5]).clamp(max=0.0),
            importance_sampling_ratio=torch.rand(99, generator=gen) + 0.5,
            index=places,
            sequence=places // 11,
            position=places % 11,
        )
    whole = _evaluated(objective, _some(tokens, slice(None)))
    if not any(x.any() for x in whole[1:]):
        raise AssertionError("check_token_level: expected a gradient, got 0 at every token")
    n = tokens.logps.numel()
    # a few tokens, whose means differ from those of all, and two halves of the rest, scattered over
    # the batch, so that no part repeats a pattern of it
    order = torch.randperm(n, generator=torch.Generator().manual_seed(1))
    few = max(1, min(n // 3, 64))
    worst = 0.0
    for part in order.tensor_split([few] if n < 3 else [few, few + (n - few) // 2]):
        part = part.to(tokens.logps.device)
        alone = _evaluated(objective, _some(tokens, part))
        for x, every in zip(alone, whole, strict=True):
            worst = max(worst, _difference(x, every[part], every))
    if worst > tolerance:
        raise AssertionError(
            "check_token_level: expected a loss of each token alone, but with fewer tokens beside "
            f"them its values or gradients differ by {worst:.1e} of their size. Do not declare it "
            "token_level. Numbers that belong to a token: extra.flatten()[tokens.index]"
        )


def _some(tokens: TokenInputs, index: Tensor | slice) -> TokenInputs:
    given = {x.name: getattr(tokens, x.name) for x in fields(TokenInputs)}
    some: dict[str, Any] = {k: x if x is None else x.flatten()[index] for k, x in given.items()}
    return TokenInputs(**some)


def _evaluated(objective: PerTokenLoss, tokens: TokenInputs) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of each token, and the gradients of their sum in logps and entropies."""
    leaves = [x.detach().clone().requires_grad_() for x in (tokens.logps, tokens.entropies)]
    losses = objective(replace(tokens, logps=leaves[0], entropies=leaves[1]))
    d_logp, d_entropy = torch.autograd.grad(
        losses.sum(), leaves, allow_unused=True, materialize_grads=True
    )
    return losses.detach(), d_logp, d_entropy


def _difference(x: Tensor, y: Tensor, every: Tensor) -> float:
    """The largest distance of x from y, relative to y or to the mean of `every`; NaN equals NaN."""
    size = torch.maximum(y.abs(), every.abs().nan_to_num(0.0, 0.0, 0.0).mean())
    same = (x == y) | (x.isnan() & y.isnan())
    distance = ((x - y).abs() / size).nan_to_num(torch.inf)
    return torch.where(same, 0.0, distance).max().item()
