"""Where offsets overflow and grids end: 2^31 logits and numbers, 65,535 rows, 300,000 columns."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from grpo_kernels import Run, grpo_loss, linear_logprob
from grpo_kernels.backends import LogitTransform, choose_backend
from grpo_kernels.backends.interface import Chunk
from grpo_kernels.base.tensors import take
from grpo_kernels.token_loss.record import TokenLoss
from tests.support.on_device import BACKENDS, leaves, on_backends, relative, same_bits, truth

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
    backend, _ = choose_backend("triton", device)
    g = torch.Generator(device).manual_seed(0)
    some = torch.randn(64, v, generator=g, device=device) * 3
    logits = some.repeat(-(-n // 64), 1)[:n]
    ids = torch.randint(v, (64,), generator=g, device=device).repeat(-(-n // 64))[:n]
    few = min(64, n)
    transform = LogitTransform()
    alone = backend.stats(Chunk(some[:few].clone(), ids[:few], transform), entropy=True)
    if kernel == "stats":
        found = backend.stats(Chunk(logits, ids, transform), entropy=True)
        rows = (
            torch.arange(n, device=device) % few
            if device.type == "cuda"
            else torch.arange(few, device=device)
        )
        assert found.entropies is not None
        assert alone.entropies is not None
        for got, want in ((found.logps, alone.logps), (found.entropies, alone.entropies)):
            assert same_bits(got, want[rows])
        return
    ones = torch.ones(n, device=device)
    want = torch.empty_like(some[:few])
    out = torch.empty(n, v, device=device)
    if kernel == "grad":
        stats = backend.stats(Chunk(logits, ids, transform), entropy=True)
        backend.grad(Chunk(logits, ids, transform), stats, ones, ones * 0.1, out)
        backend.grad(
            Chunk(some[:few].clone(), ids[:few], transform),
            alone,
            ones[:few],
            ones[:few] * 0.1,
            want,
        )
    else:
        loss = TokenLoss(
            surrogate="clipped", kl=None, corrects_kl=False, advantages=ones, d_logps=None,
            weights=ones, old=ones * -3.0, ref=None, gate=None, constants=(0.8, 1.2, math.inf),
            beta=0.0, d_entropy=0.0,
        )  # fmt: skip
        backend.fused(Chunk(logits, ids, transform), loss, out)
        backend.fused(Chunk(some[:few].clone(), ids[:few], transform), take(loss, slice(few)), want)
    for start in range(0, n, 64):
        rows_here = min(64, n - start)
        assert torch.equal(out[start : start + rows_here], want[:rows_here]), f"rows from {start}"


@pytest.mark.parametrize("backend", BACKENDS)
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
        assert part.grad is not None
        assert w.grad is not None
        return out.loss.detach(), out.per_token_logps.reshape(-1), part.grad.reshape(-1, h), w.grad

    loss, logps, d_hidden, d_weight = step(slice(0, n))
    parts = [step(slice(n * i // 8, n * (i + 1) // 8)) for i in range(8)]
    torch.testing.assert_close(loss, torch.stack([x[0] for x in parts]).sum(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(logps, torch.cat([x[1] for x in parts]), rtol=1e-5, atol=2e-5)
    assert relative(d_hidden, torch.cat([x[2] for x in parts]).double()) < BF16_GRADIENT
    assert relative(d_weight, torch.stack([x[3].double() for x in parts]).sum(0)) < BF16_GRADIENT


@pytest.mark.parametrize(("engine", "backend"), on_backends("one_pass", "two_pass", "lean"))
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1,), (4097,), (9001, 896), (151_936, 1024)])
def test_scaling_has_the_bits_of_torch(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    shape = shape if device.type == "cuda" else tuple(min(x, 4097) for x in shape[:1])
    g = torch.Generator(device).manual_seed(0)
    x, factor = torch.randn(shape, generator=g, device=device), torch.tensor(0.3, device=device)
    want = torch.mul(x, factor, out=torch.empty_like(x, dtype=dtype))
    backend, out = choose_backend("triton", device)[0], torch.empty_like(x, dtype=dtype)
    backend.scale(x, factor, out)
    assert same_bits(out, want)
    if dtype == torch.float32:
        backend.scale(x, factor, x)
        assert same_bits(x, want)


def test_scaling_beyond_2_to_the_31_numbers(gpu: torch.device) -> None:
    needs(gpu, 20)
    n = 2**31 + 5000
    x = torch.arange(n, dtype=torch.float32, device=gpu)
    backend, out = (
        choose_backend("triton", gpu)[0],
        torch.zeros(n, dtype=torch.bfloat16, device=gpu),
    )
    backend.scale(x, torch.tensor(0.5, device=gpu), out)
    for part in (slice(0, 5000), slice(2**31 - 5000, n)):
        assert same_bits(out[part], (x[part] * 0.5).bfloat16())
