"""What TRL scores before its loss: same losses and metrics as stock TRL's, with less scored; and
the sets of a sampler that truncates.

The sampler is a stand-in for vLLM: it draws ids, and scores them with the policy and some noise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
from trl import GRPOTrainer
from trl.experimental.gmpo import GMPOConfig, GMPOTrainer

from benchmarks import parity, tiny_run
from grpo_kernels.trl import FusedGRPOTrainer, FusedLossMixin
from tests.support.case_builder import seeded
from tests.support.trl_training import (
    EVALUATED,
    AllLogits,
    Curious,
    FusedGMPOTrainer,
    Run,
    Written,
    assert_same,
    count_scored,
    evaluations,
    mixed,
    sums,
    train,
)

pytestmark = pytest.mark.unit

# a generation is 2 micro-batches of 8, trained on twice
TWICE: dict[str, Any] = {"num_iterations": 2}
# a generation is 4 micro-batches of 8, and an optimizer step is 2 of them
HALVES: dict[str, Any] = {"steps_per_generation": 4}
BOTH = TWICE | HALVES
# Adam would make steps of a rounding where the policy is still its reference
SGD: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.05}
MASKED = {"mask_truncated_completions": True, "max_completion_length": 6}


def counted(base: type, **options: Any) -> Run:
    return train(base, prepare=count_scored, **{"steps": 4, **options})


# name -> (options, forwards that score beforehand in 4 steps: stock, ours)
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "twice": (TWICE, 4, 0),
    "halves, checkpointing": ({"gradient_checkpointing": True, "delta": 0.99, **HALVES}, 8, 4),
    "a generation within a step": (
        {"gradient_accumulation_steps": 4, "steps_per_generation": 6}, 18, 8
    ),
    "a shorter last step of the epoch": (
        {"steps_per_generation": 3, "steps": 7, "train_dataset": tiny_run.dataset(18)}, 15, 7
    ),
    "beta": ({"beta": 0.04, **SGD, **BOTH}, 4, 2),
    "grpo, sequence, truncated": (BOTH | parity.loss_options("grpo", "sequence", **MASKED), 4, 2),
    "bnpo, off-policy": (
        BOTH | parity.loss_options("bnpo", off_policy_mask_threshold=0.02), 4, 2
    ),
    "vespo": (BOTH | parity.loss_options("vespo"), 4, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_training_is_the_same_and_less_is_scored(name: str) -> None:
    options, stock_forwards, our_forwards = CASES[name]
    stock, ours = counted(GRPOTrainer, **options), counted(FusedGRPOTrainer, **options)
    assert_same(stock, ours)
    theirs, scored = stock.trainer.scored, ours.trainer.scored
    assert (theirs["forwards"], scored["forwards"]) == (stock_forwards, our_forwards)
    accumulated = ours.trainer.args.gradient_accumulation_steps
    assert accumulated == options.get("gradient_accumulation_steps", 2)
    if our_forwards:
        dead_are_scored = name in ("vespo", "beta")  # its metric reads them; the KL has a gradient
        share = scored["sequences"] / theirs["sequences"] / (our_forwards / stock_forwards)
        assert share > 0.9 if dead_are_scored else 0.2 < share < 0.8


@pytest.mark.parametrize(
    "more", [{"kl_estimator": "full"}, {"zero_advantage": "skip"}, {"regroup": False}], ids=str
)
def test_other_options(more: dict[str, Any]) -> None:
    """Against the same options with TRL's scoring."""
    options = BOTH | more | ({"beta": 0.04} if "kl_estimator" in more else {"epsilon": 0.02})
    want = counted(FusedGRPOTrainer, fused_sampling_correction=False, **options)
    got = counted(FusedGRPOTrainer, **options)
    compared = [
        [{k: x for k, x in step.items() if "/" not in k or "clip" in k} for step in run.steps]
        for run in (want, got)
    ]
    assert max(parity.differences(*compared).values()) <= parity.TOLERANCE
    assert want.trainer.scored["forwards"] == 4
    assert got.trainer.scored["forwards"] == 2


def assert_same_evaluations(stock: Run, ours: Run) -> None:
    for want, got in zip(evaluations(stock.trainer), evaluations(ours.trainer), strict=True):
        assert got == pytest.approx({**got, **want}, rel=1e-5, abs=1e-6)


