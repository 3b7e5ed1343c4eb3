"""Where offsets overflow and grids end: 2^31 logits and numbers, 65,535 rows, 300,000 columns. And
memory: the documented budget holds, and nothing leaks.

These tests want much memory and look at the whole device's, so nothing else should run on it at the
same time.
"""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import Run, grpo_loss, linear_logps
from grpo_kernels.backends import (
    Chunk,
    Coefficients,
    FusedLoss,
    LogitTransform,
    RowStats,
    choose_backend,
)
from grpo_kernels.base.tensors import take
from tests.support.measure import AllocationWatcher
from tests.support.on_device import leaves, relative, same_bits, truth

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("as_in_use")]

MIB, GIB = 2**20, 2**30
BF16_GRADIENT = 6e-3  # of d logits rounded to bf16 once, and of the result


def needs(device: torch.device, gigabytes: float) -> None:
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < gigabytes * 1e9:
        pytest.skip(f"needs {gigabytes:g} GB of free device memory")


@pytest.mark.parametrize("kernel", ["stats", "grad", "fused"])
def test_row_kernels_beyond_2_to_the_31_logits(device: torch.device, kernel: str) -> None:
    """Rows on both sides of the element 2^31 have the bits that they have in a small tensor."""
    n, v = (14_200, 151_936) if device.type == "cuda" else (9, 70)
    needs(device, 30)
    backend, few = choose_backend("triton", device), min(64, n)
    g = torch.Generator(device).manual_seed(0)
    some = torch.randn(few, v, generator=g, device=device) * 3
    some_ids = torch.randint(v, (few,), generator=g, device=device)
    rows = torch.arange(n, device=device) % few
    loss = FusedLoss(
        surrogate="clipped", kl_estimator=None, corrects_kl=False, d_policy=None,
        advantages=some_ids / v, weights=torch.ones(few, device=device), old=-some_ids / v,
        ref=None, gate=None, constants=(0.8, 1.2, math.inf), beta=0.0, d_entropy=0.0,
    )  # fmt: skip

    def run(logits: Tensor, at: Tensor) -> tuple[RowStats, Tensor]:
        chunk, out = Chunk(logits, some_ids[at], LogitTransform()), torch.empty_like(logits)
        if kernel == "fused":
            return backend.fused(chunk, take(loss, at), out), out
        stats = backend.stats(chunk, entropy=True)
        if kernel == "grad":
            backend.grad(chunk, stats, Coefficients(some_ids[at] / v, some_ids[at] * 0.1 / v), out)
        return stats, out

    want, gradient = run(some.clone(), rows[:few])
    found, out = run(some[rows], rows)
    assert same_bits((found.logps, found.entropies), (want.logps[rows], want.entropies[rows]))
    for start in range(0, n if kernel != "stats" else 0, few):
        here = out[start : start + few]
        assert torch.equal(here, gradient[: len(here)]), f"rows from {start}"


@pytest.mark.parametrize("workspace", [None, 14 * GIB], ids=["in chunks", "at once"])
@pytest.mark.parametrize("engine", ["one_pass", "lean"])
def test_more_than_2_to_the_31_logits(device, engine, workspace, backend):
    """16,384 tokens and 151,936 columns, against the same tokens in eight calls."""
    n, h, v = (16_384, 64, 151_936) if device.type == "cuda" else (128, 16, 130)
    if backend == "torch" and workspace is not None and device.type == "cuda":
        pytest.skip("the torch backend's temporaries are not what this is about")
    needs(device, 45)
    hidden, weight, ids = leaves(device, n, h, v, torch.bfloat16)
    advantages, run = torch.randn(n // 8, device=device), Run(engine, backend, workspace)

    def step(of: slice) -> tuple[Tensor, ...]:
        """Of these sequences of eight tokens."""
        part = hidden.detach().view(-1, 8, h)[of].requires_grad_()
        given = part, weight.detach().requires_grad_(), ids.view(-1, 8)[of], None, advantages[of]
        out = grpo_loss(*given, num_items_in_batch=n, run=run)
        out.loss.backward()
        return out.loss.detach(), out.logps, part.grad, given[1].grad

    loss, logps, d_hidden, d_weight = step(slice(None))
    parts = zip(*(step(slice(i, i + n // 64)) for i in range(0, n // 8, n // 64)), strict=True)
    losses, some_logps, d_parts, d_weights = parts
    torch.testing.assert_close(loss, torch.stack(losses).sum(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(logps, torch.cat(some_logps), rtol=1e-5, atol=2e-5)
    assert relative(d_hidden, torch.cat(d_parts).double()) < BF16_GRADIENT
    assert relative(d_weight, sum(x.double() for x in d_weights)) < BF16_GRADIENT


@pytest.mark.parametrize("engine", ["one_pass", "two_pass", "lean"])
@pytest.mark.parametrize(
    ("n", "h", "v"),
    [(131_072, 32, 512), (200, 64, 300_001), (70_001, 16, 33)],
    ids=["rows", "columns", "odd"],
)
def test_many_rows_and_many_columns(device, n, h, v, engine, backend):
    if device.type == "cpu":
        n, h, v = min(n, 24), 16, min(v, 101)
    for dtype in (torch.float32, torch.bfloat16):
        hidden, weight, ids = leaves(device, n, h, v, dtype)
        coefficients = torch.randn(n, device=device)
        logps, d_hidden, d_weight = truth(hidden, weight, ids, coefficients, at_once=2**26 // v)
        run = Run(engine, backend)
        expected = coefficients if engine == "one_pass" else None
        found = linear_logps(hidden, weight, ids, expected=expected, run=run).logps
        (found * coefficients).sum().backward()
        limit = 5e-5 if dtype == torch.float32 else BF16_GRADIENT
        torch.testing.assert_close(found.detach().double(), logps, rtol=1e-5, atol=5e-5)
        assert relative(hidden.grad, d_hidden) < limit
        assert relative(weight.grad, d_weight) < limit


def test_scaling_beyond_2_to_the_31_numbers(gpu: torch.device) -> None:
    needs(gpu, 20)
    n = 2**31 + 5000
    x = torch.arange(n, dtype=torch.float32, device=gpu)
    out = torch.zeros(n, dtype=torch.bfloat16, device=gpu)
    choose_backend("triton", gpu).scale(x, torch.tensor(0.5, device=gpu), out)
    for part in (slice(0, 5000), slice(2**31 - 5000, n)):
        assert same_bits(out[part], (x[part] * 0.5).bfloat16())


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
def test_the_peak_is_within_the_documented_budget(device, engine, workspace, backend):
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
        assert relative(got, right.double()) < BF16_GRADIENT
