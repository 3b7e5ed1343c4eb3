"""A truncating sampler's sets in TRL's trainer, against TRL's loss of log-softmaxes over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
from trl import GRPOTrainer

from grpo_kernels.trl import FusedGRPOTrainer, FusedLossMixin
from tests.support import trl_training
from tests.support.case_builder import seeded
from tests.support.trl_training import AllLogits, Curious, Run, mixed, sums

pytestmark = pytest.mark.unit

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


def train(trainer: type, steps: int = 2, **options: Any) -> Run:
    options = {"rollout_func": rollout, "temperature": 0.8, **options}
    return trl_training.train(trainer, steps, **options)


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
    want, got = train(Oracle, **options), train(FusedGRPOTrainer, **ERROR, **options)
    assert sums(got) == pytest.approx(sums(want), rel=1e-5, abs=1e-6)
    assert 1 < got.steps[0]["kept/size"] < KEPT
    assert got.steps[0]["kept/without_set"] == 0
    for x, y in zip(got.steps, want.steps, strict=True):
        for name in ("loss", "grad_norm", "entropy", *(("kl",) if "beta" in options else ())):
            assert x[name] == pytest.approx(y[name], rel=1e-4, abs=1e-6), name
    other = train(FusedGRPOTrainer, **options)  # the sets are not asked for
    assert sums(other) != pytest.approx(sums(want), rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("correction", ["auto", False])
def test_scorings_by_others_while_it_generates_are_over_the_vocabulary(correction: Any) -> None:
    # "twice" has TRL score nothing, with False it scores the completions over their sets
    stock = train(mixed(Curious, GRPOTrainer), 1, beta=0.04)
    options = {"beta": 0.04, "num_iterations": 2, "fused_sampling_correction": correction, **ERROR}
    plain, ours = (train(x, 1, **options) for x in (FusedGRPOTrainer, FusedCurious))
    assert len(ours.trainer.seen) == 2
    torch.testing.assert_close(ours.trainer.seen, stock.trainer.seen, rtol=1e-5, atol=1e-5)
    assert ours.steps == plain.steps


def test_a_token_without_a_set_may_have_the_whole_vocabulary() -> None:
    lost = changed(lambda x: x["sampling_mask"][0][0].clear())
    got = train(FusedGRPOTrainer, steps=1, on_missing_set="full", rollout_func=lost)
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
    train(fused, 1, prepare=lambda _: made.append(len(said)), **options)
    assert [all(name in x for name in options) for x in said] == [True] * warns
    assert made == [warns], "when the trainer is made"


class Rewriter(FusedGRPOTrainer):
    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        generated = super()._generate(*args, **kwargs)
        generated[1][0][0] = 9
        return generated


def of_sets(change: Callable[[Any], Any]) -> dict[str, Any]:
    return {"rollout_func": changed(lambda x: change(x["sampling_mask"]))}


NOT_A_SET = "kept_ids: expected a set where the mask counts"
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
        train(**options)
    named = "on_missing_set: " if name == "exact KL" else "sampling_mask: "  # the rollout's field
    assert str(error.value).startswith("kept_ids" if message is NOT_A_SET else named)
