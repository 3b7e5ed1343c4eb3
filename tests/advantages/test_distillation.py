"""Distillation as a policy gradient: its advantages."""

from __future__ import annotations

import pytest
import torch

from grpo_kernels.advantages import distillation_advantages

NAN = float("nan")
TEACHER = torch.tensor([[-1.0, -3.0, NAN], [-2.0, -0.5, -4.0]])
STUDENT = torch.tensor([[-2.0, -1.0, NAN], [-2.0, -5.5, -1.0]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])


def test_a_token_that_the_teacher_likes_better_is_reinforced() -> None:
    found = distillation_advantages(TEACHER, STUDENT, MASK)
    torch.testing.assert_close(found, torch.tensor([[1.0, -2.0, 0.0], [0.0, 5.0, -3.0]]))
    assert distillation_advantages(TEACHER.double(), STUDENT, MASK).dtype == torch.float64


def test_the_clip_is_in_nats_and_comes_before_the_coefficient() -> None:
    found = distillation_advantages(TEACHER, STUDENT, MASK, coefficient=0.5, clip=2.5)
    torch.testing.assert_close(found, torch.tensor([[0.5, -1.0, 0.0], [0.0, 1.25, -1.25]]))


@pytest.mark.parametrize("per_token", [False, True])
def test_advantages_of_rewards_are_added_where_the_mask_counts(per_token: bool) -> None:
    own = torch.tensor([10.0, 20.0])
    own = own[:, None].expand(2, 3) if per_token else own
    found = distillation_advantages(TEACHER, STUDENT, MASK, advantages=own)
    torch.testing.assert_close(found, torch.tensor([[11.0, 8.0, 0.0], [20.0, 25.0, 17.0]]))
