"""TRL on two processes (DDP, FSDP, ZeRO) with our trainers: what comes out is one process's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl")
from benchmarks import parity
from grpo_kernels.trl.distillation import divergence_loss
from tests.support import zero3
from tests.support.ranks import Ranks
from tests.support.training_step import assert_same
from tests.support.trl_ranks import Job, divided_heads, in_bf16, train, train_all
from tests.support.trl_training import divergence_inputs

pytestmark = [pytest.mark.unit, pytest.mark.slow]

TOLERANCE = 1e-5
LORA = ("q_proj", "lm_head")
ADAPTED: dict[str, Any] = {"lora": LORA, "arguments": {"kl_estimator": "full"}}
# the last micro-batches have no samples
LEFT: dict[str, Any] = {"tokens_per_forward": 10_000}
# a mean over micro-batches: other ones on one process
BONUS = {"entropy_coef": 0.01, "num_iterations": 2}
JOBS = {
    "DDP": Job(),
    "FSDP2": Job("FSDP2"),
    "FSDP2, tied": Job("FSDP2", kind="tied"),
    "FSDP2, head in the root unit": Job("FSDP2, head in the root unit"),
    "FSDP2, head its own unit": Job("FSDP2, head its own unit"),
    "FSDP2, head its own unit, patched": Job("FSDP2, head its own unit", stock=True, patched=True),
    "FSDP2, adapter on the head, exact KL": Job("FSDP2", **ADAPTED),
    "FSDP1": Job("FSDP1"),
    "FSDP1: micro-batches are left": Job("FSDP1", arguments=LEFT),
    "DDP: micro-batches are left": Job(arguments=LEFT),
}
# half of a batch is scored, its live sequences alone
HALVES: dict[str, Any] = {"options": {"steps_per_generation": 4, "epsilon": 1e-3}}
# the loss follows the reference's scoring
ONCE: dict[str, Any] = {"lora": LORA, "options": {"beta": 0.04}}
OTHER_JOBS = {
    "bonus, DDP": Job(options=BONUS, counted=True),
    "bonus, stock": Job(stock=True, options=BONUS),
    "halves, stock": Job(stock=True, **HALVES),
    "halves, DDP": Job(**HALVES),
    "halves, FSDP2": Job("FSDP2", **HALVES),
    "once, DDP": Job(**ONCE),
    "once, FSDP2": Job("FSDP2", **ONCE),
}
ZERO_JOBS = {
    "ZeRO-3": Job("ZeRO-3"),
    "ZeRO-3, tied": Job("ZeRO-3", kind="tied"),
    "ZeRO-3, adapter on the head, exact KL": Job("ZeRO-3", **ADAPTED),
}
BECOMES = {
    "DDP": "DistributedDataParallel",
    "FSDP1": "FullyShardedDataParallel",
    "FSDP2": "FSDPModule",
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as made:
        yield made


@pytest.fixture(scope="module")
def logged(ranks: Ranks) -> list[dict[str, Any]]:
    """By rank, by job; ZeRO last, as it changes accelerate."""
    of_zero = {} if zero3.needs_deepspeed.args[0] else ZERO_JOBS
    return ranks.run(train_all, JOBS | OTHER_JOBS | of_zero)


def test_a_divided_teacher_is_right_and_a_divided_student_that_trains_is_refused(ranks):
    given = divergence_inputs()
    loss, *_ = divergence_loss(beta=0.5, **given)
    loss.backward()
    want = {"loss": loss.detach(), "grad": given["student_lm_head_weight"].grad}
    for found in ranks.run(divided_heads):
        torch.testing.assert_close(found, want | {"scored": loss.detach()})


def test_bf16_under_fsdp2_rounds_no_log_probability(ranks: Ranks) -> None:
    """accelerate has FSDP2 round what a model returns; stock TRL's log-probabilities, too."""
    for found in ranks.run(in_bf16):
        theirs, ours = found["theirs"], found["ours"]
        assert (theirs.dtype, ours.dtype) == (torch.bfloat16, torch.float32)
        assert (ours != ours.bfloat16().float()).any()
        torch.testing.assert_close(ours, theirs.float(), rtol=1e-2, atol=5e-2)
        heads = found["ours, d head"], found["theirs, d head"]
        torch.testing.assert_close(*heads, rtol=0.1, atol=0.3)


@cache
def of_one_process(kind: str, adapted: bool) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    return train(Job(kind=kind, **ADAPTED) if adapted else Job(kind=kind, stock=True))[:2]


@pytest.mark.parametrize(
    "name", [*JOBS, *(pytest.param(name, marks=zero3.needs_deepspeed) for name in ZERO_JOBS)]
)
def test_a_divided_model_trains_as_on_one_process(name, logged):
    job = (JOBS | ZERO_JOBS)[name]
    want, moved = of_one_process(job.kind, bool(job.lora))
    assert all(x["grad_norm"] > 0.1 for x in want)
    for of_rank in logged:
        ran = of_rank[name]
        errors = parity.differences(want, ran.steps)
        assert max(errors["loss"], errors["grad_norm"]) < TOLERANCE, errors
        assert_same(ran.moved, moved, TOLERANCE)
        assert BECOMES.get(job.wrap.split(",")[0], "DeepSpeedEngine") in ran.classes
        assert ran.head.startswith("FSDP") == (job.wrap in ("FSDP2", "FSDP2, head its own unit"))


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("bonus, DDP", "bonus, stock"),
        ("halves, DDP", "halves, stock"),
        ("halves, FSDP2", "halves, stock"),
        # PEFT switches the gradient of adapters off for the reference, and on again afterwards
        ("once, FSDP2", "once, DDP"),
    ],
)
def test_metrics_are_those_of_stock_trl_or_of_ddp_on_as_many_processes(name, other, logged):
    for of_rank in logged:
        errors = parity.differences(of_rank[other].steps, of_rank[name].steps)
        assert max(errors.values()) < TOLERANCE, errors
        assert of_rank[name].steps[-1]["clip_ratio/region_mean"] > 0 or "halves" not in name
        counts = of_rank[name].counts
        # the gradient is foreseen with the normalizer of all processes; else rows would be
        # projected twice, since those of the bonus and of the policy's term differ
        assert counts.flops == 6 * counts.scored * counts.size
        assert (counts.flops > 0) == name.startswith("bonus")
