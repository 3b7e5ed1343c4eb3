"""Distillation as a policy gradient: its advantages, their expectation, and what is refused."""

from __future__ import annotations

import pytest
import torch

from grpo_kernels import Run, grpo_loss, linear_divergence
from grpo_kernels.advantages import distillation_advantages

NAN = float("nan")
TEACHER = torch.tensor([[-1.0, -3.0, NAN], [-2.0, -0.5, -4.0]])
STUDENT = torch.tensor([[-2.0, -1.0, NAN], [-2.0, -5.5, -1.0]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])


def test_a_token_that_the_teacher_likes_better_is_reinforced() -> None:
    found = distillation_advantages(TEACHER, STUDENT, MASK)
    torch.testing.assert_close(found, torch.tensor([[1.0, -2.0, 0.0], [0.0, 5.0, -3.0]]))


def test_the_clip_is_in_nats_and_comes_before_the_coefficient() -> None:
    found = distillation_advantages(TEACHER, STUDENT, MASK, coefficient=0.5, clip=2.5)
    torch.testing.assert_close(found, torch.tensor([[0.5, -1.0, 0.0], [0.0, 1.25, -1.25]]))


@pytest.mark.parametrize("per_token", [False, True])
def test_advantages_of_rewards_are_added_where_the_mask_counts(per_token: bool) -> None:
    own = torch.tensor([10.0, 20.0])
    own = own[:, None].expand(2, 3) if per_token else own
    found = distillation_advantages(TEACHER, STUDENT, MASK, advantages=own)
    torch.testing.assert_close(found, torch.tensor([[11.0, 8.0, 0.0], [20.0, 25.0, 17.0]]))


def test_the_policy_gradient_is_that_of_the_reverse_kl_in_expectation() -> None:
    """Every token of a small vocabulary in turn, weighted by its probability."""
    hidden, weight, teacher_hidden, teacher_weight = (
        torch.randn(shape, dtype=torch.float64) for shape in ((3, 4), (11, 4), (3, 6), (11, 6))
    )
    log_p = torch.log_softmax(hidden @ weight.t(), dim=1)
    log_q = torch.log_softmax(teacher_hidden @ teacher_weight.t(), dim=1)
    policy, exact = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    ones = torch.ones(3, 1)
    for v in range(11):
        ids = torch.full((3, 1), v)
        taken = distillation_advantages(log_q[:, v : v + 1], log_p[:, v : v + 1], ones)
        taken = taken * log_p[:, v : v + 1].exp()
        grpo_loss(policy[:, None], weight, ids, ones, taken).loss.backward()
    found = linear_divergence(exact, weight, teacher_hidden, teacher_weight, run=Run(backend="torch"))
    found.divergence.mean().backward()
    torch.testing.assert_close(policy.grad, exact.grad, atol=1e-12, rtol=1e-10)


def test_there_is_no_gradient_and_the_widest_dtype_is_kept() -> None:
    student = STUDENT.clone().requires_grad_()
    found = distillation_advantages(TEACHER.double(), student, MASK)
    assert not found.requires_grad and found.dtype == torch.float64
    assert distillation_advantages(TEACHER, student, MASK).dtype == torch.float32
