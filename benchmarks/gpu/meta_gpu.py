"""Tensors without memory that say they are on a Hopper GPU, so that a package launches what it would launch there."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._library import custom_ops
from torch.fx.experimental import _config as symbolic

GPU = torch.device("cuda", 0)
CAPABILITY = (9, 0)
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, warp_size=32, total_memory=80 * 2**30,
    shared_memory_per_multiprocessor=233472, shared_memory_per_block_optin=232448, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, L2_cache_size=50 * 2**20, gcnArchName="",
)  # fmt: skip
FACTORIES = (
    "arange", "empty", "empty_like", "empty_permuted", "empty_strided", "full", "full_like", "linspace", "ones",
    "ones_like", "rand", "randn", "scalar_tensor", "tensor", "zeros", "zeros_like",
)  # fmt: skip
READ = 1  # what the host reads of a tensor without values
METHODS = ("to", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")


@contextmanager
def pretended() -> Iterator[None]:
    """Inside, tensors on torch's "meta" device say that they are CUDA's, and what is made on CUDA is made there."""
    place = torch._C.TensorBase.device.__get__

    def device(tensor: Tensor) -> torch.device:
        found = place(tensor)
        return GPU if found.type == "meta" else found

    with ExitStack() as stack:

        def put(where: Any, **values: Any) -> None:
            for name, value in values.items():
                stack.enter_context(mock.patch.object(where, name, value, create=where is Tensor))

        put(Tensor, device=property(device), is_cuda=property(lambda x: place(x).type == "meta"))
        put(Tensor, item=lambda x: READ, tolist=lambda x: [READ] * x.numel(), __bool__=lambda x: False)
        put(Tensor, **{name: _there(getattr(Tensor, name)) for name in METHODS})
        put(torch, **{name: _there(getattr(torch, name)) for name in FACTORIES})
        put(torch, mm=_wide(torch.mm), addmm=_wide(torch.addmm))
        put(
            torch.cuda,
            is_available=lambda: True,
            is_bf16_supported=lambda *_, **__: True,
            is_current_stream_capturing=lambda: False,
            current_device=lambda: GPU.index,
            device_count=lambda: 1,
            get_device_capability=lambda *_: CAPABILITY,
            get_device_properties=lambda *_: PROPERTIES,
            get_device_name=lambda *_: PROPERTIES.name,
            mem_get_info=lambda *_: (PROPERTIES.total_memory, PROPERTIES.total_memory),
            synchronize=lambda *_: None,
            current_stream=lambda *_: types.SimpleNamespace(cuda_stream=0, device=GPU),
            device=lambda *_: nullcontext(),
        )
        put(torch.cuda.nvtx, range=lambda *_: nullcontext())
        put(symbolic, meta_nonzero_assume_all_nonzero=True)
        yield


def open_operators(namespace: str) -> None:
    """Have a package's custom operators run their own bodies on such tensors, not the shapes alone."""
    for name, operator in custom_ops.OPDEFS.items():
        if name.partition("::")[0] == namespace:
            operator._abstract_fn = operator._init_fn


def _there(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with "meta" for CUDA among its arguments."""

    def made(*args: Any, **kwargs: Any) -> Any:
        args = tuple("meta" if _names_gpu(x) else x for x in args)
        return function(*args, **{name: "meta" if _names_gpu(x) else x for name, x in kwargs.items()})

    return made


def _names_gpu(value: Any) -> bool:
    return isinstance(value, str | torch.device) and str(value).partition(":")[0] == "cuda"


def _wide(function: Callable[..., Any]) -> Callable[..., Any]:
    """A product that may have its result in another dtype, of which "meta" knows nothing."""

    def product(*args: Any, out_dtype: torch.dtype | None = None, out: Tensor | None = None, **kwargs: Any) -> Any:
        if out_dtype is None:
            return function(*args, **kwargs, **({} if out is None else {"out": out}))
        left, right = args[-2:]
        return left.new_empty(left.shape[0], right.shape[1], dtype=out_dtype) if out is None else out

    return product
