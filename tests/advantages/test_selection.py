"""Rejection sampling: which completions are accepted, and that the loss is then their cross entropy."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from grpo_kernels import grpo_loss, presets
from grpo_kernels.advantages import rejection_sampling_advantages

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
    assert rejection_sampling_advantages(rewards, 1.0, reward_weights=[1.0, 0.5]).tolist() == [
        1,
        0,
        0,
        0,
    ]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_reward_equals_the_threshold_that_it_was_rounded_from(dtype: torch.dtype) -> None:
    found = rejection_sampling_advantages(torch.tensor([0.9, 0.1], dtype=dtype), 0.9)
    assert found.tolist() == [1, 0]
    assert found.dtype == dtype
    whole = rejection_sampling_advantages(torch.tensor([1, 2]), 1.5)
    assert whole.tolist() == [0, 1]
    assert whole.dtype == torch.float32


@pytest.mark.parametrize("whole", [False, True], ids=["accepted tokens", "all tokens"])
def test_the_loss_is_the_cross_entropy_of_the_accepted_completions(whole: bool) -> None:
    """And what stands at rejected ones is never read, where the mask says so; completions of several lengths."""
    hidden, weight = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((B, T, H), (V, H))
    )
    lengths = torch.tensor([32, 20, 9, 30, 32, 1, 17, 25])
    ids, mask = torch.randint(V, (B, T)), (torch.arange(T) < lengths[:, None]).long()
    mask[3, 4:8] = 0
    advantages = rejection_sampling_advantages(REWARDS, 1.0)
    counted = mask if whole else mask * advantages[:, None]
    labels, logits = ids.masked_fill(mask == 0, -100)[RIGHT], hidden[RIGHT] @ weight.T
    total = functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )
    want = total / (mask.sum() if whole else mask[RIGHT].sum())
    expected = torch.autograd.grad(want, (hidden, weight))
    given = hidden.detach().clone()
    if not whole:
        given[advantages == 0] = NAN
    out = grpo_loss(
        given.requires_grad_(), weight, ids, counted, advantages, config=presets.REINFORCE
    )
    found = torch.autograd.grad(out.loss, (given, weight))
    torch.testing.assert_close(out.loss, want, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    assert not found[0][advantages == 0].any()
