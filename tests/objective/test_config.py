"""The configuration: TRL's names and defaults, one place of checking, presets that are configurations."""

from __future__ import annotations

import dataclasses
from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from grpo_kernels import GRPOLoss, LossConfig, presets
from grpo_kernels.objective.losses import LOSSES

OURS = {"kl_estimator", "final_logit_softcapping", "logit_scale", "logits_dtype"}
SWITCH = "vllm_importance_sampling_correction"


def trl_config(**options: object) -> Any:
    trl = pytest.importorskip("trl")
    return trl.GRPOConfig(output_dir="unused", bf16=False, use_cpu=True, report_to="none", **options)


def test_every_default_is_trls() -> None:
    theirs = trl_config()
    for field in fields(LossConfig):
        if field.name not in OURS | {SWITCH}:
            assert getattr(theirs, field.name) == field.default, field.name
    assert theirs.vllm_importance_sampling_correction  # made by the trainer, who hands the ratio in
    assert LossConfig.from_trl(theirs) == LossConfig()


def test_from_trl_takes_every_field_over() -> None:
    options = {
        "loss_type": "vespo",
        "importance_sampling_level": "sequence",
        "epsilon": 0.1,
        "epsilon_high": 0.3,
        "delta": 4.0,
        "beta": 0.05,
        "use_bias_correction_kl": False,
        "temperature": 0.7,
        "top_entropy_quantile": 0.2,
        "entropy_coef": 0.01,
        "off_policy_mask_threshold": 0.5,
        "max_completion_length": 77,
        "sapo_temperature_pos": 1.1,
        "sapo_temperature_neg": 1.2,
        "vespo_k_pos": 1.3,
        "vespo_lambda_pos": 1.4,
        "vespo_k_neg": 1.5,
        "vespo_lambda_neg": 1.6,
        "vllm_importance_sampling_mode": "token_mask",
        "vllm_importance_sampling_clip_max": None,
        "vllm_importance_sampling_clip_min": 0.5,
    }
    assert set(options) == {f.name for f in fields(LossConfig)} - OURS - {SWITCH}
    config = LossConfig.from_trl(trl_config(**options), final_logit_softcapping=30.0)
    assert {name: getattr(config, name) for name in options} == options
    assert config.final_logit_softcapping == 30.0


def test_from_trl_names_an_unknown_loss() -> None:
    with pytest.raises(ValueError, match=r"loss_type: expected one of grpo, .* got 'later'"):
        LossConfig.from_trl(trl_config(loss_type="later"))


@pytest.mark.parametrize("args", [None, "grpo", {"beta": 0.04}, {}, 3, object()], ids=lambda x: type(x).__name__)
def test_from_trl_refuses_what_has_no_fields(args: object) -> None:
    with pytest.raises(TypeError, match=f"^args: expected a trl.GRPOConfig or its like, got {type(args).__name__}"):
        LossConfig.from_trl(args)


def test_every_published_algorithm_is_a_preset() -> None:
    assert set(presets.__all__) == {
        "GRPO", "DR_GRPO", "DAPO", "GSPO", "CISPO", "SAPO", "LUSPO", "VESPO", "GMPO", "PPO", "REINFORCE", "RLOO",
    }  # fmt: skip
    for name in presets.__all__:
        assert isinstance(getattr(presets, name), LossConfig)
    source = presets.__loader__.get_source(presets.__name__)  # type: ignore[union-attr]
    assert source.count("https://") >= len(presets.__all__)


def test_it_is_frozen_and_the_module_takes_its_fields() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LossConfig().beta = 0.1  # type: ignore[misc]
    assert GRPOLoss(loss_type="grpo", beta=0.04).config == LossConfig(loss_type="grpo", beta=0.04)
    assert GRPOLoss(presets.DAPO, epsilon_high=0.3).config.epsilon_high == 0.3
    with pytest.raises(TypeError, match="epsilom"):
        GRPOLoss(epsilom=0.1)
    assert {*LOSSES} - {"gmpo"} == {"grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"}


def test_numpy_numbers_are_numbers() -> None:
    config = LossConfig(epsilon=np.float32(0.25), max_completion_length=np.int64(7))
    assert (config.epsilon, config.max_completion_length) == (0.25, 7)
    with pytest.raises(TypeError, match="epsilon: expected a number"):
        LossConfig(epsilon=np.array([0.25]))
