"""`python -m grpo_kernels`: its report and self-check, and the options of `memory`."""

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
GPT = {"model_type": "gpt2", "vocab_size": 3000, "n_embd": 128}  # its name for H
GEMMA = {"model_type": "gemma3", "text_config": {**LLAMA, "model_type": "gemma3_text"}}


def written(config: dict[str, Any], folder: Path) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    return capsys.readouterr().err


def test_json_report_and_self_check(capsys: pytest.CaptureFixture[str]) -> None:
    said = json.loads(shown(capsys, "--json"))
    assert said["ok"]
    assert all(check["ok"] for check in said["checks"])
    assert {check["backend"] for check in said["checks"]} >= {"torch", "cpp"}
    assert sum(check["name"].endswith("bfloat16") for check in said["checks"]) >= 10
    assert said["environment"]["versions"]["torch"] == torch.__version__
    library = r"\w+, (prebuilt|cached|built in .+|loaded before)(, /.+)?"
    assert re.fullmatch(library, said["environment"]["backend"]["C++ library"])


def test_text_report_version_and_help(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["grpo_kernels", "--no-check"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("grpo_kernels", run_name="__main__")
    said = capsys.readouterr().out
    assert "backend" in said and "self-check" not in said
    for option, told in (
        ("--version", f"^grpo_kernels {re.escape(grpo_kernels.__version__)}$"),
        ("--help", "^ +memory +compute how much memory"),
    ):
        with pytest.raises(SystemExit, match="0"):
            main([option])
        assert re.search(told, capsys.readouterr().out, re.MULTILINE)


@pytest.mark.slow
def test_a_reader_that_has_enough_gets_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "grpo_kernels", "memory", "--model", "Qwen3-8B", "--rows", "8"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=300, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


def test_names_of_gpus_and_models(capsys: pytest.CaptureFixture[str]) -> None:
    """A GPU by its name or its memory; a model in any case, with or without its organisation."""
    given = ("memory", "--rows", "1024", "--model", "qwen3-8b", "--gpu")
    for alike in (("h100", "80"), ("RTX 4090", "4090", "24")):
        shares = {tuple(re.findall(r"\S+%", shown(capsys, *given, gpu))) for gpu in alike}
        assert [len(x) for x in shares] == [3]
    said = {shown(capsys, "memory", "--model", x) for x in ("qwen3-8b", "Qwen/Qwen3-8B")}
    assert len(said) == 1
    assert said.pop().startswith("N 16,384, V 151,936, H 4,096,")


HEAD, LARGE = "memory --vocab 9 --hidden 4 ", "expected 1 to 1,000,000,000, got"
SIZES = "expected --model NAME, or both --vocab V and --hidden H"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("memory --rows 8", SIZES),
        ("memory --model /nowhere", "--model: expected Qwen3-0.6B, "),
        (f"{HEAD} --gpu G7", "--gpu: expected A10G, A100, "),
        (f"{HEAD} --rows 99999999999999999999", f"--rows: {LARGE} 9999"),
        (f"{HEAD} --mask 1", "--mask: expected at least 0 and less than 1, got 1"),
        ("--json memory --vocab 3 --hidden 3", "memory: expected neither --json nor --no-check"),
    ],
)
def test_wrong_arguments_say_what_was_expected(arguments, message, capsys):
    assert message in refused(capsys, *arguments.split())


@pytest.mark.parametrize("config", [LLAMA, GPT, GEMMA], ids=lambda x: x["model_type"])
def test_config_gives_the_sizes_of_any_model(config, tmp_path, capsys):
    read = shown(capsys, "memory", "--model", written(config, tmp_path))
    assert read == shown(capsys, "memory", "--vocab", "3000", "--hidden", "128")


@pytest.mark.parametrize(
    "changed", [{"model_type": "no-such-model"}, {"vocab_size": True}, {"hidden_size": 0}], ids=str
)
def test_a_config_that_cannot_be_read_is_one_line(changed, tmp_path, capsys):
    said = refused(capsys, "memory", "--model", written(LLAMA | changed, tmp_path))
    [error] = (x for x in said.splitlines() if "error: --model: expected " in x)
    assert "or a model whose config.json can be read, got" in error


def test_a_configs_own_code_is_not_run(tmp_path, capsys, monkeypatch):
    """Even if standard input would say yes to it."""
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(
        f"from transformers import PretrainedConfig\nopen({str(ran)!r}, 'w')\n"
        "class Own(PretrainedConfig):\n    pass\n"
    )
    config = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}, "vocab_size": 9}
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    assert "can be read" in refused(capsys, "memory", "--model", written(config, tmp_path))
    assert not ran.exists()
