"""TRL's trainers with our head or divergence against TRL's own: same losses and metrics, fewer
products."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
import trl
import trl.trainer.distillation_trainer as trl_distillation
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import head_flops, parity, tiny_models
from grpo_kernels.trl import (
    FusedDistillationTrainer,
    FusedGRPOTrainer,
    distillation,
    micro_batches,
    patch_trl,
)
from tests.support.trl_training import Run, Written, assert_same, divergence_inputs, mixed, train

pytestmark = pytest.mark.unit

TWICE = {"num_iterations": 2, "beta": 0.04}
# every option of the loss: test_training_step_trl.py; every loss type for many steps: make parity
CASES: dict[str, dict[str, Any]] = {
    "LoRA": {"learning_rate": 1e-2, "peft_config": parity.lora(), **TWICE},
    # a saturated cap makes many small gradients, of whose last bits Adam's first steps make
    # directions: 4.1e-5 with the C++ kernels, 1.9e-6 with torch, both as near to float64
    "soft-capping": {"kind": "softcap", "tolerance": 1e-4, **TWICE},
    "fp32 head in bf16": {
        "cast_lm_head_to_fp32": True, "dtype": torch.bfloat16, "tolerance": 2e-2
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_training_is_the_same(name: str) -> None:
    options = {**CASES[name]}
    tolerance = options.pop("tolerance", None)
    assert_same(*(train(x, **options) for x in (trl.GRPOTrainer, FusedGRPOTrainer)), tolerance)


def test_a_mixture_of_experts_with_its_load_balancing_loss(monkeypatch):
    fields = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    kind = "Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**tiny_models.KINDS["qwen3"][2], **fields}
    monkeypatch.setitem(tiny_models.KINDS, "other", kind)
    # without the KL term: sequences without an advantage have the gradient of this loss alone
    theirs, ours = (train(x, kind="other") for x in (trl.GRPOTrainer, FusedGRPOTrainer))
    assert_same(theirs, ours)
    assert all(step["aux_loss"] > 0 for step in theirs.steps)


def test_no_row_is_computed_twice_where_the_gradient_can_be_foreseen() -> None:
    theirs, ours = (head_flops.count(x, steps=1) for x in (trl.GRPOTrainer, FusedGRPOTrainer))
    assert theirs.flops == 8 * theirs.rows * theirs.size
    assert (ours.scored, ours.live) == (theirs.scored, theirs.live)
    assert 0 < ours.live < ours.scored == ours.rows <= theirs.rows
    assert ours.flops == (6 * ours.live + 2 * (ours.scored - ours.live)) * ours.size
    # beta or the bonus: every row carries gradient
    sequences = {"importance_sampling_level": "sequence", "use_bias_correction_kl": False}
    for options in (
        {"entropy_coef": 0.01, "loss_type": "grpo", **TWICE},
        {"loss_type": "dr_grpo", "steps": 1, "beta": 0.04, **sequences},
    ):
        ours = head_flops.count(FusedGRPOTrainer, **options)
        assert ours.flops == 6 * ours.scored * ours.size
    # coupled coefficients cost a second pass at most
    options = parity.loss_options("grpo", "sequence", num_iterations=2)
    ours = head_flops.count(FusedGRPOTrainer, **options)
    assert 2 * ours.scored < ours.flops / ours.size <= 2 * ours.scored + 6 * ours.live


class Columns:
    """Advantages (B, 1): TRL's loss broadcasts them, and nothing is foreseen."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        scored = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        return scored | {"advantages": scored["advantages"].unsqueeze(1)}


def test_inputs_that_only_trl_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(micro_batches.warnings, "warn", lambda text, *_, **__: warned.append(text))
    ours = train(mixed(Columns, FusedGRPOTrainer))
    assert any("gradient of this loss: advantages: expected shape" in str(text) for text in warned)
    assert_same(train(mixed(Columns, trl.GRPOTrainer)), ours)


UNKNOWN = """
import json, warnings
import trl

trl.__version__ = "9.9.0"
theirs = trl.trainer.utils.add_fused_lm_head
caught = []
warnings.showwarning = lambda text, *_: caught.append(str(text))
from grpo_kernels.trl import FusedGRPOTrainer, patch_trl
from tests.support.trl_training import assert_same, train

imported = [*caught]
assert_same(train(trl.GRPOTrainer), train(FusedGRPOTrainer, engine="lean"), tolerance=0.0)
try:
    train(FusedGRPOTrainer, kl_estimator="full")
except ValueError as error:
    print(error)
with patch_trl(layout="trim") as is_patched:
    assert not is_patched and trl.trainer.utils.add_fused_lm_head is theirs
print([x for x in imported if x.startswith("grpo_kernels")])
"""


def test_an_unknown_trl_is_left_alone() -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNKNOWN], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    message = "grpo_kernels: expected trl 1.16, got trl 9.9.0, so everything runs as stock TRL"
    refused = "kl_estimator: expected 'k3' with trl 9.9.0, got 'full'"
    assert done.stdout.splitlines()[-2:] == [refused, f"{[message]}"]


# Distillation

THEIRS = trl_distillation._chunked_divergence_loss
WIDER = {"hidden_size": 48, "head_dim": 12}
COOLER = {"temperature": 0.7}
# name -> (student, teacher, how the teacher's config differs, beta, options)
DISTILLED: dict[str, tuple[str, str, dict[str, Any], float, dict[str, Any]]] = {
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
    student, teacher, changes, beta, of_case = DISTILLED[name]
    given = {
        "kind": student,
        "teacher_model": tiny_models.model(teacher, seed=5, num_hidden_layers=1, **changes),
        "beta": beta,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_completion_length": 12,
    }
    options = {"config_class": trl.DistillationConfig, **given, **of_case, **options}
    return train(trainer_class, **options)


@pytest.mark.parametrize("name", DISTILLED)
def test_distillation_is_the_same(name: str) -> None:
    stock, ours = (trained(x, name) for x in (STOCK, OURS))
    assert stock.steps[0]["loss"] > 1e-3
    assert {"loss", "grad_norm", "entropy"} <= stock.steps[0].keys()
    assert_same(stock, ours)
    assert trl_distillation._chunked_divergence_loss is THEIRS
    log = ours.trainer.state.log_history[0]
    assert 0 < log["rows/projected"] <= 1
    assert log["rows/gradient"] == 1.0


def test_a_patched_distillation_is_the_same_and_unpatching_gives_trls_back() -> None:
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
