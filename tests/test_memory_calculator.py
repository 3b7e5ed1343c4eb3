"""`python -m grpo_kernels memory`: what it says is what calls allocate, ours and others', and what was measured."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.cases import HEADS, case, make_inputs
from benchmarks.harness.measure import Step
from benchmarks.providers import build
from grpo_kernels.__main__ import main
from grpo_kernels.diagnostics import peer_memory
from grpo_kernels.diagnostics.memory import MIB, MODELS, estimate
from grpo_kernels.diagnostics.sizes import Need, Size
from grpo_kernels.engine import mixed_mm
from tests.support.measure import AllocationWatcher

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "memory.md").read_text()
PROVIDERS = {
    "grpo_kernels, score": "ours",
    "grpo_kernels, frozen": "ours",
    "grpo_kernels, one_pass": "ours/one_pass",
    "grpo_kernels, two_pass": "ours/two_pass",
    "grpo_kernels, lean": "ours/lean",
    "all logits, log_softmax": "eager",
    "TRL 1.16 fused head": "trl",
    "Liger 0.8.5 fused GRPO loss": "liger_grpo",
}
TILES = (  # of others: where the number is in their source, its name here, and what a small case has in its place
    ("trl.kernels.chunked_logprob", "TOKEN_CHUNK_SIZE", "TRL_ROWS", 4096),
    ("trl.trainer.utils", "_CHUNKED_LOGPROB_CHUNK_SIZE", "TRL_COLUMNS", 2048),
    ("liger_kernel.chunked_loss.fused_linear_ppo", "_SELECTIVE_LOGPROB_SEQ_CHUNK_SIZE", "LIGER_ROWS", 2048),
    ("liger_kernel.chunked_loss.fused_linear_ppo", "_SELECTIVE_LOGPROB_VOCAB_CHUNK_SIZE", "LIGER_COLUMNS", 512),
)
# The peak of resident memory over what is allocated, at most: small blocks that were freed stay with the process.
MEASURED = {"ours": 1.3, "ours@64": 1.3, "eager": 4.1, "trl": 2.0, "liger_grpo": 1.1}
SCRATCH_MIB = 8  # of the products' library

SMALL = {"n": 128, "h": 32, "v": 3000, "t": 32}
FEW = {"n": 64, "h": 128, "v": 3000, "t": 32}
CASES: dict[str, dict[str, Any]] = {
    "fp32": SMALL,
    "bf16": {**SMALL, "dtype": "bfloat16"},
    "frozen": {**SMALL, "frozen": True},
    "score": {**SMALL, "score": True},
    "soft-cap": {**SMALL, "softcap": 30.0},
    "half masked, bf16": {**SMALL, "padding": 0.5, "dtype": "bfloat16"},
    "few rows": FEW,
    "few rows, bf16, frozen": {**FEW, "dtype": "bfloat16", "frozen": True},
    "small vocabulary": {**SMALL, "v": 400},
}


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of the peers' that are not the whole of a small case."""
    for module, name, mine, columns in TILES[1::2]:
        monkeypatch.setattr(importlib.import_module(module), name, columns)
        monkeypatch.setattr(peer_memory, mine, columns)


@pytest.fixture
def no_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor without AMX, on which the page's figures and the results were made."""
    monkeypatch.setattr(mixed_mm, "_has_tiles", lambda: False)


def size_of(fields: dict[str, Any], workspace_mib: int | None) -> Size:
    return Size(
        rows=fields["n"],
        vocab=fields["v"],
        hidden=fields["h"],
        dtype=getattr(torch, fields.get("dtype", "float32")),
        frozen=fields.get("frozen", False),
        score=fields.get("score", False),
        softcap=fields.get("softcap") is not None,
        masked=fields.get("padding", 0.0),
        length=fields["t"],
        workspace_bytes=None if workspace_mib is None else workspace_mib * MIB,
    )


