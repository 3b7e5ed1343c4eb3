"""CPU tensors that say they are on a GPU, so that its code paths run and waits are counted: host
reads of a value or of a number of elements, and copies to or from the host that block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

GPU = torch.device("cuda", 0)
aten = torch.ops.aten
READS = {  # ops whose result the host needs, or whose size it does
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.masked_select.default,
    aten.nonzero.default,
    aten.unique_consecutive.default,
    aten._unique2.default,
}
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}
READ = 1  # the number that the host reads of a tensor without data
# 16-bit operands, fp32 results: CUDA only
WIDE_PRODUCTS = {aten.mm.dtype_out, aten.addmm.dtype_out}


class Waits(list[str]):
    """The names of the waits so far."""

    forbidden = False  # as while a CUDA graph is captured
    tape: Any = None  # of `gpu_tape.py`, which is told of them and of all operations

    def add(self, name: str) -> None:
        if self.forbidden:
            raise RuntimeError(f"waits for the device while a graph is captured: {name}")
        self.append(name)
        if self.tape is not None:
            self.tape.wait(name)


WAITS = Waits()


class OnGPU(Tensor):
    """A tensor whose data is on the CPU."""

    data_here: Tensor

    @staticmethod
    def __new__(cls, data: Tensor) -> OnGPU:
        layout = {"strides": data.stride(), "storage_offset": data.storage_offset()}
        made = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, **layout)
        made.data_here = data
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def tolist(self) -> Any:
        WAITS.add("tolist")
        return [READ] * self.numel() if self.data_here.is_meta else self.data_here.tolist()

    def cpu(self, *_: Any) -> Tensor:
        return self.to("cpu")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"OnGPU({self.data_here!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        # (quantile makes its numbers on the device that C++ sees)
        if not all(isinstance(x, OnGPU) or x.numel() == 1 for x in inputs):
            assert func in INDEXING, f"{func} of tensors on two devices"
            WAITS.add("an index to the device")
        by_mask = func in INDEXING and any(x.dtype == torch.bool for x in args[1] if x is not None)
        unknown_size = func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
        if func in READS or by_mask or unknown_size:
            WAITS.add(str(func))
        here_args, here_kwargs = tree_map(here, args), tree_map(here, kwargs)
        if any(x.data_here.is_meta for x in inputs if isinstance(x, OnGPU)):
            here_args, here_kwargs = tree_map(_without_data, (here_args, here_kwargs))
            if "device" in here_kwargs:
                here_kwargs = {**here_kwargs, "device": "meta"}
        if func is aten._local_scalar_dense.default and here_args[0].is_meta:
            return False if here_args[0].dtype == torch.bool else READ
        if func in WIDE_PRODUCTS:
            result = _wide_product(*here_args, **here_kwargs)
        else:
            result = func(*here_args, **here_kwargs)
        if WAITS.tape is not None:
            WAITS.tape.note(func, here_args, here_kwargs, result)
        result = tree_map(lambda x: OnGPU(x) if isinstance(x, Tensor) else x, result)
        return return_and_correct_aliasing(func, args, kwargs, result)


def here(x: Any) -> Any:
    """The data of a tensor, on the CPU; anything else as it is."""
    return x.data_here if isinstance(x, OnGPU) else x


def _without_data(x: Any) -> Any:
    if not isinstance(x, Tensor) or x.is_meta:
        return x
    return aten.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _wide_product(*operands: Any, out: Tensor, **_: Any) -> Tensor:
    *start, left, right = (x for x in operands if isinstance(x, Tensor))
    product = left.to(out.dtype) @ right.to(out.dtype)
    return out.copy_(product if not start else start[0] + product)


def _makes_there(make: Callable[..., Tensor], *, copies: bool) -> Callable[..., Tensor]:
    """A function that makes tensors, with ``device="cuda"``; `copies` from the host."""

    def made(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        if device is None or torch.device(device).type != "cuda":
            return make(*args, **kwargs) if device is None else make(*args, device=device, **kwargs)
        if copies:
            WAITS.add(f"{make.__name__} to the device")
        result = make(*args, **kwargs)
        if WAITS.tape is not None:
            WAITS.tape.made(make.__name__, result)
        return OnGPU(result)

    return made


def _to(
    move: Callable[..., Tensor], x: Tensor, *args: Any, non_blocking: bool = False, **kwargs: Any
) -> Tensor:
    """``x.to(...)`` between the devices, or on one of them."""
    target, rest = (args[0], args[1:]) if args else (kwargs.pop("device", None), ())
    if isinstance(target, Tensor):
        rest, target = (target.dtype, *rest), target.device
    elif isinstance(target, torch.dtype):
        rest, target = (target, *rest), None
    goes = x.device if target is None else torch.device(target)
    moved = move(x, *rest, **kwargs) if rest or kwargs else x
    if goes.type == x.device.type:
        return moved
    if not (non_blocking and goes.type == "cuda"):
        WAITS.add("to the device" if goes.type == "cuda" else "to the host")
    return OnGPU(moved) if goes.type == "cuda" else here(moved)


@contextmanager
def pretended(
    monkeypatch: pytest.MonkeyPatch, *, capturing: bool = False, tape: Any = None
) -> Iterator[Waits]:
    """Within, tensors may be `OnGPU`, and waits are listed; while `capturing`, each is an error.

    A tensor whose data is on torch's "meta" device has none, and nor has what comes of it.
    """
    plenty = 2**40
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (plenty, plenty))
    names = ("reserved", "active", "inactive_split")
    nothing = {f"{name}_bytes": {"all": {"current": 0}} for name in names}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device=None: nothing)
    for name in ("arange", "empty", "full", "ones", "zeros", "tensor"):
        there = _makes_there(getattr(torch, name), copies=name == "tensor")
        monkeypatch.setattr(torch, name, there)
    move = Tensor.to
    monkeypatch.setattr(Tensor, "to", lambda x, *args, **kwargs: _to(move, x, *args, **kwargs))
    WAITS.clear()
    WAITS.forbidden, WAITS.tape = capturing, tape
    try:
        yield WAITS
    finally:
        WAITS.forbidden, WAITS.tape = False, None


@contextmanager
def autocast(dtype: torch.dtype | None) -> Iterator[None]:
    """As ``torch.autocast("cuda", dtype)``, which would look for the device; None: no autocast."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", dtype is not None)
    torch.set_autocast_dtype("cuda", before[1] if dtype is None else dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", before[0])
        torch.set_autocast_dtype("cuda", before[1])
