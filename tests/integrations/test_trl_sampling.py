"""TRL's correction for its sampler without the forward it takes: same losses and metrics as stock TRL, fewer FLOPs.

The sampler is a stand-in for vLLM: it draws ids, and scores them with the policy and some noise.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("trl")
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from benchmarks import parity, tiny_run
from grpo_kernels.trl import FusedGRPOTrainer, old_scoring
from tests.support.case_builder import seeded
from tests.support.trl_training import (
    FusedGMPOTrainer,
    Run,
    Written,
    assert_same,
    count_scored,
    evaluations,
    mixed,
    train,
)

CLIP = {"vllm_importance_sampling_clip_max": 1.3, "vllm_importance_sampling_clip_min": 0.8}


class Sampler(Written):
    """In front of a trainer: what it generates, as from vLLM."""

    def _generate_single_turn(
        self, prompts: list[list[int]], *_: Any, **__: Any
    ) -> tuple[list[Any], list[Any]]:
        completions, _ = super()._generate_single_turn(prompts)
        noise, logps = seeded("noise of the sampler"), []
        for prompt, ids in zip(prompts, completions, strict=True):
            with torch.no_grad():
                logits = self.model(input_ids=torch.tensor([[*prompt, *ids]])).logits  # type: ignore[attr-defined]
            scores = (
                logits[0, len(prompt) - 1 : -1]
                .log_softmax(-1)
                .gather(1, torch.tensor(ids)[:, None])[:, 0]
            )
            noisy = scores + 0.15 * torch.randn(len(ids), generator=noise)
            logps.append(
                [None if i == 5 else x for i, x in enumerate(noisy.tolist())]
            )  # None: could not score it
        return completions, logps


class Tools(Sampler):
    """Every third token is a tool's output."""

    def _generate(self, prompts: list[Any]) -> Any:
        prompt_ids, ids, _, *others = super()._generate(prompts)  # type: ignore[misc]
        return prompt_ids, ids, [[int(i % 3 != 1) for i, _ in enumerate(x)] for x in ids], *others


def prepare(trainer: Any) -> None:
    trainer.use_vllm = True
    count_scored(trainer)


def sampled(base: type, steps: int = 1, mixin: type = Sampler, **options: Any) -> Run:
    """A short run with the stand-in."""
    return train(mixed(mixin, base), steps, prepare=prepare, **CLIP | options)


def mode(name: str, **more: Any) -> dict[str, Any]:
    return {"vllm_importance_sampling_mode": name, **more}


