"""Statistics of the log-ratio D of a token or of a sequence, and the bounds that they have to be in."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels.base.sums import sequence_means

Bound = float | tuple[float | None, float | None]


class Rule(NamedTuple):
    """A statistic and its bounds, in the statistic's unit."""

    name: str
    level: str
    kind: str
    low: float
    high: float


def _sum(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x, 0.0).sum(dim=1, keepdim=True)


def _max(x: Tensor, mask: Tensor) -> Tensor:
    if x.numel() == 0:
        return x.new_zeros(len(x), 1)
    return x.masked_fill(~mask, -math.inf).amax(dim=1, keepdim=True)


# level -> x (R, T) and mask (R, T) to (R, T) or (R, 1); each row has a counted token
_AGGREGATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda x, mask: x,
    "seq_sum": _sum,
    "seq_mean": sequence_means,
    "seq_max": _max,
}
DIVERGENCES: dict[str, Callable[[Tensor], Tensor]] = {  # of D, of any shape
    "k1": lambda d: -d,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: torch.expm1(d) - d,
    "reverse_k3": lambda d: torch.expm1(-d) + d,
}
_WEIGHT_LEVELS = {"token": "token", "sequence": "seq_sum", "geometric": "seq_mean"}

# name -> (level, kind)
STATISTICS = {
    f"{level}_{kind}": (level, kind) for level in _AGGREGATES for kind in ("ratio", *DIVERGENCES)
}


def log_ratio(level: str, d: Tensor, mask: Tensor) -> Tensor:
    """Logarithm of the weight: (R, T) of "token", else (R, 1)."""
    return _AGGREGATES[_WEIGHT_LEVELS[level]](d, mask)


def row_means(x: Tensor, mask: Tensor) -> Tensor:
    """(R, T) -> (R,): the mean of each row's counted tokens."""
    return sequence_means(x, mask)[:, 0]


def statistic(rule: Rule, d: Tensor, mask: Tensor, safety_bound: float) -> Tensor:
    """The values that a rule judges: (R, T) of tokens, (R, 1) of sequences."""
    aggregate = _AGGREGATES[rule.level]
    if rule.kind == "ratio":
        return aggregate(d, mask).clamp(-safety_bound, safety_bound).exp()
    return aggregate(DIVERGENCES[rule.kind](d.clamp(-safety_bound, safety_bound)), mask)
