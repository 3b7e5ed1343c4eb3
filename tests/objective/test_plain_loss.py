"""The loss and its gradient against the plain torch version in the docstring of
`PolicyObjective`."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import LossConfig, policy_loss_from_logps
from grpo_kernels.objective.policy import PolicyObjective

pytestmark = pytest.mark.unit

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
    expected = torch.autograd.grad(loss, (logps, entropies), materialize_grads=True)
    out = policy_loss_from_logps(
        logps,
        entropies,
        mask,
        advantages if advantage == "token" else advantages[:, 0],
        old_per_token_logps=old,
        ref_per_token_logps=ref if config.beta else None,
        importance_sampling_ratio=importance_ratio,
        config=config,
    )
    found = torch.autograd.grad(out.loss, (logps, entropies), materialize_grads=True)
    torch.testing.assert_close(out.loss, loss, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert found[0].any() and found[1].any() == (config.entropy_coef != 0)
