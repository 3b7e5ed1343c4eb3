"""`python -m grpo_kernels warmup`: it compiles what later calls need, and says what it does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from grpo_kernels.__main__ import main
from grpo_kernels.backends.cpp_rows.build import Library
from grpo_kernels.diagnostics import warmup

SMALL = "--vocab 70 --hidden 8"


def test_without_a_gpu_the_library_is_built(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["warmup", *SMALL.split()]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "V 70, H 8, bfloat16, dapo"
    assert re.fullmatch(
        r"  C\+\+ library, for CPU tensors +\d+\.\d s  (cached|prebuilt|loaded before|built in .*)",
        said[1],
    )
    assert said[2:] == [
        "Triton's kernels: none compiled; that needs the GPU that they are for, and there is none here",
        "done",
    ]


def test_a_library_that_cannot_be_built_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(warmup.build, "load", lambda: Library(refusal="no compiler: install g++"))
    assert main(["warmup", *SMALL.split()]) == 1
    said = capsys.readouterr().out
    assert "FAILED RuntimeError: no compiler: install g++" in said
    assert "1 of 1 steps FAILED" in said


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """A GPU in name: the steps run on the CPU, with `backend`."""
    steps = warmup.steps
    monkeypatch.setattr(
        warmup,
        "steps",
        lambda head, *_, **given: steps(head, torch.device("cpu"), backend, **given),
    )
    for name, value in {
        "is_available": True,
        "get_device_name": "a pretended GPU",
        "current_device": 0,
        "synchronize": None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)


@pytest.mark.parametrize(
    "options", ["", "--bias --softcap 5 --dtype fp32 --loss-type gmpo", "--teacher --dtype fp16"]
)
def test_every_step_runs_on_a_gpu(
    options: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's interpreter."""
    pytest.importorskip("triton")
    pretend_gpu(monkeypatch, "triton")
    assert main(["warmup", *SMALL.split(), *options.split()]) == 0
    said = capsys.readouterr().out
    assert "Triton's kernels, on a pretended GPU" in said
    names = [*warmup.LOSSES, "log-probabilities", "log-probabilities, frozen head"]
    exact = "loss, exact KL to a reference"
    names += (
        ["divergence from a teacher", exact, f"{exact}, two passes"]
        if "--teacher" in options
        else []
    )
    timed = re.findall(r"^  (\S.*?) +\d+\.\d s$", said, re.MULTILINE)
    assert sorted(timed) == sorted(names)
    assert said.endswith("done\n")


def test_a_step_that_fails_stops_no_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpu(monkeypatch, "torch")

    def fails(*_: Any, **options: Any) -> None:
        raise RuntimeError("ptxas is not there")

    monkeypatch.setattr(warmup, "grpo_loss", fails)
    assert main(["warmup", *SMALL.split()]) == 1
    said = capsys.readouterr().out
    assert said.count("FAILED RuntimeError: ptxas is not there") == len(warmup.LOSSES)
    assert f"{len(warmup.LOSSES)} of {len(warmup.LOSSES) + 3} steps FAILED" in said


def test_batches_need_no_variant_that_it_has_not_compiled() -> None:
    """Of any size, masked, ragged, with any numbers, in several chunks; with every engine."""
    pytest.importorskip("triton")
    env = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.support.warmup_variants"],
        capture_output=True, text=True, env=env, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    plain, capped = json.loads(run.stdout)
    kernels = {"stats_kernel", "grad_kernel", "fused_kernel", "single_pass_kernel", "scale_kernel"}
    assert {*capped["needed"]} == {*capped["warm"]} == kernels
    assert (
        {*plain["needed"]}
        == {*plain["warm"]}
        == kernels | {"diverge_kernel", "teacher_fused_kernel"}
    )
    assert plain["missing"] == capped["missing"] == []
