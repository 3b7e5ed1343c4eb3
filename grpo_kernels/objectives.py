"""Policy losses that `LossConfig` does not have, by name: ``grpo_loss(..., objective=objectives.gspo())``.

Formulas, parameters and sources: of verl's losses in `grpo_kernels.objective.verl_losses`; of the losses of prime-rl,
SkyRL, ROLL and ms-swift, and of AReaL's M2PO mask, in `grpo_kernels.objective.named_losses`.
"""

from grpo_kernels.objective.named_losses import fipo, icepop, ipo, kpop, m2po_mask, rollout_is, topr
from grpo_kernels.objective.verl_losses import (
    cispo,
    clip_cov,
    dppo_kl,
    dppo_tv,
    dro,
    geo_mean,
    gpg,
    gspo,
    kl_cov,
)

__all__ = [
    "cispo", "clip_cov", "dppo_kl", "dppo_tv", "dro", "fipo", "geo_mean", "gpg", "gspo", "icepop", "ipo", "kl_cov",
    "kpop", "m2po_mask", "rollout_is", "topr",
]  # fmt: skip
