"""The loss and its gradient against the plain torch version that a docstring of the library has."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels
from grpo_kernels import LossConfig, policy_loss_from_logps

OPTIONS: dict[str, dict[str, Any]] = {
    "bounds": {"epsilon": 0.1, "epsilon_high": 0.3, "delta": 1.5, "beta": 0.3},
    "kl uncorrected": {"beta": 0.3, "use_bias_correction_kl": False},
    "top entropy": {"top_entropy_quantile": 0.4, "entropy_coef": 0.05, "beta": 0.1},
}
LEVELS = {"grpo": "token", "bnpo": "sequence", "dapo": "token", "dr_grpo": "sequence"}


def plain_loss() -> Callable[..., Tensor]:
    source = (Path(grpo_kernels.__file__).parent / "objective" / "policy.py").read_text()
    (code,) = re.findall(r"::\n\n((?: +def plain_loss\()(?:.*\n)+?)\n {4}\S", source)
    names: dict[str, Any] = {"torch": torch}
    exec(textwrap.dedent(code), names)
    return names["plain_loss"]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("loss_type", LEVELS)
def test_loss_and_gradient_are_those_of_the_plain_version(loss_type: str, options: str) -> None:
    plain, draw = plain_loss(), lambda: torch.randn(4, 7, dtype=torch.float64) * 0.4 - 2
    mask = torch.arange(7) < torch.tensor([[7], [3], [1], [5]])
    config = LossConfig(
        loss_type=loss_type,
        importance_sampling_level=LEVELS[loss_type],
        max_completion_length=9,
        **OPTIONS[options],
    )
    per_sequence = torch.tensor([1.5, -0.7, 0.0, -2.0], dtype=torch.float64)
    per_token = per_sequence[:, None] + draw()
    for old, advantages in itertools.product((None, draw()), (per_sequence, per_token)):
        logps, entropies = draw().requires_grad_(), draw().abs().requires_grad_()
        ref, ratio = draw(), draw().exp()
        column = advantages if advantages.dim() == 2 else advantages[:, None]
        loss = plain(config, mask, logps, entropies, column, old, ref, ratio)
        expected = torch.autograd.grad(loss, (logps, entropies), materialize_grads=True)
        out = policy_loss_from_logps(
            logps, entropies, mask, advantages, old_per_token_logps=old,
            ref_per_token_logps=ref if config.beta else None, importance_sampling_ratio=ratio,
            config=config,
        )  # fmt: skip
        found = torch.autograd.grad(out.loss, (logps, entropies), materialize_grads=True)
        torch.testing.assert_close(out.loss, loss, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
