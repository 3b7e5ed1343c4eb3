"""verl's policy losses, as objectives: ``grpo_loss(..., objective=objectives.gspo())``.

Formulas, parameters and sources: `grpo_kernels.objective.verl_losses`.
"""

from grpo_kernels.objective.verl_losses import cispo, clip_cov, dppo_kl, dppo_tv, dro, geo_mean, gpg, gspo, kl_cov

__all__ = ["cispo", "clip_cov", "dppo_kl", "dppo_tv", "dro", "geo_mean", "gpg", "gspo", "kl_cov"]
