"""The row backend in Triton, for GPUs; on a CPU it runs in Triton's interpreter.

For the interpreter, set ``TRITON_INTERPRET=1`` before Triton is imported. Only `rows` and the
modules that it imports need Triton, which may not be installed.
"""

from __future__ import annotations

import importlib.util

import torch

from grpo_kernels.backends import RowBackend, warn_of_torch


def refusal(device: torch.device, dtype: torch.dtype, *, asked_for: bool) -> str | None:
    """Refuse if Triton cannot launch on a GPU. Asked for, it also runs on a CPU, interpreted."""
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


def load() -> RowBackend:
    """Make the backend; this imports Triton."""
    from grpo_kernels.backends.triton_rows.rows import TritonRows

    return TritonRows()
