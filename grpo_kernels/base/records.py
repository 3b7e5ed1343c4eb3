"""Records of tensors, taken apart by their own structure: dataclasses, named tuples, tuples and dicts, at any depth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

R = TypeVar("R")


def map_tensors(change: Callable[[Tensor], Any], record: R) -> R:
    """Return `record` with `change` of each tensor in it, in the order of the fields; other values stay."""
    mapped: R = _mapped(change, record)
    return mapped


def take(record: R, index: Tensor | slice) -> R:
    """Select the rows at `index` (m,) of every tensor of `record`, all of them (n, ...)."""
    return map_tensors(lambda x: x[index], record)


def _mapped(change: Callable[[Tensor], Any], x: Any) -> Any:
    if isinstance(x, Tensor):
        return change(x)
    if is_dataclass(x) and not isinstance(x, type):
        return replace(
            x, **{field.name: _mapped(change, getattr(x, field.name)) for field in fields(x)}
        )
    if isinstance(x, dict):
        return {name: _mapped(change, value) for name, value in x.items()}
    if isinstance(x, tuple):
        values = [_mapped(change, value) for value in x]
        return type(x)(*values) if hasattr(x, "_fields") else tuple(values)
    return x