GSPO = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8}
CASES: dict[str, dict[str, Any]] = {
    "token_truncate": mode("token_truncate", steps=2),
    "token_mask, tools, vespo": mode(
        "token_mask", loss_type="vespo", entropy_coef=0.01, mixin=Tools
    ),
    "sequence_truncate, GSPO, beta": mode("sequence_truncate", beta=0.04, **GSPO),
    "sequence_mask, off-policy mask, evaluation": mode(
        "sequence_mask",
        off_policy_mask_threshold=0.02,
        eval_dataset=tiny_run.dataset(8),
        **EVALUATED,
    ),
    "the batch twice": mode(
        "token_truncate", gradient_accumulation_steps=4, num_iterations=2, steps_per_generation=2
    ),
    "the batch twice, two steps": mode("sequence_truncate", num_iterations=2, steps=4),
}
# an optimizer step takes half of the generated batch: the other half has to be scored
HALVES: dict[str, dict[str, Any]] = {
    "halves, twice": mode("sequence_mask", steps_per_generation=4, num_iterations=2, steps=4),
    "halves, tools, vespo": mode(  # Adam would make steps of a rounding
        "token_truncate",
        steps_per_generation=4,
        mixin=Tools,
        loss_type="vespo",
        steps=2,
        optim="sgd",
        learning_rate=0.05,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_training_is_the_same(name: str) -> None:
    """Every logged value, also of evaluations; nothing is scored beforehand but the reference."""
    stock, ours = (sampled(base, **CASES[name]) for base in (GRPOTrainer, FusedGRPOTrainer))
    assert_same(stock, ours)
    measured = "sampling/importance_sampling_ratio/mean"  # in steps with a generation
    ratios = [step[measured] for step in ours.steps if measured in step]
    assert ratios and all(0.1 < x < 1.5 and x != 1 for x in ratios)
    wanted, got = (
        [
            {k: x for k, x in log.items() if k.startswith("eval_")}
            for log in evaluations(run.trainer)
        ]
        for run in (stock, ours)
    )
    assert got == [pytest.approx(x, rel=1e-5, abs=1e-6) for x in wanted]
    assert any(got) == ("evaluation" in name)
    forwards, theirs = ours.trainer.scored["forwards"], stock.trainer.scored["forwards"]
    assert (forwards > 0) == ("evaluation" in name)  # which is without gradient itself
    assert forwards < theirs
    assert ours.trainer.vllm_importance_sampling_correction


def test_a_forward_of_the_model_is_saved() -> None:
    """Counted: exactly what the scoring beforehand took."""
    flops, scored = {}, []

    def count(trainer: Any) -> None:
        trainer.use_vllm, score = True, trainer._get_per_token_logps_and_entropies
        ids = torch.ones(1, 3, dtype=torch.long)
        with torch.no_grad():  # a first call measures the head's constants
            score(trainer.model, ids, ids, 1)

        def counted(*args: Any, **kwargs: Any) -> Any:
            with FlopCounterMode(display=False) as inner:
                result = score(*args, **kwargs)
            if not torch.is_grad_enabled():
                scored.append(inner.get_total_flops())
            return result

        trainer._get_per_token_logps_and_entropies = counted

    for fused in (True, False):
        with FlopCounterMode(display=False) as counter:
            padded = {
                "layout": "padded",
                "zero_advantage": "train",
            }  # nothing is tried on a model then
            options = {
                "fused_sampling_correction": fused,
                **padded,
                **CLIP,
                **mode("token_truncate"),
            }
            train(mixed(Sampler, FusedGRPOTrainer), 1, prepare=count, **options)
        flops[fused] = counter.get_total_flops()
        assert bool(scored) is not fused
    assert flops[False] - flops[True] == sum(scored) > 0.15 * flops[False]


@pytest.mark.parametrize("name", HALVES)
def test_samples_of_later_steps_are_scored(name: str) -> None:
    """All of them, live or not: the metrics read them."""
    stock, ours = (sampled(base, **HALVES[name]) for base in (GRPOTrainer, FusedGRPOTrainer))
    # VESPO's weights are powers of ratios: after a step of 0.05 they make 1.4e-6 of the roundings of the first
    assert_same(stock, ours, parity.TOLERANCE if "vespo" in name else None)
    theirs = stock.trainer.scored
    assert theirs["sequences"] > 0
    assert ours.trainer.scored == {key: x / 2 for key, x in theirs.items()}


@pytest.mark.parametrize("name", ["token_truncate", "sequence_mask"])
def test_regrouped_samples_have_the_same_sampler_metrics(name: str) -> None:
    """Micro-batches that are left without samples count for nothing."""
    metrics = []
    for more in ({}, {"regroup": True, "tokens_per_forward": 10_000}):
        run = sampled(FusedGRPOTrainer, loss_type="grpo", **more, **mode(name))
        metrics.append(
            [{k: x for k, x in step.items() if k.startswith("sampling/")} for step in run.steps]
        )
        assert any("has_no_samples" in batch for batch in run.trainer._buffered_inputs) is bool(
            more
        )
    assert metrics[0][0]
    assert max(parity.differences(*metrics).values()) <= parity.TOLERANCE


def test_gmpo_needs_no_ratio() -> None:
    """TRL's GMPO does not read it; its metrics are logged all the same."""
    options = mode("token_mask", config_class=GMPOConfig)
    stock, ours = (sampled(base, **options) for base in (GMPOTrainer, FusedGMPOTrainer))
    assert ours.trainer.scored["forwards"] == 0
    assert_same(stock, ours)


def test_a_sampler_without_log_probabilities_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^sampling_per_token_logps: expected .+, got None"):
        sampled(FusedGRPOTrainer, mixin=Written, fused_sampling_correction=True)


@pytest.mark.parametrize("corrects", [True, False])
def test_a_correction_without_a_sampler_is_refused(corrects: bool) -> None:
    options = {"vllm_importance_sampling_correction": corrects, "fused_sampling_correction": True}
    with pytest.raises(
        ValueError, match=r"^fused_sampling_correction: expected False without a sampler"
    ):
        train(FusedGRPOTrainer, **options)


class Reader(FusedGRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        assert "importance_sampling_ratio" in inputs or not self.vllm_importance_sampling_correction
        return super()._compute_loss(model, inputs)


class WithDropout(FusedGRPOTrainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model.model.layers[0].mlp.act_fn = torch.nn.Sequential(
            torch.nn.SiLU(), torch.nn.Dropout(0.1)
        )


SKIP, NO_SKIP = (
    {"zero_advantage": "skip"},
    "sampling/* metrics read the sequences that zero_advantage=",
)
FUSED, CORRECTED = "fused_sampling_correction", "vllm_importance_sampling_correction"


@pytest.mark.parametrize(
    ("base", "options", "scores", "said"),
    [
        (FusedGRPOTrainer, SKIP, True, NO_SKIP),
        (Reader, {}, True, "Reader._compute_loss may read its result; pass True if not"),
        (
            WithDropout,
            {},
            True,
            "dropout, or noise, makes log-probabilities random; set it to 0, or pass True",
        ),
        (WithDropout, {FUSED: True}, False, None),
        (Reader, {FUSED: False}, True, None),
        (Reader, {CORRECTED: False}, False, None),
    ],
    ids=[
        "skip",
        "a subclass",
        "dropout",
        "dropout, asked for",
        "not asked for",
        "nothing to correct",
    ],
)
def test_where_it_does_not_apply_trl_scores_and_it_is_said(
    base: type,
    options: dict[str, Any],
    scores: bool,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warned: list[str] = []
    monkeypatch.setattr(old_scoring, "warn_once", warned.append)
    assert (sampled(base, **options).trainer.scored["forwards"] > 0) == scores
    assert [said is not None and said in x for x in warned] == [True] * (said is not None), warned
