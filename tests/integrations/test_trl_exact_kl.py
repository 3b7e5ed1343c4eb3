"""GRPO with the KL term over the whole vocabulary, in TRL's trainer: against all logits and plain autograd."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("trl")
import trl
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from benchmarks import parity, tiny_models, tiny_run
from grpo_kernels.integrations.trl import FusedGRPOTrainer, FusedLossMixin
from grpo_kernels.integrations.trl import hook as trl_hook

BETA = 0.3
TWICE = {"num_iterations": 2, "beta": BETA, "learning_rate": 1e-2}


class Drawn:
    """In front of a trainer: completions that no model has to write."""

    def _generate_single_turn(self, prompts: list[list[int]], *_: Any, **__: Any) -> tuple[list[Any], None]:
        draw = torch.Generator().manual_seed(17 + self.state.global_step)  # type: ignore[attr-defined]
        lengths = torch.randint(2, 7, (len(prompts),), generator=draw).tolist()
        return [torch.randint(3, tiny_models.VOCAB, (n,), generator=draw).tolist() for n in lengths], None


class Checked(Drawn):
    """Each loss, its gradient and its KL metric against all logits of policy and reference."""

    accelerator: Any
    args: Any
    ref_model: Any
    kls: list[float]
    policy_loss: float

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        loss: Tensor = super()._compute_loss(model, inputs)  # type: ignore[misc]
        want, kl = self.plain(model, inputs)
        metrics = self._metrics["train" if model.training else "eval"]  # type: ignore[attr-defined]
        torch.testing.assert_close(loss.detach(), want.detach(), rtol=1e-5, atol=1e-6)
        assert metrics["kl"][-1] == pytest.approx(kl, rel=1e-5, abs=1e-7)
        if self.args.entropy_coef:
            assert metrics["policy_loss"][-1] == pytest.approx(self.policy_loss, rel=1e-5, abs=1e-6)
        self.kls.append(kl)
        if torch.is_grad_enabled():
            trained = [x for x in model.parameters() if x.requires_grad]
            found, wanted = (torch.autograd.grad(x, trained, retain_graph=True) for x in (loss, want))
            largest = max(float(x.abs().max()) for x in wanted)
            for got, right in zip(found, wanted, strict=True):
                assert float((got - right).abs().max()) <= 2e-5 * largest
        return loss

    def plain(self, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, float]:
        ids, mask = inputs["completion_ids"], inputs["completion_mask"]
        everything = torch.cat([inputs["prompt_ids"], ids], 1)
        attended = torch.cat([inputs["prompt_mask"], mask], 1)

        def log_probs(of: Any) -> Tensor:
            logits = of(input_ids=everything, attention_mask=attended).logits / self.args.temperature
            return logits[:, -ids.shape[1] - 1 : -1].log_softmax(-1)

        policy = log_probs(model)
        with torch.no_grad():
            if self.ref_model is not None:
                reference = log_probs(self.ref_model)
            else:
                with model.disable_adapter():
                    reference = log_probs(model)
        divergence = (policy.exp() * (policy - reference)).sum(-1)
        logps = policy.gather(-1, ids[..., None])[..., 0]
        old = inputs.get("old_per_token_logps", logps.detach())
        counted = mask * inputs.get("tool_mask", 1)
        ratio = (logps - old).exp()
        if self.args.importance_sampling_level == "sequence":
            ratio = ((logps - old) * counted).sum(1, keepdim=True).div(counted.sum(1, keepdim=True)).exp()
        advantages = inputs["advantages"][:, None]
        clipped = ratio.clamp(1 - self.args.epsilon, 1 + self.args.epsilon)
        per_token = -torch.minimum(ratio * advantages, clipped * advantages) + self.args.beta * divergence
        trains = model.training
        accumulated = self.current_gradient_accumulation_steps if trains else 1  # type: ignore[attr-defined]
        if self.args.loss_type == "dapo":
            items = inputs["num_items_in_batch"] / (self.args.steps_per_generation if trains else 1)
            loss = (per_token * counted).sum() / items
        elif self.args.loss_type == "grpo":
            loss = ((per_token * counted).sum(1) / counted.sum(1)).mean()
        else:
            loss = (per_token * counted).sum(1).mean()
        self.policy_loss = float(loss)
        entropies = -(policy.exp() * policy).sum(-1)
        bonus = self.args.entropy_coef * (entropies * counted).sum() / counted.sum()
        return (loss - bonus) / accumulated, float((divergence * counted).sum() / counted.sum())


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


def test_without_beta_nothing_is_kept() -> None:
    stock, _ = train(trl.GRPOTrainer, steps=1, mixin=Drawn)
    ours, trainer = train(FusedGRPOTrainer, steps=1, mixin=Drawn, kl_estimator="full")
    assert max(parity.differences(stock.steps, ours.steps).values()) <= parity.TOLERANCE
    assert trainer._reference_head is None


class FusedGMPOTrainer(FusedLossMixin, GMPOTrainer):
    pass


REFUSED: dict[str, tuple[type, dict[str, Any], str]] = {
    "name": (FusedGRPOTrainer, {"kl_estimator": "k1"}, "kl_estimator: expected 'k3', which is TRL's own, or 'full'"),
    "loss of its own": (FusedGMPOTrainer, {}, "GMPOTrainer has a loss of its own"),
    "moving reference": (FusedGRPOTrainer, {"sync_ref_model": True}, "sync_ref_model: expected False"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_go_with_is_refused(name: str) -> None:
    trainer_class, options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        train(trainer_class, mixin=Drawn, **{"kl_estimator": "full", "beta": BETA, **options})


def test_a_trl_without_the_known_head_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl_hook, "compatible", lambda: False)
    with pytest.raises(ValueError, match="no fused head that is known"):
        train(FusedGRPOTrainer, mixin=Drawn, kl_estimator="full", beta=BETA)
