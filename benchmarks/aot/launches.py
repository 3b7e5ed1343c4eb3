"""What the launchers pass to their kernels, caught, as ahead-of-time compilation takes it.

The launchers are called with tensors on torch's "meta" device, so that what is compiled is what
they launch: the same arguments, specialised as Triton would at run time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int64: "i64",
    torch.int32: "i32", torch.int8: "i8", torch.uint32: "u32", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip
ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Launch:
    """A kernel and the arguments of `triton.compiler.ASTSource`."""

    kernel: JITFunction
    signature: dict[str, Any]  # a tuple's is a tuple
    constexprs: dict[tuple[int, ...], Any]
    attrs: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    programs: int = 1


@contextmanager
def caught() -> Iterator[list[Launch]]:
    """Inside, kernels are not launched but put on the list."""
    launches: list[Launch] = []

    def catch(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        assert not args, f"{self.__name__}: launched with positional arguments"
        why = f"{self.__name__}: its default differs between releases of Triton"
        assert "enable_fp_fusion" in kwargs, why
        launches.append(replace(describe(self, kwargs), programs=math.prod(grid)))

    with mock.patch.object(JITFunction, "run", catch):
        yield launches


def describe(kernel: JITFunction, given: dict[str, Any]) -> Launch:
    options = dict(given)
    signature, constexprs, attrs = {}, {}, {}
    for place, param in enumerate(kernel.params):
        value = options.pop(param.name) if param.name in options else param.default
        kind, aligned = _specialise(value, param)
        signature[param.name] = kind
        if kind == "constexpr":
            constexprs[(place,)] = value
        elif aligned:
            attrs[(place,)] = ALIGNED
    return Launch(kernel, signature, constexprs, attrs, options)


def _specialise(value: Any, param: Any) -> tuple[Any, bool]:
    """The type of an argument, and whether the compiler may take it for a multiple of 16."""
    if isinstance(value, tuple):
        return tuple(_specialise(x, param)[0] for x in value), False
    if param.is_constexpr or value is None:
        return "constexpr", False
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}", value.data_ptr() % 16 == 0
    if isinstance(value, bool | float):
        return ("i1" if isinstance(value, bool) else "fp32"), False
    if isinstance(value, int):
        if value == 1 and not param.do_not_specialize:
            return "constexpr", False
        aligned = value % 16 == 0 and not param.do_not_specialize
        return ("i32" if abs(value) < 2**31 else "i64"), aligned
    raise TypeError(f"{param.name}: expected a tensor or a number, got {type(value).__name__}")
