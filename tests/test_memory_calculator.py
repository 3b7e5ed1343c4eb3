"""The planner of `python -m grpo_kernels memory` and the peers' formulas count what calls
allocate.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import peer_memory
from benchmarks.cases import case, make_inputs
from benchmarks.providers import build
from benchmarks.run import step
from grpo_kernels import Run, grpo_loss, linear_logps
from grpo_kernels.commands.memory import MODELS, Size, estimate
from grpo_kernels.engine.workspace import MIB
from tests.support.gpu_tape import GPUAllocations, taped, tensor
from tests.support.measure import AllocationWatcher
from tests.support.pretend_gpu import OnGPU

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parent.parent
BF16, FP32 = torch.bfloat16, torch.float32
PROVIDERS = {
    "score": "ours", "frozen": "ours", "one_pass": "ours/one_pass", "two_pass": "ours/two_pass",
    "lean": "ours/lean", "all logits, log_softmax": "eager", "TRL 1.16 fused head": "trl",
    "Liger 0.8.5 fused GRPO loss": "liger_grpo",
}  # fmt: skip
LIGER = "liger_kernel.chunked_loss.fused_linear_ppo"
TILES = (  # of peers: where the number is in their source, its name in `peer_memory`, a small one
    ("trl.kernels.chunked_logprob", "TOKEN_CHUNK_SIZE", "TRL_ROWS", None),
    ("trl.trainer.utils", "_CHUNKED_LOGPROB_CHUNK_SIZE", "TRL_COLUMNS", 2048),
    (LIGER, "_SELECTIVE_LOGPROB_SEQ_CHUNK_SIZE", "LIGER_ROWS", None),
    (LIGER, "_SELECTIVE_LOGPROB_VOCAB_CHUNK_SIZE", "LIGER_COLUMNS", 512),
)
SMALL = {"n": 128, "h": 32, "v": 3000, "t": 32}
FEW = {"n": 64, "h": 128, "v": 3000, "t": 32}
MANY = {"n": 2048, "h": 512, "v": 400, "t": 64, "frozen": True}  # d hidden exceeds the workspace
CASES: dict[str, dict[str, Any]] = {
    "fp32": SMALL,
    "bf16": {**SMALL, "dtype": "bfloat16"},
    "frozen": {**SMALL, "frozen": True},
    "score": {**SMALL, "score": True},
    "soft-cap": {**SMALL, "softcap": 30.0},
    "half masked, bf16": {**SMALL, "padding": 0.5, "dtype": "bfloat16"},
    "few rows, bf16, frozen": {**FEW, "dtype": "bfloat16", "frozen": True},
    "many rows": MANY,
}


@pytest.mark.parametrize("name", CASES)
def test_every_figure_is_what_is_allocated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To 2%, and 40 numbers a token; the peers' tiles are smaller than the case."""
    for module, constant, mine, columns in TILES:
        if columns is not None:
            monkeypatch.setattr(importlib.import_module(module), constant, columns)
            monkeypatch.setattr(peer_memory, mine, columns)
    fields = CASES[name]
    trains = {key: fields.get(key, False) for key in ("frozen", "score")}
    dtype, masked = getattr(torch, fields.get("dtype", "float32")), fields.get("padding", 0.0)
    size = Size(
        fields["v"], fields["h"], dtype, fields["n"], **trains, masked=masked, workspace_bytes=MIB
    )
    peers = peer_memory.estimate(size, softcap="softcap" in fields, length=fields["t"])
    for need in estimate(size) + peers:
        provider = PROVIDERS[need.name]
        inputs = make_inputs(case("counted", **fields), torch.device("cpu"))
        forward = build(f"{provider}@1" if provider.startswith("ours") else provider, inputs)
        with AllocationWatcher() as watch:
            step(forward)
        assert need.returned == sum(x.grad.nbytes for x in inputs.leaves if x.grad is not None)
        assert abs(need.peak - watch.peak) <= 0.02 * watch.peak + 160 * fields["n"], need


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")  # of autocast("cuda", enabled=False)
@pytest.mark.parametrize(
    ("step", "dtype"),
    [
        ({}, BF16), ({}, FP32), ({"frozen": True}, BF16), ({"score": True}, FP32),
        ({"masked": 0.5}, BF16),
        ({"workspace_bytes": 64 * MIB, "rows": 4096}, FP32),
    ],
    ids=str,
)  # fmt: skip
def test_figures_of_a_gpu_are_what_the_engines_allocate_there(step, dtype):
    """At a real size, on tensors without data; to 5%."""
    size = Size(151_936, 4096, dtype, **{"rows": 16_384, **step}, on_gpu=True)
    t, trains = 512, not (size.score or size.frozen)
    b = size.rows // t
    for need in estimate(size):
        with taped():
            hidden = tensor(b, t, size.hidden, dtype=dtype).requires_grad_(not size.score)
            weight = tensor(size.vocab, size.hidden, dtype=dtype).requires_grad_(trains)
            mask = (torch.arange(t) >= t * size.masked).expand(b, t).long()
            ids, mask = OnGPU(torch.zeros(b, t, dtype=torch.long)), OnGPU(mask)
            run = Run(engine=need.name, workspace_bytes=size.workspace_bytes)
            with GPUAllocations() as watch:
                if size.score:
                    linear_logps(hidden, weight, ids, completion_mask=mask)
                else:
                    given = hidden, weight, ids, mask, OnGPU(torch.ones(b))
                    grpo_loss(*given, run=run).loss.backward()
        assert abs(need.peak - watch.peak) <= 0.05 * watch.peak, need


