"""On-policy distillation as a policy gradient, from the teacher's log-probability of each sampled token."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_kernels.advantages import checks


@torch.no_grad()
def distillation_advantages(
    teacher_logps: Tensor,  # (B, T), of the sampled tokens
    student_logps: Tensor,  # (B, T)
    completion_mask: Tensor,  # (B, T)
    *,
    coefficient: float = 1.0,
    clip: float | None = None,
    advantages: Tensor | None = None,  # (B,) or (B, T)
) -> Tensor:
    """Advantages (B, T): A_t = coefficient * clamp(log q_t - log p_t, -clip, clip) + ``advantages``, 0 where masked.

    q is the teacher's and p the student's probability of the sampled token. If the tokens are sampled from p, the
    policy gradient with these is, in expectation, the gradient of sum_t KL(p || q) at the sampled prefixes: from one
    token per position, where `linear_divergence` sums over the vocabulary. A token is credited with its own log-ratio
    alone, as with a discount of 0: its effect on the prefixes of later tokens is left out. ``student_logps`` are those
    of the sampler, or of the policy before the step. ``clip`` bounds the term of a single token, and adds bias.
    ``advantages`` of rewards, `group_advantages` for one, are added as they are: GRPO and distillation in one step.

    Sources: https://arxiv.org/abs/2306.08543 (the policy gradient of a reverse KL, over whole sequences),
    https://thinkingmachines.ai/blog/on-policy-distillation (per token). Raises ValueError for counted numbers
    that are not finite, and for shapes that disagree.
    """
    checks.in_interval("coefficient", coefficient)
    if clip is not None:
        checks.in_interval("clip", clip)
    mask = checks.bool_mask(completion_mask)
    teacher = checks.counted_values("teacher_logps", teacher_logps, mask)
    student = checks.counted_values("student_logps", student_logps, mask)
    bound = math.inf if clip is None else clip
    result = coefficient * (teacher - student).clamp(-bound, bound)
    dtype = torch.promote_types(
        checks.float_dtype(teacher_logps), checks.float_dtype(student_logps)
    )
    if advantages is not None:
        checks.real_tensor("advantages", advantages)
        if advantages.dim() == 1:
            checks.expect_shape("advantages", advantages, mask.shape[:1], "(B,)")
            advantages = advantages[:, None].expand(mask.shape)
        result = result + checks.counted_values("advantages", advantages, mask)
        dtype = torch.promote_types(dtype, checks.float_dtype(advantages))
    return result.to(dtype)
