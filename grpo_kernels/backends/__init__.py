"""Row backends: the work on each row of a chunk of logits, between the matrix products.

A backend computes no matrix product, and except in ``fused`` it knows the loss only by each row's
coefficients. An engine makes these calls on a chunk, in this order::

    prepare_(logits, transform)             raw logits -> the form that the backend reads
    stats(chunk, ...)    -> RowStats        log-probability, entropy, the numbers `grad` needs
    diverge(chunk, stats, reference_stats)  the divergence from a second head, if there is one
    grad(chunk, stats, coefficients, out)   out = d loss / d raw logits

If a `FusedLoss` describes the loss and the backend can fuse it, one call of ``fused`` replaces all
but ``prepare_``. `torch_rows.TorchRows` runs anywhere and is the oracle for every other backend;
`triton_rows.rows.TritonRows` runs on a GPU, `cpp_rows.CppRows` on a CPU.

The module ``x_rows`` holds the backend that `BackendName` calls x. Importing it compiles nothing,
and imports no package that may be missing. It has three functions::

    refusal(device, dtype, asked_for=...)   why it cannot serve these logits, in words, or None;
                                            unless requested by name, it also warns of a reason that
                                            the user can remove (`warn_of_torch`)
    reason(device)                          why "auto" chooses it, in words; not in `torch_rows`,
                                            which "auto" chooses if another backend refuses
    load()               -> RowBackend      called only if there is no refusal
"""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from grpo_kernels.backends.interface import LogitTransform, RowBackend, RowStats
from grpo_kernels.base.choices import BackendName, choices

NAMES = choices(BackendName)  # valid values of `backend=`
BACKENDS = tuple(name for name in NAMES if name != "auto")


def check_backend(name: object) -> None:
    """Raise ValueError unless `name` is ``"auto"`` or one of `BACKENDS`."""
    if name not in NAMES:
        raise ValueError(f"backend: expected one of {', '.join(NAMES)}, got {name!r}")


def choose_backend(
    name: str, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[RowBackend, str]:
    """Choose the row backend for logits of `dtype` on `device`; also say in words why it was
    chosen.

    The first choice of the C++ kernels in a process may compile them.

    Args:
        name: ``"auto"``, or one of `BACKENDS`.

    Raises:
        ValueError: no backend has that name, or the named backend cannot serve here.
    """
    check_backend(name)
    if name != "auto":
        refusal = _module(name).refusal(device, dtype, asked_for=True)
        if refusal is not None:
            raise ValueError(f"backend: expected one that can serve here, got {name!r}: {refusal}")
        return _module(name).load(), "asked for"
    preferred = "cpp" if device.type == "cpu" else "triton"
    refusal = _module(preferred).refusal(device, dtype, asked_for=False)
    if refusal is not None:
        return _module("torch").load(), f"not {preferred}: {refusal}"
    return _module(preferred).load(), _module(preferred).reason(device)


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}_rows")


__all__ = [
    "BACKENDS",
    "LogitTransform",
    "RowBackend",
    "RowStats",
    "check_backend",
    "choose_backend",
]