def counted_peak(need: Need, fields: dict[str, Any], workspace_mib: int) -> int:
    """Bytes that a step of the provider has allocated at once."""
    name = PROVIDERS[need.name]
    inputs = make_inputs(case("counted", **fields), torch.device("cpu"))
    step = Step(build(f"{name}@{workspace_mib}" if name.startswith("ours") else name, inputs))
    with AllocationWatcher() as watch:
        step()
    assert need.returned == sum(x.grad.nbytes for x in inputs.leaves if x.grad is not None)
    return watch.peak


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", CASES)
def test_every_figure_is_what_is_allocated(name: str) -> None:
    """To 2 %, and 40 numbers a token."""
    fields, workspace_mib = CASES[name], 1
    for need in estimate(size_of(fields, workspace_mib)):
        peak = counted_peak(need, fields, workspace_mib)
        assert abs(need.peak - peak) <= 0.02 * peak + 40 * 4 * fields["n"], (need, peak)


@pytest.mark.usefixtures("no_tiles")
def test_every_figure_is_what_was_measured() -> None:
    seen = set()
    for path in (ROOT / "benchmarks" / "results").glob("cpu-*.json"):
        for name, fields in json.loads(path.read_text()).get("cases", {}).items():
            if set(MEASURED).isdisjoint(fields.get("providers", {})) or fields.get("divergence") is not None:
                continue
            if fields["zero_share"] or fields["sequence"] or fields["top_entropy"] < 1 or fields["padding"]:
                continue
            for provider, most in MEASURED.items():
                measured = fields["providers"].get(provider, {}).get("extra_mib")
                if measured is None:
                    continue
                needs = estimate(size_of(fields, 64 if provider == "ours@64" else None))
                kind = provider.split("@")[0]
                need = next(x for x in needs if PROVIDERS[x.name].split("/")[0] == kind)
                extra = need.extra / MIB
                assert 0.97 * extra <= measured <= most * extra + SCRATCH_MIB, (path.name, name, provider, extra)
                seen.add(provider)
    assert seen == set(MEASURED)


def test_tiles_are_those_of_the_releases() -> None:
    for module, name, mine, _ in TILES:
        assert getattr(importlib.import_module(module), name) == getattr(peer_memory, mine)


def test_models_are_those_of_the_benchmarks() -> None:
    assert {name: (head.v, head.h, head.softcap is not None) for name, head in HEADS.items()} == MODELS


@pytest.mark.usefixtures("no_tiles")
def test_output_in_the_page_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    shown = re.findall(r"```\n\$ python -m grpo_kernels (memory [^\n]*)\n(.*?)```", PAGE, re.DOTALL)
    assert len(shown) >= 2
    for command, output in shown:
        assert main(command.split()) == 0
        assert capsys.readouterr().out.strip() == output.strip()


@pytest.mark.usefixtures("no_tiles")
def test_table_of_models_in_the_page_is_computed() -> None:
    rows = re.findall(r"^\| (\S+) \| ([\d,]+) \| (.*) \|$", PAGE, re.MULTILINE)
    names = ("one_pass", "lean", "all logits", "TRL", "Liger")
    assert len(rows) == 12
    for model, tokens, figures in rows:
        vocab, hidden, softcap = MODELS[model]
        size = Size(int(tokens.replace(",", "")), vocab, hidden, torch.bfloat16, softcap=softcap)
        needs = estimate(size)
        found = [next((x for x in needs if name in x.name), None) for name in names]
        assert figures.split(" | ") == ["" if x is None else f"{x.extra / 2**30:,.1f}" for x in found]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rows 8", "expected --model, or --vocab and --hidden"),
        ("--rows 0 --vocab 9 --hidden 4", "--rows: expected at least 1, got 0"),
        ("--rows 8 --vocab 9 --hidden 4 --mask 1", "--mask: expected a share of at least 0 and less than 1, got 1.0"),
        ("--rows 8 --vocab 9 --hidden 4 --workspace 0", "--workspace: expected at least 1, got 0"),
    ],
)
def test_wrong_arguments_say_what_was_expected(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["memory", *arguments.split()])
    assert message in capsys.readouterr().err


def test_help_lists_the_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert re.search(r"^ +memory +how much memory", capsys.readouterr().out, re.MULTILINE)
