"""Memory on the device: the documented budget holds, no tensor has the logits' size, no leaks.

These tests look at the whole device's memory, so nothing else should run on it at the same time.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from grpo_kernels import Run, grpo_loss
from tests.support.measure import AllocationWatcher
from tests.support.on_device import leaves

pytestmark = pytest.mark.usefixtures("as_in_use")

MIB = 2**20
VECTORS = 60  # per-token numbers, of 8 bytes
ROUNDING = 16 * MIB  # of the allocator, whose blocks are larger than what is asked for


def step(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, **options: Any) -> str:
    """One step; the engine that served. Gradients are in the leaves."""
    h = hidden.shape[-1]
    advantages = torch.ones(len(ids) // 8, device=ids.device)
    given = hidden.view(-1, 8, h), weight, ids.view(-1, 8), None, advantages
    out = grpo_loss(*given, run=Run(**options))
    out.loss.backward()
    return out.engine


def clear(*tensors: torch.Tensor) -> None:
    for x in tensors:
        x.grad = None
    gc.collect()
    if tensors[0].is_cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def peak_of(run: Any, device: torch.device) -> int:
    """The most bytes alive at once of what `run` made."""
    if device.type != "cuda":
        with AllocationWatcher() as watch:
            run()
        return watch.peak
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated()) - before


@pytest.mark.parametrize("workspace", [256 * MIB, None], ids=["256 MiB", "default"])
@pytest.mark.parametrize("engine", ["one_pass", "two_pass", "lean", "frozen"])
def test_the_peak_is_within_the_documented_budget(
    device: torch.device, engine: str, workspace: int | None, backend: str
) -> None:
    """The workspace, the gradients, and d hidden and d weight in fp32 where stored."""
    n, h, v = (8192, 1024, 151_936) if device.type == "cuda" else (64, 16, 300)
    if device.type == "cpu":
        workspace = 2**17 if workspace else None
    hidden, weight, ids = leaves(device, n, h, v, torch.bfloat16)
    weight.requires_grad_(engine != "frozen")
    options = {"engine": engine, "backend": backend, "workspace_bytes": workspace}
    step(hidden, weight, ids, **options)
    clear(hidden, weight)
    if workspace is None:  # the largest that a call takes by itself
        workspace = (3 * 1024 if device.type == "cuda" else 512) * MIB
    d_hidden, d_weight = 4 * n * h, 4 * v * h
    stored = d_hidden + (d_weight if engine in ("one_pass", "two_pass") else 0)
    returned = 2 * n * h + (2 * v * h if engine != "frozen" else 0)
    rounding = ROUNDING
    # Triton's interpreter keeps what it was launched with last until it is collected
    if device.type == "cpu":
        rounding = 4 * n * v if backend == "triton" else 0
    limit = workspace + stored + returned + 2 * n * h + VECTORS * 8 * n + rounding
    peak = peak_of(lambda: step(hidden, weight, ids, **options), device)
    assert peak <= limit, f"{peak / MIB:.0f} MiB, allowed {limit / MIB:.0f}"
    clear(hidden, weight)


def test_nothing_of_the_size_of_the_logits_is_made(device: torch.device, backend: str) -> None:
    n, h, v = (16_384, 64, 151_936) if device.type == "cuda" else (512, 8, 300)
    hidden, weight, ids = leaves(device, n, h, v, torch.bfloat16)
    workspace = 512 * MIB if device.type == "cuda" else 2**16
    with AllocationWatcher() as watch:
        step(hidden, weight, ids, backend=backend, workspace_bytes=workspace)
    assert 0 < watch.largest < n * v / 8


@pytest.mark.parametrize("engine", ["one_pass", "lean"])
def test_a_hundred_steps_leave_nothing_behind(gpu: torch.device, engine: str, backend: str) -> None:
    hidden, weight, ids = leaves(gpu, 1024, 512, 32_003, torch.bfloat16)
    levels = []
    for _ in range(100):
        step(hidden, weight, ids, engine=engine, backend=backend)
        hidden.grad = weight.grad = None
        levels.append((torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()))
    assert len(set(levels[3:])) == 1, levels[:5] + levels[-5:]


def test_lean_is_chosen_where_memory_is_short(gpu: torch.device, backend: str) -> None:
    """Something else holds nearly all of the device: no accumulator for d weight would fit."""
    n, h, v, workspace = 512, 1024, 151_936, 128 * MIB
    hidden, weight, ids = leaves(gpu, n, h, v, torch.bfloat16)
    options = {"backend": backend, "workspace_bytes": workspace}
    assert step(hidden, weight, ids, **options) == "one_pass"
    want = (hidden.grad, weight.grad)
    hidden.grad = weight.grad = None
    clear(hidden, weight)
    ballast = []
    try:
        # the gradient and the workspace, but no accumulator of 4 V H
        keep = 2 * v * h + workspace + 256 * MIB
        free, _ = torch.cuda.mem_get_info()
        ballast.append(torch.empty(max(0, free - keep) // MIB * MIB, dtype=torch.uint8, device=gpu))
        assert step(hidden, weight, ids, **options) == "lean"
        found = (hidden.grad, weight.grad)
    finally:
        ballast.clear()
        torch.cuda.empty_cache()
    for got, right in zip(found, want, strict=True):
        assert float((got.float() - right.float()).norm() / right.float().norm()) < 6e-3
