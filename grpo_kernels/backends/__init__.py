"""Row backends: what is done to a chunk of logits, row by row, between the matrix products.

A backend knows no objective and no matrix product. Its three methods are called in this order on one chunk::

    prepare_(logits, transform)                       raw projection -> the backend's own form of the scaled logits
    stats(logits, ids, ...)         -> RowStats       log-probability, entropy, what `grad_` needs
    grad_(logits, ids, stats, a, b, transform)        in place: scaled logits -> d loss / d raw projection

`torch_rows.TorchRows` runs anywhere and is the oracle for every other backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo_kernels.backends.rows import LogitTransform, RowBackend, RowStats
from grpo_kernels.backends.torch_rows import TorchRows

if TYPE_CHECKING:
    import torch

BACKENDS: dict[str, RowBackend] = {"torch": TorchRows()}


def choose_backend(name: str, device: torch.device) -> tuple[RowBackend, str]:
    """The row backend to use on `device`, and why, in words.

    Args:
        name: ``"auto"``, or the name of one backend, which is then used or refused.

    Raises:
        ValueError: no backend of that name.
    """
    if name == "auto":
        return BACKENDS["torch"], f"the only backend for {device.type} tensors in this version"
    if name not in BACKENDS:
        raise ValueError(f"backend: expected one of auto, {', '.join(BACKENDS)}, got {name!r}")
    return BACKENDS[name], "asked for"


__all__ = ["BACKENDS", "LogitTransform", "RowBackend", "RowStats", "choose_backend"]
