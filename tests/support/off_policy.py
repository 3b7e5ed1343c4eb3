"""Log-probabilities of three policies, with ratios on both sides of any bound; and losses on them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from grpo_kernels import policy_loss_from_logps

FLOAT = torch.float64
B, T = 6, 12
Given = dict[str, Tensor]


def off_policy(seed: int, *, per_token: bool = True, weighted: bool = False) -> Given:
    """(B, T) each: ratios from e^-30 to e^39, advantages of 0, holes and an empty sequence; with weights, some 0."""
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=FLOAT)

    logps = -normal(B, T).abs() * 1.5
    old = (logps + 0.6 * normal(B, T)).clamp(max=-1e-9)
    sampling = (logps + 0.5 * normal(B, T)).clamp(max=-1e-9)
    logps[1:4, 0] = torch.tensor([-31.0, -1.0, math.log(0.2)], dtype=FLOAT)
    old[1:4, 0] = torch.tensor([-1.0, -31.0, -3.0], dtype=FLOAT)
    sampling[1:4, 0] = torch.tensor(
        [-1.0, -31.0, math.log(1e-6)], dtype=FLOAT
    )  # 0.2 / 1e-6: above IPO's cap
    sampling[0, :3] = torch.tensor([-40.0, math.nan, math.nan], dtype=FLOAT)
    logps[0, 3], old[0, 3] = -1e-12, -2.0
    advantages = normal(B, T) if per_token else normal(B, 1).expand(B, T).clone()
    advantages[4] = 0.0
    mask = torch.rand(B, T, generator=gen) < 0.7
    mask[0, :4], mask[1:5, 0], mask[5] = True, True, False
    given = {
        "logps": logps,
        "old": old,
        "sampling": sampling,
        "advantages": advantages,
        "mask": mask,
    }
    if weighted:
        given["ratio"] = 2 * torch.rand(B, T, generator=gen, dtype=FLOAT)
        given["ratio"][0, :4] = 0.0
    return given


def arguments(given: Given) -> dict[str, Any]:
    """What a loss takes besides log-probabilities or a head, NaN wherever the mask is 0."""
    names = {
        "old": "old_per_token_logps",
        "sampling": "sampling_per_token_logps",
        "ratio": "importance_sampling_ratio",
    }
    taken = {"completion_mask": "mask", "advantages": "advantages"} | {
        ours: name for name, ours in names.items()
    }
    masked = {
        ours: torch.where(given["mask"], given[name], torch.nan)
        for ours, name in taken.items()
        if name in given
    }
    return masked | {"completion_mask": given["mask"]}


def ours(given: Given, **how: Any) -> tuple[Tensor, Tensor]:
    """Value of the loss and its gradient at the counted tokens; the entropies get none."""
    logps = torch.where(given["mask"], given["logps"], torch.nan).requires_grad_()
    entropies = torch.zeros_like(logps).requires_grad_()
    out = policy_loss_from_logps(logps, entropies, **arguments(given), **how)
    gradient, of_entropies = torch.autograd.grad(
        out.loss, (logps, entropies), materialize_grads=True
    )
    assert not of_entropies.any()
    assert not gradient[~given["mask"]].any()
    return out.loss.detach(), gradient[given["mask"]]


def agree(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], rtol: float = 1e-11) -> None:
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=1e-14)
