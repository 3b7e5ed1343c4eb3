"""Result of an objective: the loss, its gradient in the per-token numbers, and the metrics' inputs."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grpo_kernels.token_loss.record import Coefficients


@dataclass(frozen=True)
class Terms:
    """Inputs of the metrics from an evaluation; (n,) unless said otherwise, None where the loss has no such term."""

    log_ratio: Tensor | None = None  # R, as the surrogate sees it
    token_log_ratio: Tensor | None = None
    kl: Tensor | None = None
    phi: Tensor | None = None
    on_policy_keep: Tensor | None = None  # bool: not dropped by the off-policy mask
    importance_sampling_ratio: Tensor | None = None  # (n,), or (B,) if it is one per sequence
    sampling_difference: Tensor | None = (
        None  # old - sampling logp, if the loss made the ratio from it
    )


@dataclass(frozen=True)
class Evaluation:
    """A loss and its gradient in the per-token numbers."""

    loss: Tensor  # ()
    coefficients: Coefficients  # (n,) each; d_logp is always there, None: the loss does not depend on that number
    policy_loss: Tensor  # () the loss without the entropy bonus
    terms: Terms = field(default_factory=Terms)

    @property
    def d_logp(self) -> Tensor:
        """d loss / d log-probability, (n,)."""
        assert self.coefficients.d_logp is not None
        return self.coefficients.d_logp

    @property
    def has_gradient(self) -> Tensor:
        """(n,) bool: the tokens that have a coefficient other than 0."""
        return functools.reduce(
            torch.logical_or, (x != 0 for x in self.coefficients if x is not None)
        )
