"""A gradient times a number, rounded once: every backend has the bits of ``torch.mul(..., out=)``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grpo_kernels.backends import choose_backend
from grpo_kernels.backends.interface import RowBackend
from tests.support.on_device import same_bits

CPU = torch.device("cpu")
SPECIAL = [
    0.0,
    -0.0,
    float("inf"),
    -float("inf"),
    float("nan"),
    1e-45,
    1e-40,
    6e-8,
    65519.9,
    65520.0,
    3e38,
    2.0**-149,
]


@pytest.fixture(params=["torch", "cpp", "triton"])
def backend(request: pytest.FixtureRequest) -> RowBackend:
    if request.param == "triton":
        pytest.importorskip("triton")
    return choose_backend(request.param, CPU)[0]


def numbers(*shape: int) -> Tensor:
    x = torch.randn(shape) * torch.exp2(torch.randint(-30, 30, shape).float())
    count = min(x.numel(), len(SPECIAL))
    x.view(-1)[:count] = torch.tensor(SPECIAL[:count])
    return x


def same(x: Tensor, y: Tensor) -> bool:
    """Bit for bit; one NaN is like another."""
    return torch.equal(x.isnan(), y.isnan()) and same_bits(
        *(z.masked_fill(z.isnan(), 0.0) for z in (x, y))
    )


def check(backend: RowBackend, x: Tensor, factor: Tensor, dtype: torch.dtype) -> None:
    want = torch.mul(x, factor, out=torch.empty_like(x, dtype=dtype))
    before = x.clone()
    out = torch.full_like(x, 7.0, dtype=dtype)
    backend.scale(x, factor, out)
    assert same(out, want)
    assert same(x, before)
    if dtype == x.dtype:
        backend.scale(x, factor, x)
        assert same(x, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 8), (1,), (4095,), (1, 4096), (4097,), (97, 127), (3, 4096)])
def test_bits_are_those_of_torch(
    backend: RowBackend, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    for factor in (0.3, -1e-5, 2.0**15, float("nan")):
        check(backend, numbers(*shape), torch.tensor(factor), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_factor_for_each_row(backend: RowBackend, dtype: torch.dtype) -> None:
    check(backend, numbers(5, 100), torch.randn(5, 1), dtype)


def test_rows_that_lie_apart(backend: RowBackend) -> None:
    check(backend, numbers(5, 100)[:, :70], torch.tensor(0.3), torch.float16)