class Sampler(Written):
    """In front of a trainer: what it generates, as from vLLM."""

    def _generate_single_turn(self, prompts: list[list[int]], *_: Any, **__: Any) -> Any:
        completions, _ = super()._generate_single_turn(prompts)
        noise, logps = seeded("noise of the sampler"), []
        for prompt, ids in zip(prompts, completions, strict=True):
            with torch.no_grad():
                logits = self.model(input_ids=torch.tensor([[*prompt, *ids]])).logits  # type: ignore[attr-defined]
            log_probs = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            scores = log_probs.gather(1, torch.tensor(ids)[:, None])[:, 0]
            noisy = (scores + 0.15 * torch.randn(len(ids), generator=noise)).tolist()
            # None: could not score it
            logps.append([None if i == 5 else x for i, x in enumerate(noisy)])
        return completions, logps


class Tools(Sampler):
    def _generate(self, prompts: list[Any]) -> Any:
        prompt_ids, ids, _, *others = super()._generate(prompts)  # type: ignore[misc]
        return prompt_ids, ids, [[int(i % 3 != 1) for i, _ in enumerate(x)] for x in ids], *others


def prepare(trainer: Any) -> None:
    trainer.use_vllm = True
    count_scored(trainer)


CLIP = {"vllm_importance_sampling_clip_max": 1.3, "vllm_importance_sampling_clip_min": 0.8}


def sampled(base: type, steps: int = 1, mixin: type = Sampler, **options: Any) -> Run:
    return train(mixed(mixin, base), steps, prepare=prepare, **CLIP | options)


def mode(name: str, **more: Any) -> dict[str, Any]:
    return {"vllm_importance_sampling_mode": name, **more}


GSPO = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
MANY = {"gradient_accumulation_steps": 4, "steps_per_generation": 2, **TWICE}
VESPO = {"mixin": Tools, "loss_type": "vespo"}
OFF_POLICY = {"off_policy_mask_threshold": 0.02, "eval_dataset": tiny_run.dataset(8), **EVALUATED}
# name -> (options, share of TRL's scoring that is left)
CORRECTED: dict[str, tuple[dict[str, Any], float]] = {
    "token_truncate": (mode("token_truncate", steps=2), 0),
    "token_mask, tools, vespo": (mode("token_mask", entropy_coef=0.01, **VESPO), 0),
    "sequence_truncate, GSPO, beta": (mode("sequence_truncate", beta=0.04, **GSPO), 0),
    "sequence_mask, off-policy mask, evaluation": (mode("sequence_mask", **OFF_POLICY), 0.8),
    "the batch twice": (mode("token_truncate", **MANY), 0),
    "the batch twice, two steps": (mode("sequence_truncate", steps=4, **TWICE), 0),
    # an optimizer step takes half of the generated batch: the other half has to be scored
    "halves, twice": (mode("sequence_mask", steps=4, **BOTH), 0.5),
    "halves, tools, vespo": (mode("token_truncate", steps=2, **HALVES, **VESPO, **SGD), 0.5),
    "GMPO, which does not read the ratio": (mode("token_mask", config_class=GMPOConfig), 0),
}


@pytest.mark.parametrize("name", CORRECTED)
def test_training_with_a_samplers_correction_is_the_same(name: str) -> None:
    options, share = CORRECTED[name]
    bases = (GMPOTrainer, FusedGMPOTrainer) if "GMPO" in name else (GRPOTrainer, FusedGRPOTrainer)
    stock, ours = (sampled(base, **options) for base in bases)
    # VESPO's weights are powers of ratios: after a step of 0.05 they make 1.4e-6 of the roundings
    # of the first
    assert_same(stock, ours, parity.TOLERANCE if "halves, tools" in name else None)
    measured = "sampling/importance_sampling_ratio/mean"  # in steps with a generation
    ratios = [step[measured] for step in ours.steps if measured in step]
    assert ratios and all(0.1 < x < 1.5 and x != 1 for x in ratios)
    assert_same_evaluations(stock, ours)
    scored, theirs = ours.trainer.scored, stock.trainer.scored
    assert theirs["sequences"] > 0
    if share == 0.8:  # an evaluation's loss is without gradient, and counts
        assert 0 < scored["forwards"] < theirs["forwards"]
    else:  # samples live or not: the metrics read them
        assert scored == {key: x * share for key, x in theirs.items() if share}
    assert ours.trainer.vllm_importance_sampling_correction


