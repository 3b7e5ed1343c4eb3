"""The fields of `LossConfig` as keyword arguments, for type checkers."""

from __future__ import annotations

from typing import TypedDict

from grpo_kernels.base.choices import (
    ImportanceSamplingLevel,
    KLEstimator,
    LossTypeName,
    SamplingMode,
)


class LossFields(TypedDict, total=False):
    """Fields of `LossConfig`, each optional."""

    loss_type: LossTypeName
    importance_sampling_level: ImportanceSamplingLevel
    epsilon: float
    epsilon_high: float | None
    delta: float | None
    beta: float
    use_bias_correction_kl: bool
    kl_estimator: KLEstimator
    temperature: float
    top_entropy_quantile: float
    entropy_coef: float
    off_policy_mask_threshold: float | None
    vllm_importance_sampling_correction: bool
    vllm_importance_sampling_mode: SamplingMode
    vllm_importance_sampling_clip_max: float | None
    vllm_importance_sampling_clip_min: float | None
    max_completion_length: int
    sapo_temperature_pos: float
    sapo_temperature_neg: float
    vespo_k_pos: float
    vespo_lambda_pos: float
    vespo_k_neg: float
    vespo_lambda_neg: float
