"""The configuration: TRL's names and defaults, one place of checking; presets."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import re
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from grpo_kernels import GRPOLoss, LossConfig, grpo_loss, presets
from grpo_kernels.typing import LossTypeName
from tests.support.flat import flat
from tests.support.small_batch import small_batch

SAMPLING = "vllm_importance_sampling_"
SWITCH = f"{SAMPLING}correction"
# fields of TRL's that a config cannot hold, with the value that asks for nothing
REFUSED = {
    "use_adaptive_entropy": False,
    "mask_truncated_completions": False,
    "cast_lm_head_to_fp32": False,
    "router_aux_loss_coef": None,
}

UNUSED = {"output_dir": "unused", "bf16": False, "use_cpu": True, "report_to": "none"}
MODULES = {
    "DistillationConfig": "trl.trainer.distillation_config",
    "GMPOConfig": "trl.experimental.gmpo",
}


def trl_config(name: str = "GRPOConfig", **options: object) -> Any:
    pytest.importorskip("trl")
    return getattr(importlib.import_module(MODULES.get(name, "trl")), name)(**UNUSED, **options)


@pytest.mark.parametrize("name", REFUSED)
def test_from_trl_refuses_what_it_cannot_hold(name: str) -> None:
    value = 0.1 if name == "router_aux_loss_coef" else True
    given = trl_config(**{name: value})
    message = rf"^{name}: expected (False|None), .* got {value}; .* in a copy: (args = .*); (.*)$"
    with pytest.raises(ValueError, match=message) as raised:
        LossConfig.from_trl(given)
    names = {"copy": copy, "args": given}
    exec("\n".join(re.search(message, str(raised.value)).groups()[1:]), names)  # as it says
    assert LossConfig.from_trl(names["args"]).loss_type == "dapo"


def test_from_trl_refuses_what_is_none_of_grpos_arguments() -> None:
    others = [trl_config(x) for x in ("RLOOConfig", "DPOConfig", "SFTConfig", "DistillationConfig")]
    expected = r"^args: expected trl\.GRPOConfig or similar, got"
    for args in others:
        with pytest.raises(TypeError, match=rf"{expected} {type(args).__name__}, which belongs"):
            LossConfig.from_trl(args)
    for args in (None, "grpo", {"beta": 0.04}, {}, 3, object()):
        with pytest.raises(TypeError, match=rf"{expected} {type(args).__name__}"):
            LossConfig.from_trl(args)


def test_a_subclass_of_grpos_arguments_has_its_own_loss() -> None:
    theirs = trl_config("GMPOConfig")
    message = r"got GMPOConfig, .*; to keep its fields: from_trl\(args, loss_type="
    with pytest.raises(TypeError, match=message):
        LossConfig.from_trl(theirs)
    assert LossConfig.from_trl(theirs, loss_type="gmpo").loss_type == "gmpo"

    class Mine(type(trl_config())):  # type: ignore[misc]
        """A user's own options beside TRL's."""

    assert LossConfig.from_trl(Mine(**UNUSED, beta=0.1)).beta == 0.1


def test_every_default_is_trls() -> None:
    theirs = trl_config()
    assert all(getattr(theirs, name) == neutral for name, neutral in REFUSED.items())
    for field in fields(LossConfig):
        if hasattr(theirs, field.name) and field.name not in (SWITCH, "max_completion_length"):
            assert getattr(theirs, field.name) == field.default, field.name
    assert theirs.vllm_importance_sampling_correction  # made by the trainer, who hands the ratio in
    assert LossConfig.from_trl(theirs) == LossConfig()
    assert LossConfig.from_trl(theirs, loss_type="dr_grpo").max_completion_length == 512


def test_from_trl_takes_every_field_over() -> None:
    options: dict[str, Any] = {
        "loss_type": "dr_grpo", "importance_sampling_level": "sequence", "epsilon": 0.1,
        "epsilon_high": 0.3, "delta": 4.0, "beta": 0.05, "use_bias_correction_kl": False,
        "temperature": 0.7, "top_entropy_quantile": 0.2, "entropy_coef": 0.01,
        "off_policy_mask_threshold": 0.5, "max_completion_length": 77, "sapo_temperature_pos": 1.1,
        "sapo_temperature_neg": 1.2, "vespo_k_pos": 1.3, "vespo_lambda_pos": 1.4,
        "vespo_k_neg": 1.5, "vespo_lambda_neg": 1.6, f"{SAMPLING}mode": "token_mask",
        f"{SAMPLING}clip_max": None, f"{SAMPLING}clip_min": 0.5,
    }  # fmt: skip
    theirs = {f.name for f in fields(trl_config())}
    assert set(options) == {f.name for f in fields(LossConfig)} & theirs - {SWITCH}
    found = LossConfig.from_trl(trl_config(**options), kl_estimator="k1")
    assert found == LossConfig(**options, kl_estimator="k1")


def test_the_trainer_makes_the_samplers_ratio() -> None:
    """So it is not made again; TRL's deprecated name for the upper bound is understood."""
    options = {f"{SAMPLING}mode": "token_mask", f"{SAMPLING}clip_max": None}
    theirs = SimpleNamespace(**{SWITCH: True}, **options)
    assert LossConfig.from_trl(theirs) == LossConfig(**options)
    assert LossConfig.from_trl(theirs, **{SWITCH: True}).vllm_importance_sampling_correction
    theirs.vllm_importance_sampling_cap = 2.0
    assert LossConfig.from_trl(theirs).vllm_importance_sampling_clip_max == 2.0


