"""A truncating sampler's sets in TRL's trainer, against TRL's own loss on log-softmaxes over the sets."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
from trl import GRPOTrainer

from benchmarks import tiny_run
from grpo_kernels.trl import FusedGRPOTrainer, FusedLossMixin, sampled_sets
from tests.support import trl_training
from tests.support.case_builder import seeded
from tests.support.trl_training import Curious, Run, mixed

KEPT = 5  # ids that the sampler keeps


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions drawn from the top-k ids, with the sets as vLLM returns them; every fourth token is a tool's."""
    draw = seeded(f"rollout of step {trainer.state.global_step}")
    names = ("prompt_ids", "completion_ids", "logprobs", "env_mask", "sampling_mask")
    found: dict[str, Any] = {name: [] for name in names}
    for prompt in trainer.processing_class(prompts)["input_ids"]:
        text, rows, logps, drawn = [*prompt], [], [], []
        for i in range(int(torch.randint(2, 9, (), generator=draw))):
            with torch.no_grad():
                z = (
                    trainer.model(input_ids=torch.tensor([text])).logits[0, -1]
                    / trainer.temperature
                )
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


class Oracle(GRPOTrainer):
    """TRL's trainer with log-probabilities and entropies over the sets, from all logits."""

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        generated = super()._generate(*args, **kwargs)
        self.rows = generated[5].pop("sampling_mask")
        return generated

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        return {**super()._generate_and_score_completions(inputs), "rows": self.rows}

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        self.rows = inputs["rows"]
        return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *_: Any,
        **__: Any,
    ) -> Any:
        z = model(input_ids=input_ids, attention_mask=attention_mask).logits[
            :, -logits_to_keep - 1 : -1
        ]
        outside = torch.zeros_like(z, dtype=torch.bool)
        for i, rows in enumerate(self.rows):
            for t, ids in enumerate(rows):
                if ids:
                    outside[i, t] = True
                    outside[i, t, ids] = False
        log_probs = (z / self.temperature).masked_fill(outside, -math.inf).log_softmax(-1)
        entropies = -(log_probs.exp() * log_probs.masked_fill(outside, 0.0)).sum(-1)
        return log_probs.gather(-1, input_ids[:, -logits_to_keep:, None])[..., 0], entropies, None


def train(trainer: type, steps: int = 2, **options: Any) -> Run:
    return trl_training.train(
        trainer, steps, **{"rollout_func": rollout, "temperature": 0.8, **options}
    )


@pytest.mark.parametrize(
    "options",
    [
        {
            "beta": 0.04,
            "entropy_coef": 0.01,
            "steps_per_generation": 4,
        },  # old log-probabilities and a reference
        {"loss_type": "dapo", "num_iterations": 2},
    ],
    ids=["halves", "twice"],
)
def test_the_loss_is_over_the_sets(options: dict[str, Any]) -> None:
    want, got = train(Oracle, **options), train(FusedGRPOTrainer, sampling_mask="error", **options)
    assert got.losses == pytest.approx(want.losses, rel=1e-5, abs=1e-6)
    names = ("loss", "grad_norm", "entropy", *(("kl",) if "beta" in options else ()))
    assert 1 < got.steps[0]["kept/size"] < KEPT
    assert got.steps[0]["kept/without_set"] == 0
    for x, y in zip(got.steps, want.steps, strict=True):
        assert {name: x[name] for name in names} == pytest.approx(
            {name: y[name] for name in names}, rel=1e-4, abs=1e-6
        )
    other = train(FusedGRPOTrainer, **options)  # the sets are not asked for
    assert other.losses != pytest.approx(want.losses, rel=1e-2, abs=1e-3)


@pytest.mark.parametrize("without_set", ["error", "full"])
def test_scorings_by_others_while_it_generates_are_over_the_vocabulary(without_set: str) -> None:
    # "twice" has TRL score nothing, with False it scores the completions over their sets
    for correction in ("auto", False):
        options = {"beta": 0.04, "num_iterations": 2, "sampling_mask": without_set}
        options["fused_sampling_correction"] = correction
        stock = train(mixed(Curious, GRPOTrainer), beta=0.04)
        plain, ours = (
            train(cls, **options) for cls in (FusedGRPOTrainer, mixed(Curious, FusedGRPOTrainer))
        )
        want, got = stock.trainer.seen, ours.trainer.seen
        assert len(got) == 2
        for i in range(2):
            torch.testing.assert_close(got[i], want[i], rtol=1e-5, atol=1e-5)
        assert ours.steps == plain.steps


