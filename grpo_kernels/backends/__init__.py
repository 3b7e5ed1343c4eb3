"""Row backends: the work on a chunk of logits, row by row, between the matrix products.

A backend knows no matrix product, and of the loss only each row's coefficients. Calls on a chunk, in this order::

    prepare_(logits, transform)             raw projection -> the form that the backend reads
    stats(chunk, ...)    -> RowStats        log-probability, entropy, the numbers `grad` needs
    grad(chunk, stats, a, b, out)           out = d loss / d raw projection

If a `TokenLoss` can describe the loss and the backend fuses, ``fused`` takes the place of the last two.
`torch_rows.TorchRows` runs anywhere and is the oracle for every other backend; `triton_rows.TritonRows` runs on a GPU,
`cpp_rows.CppRows` on a CPU.
"""

from __future__ import annotations

import functools
import importlib.util

import torch

from grpo_kernels.backends.interface import LogitTransform, RowBackend, RowStats
from grpo_kernels.backends.torch_rows import TorchRows
from grpo_kernels.base.checks import warn_once
from grpo_kernels.base.choices import BackendName, choices

NAMES = choices(BackendName)  # names that calls take
BACKENDS = tuple(name for name in NAMES if name != "auto")


def check_backend(name: object) -> None:
    """Raise ValueError unless `name` is ``"auto"`` or one of `BACKENDS`."""
    if name not in NAMES:
        raise ValueError(f"backend: expected one of {', '.join(NAMES)}, got {name!r}")


def choose_backend(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[RowBackend, str]:
    """Return the row backend for logits of `dtype` on `device`, and the reason for the choice, in words.

    The first choice of the CPU's kernels in a process may compile them, once.

    Args:
        name: ``"auto"``, or the name of one of `BACKENDS`, which is then used or refused.

    Raises:
        ValueError: no backend of that name, or one that cannot serve here.
    """
    chosen, reason = name_backend(name, device, dtype)
    return _backend(chosen), reason


def name_backend(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[str, str]:
    """Do as `choose_backend`, but return the backend's name, one of `BACKENDS`, and the reason."""
    check_backend(name)
    wanted = ("cpp" if device.type == "cpu" else "triton") if name == "auto" else name
    refusal = _refusal(wanted, device, dtype, asked_for=name == wanted)
    if refusal is None:
        return wanted, "asked for" if name == wanted else _reason(wanted, device)
    if name == wanted:
        raise ValueError(f"backend: expected one that can serve here, got {name!r}: {refusal}")
    if wanted == "cpp" or refusal == _cannot_launch(device):
        place, better = ("CPU", "C++") if wanted == "cpp" else ("GPU", "Triton's kernels")
        warn_once(
            f"on the {place}, losses and log-probabilities run in torch operations, slower than in {better} "
            f'(backend="torch" asks for this without a warning): {refusal}',
            RuntimeWarning,
        )
    return "torch", f"not {wanted}: {refusal}"


def _reason(chosen: str, device: torch.device) -> str:
    """Reason why "auto" chose `chosen`."""
    if chosen == "triton":
        return f"{device.type} tensors and Triton is installed"
    from grpo_kernels.backends.cpp_rows.build import load

    return f"CPU tensors; library {load().origin}"


def _refusal(name: str, device: torch.device, dtype: torch.dtype, *, asked_for: bool) -> str | None:
    """Reason why the backend cannot serve, or None. "auto" is refused where only an interpreter could serve."""
    if name == "torch":
        return None
    if name == "cpp":
        return _cpp_refusal(device)
    if name == "triton":
        return _triton_refusal(device, dtype, interpreted=asked_for)
    raise NotImplementedError(f"backend: {name!r} does not say where it serves")


def _cpp_refusal(device: torch.device) -> str | None:
    """Reason why the C++ kernels cannot run, or None; they are found, built and loaded here."""
    if device.type != "cpu":
        return f"it serves CPU tensors, and these are {device.type} tensors"
    from grpo_kernels.backends.cpp_rows.build import load  # not at import: only where it is wanted

    library = load()
    if library.warning:
        warn_once(library.warning, RuntimeWarning)
    return library.refusal


def _triton_refusal(device: torch.device, dtype: torch.dtype, *, interpreted: bool) -> str | None:
    """Reason why the Triton kernels cannot run, or None. `interpreted`: Triton's interpreter may serve on a CPU."""
    if dtype == torch.float64:
        return "its kernels compute in float32, and these inputs ask for float64"
    if device.type != "cuda" and not interpreted:
        return f"it serves GPUs, and these are {device.type} tensors"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type != "cuda" and not _is_interpreted():
        return f"it needs a GPU, or TRITON_INTERPRET=1 before Triton is imported, and these are {device.type} tensors"
    return _cannot_launch(device)


def _cannot_launch(device: torch.device) -> str | None:
    """Return why Triton, which is installed, can launch nothing on a GPU; None if it can."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None or _is_interpreted():
        return None
    from grpo_kernels.backends.triton_rows.device import launch_trouble

    return launch_trouble()


def _is_interpreted() -> bool:
    from grpo_kernels.backends.triton_rows import INTERPRETED

    return INTERPRETED


@functools.cache
def _backend(name: str) -> RowBackend:
    if name == "torch":
        return TorchRows()
    if name == "cpp":
        from grpo_kernels.backends.cpp_rows import CppRows

        return CppRows()
    if name == "triton":
        from grpo_kernels.backends.triton_rows import TritonRows  # not at import: only this needs Triton

        return TritonRows()
    raise NotImplementedError(f"backend: {name!r} has no class")


__all__ = ["BACKENDS", "LogitTransform", "RowBackend", "RowStats", "check_backend", "choose_backend", "name_backend"]
