"""TRL on two processes (DDP, FSDP2, ZeRO-3) with our trainer: losses and gradient norms are those of one process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

pytest.importorskip("trl")
from benchmarks import parity
from tests.support import zero3
from tests.support.ranks import run_ranks
from tests.support.trl_ranks import Job, save_model, train, train_all

TOLERANCE = 1e-5
ADAPTED: dict[str, Any] = {"lora": ("q_proj", "lm_head"), "arguments": {"kl_estimator": "full"}}
JOBS = {
    "DDP": Job(),
    "DDP, stock": Job(stock=True),
    "FSDP2": Job("FSDP2"),
    "FSDP2, tied": Job("FSDP2", kind="tied"),
    "FSDP2, head in the root unit": Job("FSDP2, head in the root unit"),
    "FSDP2, head its own unit": Job("FSDP2, head its own unit"),
    "FSDP2, adapter on the head, exact KL": Job("FSDP2", **ADAPTED),
}
ZERO3_JOBS = {
    "ZeRO-3": Job("ZeRO-3"),
    "ZeRO-3, tied": Job("ZeRO-3", kind="tied"),
    "ZeRO-3, adapter on the head, exact KL": Job("ZeRO-3", **ADAPTED),
}
BECOMES = {"DDP": "DistributedDataParallel", "FSDP2": "FSDPModule", "ZeRO-3": "DeepSpeedEngine"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By kind of model: where it is saved."""
    found = {kind: str(tmp_path_factory.mktemp(kind)) for kind in ("qwen3", "tied")}
    for kind, folder in found.items():
        save_model(kind, folder)
    return found


@pytest.fixture(scope="module")
def logged(folders: dict[str, str]) -> list[dict[str, Any]]:
    """By rank, by job: one set of processes, since they have much to import."""
    return run_ranks(train_all, 2, JOBS, folders)


@cache
def of_one_process(kind: str, adapted: bool, folder: str) -> list[dict[str, float]]:
    """Stock TRL; with an adapter on the head, which it refuses, ours: `test_trl_head_adapter.py` compares that."""
    return train(Job(kind=kind, **ADAPTED) if adapted else Job(kind=kind, stock=True), folder)[0]


def check(name: str, job: Job, found: tuple[Any, list[str], str], folders: dict[str, str]) -> None:
    steps, classes, head = found
    want = of_one_process(job.kind, bool(job.lora), folders[job.kind])
    errors = parity.differences(want, steps)
    assert max(errors["loss"], errors["grad_norm"]) < TOLERANCE, f"{name}: {errors}"
    assert all(x["grad_norm"] > 0.1 for x in want)
    assert BECOMES[job.wrap.split(",")[0]] in classes
    assert head.startswith("FSDP") == (job.wrap in ("FSDP2", "FSDP2, head its own unit"))


@pytest.mark.parametrize("name", [name for name, job in JOBS.items() if not job.stock])
def test_ddp_and_fsdp2(name: str, logged: list[dict[str, Any]], folders: dict[str, str]) -> None:
    for of_rank in logged:
        check(name, JOBS[name], of_rank[name], folders)


def test_metrics_are_those_of_stock_trl_on_as_many_processes(logged: list[dict[str, Any]]) -> None:
    """On one process some differ: TRL's are means over micro-batches."""
    for of_rank in logged:
        assert max(parity.differences(of_rank["DDP, stock"][0], of_rank["DDP"][0]).values()) < TOLERANCE


@zero3.needs_deepspeed
def test_zero3(folders: dict[str, str]) -> None:
    for of_rank in run_ranks(train_all, 2, ZERO3_JOBS, folders):
        for name, job in ZERO3_JOBS.items():
            check(name, job, of_rank[name], folders)