def test_every_published_algorithm_is_a_preset() -> None:
    published = "GRPO DR_GRPO DAPO GSPO CISPO SAPO LUSPO VESPO GMPO PPO REINFORCE RLOO TIS ICEPOP"
    assert {*presets.__all__} == {*published.split(), "MIS", "OPSM"}
    for name in presets.__all__:
        assert f"\n{name} " in str(presets.__doc__)  # what help() shows of them
        with pytest.raises(ValueError, match=rf"; .*config=presets\.{name}( |$)"):
            LossConfig(loss_type=name)  # type: ignore[arg-type]


def test_it_is_frozen_and_the_module_takes_its_fields() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LossConfig().beta = 0.1  # type: ignore[misc]
    assert GRPOLoss(loss_type="grpo", beta=0.04).config == LossConfig(loss_type="grpo", beta=0.04)
    assert GRPOLoss(presets.DAPO, epsilon_high=0.3).config.epsilon_high == 0.3
    of_trl = {"grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"}
    assert of_trl < {*get_args(LossTypeName)}


def test_numpy_numbers_are_numbers() -> None:
    config = LossConfig(epsilon=np.float32(0.25), max_completion_length=np.int64(7))
    assert (config.epsilon, config.max_completion_length) == (0.25, 7)


def test_num_items_in_whatever_form() -> None:
    inputs = small_batch(old_per_token_logps=torch.full((2, 5), -2.0))
    want = flat(grpo_loss)(**inputs).loss / 2
    one = torch.tensor(20)
    for items in (20, 20.0, np.int64(20), one, one.view(1), one.view(1, 1)):
        got = flat(grpo_loss)(**inputs, num_items_in_batch=items).loss
        assert got.shape == ()
        torch.testing.assert_close(got, want)


@dataclasses.dataclass(frozen=True)
class OfAUser(LossConfig):
    margin: float = 0.1
    name: str = "mine"


def test_a_subclass_may_have_fields_of_its_own() -> None:
    config = dataclasses.replace(OfAUser(margin=0.2), epsilon=0.3)
    assert (config.margin, config.name, config.epsilon) == (0.2, "mine", 0.3)
    with pytest.raises(TypeError, match="epsilon: expected a number"):
        OfAUser(epsilon="0.3")  # type: ignore[arg-type]
