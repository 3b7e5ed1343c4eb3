"""GRPO with the KL term over the whole vocabulary, in TRL's trainer: against all logits and plain autograd."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("trl")
from trl.experimental.gmpo import GMPOConfig

from benchmarks import parity, tiny_run
from grpo_kernels.integrations.trl import FusedGRPOTrainer, fused_head
from tests.support.trl_all_logits import Checked
from tests.support.trl_training import FusedGMPOTrainer, Written, mixed, train

EXACT = {"kl_estimator": "full", "beta": 0.3, "learning_rate": 1e-2}
TWICE = {"num_iterations": 2, **EXACT}


class CheckedTools(Checked):
    """Every fifth id counts as a tool's output."""

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        return super()._compute_loss(model, {**inputs, "tool_mask": (inputs["completion_ids"] % 5 != 0).long()})


EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}
CASES: dict[str, dict[str, Any]] = {
    "dapo, each batch twice, evaluated": TWICE | EVALUATED | {"eval_dataset": tiny_run.dataset(8)},
    "dapo, more steps a generation, adapters": {"steps_per_generation": 4, "peft_config": parity.lora(), **EXACT},
    "grpo, entropy bonus": {"loss_type": "grpo", "entropy_coef": 0.01, "temperature": 0.7, **TWICE},
    "luspo, sequence, a tied, capped head": {
        "loss_type": "luspo", "importance_sampling_level": "sequence", "model": "softcap", **TWICE
    },
    "tools": {"mixin": CheckedTools, **TWICE},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_metric_are_those_of_all_logits(name: str) -> None:
    options = {**CASES[name]}
    run = train(mixed(options.pop("mixin", Checked), FusedGRPOTrainer), **options)
    assert len(run.steps) == 2
    assert max(run.trainer.kls) > 1e-4


def test_the_exact_term_costs_no_product_beyond_that_of_the_reference() -> None:
    # the reference is projected in the loss, once, and not before
    counted = []
    for name in ("k3", "full"):
        with FlopCounterMode(display=False) as counter:
            train(mixed(Written, FusedGRPOTrainer), 1, **EXACT | {"kl_estimator": name})
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1]


REFUSED: dict[str, tuple[type, dict[str, Any], str]] = {
    "name": (FusedGRPOTrainer, {"kl_estimator": "k1"}, "kl_estimator: expected 'k3', which is TRL's own, or 'full'"),
    "no KL term": (FusedGRPOTrainer, {"beta": 0.0}, "kl_estimator: expected 'k3' with beta = 0, .* got 'full'; give"),
    "loss of its own": (FusedGMPOTrainer, {"config_class": GMPOConfig}, "GMPOTrainer has a loss of its own"),
    "moving reference": (FusedGRPOTrainer, {"sync_ref_model": True}, "sync_ref_model: expected False"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_go_with_is_refused(name: str) -> None:
    trainer_class, options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        train(trainer_class, **EXACT | options)


def test_a_trl_without_the_known_head_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_head.HEAD, "is_known", lambda: False)
    with pytest.raises(ValueError, match="no fused head that is known"):
        train(FusedGRPOTrainer, **EXACT)
