"""The float64 result that every provider is held against before it is timed.

The loss and all log-probabilities; of the gradients some rows of d hidden and some of d weight, which need a part of
the products only. With p = softmax(h @ W.T), a = d loss / d logp and y the target::

    d hidden_t = a_t (W_y - sum_j p_tj W_j)            d weight_j = sum_t a_t (1[j = y_t] - p_tj) h_t
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.cases import SEED, BenchCase, Inputs, policy_loss

SLICE = 4096  # of the vocabulary at a time
SAMPLE = 128
# What counts as the same result, for a peer that rounds logits and gradients to 16 bits: wrong formulas are far beyond.
LIMITS = {"loss": 0.02, "logp_mean": 0.05, "d_hidden": 0.05, "d_weight": 0.05}
CLIPPED_LIMITS = {**LIMITS, "d_hidden": 0.4, "d_weight": 0.4}  # a rounded logp puts some ratios on the other side


@dataclass(frozen=True)
class Outcome:
    """What a provider's step computed; gradients are in the leaves."""

    loss: Tensor | None = None  # ()
    logps: Tensor | None = None  # (B, T)
    note: str = ""  # which of its paths ran


@dataclass(frozen=True)
class Reference:
    """Float64 results of one case."""

    logps: Tensor  # (N,)
    loss: Tensor  # ()
    rows: Tensor  # (r,) which of the hidden states
    d_hidden: Tensor  # (r, H)
    tokens: Tensor  # (k,) which rows of the weight
    d_weight: Tensor  # (k, H)


def reference(inputs: Inputs) -> Reference:
    """Float64 results from the inputs as they are, rounded to bf16."""
    hidden = inputs.hidden.detach().reshape(-1, inputs.case.h).double()
    weight, ids = inputs.weight.detach(), inputs.ids.reshape(-1)
    lse, target = _log_sum_exp(hidden, weight, ids)
    logps = (target - lse).requires_grad_()
    loss = policy_loss(inputs, logps.view(inputs.ids.shape))
    (a,) = torch.autograd.grad(loss, logps)

    g = torch.Generator().manual_seed(SEED)
    rows = torch.randperm(len(ids), generator=g)[:SAMPLE].to(ids.device)
    others = torch.randint(len(weight), (SAMPLE,), generator=g).to(ids.device)
    tokens = torch.cat([ids[rows], others]).unique()
    d_hidden = torch.zeros_like(hidden[rows])
    for start in range(0, len(weight), SLICE):
        w = weight[start : start + SLICE].double()
        p = torch.exp(hidden[rows] @ w.t() - lse[rows, None])
        d_hidden -= (a[rows, None] * p) @ w
    d_hidden += a[rows, None] * weight[ids[rows]].double()
    p = torch.exp(hidden @ weight[tokens].double().t() - lse[:, None])
    d_weight = (a[:, None] * ((ids[:, None] == tokens).double() - p)).t() @ hidden
    return Reference(logps.detach(), loss.detach(), rows, d_hidden, tokens, d_weight)


def errors(outcome: Outcome, inputs: Inputs, want: Reference) -> dict[str, float]:
    """How far a step's results are off: absolute for loss and log-probabilities, relative in norm for gradients."""
    found: dict[str, float] = {}
    if outcome.loss is not None:
        found["loss"] = float((outcome.loss.detach().double() - want.loss).abs())
    if outcome.logps is not None:
        off = (outcome.logps.detach().double().reshape(-1) - want.logps).abs()
        found["logp_mean"], found["logp_max"] = float(off.mean()), float(off.max())
    if inputs.hidden.requires_grad:
        assert inputs.hidden.grad is not None, "no gradient of the hidden states"
        rows = inputs.hidden.grad.reshape(-1, inputs.case.h)[want.rows]
        found["d_hidden"] = _relative(rows, want.d_hidden)
    if inputs.weight.requires_grad:
        assert inputs.weight.grad is not None, "no gradient of the weight"
        found["d_weight"] = _relative(inputs.weight.grad[want.tokens], want.d_weight)
    return found


def is_right(found: dict[str, float], case: BenchCase) -> bool:
    """Whether something was compared, and all of it within the limits; NaN is not."""
    limits = CLIPPED_LIMITS if case.off_policy else LIMITS
    return bool(found) and all(found[name] <= limit for name, limit in limits.items() if name in found)


def _log_sum_exp(hidden: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(log sum exp of each row's logits, the target's logit), (N,) each."""
    top = torch.full_like(hidden[:, 0], -torch.inf)
    total, target = torch.zeros_like(top), torch.zeros_like(top)
    for start in range(0, len(weight), SLICE):
        z = hidden @ weight[start : start + SLICE].double().t()
        new_top = torch.maximum(top, z.amax(dim=1))
        total = total * torch.exp(top - new_top) + torch.exp(z - new_top[:, None]).sum(dim=1)
        top, place = new_top, ids - start
        inside = (place >= 0) & (place < z.shape[1])
        target = torch.where(inside, z.gather(1, torch.where(inside, place, 0)[:, None])[:, 0], target)
    return top + total.log(), target


def _relative(got: Tensor, want: Tensor) -> float:
    size = want.norm()
    return float((got.double() - want).norm() / torch.where(size > 0, size, 1.0))
