"""The objective alone: worked examples, derivatives against autograd, branches, metrics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from grpo_kernels import LossConfig, grpo_loss, presets
from grpo_kernels.base.records import take
from grpo_kernels.batch.inputs import LossInputs
from grpo_kernels.batch.tokens import Tokens, read_tokens
from grpo_kernels.objective.losses import LOSSES, token_weights
from grpo_kernels.objective.policy import PolicyObjective
from tests.support import reference_terms
from tests.support.flat import flat
from tests.support.small_batch import small_batch


def tokens_of(old: torch.Tensor | None, advantages: torch.Tensor, **more: Any) -> Tokens:
    b, t = (2, 5) if old is None else old.shape
    ids = torch.zeros(b, t, dtype=torch.long)
    inputs = LossInputs(ids, torch.ones(b, t), advantages, old_per_token_logps=old, **more)
    return read_tokens(inputs, torch.float64)


def objective(config: LossConfig, tokens: Tokens) -> PolicyObjective:
    return PolicyObjective(
        config, tokens, token_weights(config, tokens.layout, None, torch.float64)
    )


def test_no_loss_stands_in_for_another() -> None:
    """A type that is nowhere but in the config's allowed values is an error wherever it is asked for."""
    config = LossConfig()
    object.__setattr__(config, "loss_type", "foo")
    tokens = tokens_of(torch.zeros(2, 5), torch.ones(2))
    with pytest.raises(NotImplementedError, match="foo"):
        token_weights(config, tokens.layout, None, torch.float64)
    ones = torch.ones(10, dtype=torch.float64)
    with pytest.raises(NotImplementedError, match="foo"):
        PolicyObjective(config, tokens, ones)


@pytest.mark.parametrize("beta", [0.0, 0.2])
@pytest.mark.parametrize("old_given", [False, True])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_coefficients_of_some_rows_are_those_of_all(
    loss_type: str, old_given: bool, beta: float
) -> None:
    """What the one-pass engine asks for, a chunk at a time, is what the whole evaluation gives."""
    draw = lambda: torch.randn(2, 5, dtype=torch.float64) * 0.3 - 2  # noqa: E731
    old = draw() if old_given else None
    config = LossConfig(loss_type=loss_type, beta=beta, entropy_coef=0.05)
    tokens = tokens_of(old, torch.tensor([1.5, -0.7]), ref_per_token_logps=draw())
    made = objective(config, tokens)
    if made.couples_tokens:
        assert old_given and reference_terms.TERMS[loss_type].per_sequence
        return
    logps, entropies = draw().flatten(), draw().flatten().abs()
    whole = made.evaluate(logps, entropies)
    for index in (torch.tensor([7, 2, 3]), torch.arange(10)):
        found = made.coefficients_of(index, logps[index], entropies[index])
        torch.testing.assert_close(found, take(whole.coefficients, index), rtol=1e-14, atol=1e-16)


def test_published_estimators_on_policy() -> None:
    """On-policy, REINFORCE's gradient is A a token over the token count, RLOO's A a token over the batch."""
    advantages = torch.tensor([1.5, -0.7], dtype=torch.float64)
    logps = torch.linspace(-3, -1, 10, dtype=torch.float64)
    for config, divisor in ((presets.REINFORCE, 10), (presets.RLOO, 2)):
        at = objective(config, tokens_of(None, advantages)).evaluate(logps, logps.abs())
        torch.testing.assert_close(at.d_logp, -advantages.repeat_interleave(5) / divisor)


def test_rewards_in_the_place_of_advantages_show_in_the_metrics() -> None:
    inputs = small_batch()
    batch = len(inputs["advantages"])
    rewards = torch.arange(batch) % 2
    for advantages, mean, zero in (
        (rewards.float(), rewards.float().mean(), 0.5),
        (rewards - rewards.float().mean(), 0.0, 0.0),
        (rewards[:, None].expand(inputs["completion_ids"].shape).float(), None, None),
    ):
        metrics = flat(grpo_loss)(
            **{**inputs, "advantages": advantages, "completion_mask": None}
        ).metrics
        assert metrics["advantages/mean"] == (0.5 if mean is None else mean)
        assert metrics["advantages/zero"] == (0.5 if zero is None else zero)


@pytest.mark.parametrize(
    "items", [20, 20.0, np.int64(20), torch.tensor(20), torch.tensor([20]), torch.tensor([[20]])]
)
def test_num_items_in_whatever_form(items: Any) -> None:
    inputs = small_batch()
    old = torch.full((2, 5), -2.0)
    got = flat(grpo_loss)(**inputs, old_per_token_logps=old, num_items_in_batch=items).loss
    assert got.shape == ()
    torch.testing.assert_close(got, flat(grpo_loss)(**inputs, old_per_token_logps=old).loss / 2)


def test_nan_in_the_mask_is_refused() -> None:
    inputs = small_batch()
    inputs["completion_mask"][0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"^completion_mask: expected .+ got nan"):
        flat(grpo_loss)(**inputs)
