"""The device of a launch, and the reasons why Triton may be unable to launch."""

from __future__ import annotations

import functools
import subprocess
import sysconfig
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import triton


@functools.cache
def arch_of(device: torch.device) -> str:
    """Return the architecture, such as sm_90 or gfx942; "cpu" in the interpreter."""
    if device.type != "cuda":
        return device.type
    with on(device):
        target = triton.runtime.driver.active.get_current_target()
    return f"sm_{target.arch}" if target.backend == "cuda" else str(target.arch)


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` current: kernels run on the current device's stream, which has to be that of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@functools.cache
def launch_trouble() -> str | None:
    """Return the reason why nothing can be launched, and the remedy; None if all is there.

    Before its first launch Triton compiles a module in C, for the release of Python that it runs in. This check does
    the same, once in a process; Triton keeps the result.
    """
    try:
        triton.runtime.driver.active.get_current_target()
    except Exception as error:  # whatever it is: a launch would meet it too
        first_line = str(error).strip().partition("\n")[0]
        return _missing(error) or f"Triton cannot start: {type(error).__name__}: {first_line}"
    return None


def _missing(error: Exception) -> str | None:
    """Return what is missing, if `error` comes from compiling; None if something else is wrong."""
    if "C compiler" in str(error):
        return (
            "Triton needs a C compiler, and there is no gcc or clang: install gcc (Debian, Ubuntu: apt-get install "
            "gcc), or set CC"
        )
    scheme = sysconfig.get_default_scheme()
    headers = Path(
        sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
    )
    if isinstance(error, subprocess.CalledProcessError) and not (headers / "Python.h").is_file():
        return (
            f"Triton needs Python's headers, and there is no Python.h in {headers}: install them (Debian, Ubuntu: "
            "apt-get install python3-dev)"
        )
    return None
