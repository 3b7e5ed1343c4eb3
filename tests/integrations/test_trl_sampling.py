"""TRL's correction for its sampler without the forward it takes: same losses and metrics as stock TRL, fewer FLOPs.

The sampler is a stand-in for vLLM: it draws ids, and scores them with the policy and some noise.
"""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("trl")
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from benchmarks import parity, tiny_models, tiny_run
from grpo_kernels.integrations.transformers import exactness
from grpo_kernels.integrations.trl import FusedGRPOTrainer, FusedLossMixin, old_scoring

CLIP = {"vllm_importance_sampling_clip_max": 1.3, "vllm_importance_sampling_clip_min": 0.8}


class Sampler:
    """In front of a trainer: what it generates, as from vLLM."""

    def _generate_single_turn(self, prompts: list[list[int]], *_: Any, **__: Any) -> tuple[list[Any], list[Any]]:
        draw = torch.Generator().manual_seed(17 + self.state.global_step)  # type: ignore[attr-defined]
        completions, logps = [], []
        for prompt in prompts:
            length = int(torch.randint(2, 9, (), generator=draw))
            ids = torch.randint(3, tiny_models.VOCAB, (length,), generator=draw)
            with torch.no_grad():
                text = torch.tensor([[*prompt, *ids.tolist()]])
                logits = self.model(input_ids=text).logits  # type: ignore[attr-defined]
                scores = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            noisy = scores.gather(1, ids[:, None])[:, 0] + 0.15 * torch.randn(length, generator=draw)
            logps.append([None if i == 5 else x for i, x in enumerate(noisy.tolist())])  # None: could not score it
            completions.append(ids.tolist())
        return completions, logps


class Tools(Sampler):
    """Every third token is a tool's output."""

    def _generate(self, prompts: list[Any]) -> Any:
        prompt_ids, ids, _, *others = super()._generate(prompts)  # type: ignore[misc]
        return prompt_ids, ids, [[int(i % 3 != 1) for i, _ in enumerate(x)] for x in ids], *others


TRIED = [0]  # FLOPs of the trials of models' first calls


@pytest.fixture(autouse=True)
def trials_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    try_all = exactness._by_trial

    def counted(*args: Any) -> Any:
        with FlopCounterMode(display=False) as counter:
            found = try_all(*args)
        TRIED[0] += counter.get_total_flops()
        return found

    monkeypatch.setattr(exactness, "_by_trial", counted)


