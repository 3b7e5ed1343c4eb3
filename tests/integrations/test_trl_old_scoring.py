"""Old log-probabilities from the losses of the first optimizer step: stock TRL's training, with less scored."""

from __future__ import annotations

import tempfile
from collections import Counter
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from benchmarks import parity, tiny_run
from grpo_kernels.integrations.trl import FusedGRPOTrainer, FusedLossMixin

# a generation is 2 micro-batches of 8, trained on twice
TWICE: dict[str, Any] = {"num_iterations": 2}
# a generation is 4 micro-batches of 8, and an optimizer step is 2 of them
HALVES: dict[str, Any] = {"steps_per_generation": 4}


class FusedGMPOTrainer(FusedLossMixin, GMPOTrainer):
    pass


def count_scored(trainer: Any, scored: Counter[str]) -> None:
    """Count forwards of the policy without gradient, and the sequences that have a token to score in them."""
    score = trainer._get_per_token_logps_and_entropies

    def counted(model: Any, ids: Any, mask: Any, columns: int, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() and model is trainer.model:
            scored["forwards"] += -(-len(ids) // (kwargs.get("batch_size") or len(ids)))
            scored["sequences"] += int((mask[:, -columns:] != 0).any(dim=1).sum())
        return score(model, ids, mask, columns, *args, **kwargs)

    trainer._get_per_token_logps_and_entropies = counted


def train(
    base: type, steps: int = 4, more: dict[str, Any] | None = None, **options: Any
) -> tuple[tiny_run.History, Counter[str], Any]:
    """(history, what was scored, trainer) of a short run; `more` are arguments of the trainer."""
    scored: Counter[str] = Counter()
    kept = []

    def prepare(trainer: Any) -> None:
        count_scored(trainer, scored)
        kept.append(trainer)

    config_class = GMPOConfig if issubclass(base, GMPOTrainer) else tiny_run.GRPOConfig
    with tempfile.TemporaryDirectory() as folder:
        args = tiny_run.config(folder, steps, config_class=config_class, **options)
        return tiny_run.train(base, args, prepare=prepare, **(more or {})), scored, kept[0]


# name -> (options, forwards that score beforehand in 4 steps: stock, ours)
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "twice": (TWICE, 4, 0),
    "halves": (HALVES, 8, 4),
    "halves, twice": (TWICE | HALVES, 4, 2),
    "no accumulation": ({"gradient_accumulation_steps": 1, "steps_per_generation": 2}, 4, 2),
    "generations that begin within a step": ({"gradient_accumulation_steps": 4, "steps_per_generation": 6}, 18, 8),
    "a last step of the epoch that is shorter": ({"steps_per_generation": 3, "steps": 7}, 15, 7),
    # Adam would make steps of a rounding where the policy is still its reference
    "beta": (TWICE | HALVES | {"beta": 0.04, "optim": "sgd", "learning_rate": 0.05}, 4, 2),
    "off-policy mask": (TWICE | HALVES | {"off_policy_mask_threshold": 0.02}, 4, 2),
    "checkpointing": (HALVES | {"gradient_checkpointing": True}, 8, 4),
    "truncated": (TWICE | HALVES | {"mask_truncated_completions": True, "max_completion_length": 6}, 4, 2),
    "delta": (HALVES | {"delta": 0.99}, 8, 4),
    **{
        f"{name}, {level}": (TWICE | HALVES | parity.loss_options(name, level), 4, 2)
        for name, level in (
            ("grpo", "sequence"), ("bnpo", "token"), ("luspo", "sequence"), ("cispo", "token"), ("vespo", "token"),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_training_is_the_same_and_less_is_scored(name: str) -> None:
    options, stock_forwards, our_forwards = CASES[name]
    more = {"train_dataset": tiny_run.dataset(18)} if "epoch" in name else None
    stock, theirs, _ = train(GRPOTrainer, more=more, **options)
    ours, scored, trainer = train(FusedGRPOTrainer, more=more, **options)
    assert ours.losses == pytest.approx(stock.losses, rel=1e-6, abs=1e-6)
    assert max(parity.differences(stock.steps, ours.steps).values()) <= parity.TOLERANCE
    assert (theirs["forwards"], scored["forwards"]) == (stock_forwards, our_forwards)
    assert trainer.args.gradient_accumulation_steps == options.get("gradient_accumulation_steps", 2)
    if our_forwards:
        dead_are_scored = "vespo" in name or "beta" in name  # phi_seq_mean reads them; the KL term is a gradient
        share = scored["sequences"] / theirs["sequences"] / (our_forwards / stock_forwards)
        assert share > 0.9 if dead_are_scored else 0.2 < share < 0.8


def test_gmpo() -> None:
    stock, theirs, _ = train(GMPOTrainer, **TWICE, **HALVES)
    ours, scored, _ = train(FusedGMPOTrainer, **TWICE, **HALVES)
    assert max(parity.differences(stock.steps, ours.steps).values()) <= parity.TOLERANCE
    assert scored["forwards"] == theirs["forwards"] / 2


@pytest.mark.parametrize("more", [{"kl_estimator": "full"}, {"zero_advantage": "skip"}, {"regroup": True}], ids=str)
def test_other_options(more: dict[str, Any]) -> None:
    """Against the same options with TRL's scoring."""
    options = TWICE | HALVES | ({"beta": 0.04} if "kl_estimator" in more else {"epsilon": 0.02})
    want, theirs, _ = train(FusedGRPOTrainer, more={**more, "fused_sampling_correction": False}, **options)
    got, scored, _ = train(FusedGRPOTrainer, more=more, **options)
    compared = [
        [{k: x for k, x in step.items() if "/" not in k or "clip" in k} for step in y.steps] for y in (want, got)
    ]
    assert max(parity.differences(*compared).values()) <= parity.TOLERANCE
    assert (theirs["forwards"], scored["forwards"]) == (4, 2 + ("regroup" in more))  # which tries the model on a sample


def test_evaluation_scores_nothing_beforehand() -> None:
    options = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8, "steps": 2, **TWICE}
    logs = []
    for base, forwards in (
        (GRPOTrainer, 2),
        (FusedGRPOTrainer, 1),
    ):  # of a batch of an evaluation, the loss's with them
        _, scored, trainer = train(base, more={"eval_dataset": tiny_run.dataset(8)}, **options)
        logs.append([tiny_run.compared(x) for x in trainer.state.log_history if "eval_loss" in x])
        evaluated = 2 * 4  # of 8 prompts, 4 completions each: 4 batches
        assert scored["forwards"] == evaluated * forwards + (2 if base is GRPOTrainer else 0)
    for theirs, ours in zip(*logs, strict=True):
        assert ours == pytest.approx(theirs | {k: x for k, x in ours.items() if k not in theirs}, rel=1e-5, abs=1e-6)


class Reader(FusedGRPOTrainer):
    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        self.seen = batch["old_per_token_logps"]
        return batch


@pytest.mark.parametrize("why", ["False", "dropout", "a subclass that reads the batch"])
def test_trl_scores(why: str) -> None:
    """Without a word, as there is no sampler's correction."""

    def with_dropout(*args: Any, **kwargs: Any) -> Any:
        kwargs["model"].model.layers[0].self_attn.attention_dropout = 0.1
        return FusedGRPOTrainer(*args, **kwargs)

    base = Reader if "subclass" in why else FusedGRPOTrainer
    arguments: dict[str, Any] = {"fused_sampling_correction": False} if why == "False" else {}
    scored: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        trainer_class: Any = with_dropout if why == "dropout" else base
        config = tiny_run.config(folder, 2, **TWICE)
        tiny_run.train(trainer_class, config, prepare=lambda x: count_scored(x, scored), **arguments)
    assert scored["forwards"] == 2


def test_a_policy_that_has_changed_is_an_error() -> None:
    """A loop of one's own that takes optimizer steps without saying so to accelerate."""
    _, _, trainer = train(FusedGRPOTrainer, steps=1, **TWICE)
    batch = {k: x for k, x in trainer._buffered_inputs[0].items() if k != "old_per_token_logps"}
    trainer.model.train()
    with pytest.raises(
        RuntimeError, match=r"old_per_token_logps: expected them .* step 0, got None at step 1; pass fused"
    ):
        trainer._compute_loss(trainer.model, batch)


def test_the_option_is_checked() -> None:
    with pytest.raises(ValueError, match="fused_sampling_correction: expected 'auto', True or False, got 'on'"):
        train(FusedGRPOTrainer, more={"fused_sampling_correction": "on"})
