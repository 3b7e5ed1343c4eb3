"""What holds for all backends: how one is chosen, and a gradient times a number, rounded once.

A backend is a name and a module: one made here is chosen, named and refused like the others.
"""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from grpo_kernels import backends
from grpo_kernels.backends import choose_backend
from grpo_kernels.backends.interface import Backend, RowBackend
from grpo_kernels.backends.torch_rows import TorchRows
from tests.support.divergence_suite import DivergenceSuite
from tests.support.on_device import same_bits

pytestmark = pytest.mark.unit

CPU, META = torch.device("cpu"), torch.device("meta")


class MetaRows(TorchRows):
    name = "new"


class New(Backend):
    """Serves tensors without data, in fp32."""

    def prefers(self, device: torch.device) -> bool:
        return device.type == "meta"

    def reason(self, device: torch.device) -> str:
        return f"{device.type} tensors"

    def refusal(self, device: torch.device, dtype: torch.dtype, *, asked_for: bool) -> str | None:
        if device.type != "meta":
            return f"it serves meta tensors, and these are {device.type} tensors"
        return None if dtype == torch.float32 or asked_for else f"it is slow in {dtype}"

    def load(self) -> RowBackend:
        return MetaRows()


@pytest.fixture
def new_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("grpo_kernels.backends.new_rows")
    module.BACKEND = New()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(backends, "NAMES", ("auto", "new", *backends.BACKENDS))
    monkeypatch.setattr(backends, "BACKENDS", ("new", *backends.BACKENDS))


def test_auto_takes_it_where_it_serves(new_backend: None) -> None:
    chosen, reason = backends.choose_backend("auto", META)
    assert (type(chosen), reason) == (MetaRows, "meta tensors")
    chosen, reason = backends.choose_backend("auto", META, torch.float64)
    assert (chosen.name, reason) == ("torch", "not new: it is slow in torch.float64")


def test_it_serves_if_asked_for_or_says_why_not(new_backend: None) -> None:
    chosen, reason = backends.choose_backend("new", META, torch.float64)
    assert (type(chosen), reason) == (MetaRows, "asked for")
    with pytest.raises(
        ValueError, match=r"can serve here, got 'new': it serves meta tensors, and these are cpu"
    ):
        backends.choose_backend("new", torch.device("cpu"))
    with pytest.raises(
        ValueError, match="backend: expected one of auto, new, torch, triton, cpp, got 'newer'"
    ):
        backends.choose_backend("newer", META)


def test_one_backend_is_preferred_for_a_cpu(new_backend: None) -> None:
    assert backends.choose_backend("torch", META)[1] == "asked for"
    unwanted = [
        name
        for name in backends.BACKENDS
        if not backends._backend(name).prefers(torch.device("cpu"))
    ]
    assert unwanted == ["new", "torch", "triton"]


INF, NAN = float("inf"), float("nan")
SPECIAL = [0.0, -0.0, INF, -INF, NAN, 1e-45, 1e-40, 6e-8, 65519.9, 65520.0, 3e38, 2.0**-149]


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
    for factor in (0.3, -1e-5, 2.0**15, NAN):
        check(backend, numbers(*shape), torch.tensor(factor), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_factor_for_each_row(backend: RowBackend, dtype: torch.dtype) -> None:
    check(backend, numbers(5, 100), torch.randn(5, 1), dtype)


def test_rows_that_lie_apart(backend: RowBackend) -> None:
    check(backend, numbers(5, 100)[:, :70], torch.tensor(0.3), torch.float16)


class TestTorchDivergence(DivergenceSuite):
    kernels = TorchRows()
    device = "cpu"


class TestTorchDivergenceDouble(TestTorchDivergence):
    dtype = torch.float64
