"""`python -m grpo_kernels memory`, and the peers' formulas of the benchmarks: equal to what calls allocate."""

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
from benchmarks.run import Step
from grpo_kernels import Run, grpo_loss, linear_logprob
from grpo_kernels.__main__ import main
from grpo_kernels.diagnostics.head_shape import MODELS, HeadShape
from grpo_kernels.diagnostics.memory import GPU, MIB, Need, Size, estimate
from tests.support.gpu_tape import GPUAllocations, taped, tensor
from tests.support.measure import AllocationWatcher
from tests.support.pretend_gpu import OnGPU

ROOT = Path(__file__).parent.parent
PROVIDERS = {
    "score": "ours",
    "frozen": "ours",
    "one_pass": "ours/one_pass",
    "two_pass": "ours/two_pass",
    "lean": "ours/lean",
    "all logits, log_softmax": "eager",
    "TRL 1.16 fused head": "trl",
    "Liger 0.8.5 fused GRPO loss": "liger_grpo",
}
TILES = (  # of others: where the number is in their source, its name here, and what a small case has in its place
    ("trl.kernels.chunked_logprob", "TOKEN_CHUNK_SIZE", "TRL_ROWS", 4096),
    ("trl.trainer.utils", "_CHUNKED_LOGPROB_CHUNK_SIZE", "TRL_COLUMNS", 2048),
    (
        "liger_kernel.chunked_loss.fused_linear_ppo",
        "_SELECTIVE_LOGPROB_SEQ_CHUNK_SIZE",
        "LIGER_ROWS",
        2048,
    ),
    (
        "liger_kernel.chunked_loss.fused_linear_ppo",
        "_SELECTIVE_LOGPROB_VOCAB_CHUNK_SIZE",
        "LIGER_COLUMNS",
        512,
    ),
)

SMALL = {"n": 128, "h": 32, "v": 3000, "t": 32}
FEW = {"n": 64, "h": 128, "v": 3000, "t": 32}
MANY = {
    "n": 2048,
    "h": 512,
    "v": 400,
    "t": 64,
    "frozen": True,
}  # d hidden is larger than the workspace
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
    "many rows": MANY,
    "many rows, half masked": {**MANY, "padding": 0.5},
}


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of the peers' that are not the whole of a small case."""
    for module, name, mine, columns in TILES[1::2]:
        monkeypatch.setattr(importlib.import_module(module), name, columns)
        monkeypatch.setattr(peer_memory, mine, columns)


def size_of(fields: dict[str, Any], workspace_mib: int | None) -> Size:
    return Size(
        HeadShape(fields["v"], fields["h"], getattr(torch, fields.get("dtype", "float32"))),
        rows=fields["n"],
        frozen=fields.get("frozen", False),
        score=fields.get("score", False),
        masked=fields.get("padding", 0.0),
        workspace_bytes=None if workspace_mib is None else workspace_mib * MIB,
    )


def needs_of(fields: dict[str, Any], workspace_mib: int | None) -> list[Need]:
    """Needs of our engines, then of the peers."""
    size, softcap = size_of(fields, workspace_mib), fields.get("softcap") is not None
    return estimate(size) + peer_memory.estimate(size, softcap=softcap, length=fields["t"])


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
    for need in needs_of(fields, workspace_mib):
        peak = counted_peak(need, fields, workspace_mib)
        assert abs(need.peak - peak) <= 0.02 * peak + 40 * 4 * fields["n"], (need, peak)


@pytest.mark.filterwarnings(
    "ignore:.*CUDA is not available"
)  # of torch.autocast("cuda", enabled=False)
@pytest.mark.parametrize(
    ("step", "dtype"),
    [
        ({}, torch.bfloat16),
        ({}, torch.float32),
        ({"frozen": True}, torch.bfloat16),
        ({"score": True}, torch.float32),
        ({"masked": 0.5}, torch.bfloat16),
        ({"workspace_bytes": 64 * MIB, "rows": 4096}, torch.float32),
    ],
    ids=str,
)
def test_figures_of_a_gpu_are_what_the_engines_allocate_there(
    step: dict[str, Any], dtype: torch.dtype
) -> None:
    """At a real size, to 5 %."""
    size = Size(HeadShape(151_936, 4096, dtype), gpu=GPU("H100", 80), **{"rows": 16_384, **step})
    for need in estimate(size):
        peak = peak_on_a_gpu(size, need.name)
        assert abs(need.peak - peak) <= 0.05 * peak, (need, peak)


def peak_on_a_gpu(size: Size, engine: str) -> int:
    """Bytes that a step has allocated at once, on tensors without data."""
    t, head = 512, size.head
    b = size.rows // t
    with taped():
        hidden = tensor(b, t, head.hidden, dtype=head.dtype).requires_grad_(not size.score)
        weight = tensor(head.vocab, head.hidden, dtype=head.dtype).requires_grad_(
            not (size.score or size.frozen)
        )
        ids, mask = torch.zeros(b, t, dtype=torch.long), torch.arange(t) >= t * size.masked
        given = hidden, weight, OnGPU(ids), OnGPU(mask.expand(b, t).long())
        with GPUAllocations() as watch:
            if size.score:
                linear_logprob(*given[:3], mask=given[3])
            else:
                options: Any = {"engine": engine, "workspace_bytes": size.workspace_bytes}
                grpo_loss(*given, OnGPU(torch.ones(b)), run=Run(**options)).loss.backward()
        return watch.peak


