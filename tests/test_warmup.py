"""`python -m grpo_kernels warmup`: it compiles what later calls need, and says what it does."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
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
        r"  C\+\+ library, for CPU tensors +\d+\.\d s  (cached|prebuilt|loaded before|built in .*)", said[1]
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
    monkeypatch.setattr(warmup, "steps", lambda head, *_, **given: steps(head, torch.device("cpu"), backend, **given))
    for name, value in {
        "is_available": True,
        "get_device_name": "a pretended GPU",
        "current_device": 0,
        "synchronize": None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)


@pytest.mark.parametrize("options", ["", "--bias --softcap 5 --dtype fp32 --loss-type gmpo", "--teacher --dtype fp16"])
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
    names += ["divergence from a teacher", exact, f"{exact}, two passes"] if "--teacher" in options else []
    timed = re.findall(r"^  (\S.*?) +\d+\.\d s$", said, re.MULTILINE)
    assert sorted(timed) == sorted(names)
    assert said.endswith("done\n")


def test_a_step_that_fails_stops_no_other(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert {*plain["needed"]} == {*plain["warm"]} == kernels | {"diverge_kernel", "teacher_fused_kernel"}
    assert plain["missing"] == capped["missing"] == []


GEMMA = {"model_type": "gemma2", "vocab_size": 256, "hidden_size": 24}  # whose soft-cap is 30 unless it says otherwise


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (GEMMA, "V 256, H 24, bfloat16, dapo, soft-cap 30"),
        ({**GEMMA, "final_logit_softcapping": 12.5}, "V 256, H 24, bfloat16, dapo, soft-cap 12.5"),
        (
            {"model_type": "granite", "vocab_size": 99, "hidden_size": 32, "logits_scaling": 8.0},
            "V 99, H 32, bfloat16, dapo, logit scale 0.125",
        ),
        (
            {"model_type": "cohere", "vocab_size": 1200, "hidden_size": 64, "logit_scale": 0.25},
            "V 1,200, H 64, bfloat16, dapo, logit scale 0.25",
        ),
    ],
)
def test_a_models_config_is_read(
    config: dict[str, Any],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["warmup", "--config", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("warmup", "expected --model NAME, --config DIR, or both --vocab V and --hidden H"),
        ("warmup --config . --vocab 3", "expected --model NAME, --config DIR, or both --vocab V and --hidden H"),
        ("warmup --vocab 3", "--hidden: expected 1 to 1,000,000,000, got None"),
        ("warmup --vocab 3 --hidden 0", "--hidden: expected 1 to 1,000,000,000, got 0"),
        ("warmup --vocab 3 --hidden 3 --softcap 0", "--softcap: expected more than 0, got 0.0"),
        ("warmup --config /no/such", "--config: expected a folder with config.json, got /no/such"),
        ("--json warmup --vocab 3 --hidden 3", "warmup: expected neither --json nor --no-check before it"),
    ],
)
def test_wrong_arguments_say_what_was_expected(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments.split())
    assert message in capsys.readouterr().err


def test_help_lists_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert re.search(r"^ +warmup +compile what the first calls", capsys.readouterr().out, re.MULTILINE)
