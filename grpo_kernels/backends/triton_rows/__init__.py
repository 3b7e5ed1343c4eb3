"""The row backend in Triton, for GPUs, and in Triton's interpreter for a CPU.

The interpreter needs ``TRITON_INTERPRET=1`` to be set before Triton is imported. Only `rows` and
what it imports need Triton, which may not be installed.
"""

from __future__ import annotations

import importlib.util

import torch

from grpo_kernels.backends.interface import RowBackend, warn_of_torch


def refusal(device: torch.device, dtype: torch.dtype, *, asked_for: bool) -> str | None:
    """Serves GPUs where Triton can launch; if asked for, also a CPU, in Triton's interpreter."""
    if dtype == torch.float64:
        return "its kernels compute in float32, and these inputs ask for float64"
    if device.type != "cuda" and not asked_for:
        return f"it serves GPUs, and these are {device.type} tensors"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    from grpo_kernels.backends.triton_rows.device import launch_trouble
    from grpo_kernels.backends.triton_rows.rows import INTERPRETED

    if INTERPRETED:
        return None
    if device.type != "cuda":
        needs = "a GPU, or TRITON_INTERPRET=1 before Triton is imported"
        return f"it needs {needs}, and these are {device.type} tensors"
    trouble = launch_trouble()
    if trouble is not None and not asked_for:
        warn_of_torch("GPU", "Triton's kernels", trouble)
    return trouble


def reason(device: torch.device) -> str:
    """What there is."""
    return f"{device.type} tensors and Triton is installed"


def load() -> RowBackend:
    """The row work, whose modules import Triton."""
    from grpo_kernels.backends.triton_rows.rows import TritonRows

    return TritonRows()
