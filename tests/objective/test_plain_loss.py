"""`PolicyObjective` against the plain torch version in its docstring: the loss, and its gradient by autograd."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import LossConfig
from grpo_kernels.batch.inputs import LossInputs
from grpo_kernels.batch.tokens import read_tokens
from grpo_kernels.objective.losses import token_weights
from grpo_kernels.objective.policy import PolicyObjective

OPTIONS: dict[str, dict[str, Any]] = {
    "clip": {},
    "bounds": {"epsilon": 0.1, "epsilon_high": 0.3, "delta": 1.5},
    "kl": {"beta": 0.3},
    "kl uncorrected": {"beta": 0.3, "use_bias_correction_kl": False},
    "entropy": {"entropy_coef": 0.05},
    "top entropy": {"top_entropy_quantile": 0.4, "entropy_coef": 0.05, "beta": 0.1},
}


def plain_loss() -> Callable[..., Tensor]:
    """The code of the docstring, which is short."""
    blocks = re.findall(
        r"::\n\n((?:    .*\n|\n)+)", inspect.cleandoc(PolicyObjective.__doc__ or "")
    )
    (code,) = (textwrap.dedent(block).strip() for block in blocks)
    assert 10 < len(code.splitlines()) <= 25
    names: dict[str, Any] = {"torch": torch}
    exec(code, names)
    return names["plain_loss"]


@pytest.mark.parametrize("advantage", ["sequence", "token"])
@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    ("loss_type", "level"),
    [("grpo", "token"), ("bnpo", "sequence"), ("dapo", "token"), ("dr_grpo", "sequence")],
)
def test_loss_and_gradient_are_those_of_the_plain_version(
    loss_type: str, level: str, options: str, on_policy: bool, advantage: str
) -> None:
    draw = lambda: torch.randn(4, 7, dtype=torch.float64) * 0.4 - 2  # noqa: E731
    mask = torch.arange(7) < torch.tensor([[7], [3], [1], [5]])
    logps, entropies = draw().requires_grad_(), draw().abs().requires_grad_()
    old, ref, importance_ratio = None if on_policy else draw(), draw(), draw().exp()
    advantages = torch.tensor([1.5, -0.7, 0.0, -2.0], dtype=torch.float64)[:, None]
    if advantage == "token":
        advantages = advantages + draw()
    config = LossConfig(
        loss_type=loss_type,
        importance_sampling_level=level,
        max_completion_length=9,
        **OPTIONS[options],
    )

    loss = plain_loss()(config, mask, logps, entropies, advantages, old, ref, importance_ratio)
    loss.backward()

    per_call = advantages if advantage == "token" else advantages[:, 0]
    inputs = LossInputs(
        torch.zeros(4, 7, dtype=torch.long), mask, per_call, old, ref, None, importance_ratio
    )
    tokens = read_tokens(inputs, torch.float64)
    weights = token_weights(config, tokens.layout, None, torch.float64)
    result = PolicyObjective(config, tokens, weights).evaluate(
        logps[mask].detach(), entropies[mask].detach()
    )

    torch.testing.assert_close(result.loss, loss.detach(), rtol=1e-12, atol=1e-14)
    assert logps.grad is not None and logps.grad[mask].abs().max() > 0
    torch.testing.assert_close(result.d_logp, logps.grad[mask], rtol=1e-12, atol=1e-14)
    if config.entropy_coef != 0:
        assert entropies.grad is not None and result.coefficients.d_entropy is not None
        torch.testing.assert_close(
            result.coefficients.d_entropy, entropies.grad[mask], rtol=1e-12, atol=1e-14
        )
    else:
        assert result.coefficients.d_entropy is None
    assert logps.grad[~mask].abs().max() == 0
