"""Result of an objective: the loss, its gradient in the per-token numbers, and the metrics' inputs."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Terms:
    """Inputs of the metrics from an evaluation; (n,) unless said otherwise, None where the loss has no such term."""

    log_ratio: Tensor | None = None  # R, as the surrogate sees it
    token_log_ratio: Tensor | None = None
    kl: Tensor | None = None
    phi: Tensor | None = None
    on_policy_keep: Tensor | None = None  # bool: not dropped by the off-policy mask
    importance_sampling_ratio: Tensor | None = None  # or (B,), where it is one per sequence
    sampling_difference: Tensor | None = None  # old - sampling logp, where the ratio was made of it


@dataclass(frozen=True)
class Evaluation:
    """A loss and its gradient in the per-token numbers."""

    loss: Tensor  # ()
    a: Tensor  # (n,) d loss / d logp
    b: Tensor | None  # (n,) d loss / d entropy; None if the loss does not depend on the entropies
    policy_loss: Tensor  # () the loss without the entropy bonus
    terms: Terms = field(default_factory=Terms)
    c: Tensor | None = None  # (n,) d loss / d divergence; None if the loss does not depend on the divergences
