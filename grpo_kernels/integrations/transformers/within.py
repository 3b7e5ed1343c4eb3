"""Attributes of modules, changed for the length of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


def forward_name(module: nn.Module) -> str:
    """Name of the attribute that holds the module's forward; accelerate's hook goes on running around it."""
    return "_old_forward" if hasattr(module, "_hf_hook") else "forward"


@contextmanager
def replaced(module: nn.Module, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Inside, the attribute `name` of `module` is `function`."""
    before = vars(module).get(name)
    setattr(module, name, function)
    try:
        yield
    finally:
        if before is None:
            delattr(module, name)
        else:
            setattr(module, name, before)
