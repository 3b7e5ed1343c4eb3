"""Helpers for your own tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_kernels.base.checks import hints_names
from grpo_kernels.objective.config import LossConfig, check_objective
from grpo_kernels.objective.custom import (
    INPUTS,
    OPTIONAL,
    PerTokenLoss,
    TokenInputs,
    with_loss,
)
from grpo_kernels.objective.policy import PolicyLoss
from grpo_kernels.tokens import Layout, Tokens

__all__ = ["check_token_level"]


@hints_names
def check_token_level(
    objective: PerTokenLoss,
    tokens: TokenInputs | None = None,
    *,
    config: LossConfig | None = None,
    tolerance: float = 1e-3,
) -> None:
    """Check that `objective`'s loss of each token depends on that token alone.

    `grpo_kernels.token_level` declares this property. The check leaves out some tokens, and
    requires that the losses and gradients of the remaining tokens stay the same. ::

        def test_my_loss():
            check_token_level(my_loss)

    Args:
        objective: the function, or a ``functools.partial`` of it.
        tokens: at least two tokens on which to evaluate the function. None: 99 random tokens of
            nine sequences, with all optional inputs. Pass your own tokens if the function
            also uses tensors whose shape must match your batch.
        config: the config whose loss the function reads as ``tokens.loss``; default `LossConfig()`.
        tolerance: largest allowed difference of a number x, relative to max(abs(x), mean abs(x)).
            The default is far above float32's rounding; raise it for 16-bit products.

    Raises:
        AssertionError: losses or gradients differ; or all gradients are 0, which proves nothing;
            or the function does not return a differentiable loss of each token.
        ValueError: fewer than two tokens.
    """
    if tokens is None:
        gen = torch.Generator().manual_seed(0)
        numbers = torch.randn(6, 9, 11, generator=gen)
        logps = -numbers[0].abs() - 0.01
        old, ref, sampling = ((logps + 0.3 * x).clamp(max=0.0) for x in numbers[3:])
        ratio, mask = torch.rand(9, 11, generator=gen) + 0.5, torch.ones(9, 11, dtype=torch.bool)
        policy = logps, numbers[1].abs(), mask, numbers[2]
        tokens = TokenInputs(*policy, old, ref, sampling, ratio)
    n = tokens.logps.numel()
    if n < 2:
        raise ValueError(f"tokens: expected at least two, since some are left out, got {n}")
    batch = {name: getattr(tokens, name) for name in INPUTS}
    config = config or LossConfig()
    check_objective(config, objective)

    def evaluated(index: Tensor | slice) -> tuple[Tensor, ...]:  # losses, gradients of their sum
        part: dict[str, Any] = {  # copies, since the function may write into them
            k: x if x is None else x.flatten()[index].clone() for k, x in batch.items()
        }
        leaves = [part[x].detach().clone().requires_grad_() for x in ("logps", "entropies")]
        part["logps"], part["entropies"] = leaves
        m = len(leaves[0])
        layout = Layout(part["index"], part["sequence"], part["position"], m, m, (m,))
        numbers = {x: part[x] for x in ("advantages", "old_per_token_logps", *OPTIONAL)}
        inputs = Tokens(layout, **numbers)
        policy_loss = PolicyLoss(config, inputs, torch.ones_like(leaves[0]))

        def config_loss() -> Tensor:
            return policy_loss.per_token_loss(*leaves, token_level=True)[0]

        losses = objective(with_loss(TokenInputs(**part), config_loss))
        if not isinstance(losses, Tensor) or losses.shape != leaves[0].shape:
            got = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
            raise AssertionError(
                "check_token_level: expected a loss of each token, of the shape of tokens.logps = "
                f"{tuple(leaves[0].shape)}, got {got}"
            )
        if not losses.requires_grad:
            raise AssertionError(
                "check_token_level: expected a loss that depends on tokens.logps or "
                "tokens.entropies, got one without a gradient"
            )
        options: dict[str, Any] = {"allow_unused": True, "materialize_grads": True}
        return losses.detach(), *torch.autograd.grad(losses.sum(), leaves, **options)

    whole = evaluated(slice(None))
    if not any(x.any() for x in whole[1:]):
        raise AssertionError("check_token_level: expected a gradient, got 0 at every token")
    # a few tokens, whose means differ from the whole batch's, and two halves of the rest, scattered
    # over the batch, so no part repeats a pattern of it
    order = torch.randperm(n, generator=torch.Generator().manual_seed(1))
    few = max(1, min(n // 3, 64))
    worst = 0.0
    for part in order.tensor_split([few] if n < 3 else [few, few + (n - few) // 2]):
        part = part.to(tokens.logps.device)
        for x, every in zip(evaluated(part), whole, strict=True):
            y = every[part]
            size = torch.maximum(y.abs(), every.abs().nan_to_num(0.0, 0.0, 0.0).mean())
            same = (x == y) | (x.isnan() & y.isnan())
            distance = torch.where(same, 0.0, ((x - y).abs() / size).nan_to_num(torch.inf))
            worst = max(worst, distance.max().item())
    if worst > tolerance:
        raise AssertionError(
            "check_token_level: expected each token's loss to depend on that token alone, but "
            "without other tokens its values or gradients differ by "
            f"{worst:.1e} of their size. Do not declare it token_level. Index per-token extras "
            "with extra.flatten()[tokens.index]"
        )
