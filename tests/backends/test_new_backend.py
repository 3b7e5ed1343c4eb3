"""A backend is a name and a module: one that is made here is chosen, named and refused like those that are there."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from grpo_kernels import backends
from grpo_kernels.backends.interface import Backend, RowBackend
from grpo_kernels.backends.torch_rows import TorchRows

META = torch.device("meta")


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


@pytest.fixture(autouse=True)
def new_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("grpo_kernels.backends.new_rows")
    module.BACKEND = New()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(backends, "NAMES", ("auto", "new", *backends.BACKENDS))
    monkeypatch.setattr(backends, "BACKENDS", ("new", *backends.BACKENDS))


def test_auto_takes_it_where_it_serves() -> None:
    chosen, reason = backends.choose_backend("auto", META)
    assert (type(chosen), reason) == (MetaRows, "meta tensors")
    assert backends.name_backend("auto", META, torch.float64) == (
        "torch",
        "not new: it is slow in torch.float64",
    )


def test_it_serves_if_asked_for_or_says_why_not() -> None:
    assert backends.name_backend("new", META, torch.float64) == ("new", "asked for")
    with pytest.raises(
        ValueError, match=r"can serve here, got 'new': it serves meta tensors, and these are cpu"
    ):
        backends.name_backend("new", torch.device("cpu"))
    with pytest.raises(
        ValueError, match="backend: expected one of auto, new, torch, triton, cpp, got 'newer'"
    ):
        backends.choose_backend("newer", META)


def test_one_backend_is_preferred_for_a_cpu() -> None:
    assert backends.name_backend("torch", META) == ("torch", "asked for")
    unwanted = [
        name
        for name in backends.BACKENDS
        if not backends._backend(name).prefers(torch.device("cpu"))
    ]
    assert unwanted == ["new", "torch", "triton"]