class Half:
    """In front of a trainer: it keeps every second sample, the last one first."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        size = len(batch["prompt_ids"])
        kept = {name: x for name, x in batch.items() if isinstance(x, list) or x.dim()}
        chosen = range(size - 1, 0, -2)
        return batch | {
            name: x[[*chosen]] if isinstance(x, Tensor) else [x[i] for i in chosen]
            for name, x in kept.items()
        }


def test_a_subclass_below_may_choose_the_samples() -> None:
    """It gets the batch without the sets."""
    options = {"beta": 0.04, "loss_type": "grpo"}
    want = train(mixed(Half, Oracle), **options)
    got = train(mixed(FusedLossMixin, mixed(Half, GRPOTrainer)), sampling_mask="error", **options)
    assert got.losses == pytest.approx(want.losses, rel=1e-5, abs=1e-6)


class Rewriter(FusedGRPOTrainer):
    """Completions that nobody has sampled."""

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        generated = super()._generate(*args, **kwargs)
        generated[1][0][0] = 9
        return generated


def test_completions_that_the_sets_are_not_of_are_an_error() -> None:
    with pytest.raises(
        ValueError, match="sampling_mask: expected a batch of the completions that rollout_func"
    ):
        train(Rewriter, sampling_mask="full", rollout_func=lambda *x: rollout(*x))


def changed(change: Callable[[Any], Any]) -> Callable[[list[str], Any], dict[str, Any]]:
    """A rollout whose sets are changed."""

    def wrong(prompts: list[str], trainer: Any) -> dict[str, Any]:
        generated = rollout(prompts, trainer)
        change(generated["sampling_mask"])
        return generated

    return wrong


def without(prompts: list[str], trainer: Any) -> dict[str, Any]:
    return {name: x for name, x in rollout(prompts, trainer).items() if name != "sampling_mask"}


def test_a_token_without_a_set_may_have_the_whole_vocabulary() -> None:
    lost = changed(lambda sets: sets[0][0].clear())
    got = train(FusedGRPOTrainer, steps=1, sampling_mask="full", rollout_func=lost)
    assert 0 < got.steps[0]["kept/without_set"] < 0.1


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({"top_p": 0.9, "top_k": 50}, True),
        ({"min_p": 0.1}, True),
        ({}, False),
        ({"top_p": 0.9, "vllm_importance_sampling_mode": "token_truncate"}, False),
        ({"top_p": 0.9, "vllm_importance_sampling_correction": False}, False),
        ({"top_p": 0.9, "sampling_mask": "error"}, False),
    ],
    ids=str,
)
def test_a_truncating_sampler_without_its_sets_is_warned_of(
    options: dict[str, Any], warns: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[str] = []
    monkeypatch.setattr(sampled_sets, "warn_once", said.append)
    of_config = {name: x for name, x in options.items() if name != "sampling_mask"}
    args = tiny_run.config(str(tmp_path), 1, **of_config)
    trainer = SimpleNamespace(
        args=args,
        use_vllm=True,
        vllm_importance_sampling_correction=args.vllm_importance_sampling_correction,
        sampling_mask=options.get("sampling_mask"),
    )
    sampled_sets.warn_of_truncation(trainer)
    assert [all(name in x for name in options) for x in said] == [True] * warns


ERROR = {"sampling_mask": "error"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sampling_mask": True},
            "sampling_mask: expected one of 'error', 'full', or None, got True",
        ),
        (
            {**ERROR, "rollout_func": None},
            "sampling_mask: expected None with no rollout_func, whose output has the",
        ),
        (
            {**ERROR, "kl_estimator": "full"},
            "sampling_mask: expected None with kl_estimator='full'",
        ),
        (
            {**ERROR, "rollout_func": without},
            "sampling_mask: expected a list of them in rollout_func's output, got none",
        ),
        (
            {**ERROR, "rollout_func": changed(lambda sets: sets[1].append([1]))},
            "sampling_mask: expected .* lists of ids for completion 1, one a token",
        ),
        (
            {**ERROR, "rollout_func": changed(lambda sets: sets.pop())},
            "sampling_mask: expected the sets of 16 completions, got 15",
        ),
        (
            {**ERROR, "rollout_func": changed(lambda sets: sets[0][0].clear())},
            "kept_ids: expected a set where the mask counts",
        ),
    ],
    ids=[
        "name",
        "no rollout",
        "exact KL",
        "no sets",
        "a set too many",
        "a completion too few",
        "a token without one",
    ],
)
def test_wrong_sets(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(FusedGRPOTrainer, steps=1, beta=0.1, **options)
