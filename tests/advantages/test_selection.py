"""Rejection sampling: which completions are accepted, that the loss is then their cross entropy, and what it costs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from grpo_kernels import grpo_loss, presets
from grpo_kernels.advantages import rejection_sampling_advantages
from tests.support.measure import count_flops

NAN = math.nan
B, T, H, V = 8, 32, 12, 50
REWARDS = torch.tensor([1.0, 0.0, 0.0, 1.0, NAN, 0.0, 1.0, 0.0])
RIGHT = [0, 3, 6]


def test_what_reaches_the_threshold_is_accepted_and_nothing_is_ever_negative() -> None:
    rewards = torch.tensor([-2.0, 0.5, 0.49, NAN, 3.0, -0.0])
    assert rejection_sampling_advantages(rewards, 0.5).tolist() == [0, 1, 0, 0, 1, 0]
    assert rejection_sampling_advantages(rewards, -2).tolist() == [1, 1, 1, 0, 1, 1]
    assert rejection_sampling_advantages(rewards, -math.inf).tolist() == [1, 1, 1, 0, 1, 1]
    assert not rejection_sampling_advantages(rewards, math.inf).any()
    assert not rejection_sampling_advantages(rewards, 0.5).signbit().any()


def test_a_threshold_a_row_takes_the_best_of_each_group() -> None:
    rewards = torch.tensor([0.2, 0.9, 0.1, 0.3, 0.3, NAN])
    best = rewards.view(2, 3).nan_to_num(nan=-math.inf).amax(1).repeat_interleave(3)
    assert rejection_sampling_advantages(rewards, best).tolist() == [0, 1, 0, 1, 1, 0]
    assert rejection_sampling_advantages(rewards, torch.tensor(0.3)).tolist() == [0, 1, 0, 1, 1, 0]
    unscored = torch.where(rewards.isnan(), NAN, best)
    assert rejection_sampling_advantages(rewards, unscored).tolist() == [0, 1, 0, 1, 1, 0]


def test_several_rewards_are_weighted_and_those_that_are_missing_left_out() -> None:
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0], [NAN, 1.0], [NAN, NAN]])
    assert rejection_sampling_advantages(rewards, 1.0).tolist() == [1, 1, 1, 0]
    assert rejection_sampling_advantages(rewards, 1.0, reward_weights=[1.0, 0.5]).tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_reward_equals_the_threshold_that_it_was_rounded_from(dtype: torch.dtype) -> None:
    found = rejection_sampling_advantages(torch.tensor([0.9, 0.1], dtype=dtype), 0.9)
    assert found.tolist() == [1, 0]
    assert found.dtype == dtype
    whole = rejection_sampling_advantages(torch.tensor([1, 2]), 1.5)
    assert whole.tolist() == [0, 1]
    assert whole.dtype == torch.float32


def test_no_rows_and_no_gradient() -> None:
    assert rejection_sampling_advantages(torch.zeros(0), 1.0).shape == (0,)
    assert not rejection_sampling_advantages(REWARDS.clone().requires_grad_(), 1.0).requires_grad


def batch(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, head, ids and a mask with completions of several lengths, one of them with a hole."""
    g = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(B, T, H, generator=g, dtype=dtype), torch.randn(V, H, generator=g, dtype=dtype)
    mask = (torch.arange(T) < torch.tensor([32, 20, 9, 30, 32, 1, 17, 25])[:, None]).long()
    mask[3, 4:8] = 0
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(V, (B, T), generator=g), mask


def cross_entropy(hidden: Tensor, weight: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """The sum over the counted tokens of the right completions, by torch alone."""
    labels = ids.masked_fill(mask == 0, -100)[RIGHT]
    logits = hidden[RIGHT] @ weight.T
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


@pytest.mark.parametrize("whole", [False, True], ids=["accepted tokens", "all tokens"])
def test_the_loss_is_the_cross_entropy_of_the_accepted_completions(whole: bool) -> None:
    """And what stands at rejected ones is never read, where the mask says so."""
    hidden, weight, ids, mask = batch()
    advantages = rejection_sampling_advantages(REWARDS, 1.0)
    counted = mask if whole else mask * advantages[:, None]
    want = cross_entropy(hidden, weight, ids, mask) / (mask.sum() if whole else mask[RIGHT].sum())
    expected = torch.autograd.grad(want, (hidden, weight))
    given = hidden.detach().clone()
    if not whole:
        given[advantages == 0] = NAN
    out = grpo_loss(given.requires_grad_(), weight, ids, counted, advantages, config=presets.REINFORCE)
    found = torch.autograd.grad(out.loss, (given, weight))
    torch.testing.assert_close(out.loss, want, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    assert not found[0][advantages == 0].any()


def test_ones_are_supervised_fine_tuning_and_a_step_is_divided_as_the_caller_says() -> None:
    hidden, weight, ids, mask = batch()
    labels = ids.masked_fill(mask == 0, -100).flatten()
    logits = (hidden @ weight.T).flatten(0, 1)
    want = functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / 1000
    given = {"config": presets.REINFORCE, "num_items_in_batch": 1000}
    found = grpo_loss(hidden, weight, ids, mask, torch.ones(B), **given).loss
    torch.testing.assert_close(found, want, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
def test_rejected_completions_are_projected_once_or_not_at_all(frozen: bool) -> None:
    hidden, weight, ids, mask = batch(torch.float32)
    weight = weight.detach().requires_grad_(not frozen)
    advantages = rejection_sampling_advantages(REWARDS, 1.0)
    everything, learnt = int(mask.sum()), int(mask[RIGHT].sum())

    def cost(counted: Tensor) -> tuple[float, Any]:
        found = []

        def run() -> None:
            found.append(grpo_loss(hidden, weight, ids, counted, advantages, config=presets.REINFORCE))
            found[0].loss.backward()

        return count_flops(run) / (V * H), found[0].metrics["rows/gradient"].item()

    backward = 2 if frozen else 4
    whole, some = cost(mask), cost(mask * advantages[:, None])
    assert whole == (2 * everything + backward * learnt, pytest.approx(learnt / everything))
    assert some == ((2 + backward) * learnt, 1.0)


def test_a_batch_without_an_accepted_completion_moves_nothing() -> None:
    hidden, weight, ids, mask = batch()
    advantages = rejection_sampling_advantages(REWARDS, 2.0)
    for counted in (mask, mask * advantages[:, None]):
        out = grpo_loss(hidden, weight, ids, counted, advantages, config=presets.REINFORCE)
        assert out.loss.item() == 0
        for gradient in torch.autograd.grad(out.loss, (hidden, weight)):
            assert not gradient.any()
