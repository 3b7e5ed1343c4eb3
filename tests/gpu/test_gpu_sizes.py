"""Where offsets overflow and grids end: 2^31 logits and numbers, 65,535 rows, 300,000 columns."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from grpo_kernels import Run, grpo_loss, linear_logprob
from grpo_kernels.backends import LogitTransform, choose_backend
from grpo_kernels.backends.interface import Chunk, Coefficients, FusedLoss, RowStats
from grpo_kernels.base.tensors import take
from tests.support.on_device import leaves, relative, same_bits, truth

pytestmark = pytest.mark.unit

GIB = 2**30
BF16_GRADIENT = 6e-3  # of d logits rounded to bf16 once, and of the result


def needs(device: torch.device, gigabytes: float) -> None:
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < gigabytes * 1e9:
        pytest.skip(f"needs {gigabytes:g} GB of free device memory")


@pytest.mark.parametrize("kernel", ["stats", "grad", "fused"])
def test_row_kernels_beyond_2_to_the_31_logits(
    device: torch.device, kernel: str, as_in_use: None
) -> None:
    """Rows on both sides of the element 2^31 have the bits that they have in a small tensor."""
    n, v = (14_200, 151_936) if device.type == "cuda" else (9, 70)
    needs(device, 30)
    backend, few = choose_backend("triton", device)[0], min(64, n)
    g = torch.Generator(device).manual_seed(0)
    some = torch.randn(few, v, generator=g, device=device) * 3
    some_ids = torch.randint(v, (few,), generator=g, device=device)
    rows = torch.arange(n, device=device) % few
    loss = FusedLoss(
        surrogate="clipped", kl=None, corrects_kl=False, advantages=some_ids / v, d_policy=None,
        weights=torch.ones(few, device=device), old=-some_ids / v, ref=None, gate=None,
        constants=(0.8, 1.2, math.inf), beta=0.0, d_entropy=0.0,
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
def test_more_than_2_to_the_31_logits(
    device: torch.device, engine: str, workspace: int | None, backend: str, as_in_use: None
) -> None:
    """16,384 tokens and 151,936 columns, against the same tokens in eight calls."""
    n, h, v = (16_384, 64, 151_936) if device.type == "cuda" else (128, 16, 130)
    if backend == "torch" and workspace is not None and device.type == "cuda":
        pytest.skip("the torch backend's temporaries are not what this is about")
    needs(device, 45)
    hidden, weight, ids = leaves(device, n, h, v, torch.bfloat16)
    advantages = torch.randn(n // 8, device=device)

    def step(rows: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        part = hidden.detach()[rows].view(-1, 8, h).requires_grad_()
        w = weight.detach().requires_grad_()
        out = grpo_loss(
            part, w, ids[rows].view(-1, 8), None, advantages[rows.start // 8 : rows.stop // 8],
            num_items_in_batch=n,
            run=Run(engine, backend, workspace),
        )  # fmt: skip
        out.loss.backward()
        return out.loss.detach(), out.logps.reshape(-1), part.grad.reshape(-1, h), w.grad

    loss, logps, d_hidden, d_weight = step(slice(0, n))
    parts = [step(slice(n * i // 8, n * (i + 1) // 8)) for i in range(8)]
    torch.testing.assert_close(loss, torch.stack([x[0] for x in parts]).sum(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(logps, torch.cat([x[1] for x in parts]), rtol=1e-5, atol=2e-5)
    assert relative(d_hidden, torch.cat([x[2] for x in parts]).double()) < BF16_GRADIENT
    assert relative(d_weight, torch.stack([x[3].double() for x in parts]).sum(0)) < BF16_GRADIENT


@pytest.mark.parametrize("engine", ["one_pass", "two_pass", "lean"])
@pytest.mark.parametrize(
    ("n", "h", "v"),
    [(131_072, 32, 512), (200, 64, 300_001), (70_001, 16, 33)],
    ids=["rows", "columns", "odd"],
)
def test_many_rows_and_many_columns(
    device: torch.device, n: int, h: int, v: int, engine: str, backend: str, as_in_use: None
) -> None:
    if device.type == "cpu":
        n, h, v = min(n, 24), 16, min(v, 101)
    for dtype in (torch.float32, torch.bfloat16):
        hidden, weight, ids = leaves(device, n, h, v, dtype)
        coefficients = torch.randn(n, device=device)
        logps, d_hidden, d_weight = truth(hidden, weight, ids, coefficients, at_once=2**26 // v)
        run = Run(engine, backend)
        expected = coefficients if engine == "one_pass" else None
        found = linear_logprob(hidden, weight, ids, expected=expected, run=run).logps
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
    choose_backend("triton", gpu)[0].scale(x, torch.tensor(0.5, device=gpu), out)
    for part in (slice(0, 5000), slice(2**31 - 5000, n)):
        assert same_bits(out[part], (x[part] * 0.5).bfloat16())
