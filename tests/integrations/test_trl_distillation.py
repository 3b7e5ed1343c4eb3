"""TRL's distillation with our divergence against TRL's own: same losses, fewer products."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("trl")
import trl
import trl.trainer.distillation_trainer as trl_distillation

from benchmarks import parity, tiny_models
from grpo_kernels.trl import FusedDistillationTrainer, distillation, patch_trl
from tests.support.trl_training import Run, Written, assert_same, divergence_inputs, mixed, train

pytestmark = pytest.mark.unit

THEIRS = trl_distillation._chunked_divergence_loss
WIDER = {"hidden_size": 48, "head_dim": 12}
COOLER = {"temperature": 0.7}
# name -> (student, teacher, how the teacher's config differs, beta, options)
CASES: dict[str, tuple[str, str, dict[str, Any], float, dict[str, Any]]] = {
    "forward KL, a wider teacher": ("qwen3", "qwen3", WIDER, 0.0, {}),
    "JSD, tied student with adapters on the body": (
        "tied", "qwen3", {}, 0.5, {"peft_config": parity.lora(), **COOLER}
    ),
    "JSD, scaled student, capped teacher": ("logit_scale", "softcap", {}, 0.3, {}),
    "reverse KL, a bias each, scaled teacher": ("bias", "logits_scaling", {}, 1.0, COOLER),
}  # fmt: skip


class Drawn(Written):
    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        return super()._generate_single_turn(*args, **kwargs)[0]


STOCK, OURS = (mixed(Drawn, x) for x in (trl.DistillationTrainer, FusedDistillationTrainer))


def trained(trainer_class: type, name: str, **options: Any) -> Run:
    student, teacher, changes, beta, of_case = CASES[name]
    given = {
        "kind": student,
        "teacher_model": tiny_models.model(teacher, seed=5, num_hidden_layers=1, **changes),
        "beta": beta,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_completion_length": 12,
    }
    return train(
        trainer_class, config_class=trl.DistillationConfig, **{**given, **of_case, **options}
    )


@pytest.mark.parametrize("name", CASES)
def test_training_is_the_same(name: str) -> None:
    stock, ours = (trained(x, name) for x in (STOCK, OURS))
    assert stock.steps[0]["loss"] > 1e-3
    assert {"loss", "grad_norm", "entropy"} <= stock.steps[0].keys()
    assert_same(stock, ours)
    assert trl_distillation._chunked_divergence_loss is THEIRS
    log = ours.trainer.state.log_history[0]
    assert 0 < log["rows/projected"] <= 1
    assert log["rows/gradient"] == 1.0


def test_a_patched_trainer_is_the_same_and_unpatching_gives_trls_back() -> None:
    name = "JSD, tied student with adapters on the body"
    stock = trained(trl.DistillationTrainer, name, steps=1)
    with patch_trl():
        patched = trained(trl.DistillationTrainer, name, steps=1)
    assert_same(stock, patched)
    logs = [run.trainer.state.log_history[0] for run in (stock, patched)]
    assert "rows/gradient" not in logs[0]
    assert 0 < logs[1]["rows/projected"] <= logs[1]["rows/gradient"] == 1.0
    assert trl_distillation._chunked_divergence_loss is THEIRS


@pytest.mark.usefixtures("forget_warnings")
def test_our_trainer_under_a_patch_counts_its_own_rows_and_nothing_is_said() -> None:
    def prepare(_: Any) -> None:
        warnings.simplefilter("always")  # a tiny run is silent

    with patch_trl(), warnings.catch_warnings(record=True) as caught:
        ours = trained(OURS, "JSD, scaled student, capped teacher", steps=1, prepare=prepare)
    assert ours.trainer.state.log_history[0]["rows/gradient"] == 1.0
    assert not [x for x in caught if "patch_trl" in str(x.message)]


def test_masked_positions_are_never_read() -> None:
    results = []
    for function, of_masked in ((distillation.divergence_loss, torch.nan), (THEIRS, 0.7)):
        given = divergence_inputs(of_masked)
        loss, entropy, count = function(beta=0.5, num_items_in_batch=torch.tensor(40), **given)
        wanted = given["student_hidden_states"], given["student_lm_head_weight"]
        results.append((loss, entropy, count, *torch.autograd.grad(loss, wanted)))
        assert not entropy.requires_grad
    torch.testing.assert_close(*results, rtol=2e-5, atol=1e-7)


def test_a_batch_without_a_counted_token_gives_a_loss_of_zero_that_is_attached() -> None:
    given = divergence_inputs(torch.nan) | {"completion_mask": torch.zeros(3, 7)}
    loss, entropy, count = distillation.divergence_loss(beta=1.0, **given)
    loss.backward()
    assert (loss.item(), entropy.item(), count.item()) == (0.0, 0.0, 0)
    assert not given["student_lm_head_weight"].grad.any()


def test_each_head_is_projected_once() -> None:
    given = divergence_inputs(width=12) | {"completion_mask": torch.ones(3, 7)}
    for beta in (0.0, 0.5, 1.0):
        with FlopCounterMode(display=False) as counter:
            distillation.divergence_loss(beta=beta, **given)[0].backward()
        assert counter.get_total_flops() == 8 * 21 * 50 * 12  # two projections, d hidden, d weight
