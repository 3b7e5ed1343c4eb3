"""What holds for all backends: how one is chosen, and a gradient times a number, rounded once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from grpo_kernels.backends import RowBackend, choose_backend, why_torch
from grpo_kernels.backends.torch_rows import TorchRows
from tests.support.divergence_suite import DivergenceSuite
from tests.support.row_cases import same

pytestmark = pytest.mark.unit

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_backend_is_chosen_or_says_why_not(dtype: torch.dtype) -> None:
    def chosen(name: str, device: torch.device) -> str:
        return choose_backend(name, device, dtype).name

    assert (chosen("auto", CPU), why_torch(CPU, dtype)) == ("cpp", None)
    for name in ("torch", "cpp"):
        assert chosen(name, CPU) == name
    assert chosen("torch", META) == chosen("auto", META) == "torch"
    assert why_torch(META, dtype).startswith(
        "not triton: its kernels compute in float32"
        if dtype == torch.float64
        else "not triton: it serves GPUs, and these are meta tensors"
    )
    with pytest.raises(
        ValueError, match=r"here, got 'cpp': it serves CPU tensors, .* meta tensors"
    ):
        choose_backend("cpp", META, dtype)
    with pytest.raises(ValueError, match="expected one of auto, torch, triton, cpp, got 'newer'"):
        choose_backend("newer", CPU, dtype)


INF, NAN = float("inf"), float("nan")
SPECIAL = [0.0, -0.0, INF, -INF, NAN, 1e-45, 1e-40, 6e-8, 65519.9, 65520.0, 3e38, 2.0**-149]


@pytest.fixture(params=["torch", "cpp", "triton"])
def backend(request: pytest.FixtureRequest) -> RowBackend:
    if request.param == "triton":
        pytest.importorskip("triton")
    return choose_backend(request.param, CPU)


def numbers(*shape: int) -> Tensor:
    x = torch.randn(shape) * torch.exp2(torch.randint(-30, 30, shape).float())
    count = min(x.numel(), len(SPECIAL))
    x.view(-1)[:count] = torch.tensor(SPECIAL[:count])
    return x


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
@pytest.mark.parametrize("shape", [(0, 8), (1,), (4095,), (4097,), (3, 4096)])
def test_bits_are_those_of_torch(backend, shape, dtype):
    for factor in (0.3, -1e-5, 2.0**15, NAN):
        check(backend, numbers(*shape), torch.tensor(factor), dtype)


def test_rows_that_lie_apart_or_have_a_factor_each(backend: RowBackend) -> None:
    check(backend, numbers(5, 100), torch.randn(5, 1), torch.float16)
    check(backend, numbers(5, 100)[:, :70], torch.tensor(0.3), torch.float16)


class TestTorchDivergence(DivergenceSuite):
    kernels = TorchRows()
    device = "cpu"


class TestTorchDivergenceDouble(TestTorchDivergence):
    dtype = torch.float64