def gib(model, rows, column, *, frozen=False):
    """A cell of the page's table; `column` is its header, without marks of code."""
    workspace = 512 * MIB if "512 MiB" in column else None
    size = Size(*MODELS[model], BF16, rows, on_gpu=True, workspace_bytes=workspace, frozen=frozen)
    needs = {x.name: x for x in estimate(size)}
    name = "lean" if "lean" in column else "frozen" if frozen else "one_pass"
    if column.startswith(("all logits", "TRL", "Liger")):
        peers = peer_memory.estimate(size, softcap=model == "Gemma-2-2B")
        needs, name = {x.name.partition(" ")[0]: x for x in peers}, column.partition(" ")[0]
    return f"{needs[name].extra / 2**30:.1f}" if name in needs else ""


def test_the_pages_have_these_figures() -> None:
    """docs/memory.md's table of real models on a GPU, its advice, and docs/results.md."""
    page = (ROOT / "docs" / "memory.md").read_text()
    on_gpu = page.partition("\n### On a GPU\n")[2].partition("\n### On a CPU\n")[0]
    lines = [line for line in on_gpu.splitlines() if line.startswith("|")]
    header, _, *rows = (
        [cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines
    )
    assert len(rows) == 12
    for model, tokens, *cells in rows:
        n = int(tokens.replace(",", ""))
        assert cells == [gib(model, n, column) for column in header[2:]], (model, tokens)
    claim = (ROOT / "docs" / "results.md").read_text()
    claim = claim.partition("for Qwen3-8B and 16,384 tokens")[2]
    wanted = [gib("Qwen3-8B", 16_384, x) for x in ("ours", "TRL", "512 MiB, lean")]
    assert re.findall(r"(\d\.\d) GiB", claim) == wanted
    advice = page.partition("\n## Use less memory\n")[2].partition("\n## ")[0]
    columns = ("ours", "512 MiB", "512 MiB, lean")
    wanted = [gib("Qwen3-8B", 16_384, x) for x in columns]
    wanted += [gib("Qwen3-8B", 16_384, x, frozen=True) for x in columns[:2]]
    assert re.findall(r"(\d\.\d) GiB", advice) == wanted


def test_tiles_are_those_of_the_releases() -> None:
    for module, name, mine, _ in TILES:
        assert getattr(importlib.import_module(module), name) == getattr(peer_memory, mine)
