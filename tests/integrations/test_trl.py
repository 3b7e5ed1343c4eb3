"""TRL's trainers with our head against TRL's own: same losses and metrics, fewer products."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("trl")
import trl

from benchmarks import head_flops, parity, tiny_models
from grpo_kernels.trl import FusedGRPOTrainer, micro_batches
from tests.support.trl_training import assert_same, mixed, train

pytestmark = pytest.mark.unit

TWICE = {"num_iterations": 2, "beta": 0.04}
# every option of the loss: test_training_step_trl.py; every loss type for many steps: make parity
CASES: dict[str, dict[str, Any]] = {
    "LoRA": {"learning_rate": 1e-2, "peft_config": parity.lora(), "steps": 4, **TWICE},
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
