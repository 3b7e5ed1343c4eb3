"""`python -m grpo_kernels`: its report, and the options of `memory` and `warmup`."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import grpo_kernels
from grpo_kernels.__main__ import main

LLAMA = {"model_type": "llama", "vocab_size": 3000, "hidden_size": 128}
GEMMA = {
    "model_type": "gemma2",
    "vocab_size": 256,
    "hidden_size": 24,
}  # whose soft-cap is 30 unless it says otherwise


def written(config: dict[str, Any], folder: Path) -> str:
    """`config` as a model's configuration in `folder`."""
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error that these arguments are."""
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    return capsys.readouterr().err


def test_json_report_and_self_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"]
    assert len(said["checks"]) >= 10
    assert all(check["ok"] for check in said["checks"])
    assert sum(check["name"].endswith("V 9001, bfloat16") for check in said["checks"]) >= 5
    assert said["environment"]["versions"]["torch"] == torch.__version__
    assert set(said["environment"]["backend"]) >= {"cpu"}


def test_text_report_version_and_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["grpo_kernels", "--no-check"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("grpo_kernels", run_name="__main__")
    said = capsys.readouterr().out
    assert "backend" in said
    assert "self-check" not in said
    shown = {}
    for option in ("--version", "--help"):
        with pytest.raises(SystemExit, match="0"):
            main([option])
        shown[option] = capsys.readouterr().out
    assert shown["--version"] == f"grpo_kernels {grpo_kernels.__version__}\n"
    assert re.search(r"^ +memory +how much memory", shown["--help"], re.MULTILINE)
    assert re.search(r"^ +warmup +compile what the first calls", shown["--help"], re.MULTILINE)


def test_a_reader_that_has_enough_gets_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "grpo_kernels", "memory", "--model", "Qwen3-8B", "--rows", "8"]
    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


SIZES = "expected --model NAME, --config DIR, or both --vocab V and --hidden H"
LARGE = "expected 1 to 1,000,000,000, got"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("memory --rows 8", SIZES),
        ("memory --rows 8 --vocab 9", f"--hidden: {LARGE} None"),
        ("memory --model Qwen3-8B --vocab 9", SIZES),
        ("memory --model Qwen4-8B", "--model: expected Qwen3-0.6B, "),
        ("memory --rows 8 --vocab 9 --hidden 4 --gpu 4091", "or the GPU's memory in GiB, got 4091"),
        ("memory --rows 8 --vocab 9 --hidden 4 --gpu G7", "--gpu: expected A10G, A100, "),
        ("memory --rows 8 --vocab 9 --hidden 4 --gpu -1", "or the GPU's memory in GiB, got -1"),
        (
            "memory --rows 8 --config /nowhere",
            "--config: expected a folder with config.json, got /nowhere",
        ),
        ("memory --rows 0 --vocab 9 --hidden 4", f"--rows: {LARGE} 0"),
        ("memory --rows 99999999999999999999 --vocab 9 --hidden 4", f"--rows: {LARGE} 9999"),
        (
            "memory --rows 8 --vocab 9 --hidden 4 --mask 1",
            "--mask: expected a share of at least 0 and less than 1, got 1.0",
        ),
        (
            "memory --rows 8 --vocab 9 --hidden 4 --workspace 0",
            "--workspace: expected at least 1, got 0",
        ),
        ("warmup --config . --vocab 3", SIZES),
        ("warmup --vocab 3 --hidden 0", f"--hidden: {LARGE} 0"),
        ("warmup --vocab 3 --hidden 3 --softcap 0", "--softcap: expected more than 0, got 0.0"),
        (
            "--json warmup --vocab 3 --hidden 3",
            "warmup: expected neither --json nor --no-check before it",
        ),
    ],
)
def test_wrong_arguments_say_what_was_expected(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *arguments.split())


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        {"model_type": "gpt2", "vocab_size": 3000, "n_embd": 128},  # its name for H
        {
            "model_type": "gemma3",
            "text_config": {"model_type": "gemma3_text", "vocab_size": 3000, "hidden_size": 128},
        },
    ],
    ids=lambda x: x["model_type"],
)
def test_config_gives_the_sizes_of_any_model(
    config: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = []
    for head in (["--config", written(config, tmp_path)], ["--vocab", "3000", "--hidden", "128"]):
        assert main(["memory", "--rows", "64", *head]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (GEMMA, "V 256, H 24, bfloat16, dapo, soft-cap 30"),
        (GEMMA | {"final_logit_softcapping": 12.5}, "V 256, H 24, bfloat16, dapo, soft-cap 12.5"),
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
def test_config_gives_the_constants_of_the_head(
    config: dict[str, Any],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: Any,
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["warmup", "--config", written(config, tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == said


def test_config_that_transformers_does_not_know_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "memory", "--config", written({"model_type": "no-such-model"}, tmp_path))
    assert f"--config: {tmp_path / 'config.json'} cannot be read" in said
    assert "give --vocab and --hidden" in said


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", None), ("vocab_size", "abc"), ("vocab_size", 100.5), ("vocab_size", True), ("hidden_size", 0),
        ("vocab_size", 10**20), ("logit_scale", 0), ("logit_scale", "one"), ("logits_scaling", True),
    ],
)  # fmt: skip
def test_numbers_of_a_config_that_cannot_be_are_one_line(
    field: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(capsys, "memory", "--config", written(LLAMA | {field: value}, tmp_path))
    assert len([x for x in said.splitlines() if "error: --config: " in x]) == 1


def test_a_configs_own_code_is_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if standard input would say yes to it."""
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(
        f"from transformers import PretrainedConfig\nopen({str(ran)!r}, 'w')\nclass Own(PretrainedConfig):\n    pass\n"
    )
    config = {
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.Own"},
        "vocab_size": 9,
        "hidden_size": 4,
    }
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    assert "cannot be read" in refused(capsys, "memory", "--config", written(config, tmp_path))
    assert not ran.exists()
