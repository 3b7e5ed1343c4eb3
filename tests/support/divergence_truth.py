"""A divergence of two heads' rows in float64, and how far one that computes in float32 may be off."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.support.row_truth import Truth, U

RELATIVE = (
    1e-5  # of a term: its exponentials are off by a few units in the last place times |log p|
)
LOWEST = -1e4  # in the place of -inf: e^ of it is 0 in float64 too, and 0 * it is 0


@dataclass(frozen=True)
class Divergence:
    """D (n,) and d D / d (raw projection) (n, V), with their bounds."""

    value: Tensor
    bound: Tensor
    gradient: Tensor
    gradient_bound: Tensor


def divergence(student: Truth, teacher: Truth, beta: float) -> Divergence:
    """By the definition, and autograd. Where it should be infinite it is thousands."""
    leaves = [x.logs.clamp(min=LOWEST).requires_grad_() for x in (student, teacher)]
    logs, other_logs = (torch.log_softmax(leaf, dim=1) for leaf in leaves)
    value = _defined(logs, other_logs, beta)
    slopes = torch.autograd.grad(value.sum(), leaves)
    logs, other_logs, value = logs.detach(), other_logs.detach(), value.detach()
    p, q, d = logs.exp(), other_logs.exp(), logs - other_logs

    # of d: of both logits, their difference, and that less the offset; what all d share counts in second order only
    own, others = (x.want["max_logit"] + x.want["log_sum"] for x in (student, teacher))
    apart = (d + (own - others)[:, None]).abs() + d.abs()
    error = student.e + teacher.e + U * apart.clamp(max=1e3)
    shared = error.amax(1) + 4 * U * (own.abs() + others.abs())
    moved = (error * (slopes[0].abs() + slopes[1].abs())).sum(1)
    bound = RELATIVE * value.abs() + 2 * moved + 4 * (1 + value.abs()) * shared.square()

    k = (
        p * d
        if beta == 1.0
        else p - q
        if beta == 0.0
        else (1 - beta) * p * (logs - _mixture(logs, other_logs, beta))
    )
    k = torch.where(p + q > 0, k, 0.0)
    size = RELATIVE * k.abs() + 4 * error * (p * (1 + d.abs().clamp(max=1e3)) + q)
    size = size + p * size.sum(1, keepdim=True)
    gradient = slopes[0] * student.slope
    return Divergence(
        value, bound, gradient, size * student.slope.abs() + gradient.abs() * student.slope_error
    )


def _defined(logs: Tensor, other_logs: Tensor, beta: float) -> Tensor:
    """D (n,) of log-probabilities (n, V)."""
    p, q = logs.exp(), other_logs.exp()
    if beta == 0.0:
        return (q * (other_logs - logs)).sum(1)
    if beta == 1.0:
        return (p * (logs - other_logs)).sum(1)
    log_m = _mixture(logs, other_logs, beta)
    return (1 - beta) * (p * (logs - log_m)).sum(1) + beta * (q * (other_logs - log_m)).sum(1)


def _mixture(logs: Tensor, other_logs: Tensor, beta: float) -> Tensor:
    """log((1 - beta) p + beta q) (n, V)."""
    shares = torch.tensor([1 - beta, beta], dtype=logs.dtype, device=logs.device).log()
    return torch.logaddexp(logs + shares[0], other_logs + shares[1])
