"""What TRL's own trainer does not do, against all logits and plain autograd: the exact KL term, and
LoRA on the head."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("trl")
pytest.importorskip("peft")
import peft
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOConfig

from benchmarks import parity, tiny_run
from grpo_kernels.trl import FusedGRPOTrainer, FusedLossMixin
from tests.support.trl_training import (
    EVALUATED,
    AllLogits,
    Checked,
    Curious,
    FusedGMPOTrainer,
    Half,
    Run,
    Written,
    assert_same,
    mixed,
    train,
)

pytestmark = pytest.mark.unit

EXACT = {"kl_estimator": "full", "beta": 0.3, "learning_rate": 1e-2}
TWICE = {"num_iterations": 2, **EXACT}
BONUS = {"entropy_coef": 0.01, "temperature": 0.7, "loss_type": "grpo"}
LUSPO = {"loss_type": "luspo", "importance_sampling_level": "sequence", "kind": "softcap"}
WRITTEN, STOCK = mixed(Written, FusedGRPOTrainer), mixed(Written, GRPOTrainer)


class CheckedTools(Checked):
    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        tool_mask = (inputs["completion_ids"] % 5 != 0).long()
        return super()._compute_loss(model, {**inputs, "tool_mask": tool_mask})


OURS = mixed(Checked, FusedGRPOTrainer)
CHOSEN = mixed(Checked, mixed(FusedLossMixin, mixed(Half, GRPOTrainer)))
HALVES = {"steps_per_generation": 4, "peft_config": parity.lora(), **EXACT}
CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "dapo, twice, evaluated": (OURS, TWICE | EVALUATED | {"eval_dataset": tiny_run.dataset(8)}),
    "dapo, more steps a generation, adapters": (OURS, HALVES),
    "grpo, entropy bonus": (OURS, TWICE | BONUS),
    "luspo, sequence, a tied, capped head": (OURS, TWICE | LUSPO),
    "tools": (mixed(CheckedTools, FusedGRPOTrainer), TWICE),
    "a subclass below chooses the samples": (CHOSEN, EXACT | {"loss_type": "grpo"}),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_metric_are_those_of_all_logits(name: str) -> None:
    trainer_class, options = CASES[name]
    run = train(trainer_class, **options)
    assert len(run.steps) == 2
    assert max(run.trainer.kls) > 1e-4


def test_the_exact_term_costs_no_product_beyond_that_of_the_reference() -> None:
    # the reference is projected in the loss, once, and not before
    counted = []
    for name in ("k3", "full"):
        with FlopCounterMode(display=False) as counter:
            train(WRITTEN, 1, **EXACT | {"kl_estimator": name})
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1]


def test_scorings_by_others_while_it_generates_are_true_and_change_nothing() -> None:
    # a reward function, say, that scores completions of its own with policy and reference
    stock = train(mixed(Curious, STOCK), 1, beta=0.3)
    plain, ours = (train(cls, 1, **EXACT) for cls in (WRITTEN, mixed(Curious, WRITTEN)))
    want, got = stock.trainer.seen, ours.trainer.seen
    assert len(got) == 4
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert ours.steps == plain.steps
    assert ours.steps[0]["kl"] == 0.0


class Rolled:
    """In front of a trainer: its loss scores the rows in another order first, and keeps that."""

    def _get_per_token_logps_and_entropies(self, model, ids, mask, columns, *args, **kwargs):
        score = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        if torch.is_grad_enabled():
            self.seen = score(model, ids.roll(1, 0), mask.roll(1, 0), columns)[0].detach()
        return score(model, ids, mask, columns, *args, **kwargs)


def test_another_scoring_within_the_loss_is_true_and_changes_nothing() -> None:
    options = {"gradient_accumulation_steps": 1, "steps": 1}
    stock = train(mixed(Rolled, STOCK), beta=0.3, **options)
    plain, ours = (train(cls, **EXACT, **options) for cls in (WRITTEN, mixed(Rolled, OURS)))
    torch.testing.assert_close(ours.trainer.seen, stock.trainer.seen, rtol=1e-5, atol=1e-5)
    assert ours.losses == pytest.approx(plain.losses, rel=1e-6)


def equal(prompts: list[str], **_: Any) -> list[float]:
    return [1.0] * len(prompts)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"peft_config": None},  # all parameters are trained
        {"kl_estimator": "full"},
        {"regroup": True, "tokens_per_forward": 200},
        {"layout": "trim", "num_iterations": 2},
        {"steps_per_generation": 4, "fused_sampling_correction": False},  # scored by TRL
    ],
    ids=str,
)
def test_a_policy_that_is_its_reference_has_no_gradient_of_the_term(options):
    """Not even a rounding, of which Adam would make a full step."""
    options = {"beta": 0.04, "reward_funcs": equal, "peft_config": parity.lora(), **options}
    steps = train(WRITTEN, **options).steps
    assert [(x["grad_norm"], x["kl"]) for x in steps] == [(0.0, 0.0)] * 2


class Reader(FusedGRPOTrainer):
    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        self.read = batch["ref_per_token_logps"]
        return batch


def test_trl_scores_the_reference_for_a_subclass_that_may_read_it() -> None:
    read = train(Reader, beta=0.04, learning_rate=0.0).trainer.read
    assert read.shape == (16, read.shape[1])
    assert (read < 0).any()


def test_a_reference_that_moves_is_scored_when_it_was() -> None:
    options = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
    options |= {"steps": 4, "beta": 0.3, "steps_per_generation": 4, "learning_rate": 1e-2}
    stock, ours = (train(cls, optim="sgd", **options) for cls in (STOCK, WRITTEN))
    assert_same(stock, ours)
    assert ours.steps[-1]["kl"] > 0


def test_what_it_does_not_go_with_is_refused() -> None:
    for trainer_class, options, message in (
        (FusedGMPOTrainer, {"config_class": GMPOConfig}, "GMPOTrainer has a loss of its own"),
        (FusedGRPOTrainer, {"sync_ref_model": True}, "sync_ref_model: expected False"),
    ):
        with pytest.raises(ValueError, match=message):
            train(trainer_class, **EXACT | options)


K3_TWICE = {"num_iterations": 2, "beta": 0.04}
# LoRA on the head, which TRL refuses; both factors random: the adapter counts at once
SHAPE = {"init_lora_weights": False, "task_type": "CAUSAL_LM"}
ON_HEAD = {"r": 4, "target_modules": ["q_proj", "lm_head"], **SHAPE}
on_head = partial(peft.LoraConfig, **ON_HEAD)
PLAIN = mixed(Written, AllLogits)


def trained(trainer_class: type, **options: Any) -> Run:
    return train(trainer_class, **{"optim": "sgd", "learning_rate": 0.1, **options})


def assert_moved_alike(stock: Run, ours: Run) -> None:
    """Everything that was logged, and how far each parameter has gone."""
    assert_same(stock, ours)
    theirs = dict(stock.trainer.model.named_parameters())
    for name, x in ours.trainer.model.named_parameters():
        errors = (x - theirs[name]).abs() - 1e-5 * theirs[name].abs()
        assert errors.max() <= 1e-6, name


ADAPTED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "reference without adapters, two iterations": ("qwen3", {}, K3_TWICE),
    "entropy bonus, frozen bias": ("bias", {}, {"entropy_coef": 0.01}),
    "tied, soft-cap, bias of the adapter": ("softcap", {"lora_bias": True}, {"loss_type": "grpo"}),
}


@pytest.mark.parametrize("name", ADAPTED)
def test_training_is_that_of_all_logits(name: str) -> None:
    kind, shape, options = ADAPTED[name]
    options = {"kind": kind, "peft_config": on_head(**shape), **options}
    assert_moved_alike(*(trained(cls, **options) for cls in (PLAIN, WRITTEN)))


class Adapted:
    """In front of a trainer: its model has an adapter already."""

    def __init__(self, *, model: Any, **kwargs: Any) -> None:
        super().__init__(model=peft.get_peft_model(model, on_head()), **kwargs)


def test_an_adapter_that_is_there_already_is_its_own_reference() -> None:
    """TRL keeps a frozen copy of it for the reference."""
    stock, ours = (trained(mixed(Adapted, cls), **K3_TWICE) for cls in (PLAIN, WRITTEN))
    assert_moved_alike(stock, ours)
    assert "ref" in ours.trainer.model.get_output_embeddings().lora_A
    assert ours.steps[-1]["kl"] > 0
    message = "kl_estimator: expected 'k3' if the reference is a separate adapter"
    with pytest.raises(ValueError, match=message):
        trained(mixed(Adapted, WRITTEN), kl_estimator="full", **K3_TWICE)


def test_a_trained_copy_of_the_head_is_stock_trls() -> None:
    shape = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], **SHAPE}
    options = {"peft_config": peft.LoraConfig(r=4, **shape), **K3_TWICE}
    assert_moved_alike(*(trained(cls, **options) for cls in (STOCK, WRITTEN)))


def test_the_exact_kl_has_the_adapter_in_the_policy_and_not_in_the_reference() -> None:
    options = {"peft_config": on_head(), "kl_estimator": "full", **K3_TWICE}
    kls = trained(OURS, **options).trainer.kls
    assert len(kls) == 4
    assert min(kls) > 1e-3


INDICES = {"target_modules": ["q_proj"], "trainable_token_indices": {"lm_head": [3, 4]}}
OF_INDICES = {"peft_config": peft.LoraConfig(task_type="CAUSAL_LM", **INDICES)}
DORA = {"peft_config": on_head(use_dora=True)}
FP32 = {"peft_config": on_head(), "cast_lm_head_to_fp32": True}
REFUSED: dict[str, tuple[type, dict[str, Any], type[Exception], str]] = {
    "token indices": (WRITTEN, OF_INDICES, TypeError, r"^lm_head: expected .*; train it by"),
    "DoRA": (WRITTEN, DORA, ValueError, "expected adapters that are plain LoRA, got Dora"),
    "fp32 head": (WRITTEN, FP32, ValueError, "cast_lm_head_to_fp32: expected False"),
    "stock TRL": (STOCK, {"peft_config": on_head()}, ValueError, "adapter to `lm_head` is not sup"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_computed_is_refused_when_the_trainer_is_made(name: str) -> None:
    trainer_class, options, error, says = REFUSED[name]
    if trainer_class is STOCK:
        trained(WRITTEN, steps=1, **options)
    made: list[Any] = []
    with pytest.raises(error, match=says):
        trained(trainer_class, prepare=made.append, **options)
    assert not made
