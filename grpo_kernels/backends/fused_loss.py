"""A built-in loss as numbers per token and a few constants, for row kernels that fuse it.

With R = logp - old (0 on-policy), w the weight, gate the importance ratio and the masks, and
``surrogate`` and ``kl`` those of `formulas`::

    loss_t    = w * gate * surrogate(R, A) + beta * w * kl [* exp(R)]
    d_logp_t  = d loss_t / d logp_t
    d_entropy = d loss / d entropy_t, the same for every token

On-policy R is 0 and the policy term's derivative, `d_policy`, is known beforehand. Two surrogates
are for that alone: ``"constant"``, whose loss is known, too, and left out here, and ``"linear"``,
whose loss is d_logp * logp. The loss is NaN where the log-probability is not finite. d_logp is NaN,
too, where the id is -1. `PolicyObjective.fused_loss` makes the record. It knows no vocabulary; the
kernels know no policy.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# per-token results of a fused kernel, besides the statistics
LOSS_TERMS = ("loss", "d_logp", "log_ratio", "kl")


@dataclass(frozen=True)
class FusedLoss:
    """A loss whose tokens are not coupled. Tensors are (n,), in the accumulator's dtype."""

    surrogate: str  # one of `formulas.SURROGATES`
    constants: tuple[float, ...]  # of the surrogate, in the order of its arguments
    # one of `formulas.ESTIMATORS`, or "full" with a second head; None without a KL term
    kl: str | None
    corrects_kl: bool  # the estimate is multiplied by exp(R)
    advantages: Tensor | None  # A; None on-policy
    # only on-policy: the policy term's derivative, weight and gate included
    d_policy: Tensor | None
    weights: Tensor
    old: Tensor | None  # None on-policy
    ref: Tensor | None  # only if `kl` is an estimator
    gate: Tensor | None  # None: 1
    beta: float
    d_entropy: float  # d loss / d entropy

    @property
    def terms(self) -> tuple[str, ...]:
        """The `LOSS_TERMS` that this loss has."""
        return LOSS_TERMS if self.kl is not None else LOSS_TERMS[:-1]
