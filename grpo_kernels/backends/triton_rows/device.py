"""Which device a launch is for."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton


@functools.cache
def arch_of(device: torch.device) -> str:
    """Such as sm_90 or gfx942; "cpu" in the interpreter."""
    if device.type != "cuda":
        return device.type
    with on(device):
        target = triton.runtime.driver.active.get_current_target()
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Kernels run on the current device's current stream, and that must be the tensors' device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
