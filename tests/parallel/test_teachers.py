"""A student and its teacher, each divided in its own way: gradients equal those of one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from grpo_kernels import Run, grpo_loss, linear_divergence
from tests.support import parallel_cases as cases
from tests.support import zero3
from tests.support.parallel_cases import LOSSES, SETUPS, Batch, TinyModel, relative_error
from tests.support.ranks import run_ranks

KL = {"beta": 0.3, "kl_estimator": "full"}
Gradients = dict[str, Tensor]

ROOT, OWN = "FSDP2, head in the root unit", "FSDP2, head its own unit"
ZERO3 = "ZeRO-3"
# (the student's way, the teacher's, what is computed, engine, tied)
CASES = (
    ("DDP", "whole", "jsd", "auto", False),
    ("DDP", OWN, "reverse_kl", "lean", True),
    (OWN, OWN, "jsd", "auto", False),
    (f"{OWN}, after the forward", OWN, "jsd", "two_pass", False),
    (OWN, OWN, "forward_kl", "lean", False),
    (ROOT, ROOT, "jsd", "two_pass", False),
    (ROOT, ROOT, "jsd", "lean", True),
    (OWN, OWN, "loss", "two_pass", False),
    (ROOT, ROOT, "loss", "auto", True),
    ("DDP", ROOT, "loss", "lean", False),
)
OF_ZERO3 = (
    (ZERO3, ZERO3, "jsd", "auto", False),
    (ZERO3, ZERO3, "reverse_kl", "lean", False),
    (ZERO3, ZERO3, "loss", "two_pass", False),
)


def make_teacher() -> TinyModel:
    """Another model than the student, with a bias."""
    teacher = cases.make_model(torch.float64, LOSSES["off-policy"], bias=True)
    with torch.no_grad():
        for x in teacher.parameters():
            x.mul_(0.7).add_(0.1)
    return teacher.requires_grad_(False)


def divided(teacher: TinyModel, way: str) -> nn.Module:
    if way == ZERO3:
        return zero3.divided(teacher)
    if way == OWN:
        fully_shard(teacher.lm_head)
    return teacher if way == "whole" else fully_shard(teacher)


def score(
    models: tuple[TinyModel, TinyModel], batch: Batch, states: Tensor, what: str, engine: str,
    hidden: Tensor,
) -> Tensor:  # fmt: skip
    items, run = cases.items_per_rank(2, last_empty=False), Run(engine)
    head, second = models[0].lm_head, (states, models[1].lm_head)
    if what == "loss":
        given = cases.arguments(LOSSES["off-policy"], batch, items)
        out = grpo_loss(hidden, head, **KL, reference=second, run=run, **given)
        assert engine in ("auto", out.engine)
        return out.loss
    given = {"completion_mask": batch.completion_mask, "divergence": what, "run": run}
    return linear_divergence(hidden, head, second, **given).divergence.sum() / items


def gradients(student_way: str, teacher_way: str, what: str, engine: str, tied: bool) -> Gradients:
    setup = zero3.INSIDE if student_way == ZERO3 else SETUPS[student_way]
    run = cases.Run(setup, LOSSES["off-policy"], torch.device("cpu"), torch.float64)
    student, teacher = cases.make_model(torch.float64, run.loss, tied=tied), make_teacher()
    wrapped, tokens = setup.wrap(student, None), run.batch.tokens
    with torch.no_grad():
        states = divided(teacher, teacher_way)(tokens)
    then = functools.partial(score, (student, teacher), run.batch, states, what, engine)
    cases.backward(wrapped, wrapped(tokens, then) if setup.inside else then(wrapped(tokens)))
    return cases.gradients_of(student)


def truth(what: str, tied: bool) -> Gradients:
    """The mean over ranks."""
    student = cases.make_model(torch.float64, LOSSES["off-policy"], tied=tied)
    teacher = make_teacher()
    for rank in range(2):
        batch = cases.make_batch(rank, 2, torch.float64, last_empty=False)
        states, hidden = teacher(batch.tokens), student(batch.tokens)
        (score((student, teacher), batch, states, what, "auto", hidden) / 2).backward()
    return cases.gradients_of(student)


def run_cases(rank: int, world_size: int, given: Any) -> list[Gradients]:
    return [gradients(*case) for case in given]


# of the largest entry; DeepSpeed keeps gradients in float32
@pytest.mark.parametrize(
    ("given", "bound"),
    [(CASES, 1e-13), pytest.param(OF_ZERO3, 2e-7, marks=zero3.needs_deepspeed)],
    ids=["", "ZeRO-3"],
)
def test_gradients_are_those_of_one_process(given: Any, bound: float) -> None:
    wanted = [truth(what, tied) for _, _, what, _, tied in given]
    for found in run_ranks(run_cases, 2, given):
        for case, got, want in zip(given, found, wanted, strict=True):
            errors = relative_error(got, want)
            assert max(errors.values()) < bound, (case, errors)