def count_scored(trainer: Any) -> None:
    """Count what `trainer` scores without gradient.

    `trainer.scored` are its FLOPs, but for the trial of its first call; `trainer.sequences` have a token to score.
    """
    trainer.scored, trainer.sequences, score = 0, 0, trainer._get_per_token_logps_and_entropies

    def counted(model: Any, ids: Any, mask: Any, columns: int, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            return score(model, ids, mask, columns, *args, **kwargs)
        before = TRIED[0]
        with FlopCounterMode(display=False) as counter:
            found = score(model, ids, mask, columns, *args, **kwargs)
        trainer.scored += counter.get_total_flops() - (TRIED[0] - before)
        trainer.sequences += int((mask[:, -columns:] != 0).any(dim=1).sum())
        return found

    trainer._get_per_token_logps_and_entropies = counted


def train(base: type, steps: int = 1, mixin: type = Sampler, **options: Any) -> tuple[tiny_run.History, Any]:
    """A short run with the stand-in; the history and the trainer. `fused` is the option's value; `more` are others."""
    more = {"fused_sampling_correction": options.pop("fused")} if "fused" in options else {}
    more |= options.pop("more", {})
    if options.get("eval_strategy"):
        more["eval_dataset"] = tiny_run.dataset(8)
    kept = []

    def prepare(trainer: Any) -> None:
        trainer.use_vllm = True
        count_scored(trainer)
        kept.append(trainer)

    config_class = GMPOConfig if issubclass(base, GMPOTrainer) else tiny_run.GRPOConfig
    with tempfile.TemporaryDirectory() as folder:
        args = tiny_run.config(folder, steps, config_class=config_class, **CLIP | options)
        history = tiny_run.train(type(base.__name__, (mixin, base), {}), args, prepare=prepare, **more)
    return history, kept[0]


def mode(name: str, **more: Any) -> dict[str, Any]:
    return {"vllm_importance_sampling_mode": name, **more}


CASES: dict[str, dict[str, Any]] = {
    "token_truncate": mode("token_truncate", steps=2),
    "token_mask, vespo": mode("token_mask", loss_type="vespo", entropy_coef=0.01),
    "sequence_truncate, GSPO, beta": mode(
        "sequence_truncate", loss_type="grpo", importance_sampling_level="sequence", beta=0.04
    ),
    "sequence_mask, off-policy mask, evaluation": mode(
        "sequence_mask",
        off_policy_mask_threshold=0.02,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=8,
    ),
    "tools": mode("token_mask", mixin=Tools),
    "the batch twice": mode("token_truncate", gradient_accumulation_steps=4, num_iterations=2, steps_per_generation=2),
    "the batch twice, two steps": mode("sequence_truncate", num_iterations=2, steps=4),
}
# an optimizer step takes half of the generated batch: the other half has to be scored
HALVES: dict[str, dict[str, Any]] = {
    "halves": mode("token_mask", steps_per_generation=4, steps=2),
    "halves, twice": mode("sequence_mask", steps_per_generation=4, num_iterations=2, steps=4),
    "halves, tools, vespo": mode("token_truncate", steps_per_generation=4, steps=2, mixin=Tools, loss_type="vespo"),
}


@pytest.mark.parametrize("name", CASES)
def test_training_is_the_same(name: str) -> None:
    """Every logged value, also of evaluations; nothing is scored beforehand but the reference."""
    stock, theirs = train(GRPOTrainer, **CASES[name])
    ours, trainer = train(FusedGRPOTrainer, **CASES[name])
    assert ours.losses == pytest.approx(stock.losses, rel=1e-6, abs=1e-6)
    assert max(parity.differences(stock.steps, ours.steps).values()) <= parity.TOLERANCE
    measured = "sampling/importance_sampling_ratio/mean"  # in steps with a generation
    ratios = [step[measured] for step in ours.steps if measured in step]
    assert ratios and all(0.1 < x < 1.5 and x != 1 for x in ratios)
    evaluations = [
        [{k: x for k, x in tiny_run.compared(log).items() if k.startswith("eval_")} for log in t.state.log_history]
        for t in (theirs, trainer)
    ]
    assert [*filter(None, evaluations[0])] == [pytest.approx(x, rel=1e-5, abs=1e-6) for x in evaluations[1] if x]
    assert any(evaluations[1]) == ("evaluation" in name)
    assert (trainer.scored > 0) == any(x in name for x in ("beta", "evaluation"))  # which is without gradient itself
    assert trainer.scored < theirs.scored
    assert trainer.vllm_importance_sampling_correction


def test_a_forward_of_the_model_is_saved() -> None:
    """Counted: exactly what the scoring beforehand took."""
    flops, scored = {}, {}
    for fused in (False, True):
        with FlopCounterMode(display=False) as counter:
            padded = {"layout": "padded", "zero_advantage": "train"}  # nothing is tried on a model then
            _, trainer = train(FusedGRPOTrainer, fused=fused, more=padded, **mode("token_truncate"))
        flops[fused], scored[fused] = counter.get_total_flops(), trainer.scored
    assert scored[True] == 0
    assert flops[False] - flops[True] == scored[False] > 0.15 * flops[False]


@pytest.mark.parametrize("name", HALVES)
def test_samples_of_later_steps_are_scored(name: str) -> None:
    """All of them, live or not: the metrics read them."""
    (stock, theirs), (ours, trainer) = train(GRPOTrainer, **HALVES[name]), train(FusedGRPOTrainer, **HALVES[name])
    assert ours.losses == pytest.approx(stock.losses, rel=1e-6, abs=1e-6)
    assert max(parity.differences(stock.steps, ours.steps).values()) <= parity.TOLERANCE
    assert trainer.sequences == theirs.sequences / 2
    assert 0 < trainer.scored <= theirs.scored / 2


@pytest.mark.parametrize("name", ["token_truncate", "sequence_mask"])
def test_regrouped_samples_have_the_same_sampler_metrics(name: str) -> None:
    """Micro-batches that are left without samples count for nothing."""
    found = []
    for more in ({}, {"regroup": True, "tokens_per_forward": 10_000}):
        history, trainer = train(FusedGRPOTrainer, more=more, loss_type="grpo", **mode(name))
        found.append([{k: x for k, x in step.items() if k.startswith("sampling/")} for step in history.steps])
        assert any("has_no_samples" in batch for batch in trainer._buffered_inputs) is bool(more)
    assert found[0][0]
    assert max(parity.differences(*found).values()) <= parity.TOLERANCE


def test_gmpo_needs_no_ratio() -> None:
    """TRL's GMPO does not read it; its metrics are logged all the same."""

    class FusedGMPOTrainer(FusedLossMixin, GMPOTrainer):
        pass

    stock, _ = train(GMPOTrainer, **mode("token_mask"))
    ours, trainer = train(FusedGMPOTrainer, **mode("token_mask"))
    assert trainer.scored == 0
    assert max(parity.differences(stock.steps, ours.steps).values()) <= parity.TOLERANCE


def test_a_sampler_without_log_probabilities_is_an_error() -> None:
    class Silent(Sampler):
        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            return super()._generate_single_turn(*args, **kwargs)[0], None

    with pytest.raises(ValueError, match=r"^sampling_per_token_logps: expected .+, got None"):
        train(FusedGRPOTrainer, fused=True, mixin=Silent)


@pytest.mark.parametrize("corrects", [True, False])
def test_a_correction_without_a_sampler_is_refused(corrects: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        args = tiny_run.config(folder, 1, vllm_importance_sampling_correction=corrects)
        with pytest.raises(ValueError, match=r"^fused_sampling_correction: expected False without a sampler"):
            tiny_run.train(FusedGRPOTrainer, args, fused_sampling_correction=True)


class Reader(FusedGRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        assert "importance_sampling_ratio" in inputs or not self.vllm_importance_sampling_correction
        return super()._compute_loss(model, inputs)


class WithDropout(FusedGRPOTrainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model.model.layers[0].mlp.act_fn = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(0.1))


REASONS: dict[str, tuple[type, dict[str, Any], str]] = {
    "skip": (
        FusedGRPOTrainer,
        {"zero_advantage": "skip"},
        "sampling/* metrics read the sequences that zero_advantage=",
    ),
    "a subclass": (Reader, {}, "Reader._compute_loss may read its result; pass True if not"),
    "dropout": (WithDropout, {}, "dropout, or noise, makes log-probabilities random; set it to 0, or pass True"),
}


@pytest.mark.parametrize("name", REASONS)
def test_where_it_does_not_apply_trl_scores_and_it_is_said(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    base, more, reason = REASONS[name]
    said: list[str] = []
    monkeypatch.setattr(old_scoring, "warn_once", said.append)
    _, trainer = train(base, more=more)
    assert trainer.scored > 0
    assert [reason in x for x in said] == [True], said


@pytest.mark.parametrize("options", [{"fused": False}, {"vllm_importance_sampling_correction": False}], ids=str)
def test_where_nothing_is_corrected_or_asked_for_nothing_is_said(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(old_scoring, "warn_once", said.append)
    train(Reader, **options)
    assert said == []


def test_true_is_for_a_model_with_dropout() -> None:
    _, trainer = train(WithDropout, fused=True)
    assert trainer.scored == 0