@pytest.mark.parametrize("name", ["token_truncate", "sequence_mask"])
def test_regrouped_samples_have_the_same_sampler_metrics(name: str) -> None:
    metrics = []
    for more in ({"regroup": False}, {"tokens_per_forward": 10_000}):
        run = sampled(FusedGRPOTrainer, loss_type="grpo", **more, **mode(name))
        of_sampler = lambda step: {k: x for k, x in step.items() if k.startswith("sampling/")}  # noqa: E731
        metrics.append([*map(of_sampler, run.steps)])
        sizes = [int(x["completion_mask"].sum()) for x in run.trainer._buffered_inputs]
        assert (0 in sizes) is run.trainer.regroup
    assert metrics[0][0]
    assert max(parity.differences(*metrics).values()) <= parity.TOLERANCE


class Reader(FusedGRPOTrainer):
    """It may read what its loss gets."""

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        corrects = self.use_vllm and self.vllm_importance_sampling_correction
        assert "importance_sampling_ratio" in inputs or not corrects
        return super()._compute_loss(model, inputs)


class WithDropout(FusedGRPOTrainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model.model.layers[0].self_attn.attention_dropout = 0.1


FUSED, CORRECTS = "fused_sampling_correction", "vllm_importance_sampling_correction"
SKIP = {"zero_advantage": "skip"}


@pytest.mark.parametrize(
    ("base", "options", "scores", "said"),
    [
        (FusedGRPOTrainer, SKIP, True, "sampling/* metrics read the sequences that zero_advant"),
        (Reader, {}, True, "may read its result; pass True if not"),
        (WithDropout, {}, True, "dropout, or noise, makes log-probabilities random; set it to 0"),
        (WithDropout, {FUSED: True}, False, None),
        (Reader, {FUSED: False}, True, None),
        (Reader, {CORRECTS: False}, False, None),
        # without a sampler, for the ratio to the old policy: not a word
        (FusedGRPOTrainer, {FUSED: False, **TWICE}, True, None),
        (WithDropout, TWICE, True, None),
    ],
    ids=["skip", "a subclass", "dropout", "dropout, asked for", "not asked for",
         "nothing to correct", "old: not asked for", "old: dropout"],
)  # fmt: skip
def test_where_it_does_not_apply_trl_scores_and_it_is_said(
    base: type,
    options: dict[str, Any],
    scores: bool,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warned: list[str] = []
    monkeypatch.setattr("grpo_kernels.trl.trainer.warn_once", warned.append)
    run = counted(base, **options) if "num_iterations" in options else sampled(base, **options)
    assert (run.trainer.scored["forwards"] > 0) == scores
    assert [said is not None and said in x for x in warned] == [True] * (said is not None), warned


def test_a_policy_that_has_changed_is_an_error() -> None:
    """A loop of one's own that takes optimizer steps without saying so to accelerate."""
    trainer = train(FusedGRPOTrainer, steps=1, **TWICE).trainer
    batch = {k: x for k, x in trainer._buffered_inputs[0].items() if k != "old_per_token_logps"}
    trainer.model.train()
    message = r"old_per_token_logps: expected a tensor .* step 0, got None at step 1; pass fused"
    with pytest.raises(RuntimeError, match=message):
        trainer._compute_loss(trainer.model, batch)


@pytest.mark.parametrize(
    ("run", "options", "message"),
    [
        (sampled, {"mixin": Written, FUSED: True}, "sampling_per_token_logps: expected .+ None"),
        (train, {FUSED: True}, "fused_sampling_correction: expected False without"),
    ],
    ids=["no log-probabilities", "no sampler"],
)  # fmt: skip
def test_what_it_needs_is_said(run: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        run(FusedGRPOTrainer, **options)


class EvaluatesWithin(Sampler):
    """It evaluates within an optimizer step, when half of a generation's ratios are known."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        if not self.accelerator.sync_gradients:  # type: ignore[attr-defined]
            self.evaluate()  # type: ignore[attr-defined]
        return loss


def test_an_evaluation_within_a_step_takes_nothing_from_its_metrics() -> None:
    options = {"mixin": EvaluatesWithin, "eval_dataset": tiny_run.dataset(8), "steps": 2}
    options |= mode("token_truncate", per_device_eval_batch_size=8)
    stock, ours = (sampled(cls, **options) for cls in (GRPOTrainer, FusedGRPOTrainer))
    assert_same(stock, ours)
    assert_same_evaluations(stock, ours)


# The sets of a truncating sampler, against TRL's loss of log-softmaxes over them

KEPT = 5  # ids that the sampler keeps
ERROR = {"on_missing_set": "error"}
FusedCurious = mixed(Curious, FusedGRPOTrainer)


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions of the top-k ids, and the sets as vLLM's; every fourth token is a tool's."""
    draw = seeded(f"rollout of step {trainer.state.global_step}")
    names = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "sampling_mask")
    found: dict[str, Any] = {name: [] for name in names}
    for prompt in trainer.processing_class(prompts)["input_ids"]:
        text, rows, logps, drawn = [*prompt], [], [], []
        for i in range(int(torch.randint(2, 9, (), generator=draw))):
            with torch.no_grad():
                logits = trainer.model(input_ids=torch.tensor([text])).logits[0, -1]
            z = logits / trainer.temperature
            drawn.append(int(i % 4 != 2))
            kept = z.topk(1 + (i % KEPT)).indices.sort().values
            of_set = z[kept].log_softmax(-1)
            k = int(torch.multinomial(of_set.exp(), 1, generator=draw))
            text.append(int(kept[k]) if drawn[-1] else 7)
            rows.append(kept.tolist() if drawn[-1] else [])
            logps.append(of_set[k].item() if drawn[-1] else 0.0)
        for name, x in zip(found, (prompt, text[len(prompt) :], logps, drawn, rows), strict=True):
            found[name].append(x)
    return found


class Oracle(AllLogits):
    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        generated = super()._generate(*args, **kwargs)
        self.rows = generated[5].pop("sampling_mask")
        return generated

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        return {**super()._generate_and_score_completions(inputs), "rows": self.rows}

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        self.rows = inputs["rows"]
        return super()._compute_loss(model, inputs)

    def outside(self, logits: Tensor) -> Tensor:
        found = torch.zeros_like(logits, dtype=torch.bool)
        for i, rows in enumerate(self.rows):
            for t, kept in enumerate(rows):
                if kept:
                    found[i, t] = True
                    found[i, t, kept] = False
        return found


def trained(trainer: type, steps: int = 2, **options: Any) -> Run:
    options = {"rollout_func": rollout, "temperature": 0.8, **options}
    return train(trainer, steps, **options)


def changed(change: Callable[[Any], Any]) -> Callable[[list[str], Any], dict[str, Any]]:
    def wrong(prompts: list[str], trainer: Any) -> dict[str, Any]:
        generated = rollout(prompts, trainer)
        change(generated)
        return generated

    return wrong


@pytest.mark.parametrize(
    "options",
    [
        # old log-probabilities and a reference
        {"beta": 0.04, "entropy_coef": 0.01, "steps_per_generation": 4},
        {"loss_type": "dapo", "num_iterations": 2},
    ],
    ids=["halves", "twice"],
)
def test_the_loss_is_over_the_sets(options: dict[str, Any]) -> None:
    want, got = trained(Oracle, **options), trained(FusedGRPOTrainer, **ERROR, **options)
    assert sums(got) == pytest.approx(sums(want), rel=1e-5, abs=1e-6)
    assert 1 < got.steps[0]["kept/size"] < KEPT
    assert got.steps[0]["kept/without_set"] == 0
    for x, y in zip(got.steps, want.steps, strict=True):
        for name in ("loss", "grad_norm", "entropy", *(("kl",) if "beta" in options else ())):
            assert x[name] == pytest.approx(y[name], rel=1e-4, abs=1e-6), name
    other = trained(FusedGRPOTrainer, **options)  # the sets are not asked for
    assert sums(other) != pytest.approx(sums(want), rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("correction", ["auto", False])
def test_scorings_by_others_while_it_generates_are_over_the_vocabulary(correction: Any) -> None:
    # "twice" has TRL score nothing, with False it scores the completions over their sets
    stock = trained(mixed(Curious, GRPOTrainer), 1, beta=0.04)
    options = {"beta": 0.04, "num_iterations": 2, "fused_sampling_correction": correction, **ERROR}
    plain, ours = (trained(x, 1, **options) for x in (FusedGRPOTrainer, FusedCurious))
    assert len(ours.trainer.seen) == 2
    torch.testing.assert_close(ours.trainer.seen, stock.trainer.seen, rtol=1e-5, atol=1e-5)
    assert ours.steps == plain.steps


class OwnScoring(FusedGRPOTrainer):
    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        return GRPOTrainer._get_per_token_logps_and_entropies(self, *args, **kwargs)


def test_a_subclass_that_scores_itself_gets_the_sets() -> None:
    options = {"beta": 0.04, **HALVES, **ERROR}
    want, got = (trained(x, **options).steps for x in (FusedGRPOTrainer, OwnScoring))
    assert max(parity.differences(want, got).values()) <= parity.TOLERANCE


class ReferenceInLoss(GRPOTrainer):
    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        x, count = inputs, inputs["completion_ids"].shape[1]
        rows = [torch.cat([x[f"prompt_{y}"], x[f"completion_{y}"]], 1) for y in ("ids", "mask")]
        score = super()._get_per_token_logps_and_entropies
        with torch.no_grad():
            found = [score(x, *rows, count)[0] for x in (self.ref_model, model)]
        torch.testing.assert_close(found, [inputs["sampling_per_token_logps"]] * 2)  # of the sets
        return super()._compute_loss(model, inputs)


def test_a_loss_that_runs_the_reference_itself_has_the_sets_there() -> None:
    trained(mixed(FusedLossMixin, ReferenceInLoss), 1, beta=0.04, **ERROR)


def test_a_token_without_a_set_may_have_the_whole_vocabulary() -> None:
    lost = changed(lambda x: x["sampling_mask"][0][0].clear())
    got = trained(FusedGRPOTrainer, steps=1, on_missing_set="full", rollout_func=lost)
    assert 0 < got.steps[0]["kept/without_set"] < 0.1


class WithVLLM(GRPOTrainer):
    """It has vLLM, it says."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.use_vllm, self._last_loaded_step = True, 0


TRUNCATES = {"top_p": 0.9, "top_k": 50}


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        (TRUNCATES, True),
        ({"min_p": 0.1}, True),
        ({}, False),
        ({"vllm_importance_sampling_mode": "token_truncate", **TRUNCATES}, False),
        ({**ERROR, **TRUNCATES}, False),
    ],
    ids=str,
)
def test_a_truncating_sampler_without_its_sets_is_warned_of(options, warns, monkeypatch):
    said: list[str] = []
    made: list[int] = []
    monkeypatch.setattr("grpo_kernels.trl.trainer.warn_once", said.append)
    fused = mixed(FusedLossMixin, WithVLLM)
    trained(fused, 1, prepare=lambda _: made.append(len(said)), **options)
    assert [all(name in x for name in options) for x in said] == [True] * warns
    assert made == [warns], "when the trainer is made"


class Rewriter(FusedGRPOTrainer):
    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        generated = super()._generate(*args, **kwargs)
        generated[1][0][0] = 9
        return generated


def of_sets(change: Callable[[Any], Any]) -> dict[str, Any]:
    return {"rollout_func": changed(lambda x: change(x["sampling_mask"]))}


NOT_A_SET = "kept_ids: expected a set at unmasked positions"
NO_SETS = {"rollout_func": changed(lambda x: x.pop("sampling_mask"))}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "exact KL": ({"kl_estimator": "full"}, "expected None with kl_estimator='full'"),
    "no sets": (NO_SETS, "expected this field in rollout_func's output, got none"),
    "a set too many": (of_sets(lambda x: x[1].append([1])), "lists of ids for completion 1, one p"),
    "a completion too few": (of_sets(lambda x: x.pop()), "the sets of 16 completions, got 15"),
    "a token without one": (of_sets(lambda x: x[0][0].clear()), NOT_A_SET),
    "other completions": ({"trainer": Rewriter}, "the completions that rollout_func returned"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_sets(name: str) -> None:
    options, message = WRONG[name]
    options = {"trainer": FusedGRPOTrainer, "steps": 1, "beta": 0.1, **ERROR, **options}
    with pytest.raises(ValueError, match=message) as error:
        trained(**options)
    named = "on_missing_set: " if name == "exact KL" else "sampling_mask: "  # the rollout's field
    assert str(error.value).startswith("kept_ids" if message is NOT_A_SET else named)
