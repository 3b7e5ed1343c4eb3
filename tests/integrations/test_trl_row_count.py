"""The rows that TRL's trainers log while our head is at work, and the log of what is patched."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
import trl
from datasets import Dataset
from trl.trainer.base_trainer import _BaseTrainer

from benchmarks import tiny_models
from grpo_kernels.base import checks
from grpo_kernels.host import Shares
from grpo_kernels.trl import FusedDistillationTrainer, FusedGRPOTrainer, patch_trl
from grpo_kernels.trl.row_count import count_rows
from grpo_kernels.trl.scoring import PATCHED
from tests.support.trl_training import Run, train

ROWS = {"rows/projected", "rows/gradient"}


def logged(
    trainer_class: type[trl.GRPOTrainer],
) -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
    """The log's training steps of a short run, and the batches of its losses."""
    batches: list[dict[str, Any]] = []

    class Noted(trainer_class):  # type: ignore[misc, valid-type]
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
            inputs["completion_mask"][::2, -3:] = 0  # completions that ended early
            batches.append(inputs)
            return super()._compute_loss(model, inputs)

    # the reward of the first steps is the same for some groups, which then have no gradient
    return steps_of(train(Noted, temperature=0.2)), batches


def steps_of(run: Run) -> list[dict[str, float]]:
    return [entry for entry in run.trainer.state.log_history if "loss" in entry]


def shares(batches: list[dict[str, Any]]) -> dict[str, float]:
    """What a step of these micro-batches is to log: by the mask, and by the advantages."""
    masks = [batch["completion_mask"].bool() for batch in batches]
    counted, places = sum(int(mask.sum()) for mask in masks), sum(mask.numel() for mask in masks)
    graded = (
        int(mask[batch["advantages"] != 0].sum())
        for mask, batch in zip(masks, batches, strict=True)
    )
    return {"rows/projected": counted / places, "rows/gradient": sum(graded) / counted}


def test_the_trainer_logs_the_share_of_completion_tokens_and_of_those_with_an_advantage() -> None:
    steps, batches = logged(FusedGRPOTrainer)
    wanted = [shares(batches[:2]), shares(batches[2:])]
    assert [{name: step[name] for name in ROWS} for step in steps] == wanted
    assert any(0 < step["rows/gradient"] < 1 for step in wanted), "the case shows nothing"
    assert all(step["rows/projected"] < 1 for step in wanted), "the case shows nothing"


def test_a_patched_trainer_logs_the_rows_that_trl_passes_and_an_unpatched_one_none() -> None:
    with patch_trl():
        steps, batches = logged(trl.GRPOTrainer)
    for step in steps:
        assert (
            step["rows/projected"] == 1.0
        )  # on a CPU TRL passes every position, prompt and padding too
    assert [step["rows/gradient"] > 0 for step in steps] == [
        shares(of_step)["rows/gradient"] > 0 for of_step in (batches[:2], batches[2:])
    ]
    assert "log" not in vars(_BaseTrainer)
    steps, _ = logged(trl.GRPOTrainer)
    assert not any(ROWS & step.keys() for step in steps)


def test_a_trainer_that_makes_its_own_logits_is_named_once() -> None:
    gkd = pytest.importorskip("trl.experimental.gkd")
    turns = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3 w4 w5"}]
    checks.warn_once.cache_clear()
    given = {
        "teacher_model": tiny_models.model(),
        "train_dataset": Dataset.from_dict({"messages": [turns] * 16}),
    }
    given["prepare"] = lambda _: warnings.simplefilter("always")  # a tiny run is silent
    with patch_trl(), pytest.warns(RuntimeWarning, match="patch_trl") as caught:
        train(gkd.GKDTrainer, config_class=gkd.GKDConfig, lmbda=0.0, **given)
    found = [str(x.message) for x in caught if "patch_trl" in str(x.message)]
    assert len(found) == 1
    assert found[0].startswith(
        "grpo_kernels: patch_trl: GKDTrainer has trained a step without TRL's fused head"
    )


def test_distillation_logs_its_rows() -> None:
    options = {
        "per_device_train_batch_size": 4,
        "max_completion_length": 6,
        "teacher_model": tiny_models.model(),
    }
    step = steps_of(
        train(FusedDistillationTrainer, 1, config_class=trl.DistillationConfig, **options)
    )[0]
    assert 0 < step["rows/projected"] <= 1
    assert step["rows/gradient"] == 1.0


def test_rows_are_counted_once_however_many_results_have_a_gradient_and_never_without_one() -> None:
    shares, mask = Shares(), torch.tensor([True, True, True, False])
    x = torch.randn(4, requires_grad=True)
    logps, entropy = 2 * x, 3 * x
    count_rows(shares, 10, mask, (logps, entropy))
    (
        logps * torch.tensor([1.0, 0.0, 0.0, 1.0]) + entropy * torch.tensor([1.0, 1.0, 0.0, 0.0])
    ).sum().backward()
    count_rows(shares, 10, None, (torch.zeros(4),))  # a scoring call
    assert shares.take() == {"rows/projected": 0.3, "rows/gradient": 2 / 3}
    assert shares.take() == {}

    logps, entropy = 2 * x, 3 * x
    count_rows(shares, 4, None, (logps, entropy))
    logps[:1].sum().backward()  # the entropy has no part in the loss
    assert shares.take() == {"rows/projected": 1.0, "rows/gradient": 0.25}


def test_what_was_counted_before_is_not_logged_after_patching() -> None:
    count_rows(PATCHED.shares, 4, None, (2 * torch.randn(4, requires_grad=True),))
    with patch_trl():
        assert PATCHED.shares.take() == {}


def test_a_result_that_nothing_reads_has_no_rows_with_a_gradient() -> None:
    """Where a node made several, torch hands the hook of such a result None."""

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            ctx.set_materialize_grads(False)
            return x * 1, x * 2

        @staticmethod
        def backward(
            ctx: Any, one: torch.Tensor | None, other: torch.Tensor | None
        ) -> torch.Tensor | None:  # type: ignore[override]
            return one if other is None else other

    shares, results = Shares(), Both.apply(torch.ones(4, requires_grad=True))
    count_rows(shares, 4, None, results)
    (results[0] * torch.tensor([1.0, 0.0, 0.0, 0.0])).sum().backward()
    assert shares.take() == {"rows/projected": 1.0, "rows/gradient": 0.25}
