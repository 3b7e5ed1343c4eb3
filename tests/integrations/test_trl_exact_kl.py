"""GRPO with the KL term over the whole vocabulary, in TRL's trainer: against all logits and plain autograd."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("trl")
import trl
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from benchmarks import parity, tiny_run
from grpo_kernels.integrations.trl import FusedGRPOTrainer, FusedLossMixin, fused_head
from tests.support.trl_all_logits import Checked, Drawn

BETA = 0.3
TWICE = {"num_iterations": 2, "beta": BETA, "learning_rate": 1e-2}


class CheckedTools(Checked):
    """Every fifth id counts as a tool's output."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        return super()._compute_loss(model, {**inputs, "tool_mask": (inputs["completion_ids"] % 5 != 0).long()})


def train(trainer_class: type, steps: int = 2, mixin: type = Checked, **options: Any) -> tuple[Any, Any]:
    """What a short run logged, and its trainer."""
    names = ("kl_estimator", "peft_config", "kind", "eval_dataset")
    more = {name: options.pop(name) for name in names if name in options}
    kept: list[Any] = []

    def prepare(trainer: Any) -> None:
        trainer.kls = []
        kept.append(trainer)

    config_class = GMPOConfig if issubclass(trainer_class, GMPOTrainer) else trl.GRPOConfig
    with tempfile.TemporaryDirectory() as folder:
        args = tiny_run.config(folder, steps, config_class=config_class, **options)
        made = type(trainer_class.__name__, (mixin, trainer_class), {})
        history = tiny_run.train(made, args, prepare=prepare, **more)
    return history, kept[0]


EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}
CASES: dict[str, dict[str, Any]] = {
    "dapo, each batch twice, evaluated": TWICE | EVALUATED | {"eval_dataset": tiny_run.dataset(8)},
    "dapo, more steps a generation": {"steps_per_generation": 4, "beta": BETA, "learning_rate": 1e-2},
    "grpo, entropy bonus": {"loss_type": "grpo", "entropy_coef": 0.01, "temperature": 0.7, **TWICE},
    "luspo, sequence": {"loss_type": "luspo", "importance_sampling_level": "sequence", **TWICE},
    "tools": {"mixin": CheckedTools, **TWICE},
    "adapters": {"peft_config": parity.lora(), **TWICE},
    "a tied, capped head": {"kind": "softcap", **TWICE},
}


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_metric_are_those_of_all_logits(name: str) -> None:
    history, trainer = train(FusedGRPOTrainer, kl_estimator="full", **CASES[name])
    assert len(history.steps) == 2
    assert max(trainer.kls) > 1e-4


def test_the_exact_term_costs_no_product_beyond_that_of_the_reference() -> None:
    # the reference is projected in the loss, once, and not before
    counted = []
    for name in ("k3", "full"):
        with FlopCounterMode(display=False) as counter:
            train(FusedGRPOTrainer, steps=1, mixin=Drawn, kl_estimator=name, beta=BETA)
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1]


class FusedGMPOTrainer(FusedLossMixin, GMPOTrainer):
    pass


REFUSED: dict[str, tuple[type, dict[str, Any], str]] = {
    "name": (FusedGRPOTrainer, {"kl_estimator": "k1"}, "kl_estimator: expected 'k3', which is TRL's own, or 'full'"),
    "no KL term": (
        FusedGRPOTrainer,
        {"beta": 0.0},
        "kl_estimator: expected 'k3' with beta = 0, .* got 'full'; give beta",
    ),
    "loss of its own": (FusedGMPOTrainer, {}, "GMPOTrainer has a loss of its own"),
    "moving reference": (FusedGRPOTrainer, {"sync_ref_model": True}, "sync_ref_model: expected False"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_go_with_is_refused(name: str) -> None:
    trainer_class, options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        train(trainer_class, mixin=Drawn, **{"kl_estimator": "full", "beta": BETA, **options})


def test_a_trl_without_the_known_head_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_head.HEAD, "is_known", lambda: False)
    with pytest.raises(ValueError, match="no fused head that is known"):
        train(FusedGRPOTrainer, mixin=Drawn, kl_estimator="full", beta=BETA)
