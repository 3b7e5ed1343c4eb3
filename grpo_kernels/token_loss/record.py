"""A built-in loss as numbers a token and a few constants: what a row kernel that fuses the loss needs of it.

With R = logp - old (0 on-policy), w the weight, gate the importance ratio and the masks, and ``surrogate``, ``kl`` as
in `surrogates`::

    loss_t = w * gate * surrogate(R, A) + beta * w * kl [* exp(R)]
    a_t    = d loss_t / d logp_t
    b_t    = b, the same for every token

On-policy the policy term's a is known beforehand, and there are two surrogates of its own for that: ``"constant"``,
whose loss is known as well and left out here, and ``"linear"``, whose loss is a * logp. Both find a in `advantages`.
R is then 0; the loss is NaN where the log-probability is not finite, and a, too, where that is NaN.
Written by `objective.PolicyObjective.token_loss`; it knows no vocabulary, and its readers know no policy.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

TERMS = ("loss", "a", "log_ratio", "kl")  # what a fused kernel returns a token, besides the statistics


@dataclass(frozen=True)
class TokenLoss:
    """A loss whose tokens are not coupled. Tensors are (n,), in the accumulator's dtype."""

    surrogate: str  # "clipped", "cispo", "sapo"; on-policy "constant", "linear"
    kl: str | None  # estimator: "k1", "k2", "k3"; None without a KL term
    corrects_kl: bool  # the estimate is multiplied by exp(R)
    advantages: Tensor  # A; on-policy a itself, weight and gate included
    weights: Tensor
    old: Tensor | None  # None on-policy
    ref: Tensor | None  # where there is a KL term
    gate: Tensor | None  # None: 1
    clip_low: float  # 1 - epsilon
    clip_high: float  # 1 + epsilon_high; for "cispo" the cap
    delta: float  # inf: none
    tau_pos: float
    tau_neg: float
    beta: float
    b: float  # d loss / d entropy

    @property
    def terms(self) -> tuple[str, ...]:
        """Those of `TERMS` that this loss has."""
        return TERMS if self.kl is not None else TERMS[:-1]

    def at(self, index: Tensor | slice) -> TokenLoss:
        """The tokens at `index` (m,)."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        picked: dict[str, Any] = {name: x[index] for name, x in values.items() if isinstance(x, Tensor)}
        return replace(self, **picked)
