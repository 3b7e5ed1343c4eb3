"""Log-probabilities of three policies, with ratios on both sides of any bound."""

from __future__ import annotations

import math

import torch
from torch import Tensor

FLOAT = torch.float64


def off_policy(seed: int, b: int, t: int, *, per_token: bool = True) -> dict[str, Tensor]:
    """(b, t) each: ratios from e^-30 to e^39, advantages of 0, holes and an empty sequence; b is at least 6."""
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=FLOAT)

    logps = -normal(b, t).abs() * 1.5
    old = (logps + 0.6 * normal(b, t)).clamp(max=-1e-9)
    sampling = (logps + 0.5 * normal(b, t)).clamp(max=-1e-9)
    logps[1:4, 0] = torch.tensor([-31.0, -1.0, math.log(0.2)], dtype=FLOAT)
    old[1:4, 0] = torch.tensor([-1.0, -31.0, -3.0], dtype=FLOAT)
    sampling[1:4, 0] = torch.tensor([-1.0, -31.0, math.log(1e-6)], dtype=FLOAT)  # 0.2 / 1e-6: above IPO's cap
    sampling[0, :3] = torch.tensor([-40.0, math.nan, math.nan], dtype=FLOAT)
    logps[0, 3], old[0, 3] = -1e-12, -2.0
    advantages = normal(b, t) if per_token else normal(b, 1).expand(b, t).clone()
    advantages[4] = 0.0
    mask = torch.rand(b, t, generator=gen) < 0.7
    mask[0, :4], mask[1:5, 0], mask[5] = True, True, False
    return {"logps": logps, "old": old, "sampling": sampling, "advantages": advantages, "mask": mask}