class NoKernel:
    """A Triton kernel of TRL's, which works in place: nothing is launched."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: None


@pytest.mark.parametrize(
    "step",
    [
        {},
        {"frozen": True},
        {"score": True},
        {"dtype": torch.float32},
        {"rows": 1024},
        {"masked": 0.5},
    ],
    ids=str,
)
def test_trls_figure_of_a_gpu_is_what_its_head_allocates_there(
    step: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own code, with its kernels left out, on tensors without data; to 1 %."""
    chunked = pytest.importorskip("trl.kernels.chunked_logprob")
    for name in ("_forward_kernel", "_backward_kernel"):
        monkeypatch.setattr(chunked, name, NoKernel())
    fields: dict[str, Any] = {"dtype": torch.bfloat16, "rows": 8192, **step}
    head = HeadShape(50_000, 1024, fields.pop("dtype"))
    size = Size(head, gpu=GPU("H100", 80), **fields)
    need = peer_memory.trl(size, softcap=False)
    trains = not size.score
    with taped():
        assert chunked._use_triton(torch.device("cuda"))
        hidden = tensor(size.counted, head.hidden, dtype=head.dtype).requires_grad_(trains)
        weight = tensor(head.vocab, head.hidden, dtype=head.dtype).requires_grad_(
            trains and not size.frozen
        )
        ids = OnGPU(torch.zeros(size.counted, dtype=torch.long))
        with GPUAllocations() as watch, torch.set_grad_enabled(trains):
            options = (None, ids, 1.0, peer_memory.TRL_COLUMNS, None, 1.0, ("entropy",))
            logps, *_ = chunked.ChunkedLogProbFunction.apply(hidden, weight, *options)
            if trains:
                logps.sum().backward()
    assert need.returned == sum(x.grad.nbytes for x in (hidden, weight) if x.grad is not None)
    assert abs(need.peak - watch.peak) <= 0.01 * watch.peak, (need, watch.peak)


def test_a_gpu_is_named_or_given_by_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    shares = []
    for gpus in (("h100", "80"), ("RTX 4090", "4090", "24")):
        for gpu in gpus:
            assert main(["memory", "--rows", "1024", "--model", "Qwen3-8B", "--gpu", gpu]) == 0
            shares.append(re.findall(r"\S+%", capsys.readouterr().out))
        assert len({*map(tuple, shares)}) == 1
        assert len(shares[0]) == 3
        shares.clear()


def test_a_model_is_known_by_its_name_in_any_case_and_with_its_organisation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = set()
    for name in ("Qwen3-8B", "qwen3-8b", "Qwen/Qwen3-8B"):
        assert main(["memory", "--model", name]) == 0
        said.add(capsys.readouterr().out)
    assert len(said) == 1
    assert said.pop().startswith("N 16,384, V 151,936, H 4,096,")


SOFTCAPPED = ("Gemma-2-2B",)
ON_A_GPU = GPU("H100", 80)


def gib(model: str, rows: int, column: str, gpu: GPU | None) -> str:
    """A cell of the page's tables; `column` is its header, without marks of code."""
    workspace = 512 * MIB if "workspace" in column else None
    size = Size(
        HeadShape(*MODELS[model], torch.bfloat16), rows=rows, gpu=gpu, workspace_bytes=workspace
    )
    needs = {x.name: x for x in estimate(size)}
    name = "lean" if "lean" in column else "one_pass"
    if column.startswith(("all logits", "TRL", "Liger")):
        peers = peer_memory.estimate(size, softcap=model in SOFTCAPPED)
        needs, name = {x.name.partition(" ")[0]: x for x in peers}, column.partition(" ")[0]
    return f"{needs[name].extra / 2**30:.1f}" if name in needs else ""


@pytest.mark.parametrize("gpu", [None, ON_A_GPU], ids=["CPU", "GPU"])
def test_the_page_has_these_figures(gpu: GPU | None) -> None:
    """Every cell of its table of real models on a CPU, and of that on a GPU."""
    page = (
        (ROOT / "docs" / "memory.md")
        .read_text()
        .partition(f"### On a {'GPU' if gpu else 'CPU'}\n")[2]
    )
    lines = [line for line in page.partition("\n#")[0].splitlines() if line.startswith("|")]
    header, _, *rows = (
        [cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines
    )
    assert len(rows) == 12
    for model, tokens, *cells in rows:
        wanted = [gib(model, int(tokens.replace(",", "")), column, gpu) for column in header[2:]]
        assert cells == wanted, (model, tokens)


def test_the_readme_has_one_row_for_each_device() -> None:
    text = (ROOT / "README.md").read_text()
    for place, gpu in (("on a GPU", ON_A_GPU), ("on a CPU", None)):
        row = next(x for x in text.splitlines() if x.startswith("| memory") and place in x)
        *peers, ours = (cell.strip() for cell in row.strip("|").split("|")[1:])
        assert peers == [f"{gib('Qwen3-8B', 16_384, name, gpu)} GiB" for name in ("TRL", "Liger")]
        columns = ["ours", "workspace", "lean workspace"] if gpu else ["ours", "lean"]
        assert re.findall(r"[0-9]\.[0-9]", ours) == [
            gib("Qwen3-8B", 16_384, x, gpu) for x in columns
        ]


def test_tiles_are_those_of_the_releases() -> None:
    for module, name, mine, _ in TILES:
        assert getattr(importlib.import_module(module), name) == getattr(peer_memory, mine)
