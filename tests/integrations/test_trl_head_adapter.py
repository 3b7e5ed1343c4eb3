"""LoRA on the head, which TRL refuses: our trainer against TRL's own loss of all logits."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

pytest.importorskip("trl")
pytest.importorskip("peft")
import peft
import trl

from grpo_kernels.trl import FusedGRPOTrainer
from tests.support import trl_training
from tests.support.trl_training import AllLogits, Checked, Run, Written, mixed

pytestmark = pytest.mark.unit

TWICE = {"num_iterations": 2, "beta": 0.04}
# both factors random: the adapter counts at once
SHAPE = {"init_lora_weights": False, "task_type": "CAUSAL_LM"}
ON_HEAD = {"r": 4, "target_modules": ["q_proj", "lm_head"], **SHAPE}
on_head = partial(peft.LoraConfig, **ON_HEAD)
Ours, Stock = mixed(Written, FusedGRPOTrainer), mixed(Written, trl.GRPOTrainer)
Plain = mixed(Written, AllLogits)


def train(trainer_class: type, **options: Any) -> Run:
    return trl_training.train(trainer_class, **{"optim": "sgd", "learning_rate": 0.1, **options})


def assert_same(stock: Run, ours: Run) -> None:
    """Everything that was logged, and how far each parameter has gone."""
    trl_training.assert_same(stock, ours)
    theirs = dict(stock.trainer.model.named_parameters())
    for name, x in ours.trainer.model.named_parameters():
        errors = (x - theirs[name]).abs() - 1e-5 * theirs[name].abs()
        assert errors.max() <= 1e-6, name


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "reference without adapters, two iterations": ("qwen3", {}, TWICE),
    "entropy bonus, frozen bias": ("bias", {}, {"entropy_coef": 0.01}),
    "tied, soft-cap, bias of the adapter": ("softcap", {"lora_bias": True}, {"loss_type": "grpo"}),
}


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_all_logits(name: str) -> None:
    kind, shape, options = CASES[name]
    options = {"kind": kind, "peft_config": on_head(**shape), **options}
    assert_same(*(train(cls, **options) for cls in (Plain, Ours)))


class Adapted:
    """In front of a trainer: its model has an adapter already."""

    def __init__(self, *, model: Any, **kwargs: Any) -> None:
        super().__init__(model=peft.get_peft_model(model, on_head()), **kwargs)


def test_an_adapter_that_is_there_already_is_its_own_reference() -> None:
    """TRL keeps a frozen copy of it for the reference."""
    stock, ours = (train(mixed(Adapted, cls), **TWICE) for cls in (Plain, Ours))
    assert_same(stock, ours)
    assert "ref" in ours.trainer.model.get_output_embeddings().lora_A
    assert ours.steps[-1]["kl"] > 0
    message = "kl_estimator: expected 'k3' if the reference is a separate adapter"
    with pytest.raises(ValueError, match=message):
        train(mixed(Adapted, Ours), kl_estimator="full", **TWICE)


def test_a_trained_copy_of_the_head_is_stock_trls() -> None:
    shape = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], **SHAPE}
    options = {"peft_config": peft.LoraConfig(r=4, **shape), **TWICE}
    assert_same(*(train(cls, **options) for cls in (Stock, Ours)))


def test_the_exact_kl_has_the_adapter_in_the_policy_and_not_in_the_reference() -> None:
    options = {"peft_config": on_head(), "kl_estimator": "full", **TWICE}
    kls = train(mixed(Checked, FusedGRPOTrainer), **options).trainer.kls
    assert len(kls) == 4
    assert min(kls) > 1e-3


INDICES = {"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": [3, 4]}}
OF_INDICES = {"peft_config": peft.LoraConfig(task_type="CAUSAL_LM", **INDICES)}
DORA = {"peft_config": on_head(use_dora=True)}
FP32 = {"peft_config": on_head(), "cast_lm_head_to_fp32": True}
REFUSED: dict[str, tuple[type, dict[str, Any], type[Exception], str]] = {
    "token indices": (Ours, OF_INDICES, TypeError, r"^lm_head: expected .*; train it by"),
    "DoRA": (Ours, DORA, ValueError, "expected adapters that are plain LoRA, got Dora"),
    "fp32 head": (Ours, FP32, ValueError, "cast_lm_head_to_fp32: expected False"),
    "stock TRL": (Stock, {"peft_config": on_head()}, ValueError, "adapter to `lm_head` is not sup"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_computed_is_refused_when_the_trainer_is_made(name: str) -> None:
    trainer_class, options, error, says = REFUSED[name]
    if trainer_class is Stock:
        train(Ours, steps=1, **options)
    made: list[Any] = []
    with pytest.raises(error, match=says):
        train(trainer_class, prepare=made.append, **options)
    assert not made
