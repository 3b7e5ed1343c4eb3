"""The most memory a step needs beyond what is there before it and the gradients it returns.

On a GPU torch's allocator tells. On a CPU under Linux it is resident memory: the kernel's
high-water mark is set back (5 to ``/proc/self/clear_refs``) after what is free was given back.
Scratch space that libraries keep from an earlier step does not count.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

CLEAR_REFS = Path("/proc/self/clear_refs")
MIB = 2**20
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's mallopt
TRIM_THRESHOLD, MMAP_MAX = 128 * 1024, 65536  # its defaults


class Peak:
    """Begins where it is made; `extra_bytes` ends it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        elif is_measured(device):
            trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
            if trim is not None:
                trim(0)
            CLEAR_REFS.write_text("5")
            self._before = status_bytes("VmRSS")

    def extra_bytes(self, returned: int) -> int | None:
        """The peak since the start, less `returned` bytes; None where nothing measures it."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            return int(torch.cuda.max_memory_allocated()) - self._before - returned
        return (
            status_bytes("VmHWM") - self._before - returned if is_measured(self._device) else None
        )


class _Held:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


@contextmanager
def saved_bytes(model: nn.Module) -> Iterator[Callable[[], int]]:
    """The function counts bytes that graphs made inside have saved, without parameters."""
    held: weakref.WeakSet[_Held] = weakref.WeakSet()

    def pack(tensor: Tensor) -> _Held:
        found = _Held(tensor.detach())  # an output with its graph would hold itself
        held.add(found)
        return found

    def count() -> int:
        storages = {
            x.tensor.untyped_storage().data_ptr(): x.tensor.untyped_storage().nbytes() for x in held
        }
        for parameter in model.parameters():
            storages.pop(parameter.untyped_storage().data_ptr(), None)
        return sum(storages.values())

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x.tensor):
        yield count


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Inside, glibc keeps what is freed: left alone, a step of stock TRL in the part "step" has
    176,000 page faults, which take a seventh of its CPU time."""
    _mallopt({M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1})
    try:
        yield
    finally:
        _mallopt({M_MMAP_MAX: MMAP_MAX, M_TRIM_THRESHOLD: TRIM_THRESHOLD})


def _mallopt(values: dict[int, int]) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    for name, value in values.items() if mallopt is not None else ():
        mallopt(name, value)


def is_measured(device: torch.device) -> bool:
    return device.type == "cuda" or (sys.platform == "linux" and os.access(CLEAR_REFS, os.W_OK))


def status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
