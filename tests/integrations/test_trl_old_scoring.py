"""Old log-probabilities from the losses of the first optimizer step: stock TRL's training, with less scored."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("trl")
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from benchmarks import parity, tiny_run
from grpo_kernels.trl import FusedGRPOTrainer
from tests.support.trl_training import (
    FusedGMPOTrainer,
    Run,
    assert_same,
    count_scored,
    evaluations,
    train,
)

# a generation is 2 micro-batches of 8, trained on twice
TWICE: dict[str, Any] = {"num_iterations": 2}
# a generation is 4 micro-batches of 8, and an optimizer step is 2 of them
HALVES: dict[str, Any] = {"steps_per_generation": 4}
BOTH = TWICE | HALVES


def counted(base: type, **options: Any) -> Run:
    return train(base, prepare=count_scored, **{"steps": 4, **options})


# name -> (options, forwards that score beforehand in 4 steps: stock, ours)
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "twice": (TWICE, 4, 0),
    "halves, checkpointing, delta": (HALVES | {"gradient_checkpointing": True, "delta": 0.99}, 8, 4),
    "no accumulation": ({"gradient_accumulation_steps": 1, "steps_per_generation": 2}, 4, 2),
    "generations that begin within a step": ({"gradient_accumulation_steps": 4, "steps_per_generation": 6}, 18, 8),
    "a last step of the epoch that is shorter": (
        {"steps_per_generation": 3, "steps": 7, "train_dataset": tiny_run.dataset(18)}, 15, 7
    ),
    # Adam would make steps of a rounding where the policy is still its reference
    "beta": (BOTH | {"beta": 0.04, "optim": "sgd", "learning_rate": 0.05}, 4, 2),
    "grpo, sequence, truncated": (
        BOTH | parity.loss_options("grpo", "sequence", mask_truncated_completions=True, max_completion_length=6), 4, 2
    ),
    "bnpo, off-policy mask": (BOTH | parity.loss_options("bnpo", off_policy_mask_threshold=0.02), 4, 2),
    "luspo, sequence": (BOTH | parity.loss_options("luspo", "sequence"), 4, 2),
    "cispo": (BOTH | parity.loss_options("cispo"), 4, 2),
    "vespo": (BOTH | parity.loss_options("vespo"), 4, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_training_is_the_same_and_less_is_scored(name: str) -> None:
    options, stock_forwards, our_forwards = CASES[name]
    stock, ours = counted(GRPOTrainer, **options), counted(FusedGRPOTrainer, **options)
    assert_same(stock, ours)
    theirs, scored = stock.trainer.scored, ours.trainer.scored
    assert (theirs["forwards"], scored["forwards"]) == (stock_forwards, our_forwards)
    assert ours.trainer.args.gradient_accumulation_steps == options.get(
        "gradient_accumulation_steps", 2
    )
    if our_forwards:
        dead_are_scored = name in (
            "vespo",
            "beta",
        )  # phi_seq_mean reads them; the KL term is a gradient
        share = scored["sequences"] / theirs["sequences"] / (our_forwards / stock_forwards)
        assert share > 0.9 if dead_are_scored else 0.2 < share < 0.8


def test_gmpo() -> None:
    stock, ours = (
        counted(cls, config_class=GMPOConfig, **BOTH) for cls in (GMPOTrainer, FusedGMPOTrainer)
    )
    assert_same(stock, ours)
    assert ours.trainer.scored["forwards"] == stock.trainer.scored["forwards"] / 2


@pytest.mark.parametrize(
    "more", [{"kl_estimator": "full"}, {"zero_advantage": "skip"}, {"regroup": True}], ids=str
)
def test_other_options(more: dict[str, Any]) -> None:
    """Against the same options with TRL's scoring."""
    options = BOTH | more | ({"beta": 0.04} if "kl_estimator" in more else {"epsilon": 0.02})
    want, got = (
        counted(FusedGRPOTrainer, fused_sampling_correction=False, **options),
        counted(FusedGRPOTrainer, **options),
    )
    compared = [
        [{k: x for k, x in step.items() if "/" not in k or "clip" in k} for step in run.steps]
        for run in (want, got)
    ]
    assert max(parity.differences(*compared).values()) <= parity.TOLERANCE
    assert want.trainer.scored["forwards"] == 4
    assert got.trainer.scored["forwards"] == 2 + (
        "regroup" in more
    )  # which tries the model on a sample


def test_evaluation_scores_nothing_beforehand() -> None:
    options = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 8,
        "steps": 2,
        **TWICE,
    }
    stock, ours = (
        counted(x, eval_dataset=tiny_run.dataset(8), **options)
        for x in (GRPOTrainer, FusedGRPOTrainer)
    )
    batches = 2 * 4  # of 8 prompts, 4 completions each, in each of two evaluations
    assert stock.trainer.scored["forwards"] == 2 * batches + 2  # the loss's with them
    assert ours.trainer.scored["forwards"] == batches
    for want, got in zip(evaluations(stock.trainer), evaluations(ours.trainer), strict=True):
        assert got == pytest.approx(
            want | {k: x for k, x in got.items() if k not in want}, rel=1e-5, abs=1e-6
        )


class Reader(FusedGRPOTrainer):
    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = super()._generate_and_score_completions(inputs)
        self.seen = batch["old_per_token_logps"]
        return batch


def with_dropout(*args: Any, **kwargs: Any) -> FusedGRPOTrainer:
    kwargs["model"].model.layers[0].self_attn.attention_dropout = 0.1
    return FusedGRPOTrainer(*args, **kwargs)


@pytest.mark.parametrize(
    ("base", "arguments"),
    [(FusedGRPOTrainer, {"fused_sampling_correction": False}), (with_dropout, {}), (Reader, {})],
    ids=["False", "dropout", "a subclass that reads the batch"],
)
def test_trl_scores(base: Any, arguments: dict[str, Any]) -> None:
    """Without a word, as there is no sampler's correction."""
    assert counted(base, steps=2, **TWICE, **arguments).trainer.scored["forwards"] == 2


def test_a_policy_that_has_changed_is_an_error() -> None:
    """A loop of one's own that takes optimizer steps without saying so to accelerate."""
    trainer = train(FusedGRPOTrainer, steps=1, **TWICE).trainer
    batch = {k: x for k, x in trainer._buffered_inputs[0].items() if k != "old_per_token_logps"}
    trainer.model.train()
    with pytest.raises(
        RuntimeError,
        match=r"old_per_token_logps: expected them .* step 0, got None at step 1; pass fused",
    ):
        trainer._compute_loss(trainer.model, batch)


def test_the_option_is_checked() -> None:
    with pytest.raises(
        ValueError, match="fused_sampling_correction: expected 'auto', True or False, got 'on'"
    ):
        train(FusedGRPOTrainer, fused_sampling_correction="on")
