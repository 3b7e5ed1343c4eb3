"""Which device a launch is for, and whether there can be one."""

from __future__ import annotations

import functools
import os
import shutil
import sysconfig
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


@functools.cache
def launch_trouble() -> str | None:
    """Why nothing can be launched, and what to install; None: all is there.

    Before its first launch Triton compiles a module in C, for the release of Python that it runs in. The question does
    the same, once in a process; Triton keeps the result.
    """
    try:
        triton.runtime.driver.active.get_current_target()
    except Exception as error:  # whatever it is: a launch would meet it too
        first_line = str(error).strip().partition("\n")[0]
        return _missing() or f"Triton cannot start: {type(error).__name__}: {first_line}"
    return None


def _missing() -> str | None:
    """Which part of a C compiler is not there; None: all are."""
    compiler = os.environ.get("CC")
    if not any(shutil.which(name) for name in ([compiler] if compiler else ["gcc", "clang"])):
        named = f"CC names {compiler!r}, which is not there" if compiler else "there is no gcc or clang"
        return f"Triton needs a C compiler, and {named}: install gcc (Debian, Ubuntu: apt-get install gcc), or set CC"
    scheme = sysconfig.get_default_scheme()
    headers = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
    if not os.path.isfile(os.path.join(headers, "Python.h")):
        return (
            f"Triton needs Python's headers, and there is no Python.h in {headers}: install them (Debian, Ubuntu: "
            "apt-get install python3-dev)"
        )
    return None
