"""Published algorithms as ready-made `LossConfig`s.

A preset sets only the loss. Compute the advantages yourself, for example with
`grpo_kernels.advantages`. Fields that a preset does not set have the defaults of `LossConfig`:
token ratios clipped to [0.8, 1.2], no KL term, a mean over all tokens. ``print(presets.GSPO)``
shows the fields that differ. A paper is an arXiv number. A is the advantage, p the probability of
the sampled token, and w a weight without gradient, which each row defines.

Preset    | Paper      | Loss
--------- | ---------- | ----
GRPO      | 2402.03300 | mean over each sequence, then over sequences; a KL term with beta 0.04
DR_GRPO   | 2503.20783 | divided by `max_completion_length`; advantages not divided by the std
DAPO      | 2503.14476 | ratios clipped to [0.8, 1.28]
GSPO      | 2507.18071 | GRPO's mean, no KL term; a ratio per sequence, in [1 - 0.0003, 1 + 0.0004]
CISPO     | 2506.13585 | -w A log p, where w is the token's ratio, capped at 5
SAPO      | 2511.20347 | GRPO's mean, no KL term; a sigmoid gate instead of the clip
LUSPO     | 2602.05261 | a ratio per sequence, in [0.998, 1.0025]; a sum over each sequence
VESPO     | 2602.10693 | -w A log p, where w is a gamma-shaped function of the sequence's ratio
GMPO      | 2507.20673 | geometric mean of the sequence's ratios, each clipped to exp(+-0.4)
PPO       | 1707.06347 | mean over the call's tokens; one ratio and one advantage (`gae`) per token
REINFORCE | Williams   | -w A log p, where w is the token's ratio, capped at 1
RLOO      | 2402.14740 | a sum over each sequence, for the advantages of `rloo_advantages`
TIS       | (blog)     | default loss times w, the token's ratio old policy / sampler, capped at 2
ICEPOP    | 2510.18855 | as TIS, but w is not capped; outside [0.5, 5], w is 0
MIS       | (TRL)      | as TIS, but w is the sequence's ratio; above 3, w is 0
OPSM      | 2512.02556 | GRPO's mean, no KL term; off-policy sequences with A < 0 are dropped
"""

from __future__ import annotations

from grpo_kernels.base.checks import only_public
from grpo_kernels.objective.config import LossConfig

GRPO = LossConfig(loss_type="grpo", beta=0.04, use_bias_correction_kl=False)
"""DeepSeekMath, https://arxiv.org/abs/2402.03300: a mean over each sequence, then over the
sequences, with a KL weight of 0.04. The KL estimate is the paper's; TRL multiplies it by the ratio
(``use_bias_correction_kl=True``)."""

DR_GRPO = LossConfig(loss_type="dr_grpo")
"""Understanding R1-Zero-like training, https://arxiv.org/abs/2503.20783: a constant normalizer, for
unscaled advantages. Pass the constant: ``GRPOLoss(presets.DR_GRPO, max_completion_length=...)``."""

DAPO = LossConfig(loss_type="dapo", epsilon=0.2, epsilon_high=0.28)
"""DAPO, https://arxiv.org/abs/2503.14476: a mean over all tokens of the batch, with the
ratio clipped to [0.8, 1.28]."""

GSPO = LossConfig(
    loss_type="grpo", importance_sampling_level="sequence", epsilon=3e-4, epsilon_high=4e-4
)
"""Group sequence policy optimization, https://arxiv.org/abs/2507.18071: one ratio per sequence, and
a narrow clip range."""

CISPO = LossConfig(loss_type="cispo", epsilon_high=5.0)
"""MiniMax-M1, https://arxiv.org/abs/2506.13585: the capped ratio is a constant weight of the
log-probability."""

SAPO = LossConfig(loss_type="sapo")
"""Soft adaptive policy optimization, https://arxiv.org/abs/2511.20347: a sigmoid gate instead of
the clip."""

LUSPO = LossConfig(
    loss_type="luspo", importance_sampling_level="sequence", epsilon=2e-3, epsilon_high=2.5e-3
)
"""Length-unbiased sequence policy optimization, https://arxiv.org/abs/2602.05261."""

VESPO = LossConfig(loss_type="vespo")
"""Variational sequence-level soft policy optimization, https://arxiv.org/abs/2602.10693: a
gamma-shaped weight per sequence."""

GMPO = LossConfig(loss_type="gmpo", importance_sampling_level="sequence", epsilon=0.4)
"""Geometric-mean policy optimization, https://arxiv.org/abs/2507.20673: token ratios are clipped to
exp(+-0.4), then averaged."""

PPO = LossConfig(loss_type="bnpo", epsilon=0.2)
"""Proximal policy optimization, https://arxiv.org/abs/1707.06347: one ratio and one advantage
(`gae`) per token."""

REINFORCE = LossConfig(loss_type="cispo", epsilon_high=1.0)
"""Williams's REINFORCE (1992), https://doi.org/10.1007/BF00992696: -A log p per token. If the
samples are off-policy, the ratio, capped at 1, is a constant weight of the token."""

RLOO = LossConfig(loss_type="luspo")
"""REINFORCE leave-one-out, https://arxiv.org/abs/2402.14740: the loss is summed over each sequence.
Use it with `rloo_advantages`. The published estimator is on-policy; given old log-probabilities,
each token's ratio is clipped as in PPO."""

TIS = LossConfig(
    vllm_importance_sampling_correction=True,
    vllm_importance_sampling_mode="token_truncate",
    vllm_importance_sampling_clip_max=2.0,
)
"""Truncated importance sampling, https://fengyao.notion.site/off-policy-rl: PPO's loss times min(w,
2), where w is the token's probability under the old policy divided by its probability under the
sampler. slime and verl use this bound; OpenRLHF clamps w to [0.5, 5]."""

ICEPOP = LossConfig(
    vllm_importance_sampling_correction=True,
    vllm_importance_sampling_mode="token_mask",
    vllm_importance_sampling_clip_min=0.5,
    vllm_importance_sampling_clip_max=5.0,
)
"""IcePop, https://arxiv.org/abs/2510.18855, as in OpenRLHF and NeMo-RL: PPO's loss times the w of
`TIS`, or 0 if w is outside [0.5, 5] (slime: [0, 2]). prime-rl's IcePop, -A r within [0.2, 5], is
`objectives.icepop_prime_rl`."""

MIS = LossConfig(
    vllm_importance_sampling_correction=True,
    vllm_importance_sampling_mode="sequence_mask",
    vllm_importance_sampling_clip_max=3.0,
)
"""Masked importance sampling, TRL's default (https://github.com/huggingface/trl): PPO's loss times
w, the sequence's probability under the old policy divided by its probability under the sampler. The
loss is 0 if w is above 3."""

OPSM = LossConfig(loss_type="grpo", off_policy_mask_threshold=1e-4)
"""Off-policy sequence masking, https://arxiv.org/abs/2512.02556, with slime's threshold: GRPO's
loss, but 0 for a sequence with A < 0 whose mean of (old - current) log-probability is above 1e-4.
If you pass the sampler's log-probabilities, the mean of (sampler - current) decides instead."""

__all__ = [
    "CISPO", "DAPO", "DR_GRPO", "GMPO", "GRPO", "GSPO", "ICEPOP", "LUSPO", "MIS", "OPSM", "PPO",
    "REINFORCE", "RLOO", "SAPO", "TIS", "VESPO",
]  # fmt: skip

only_public(__name__)
