"""Where offsets overflow and grids end: 2^31 logits and numbers, 65,535 rows, 300,000 columns."""

from __future__ import annotations

import pytest
import torch

from grpo_kernels import Run, linear_logprob
from grpo_kernels.backends import choose_backend
from tests.support.on_device import BACKENDS, leaves, relative, same_bits, truth

pytestmark = pytest.mark.unit

GIB = 2**30
BF16_GRADIENT = 6e-3  # of d logits rounded to bf16 once, and of the result


def needs(device: torch.device, gigabytes: float) -> None:
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < gigabytes * 1e9:
        pytest.skip(f"needs {gigabytes:g} GB of free device memory")


@pytest.mark.parametrize("backend", BACKENDS)
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
