"""The environment for a bug report: versions, devices, and which backend is used there and why."""

from __future__ import annotations

import os
import platform
import warnings
from importlib import metadata
from typing import Any, cast

import torch

import grpo_kernels
from grpo_kernels.backends import choose_backend
from grpo_kernels.backends.cpp_rows import build
from grpo_kernels.engine.device import CUDA
from grpo_kernels.engine.memory import LARGE_CHUNK_ROWS

PACKAGES = (
    "grpo-kernels", "torch", "triton", "trl", "transformers", "accelerate", "peft", "liger-kernel", "verl", "numpy",
)  # fmt: skip

Report = dict[str, dict[str, str]]

PRECISIONS = {  # of float32 products, by torch's names
    "none": "full",
    "ieee": "full",
    "tf32": "TF32, 10 bits of mantissa where the device has it: results of float32 operands are not exact",
    "bf16": "bfloat16, 7 bits of mantissa where the device has it: results of float32 operands are not exact",
}


def collect() -> Report:
    """Collect the report: section -> name -> text. Of the packages that it names, only torch is imported."""
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
        },
        "system": {
            "os": platform.platform(),
            "cpu": _cpu_name(),
            "cores": str(os.cpu_count()),
            "torch threads": str(torch.get_num_threads()),
            "torch cpu capability": torch.backends.cpu.get_cpu_capability(),
        },
        "devices": {str(device): _describe(device) for device in devices()},
        "backend": {
            **{str(device): _backend(device) for device in devices()},
            "C++ library": _library(),
        },
        "defaults": {"workspace": _default_workspace()},
        "settings of torch": _settings(),
    }


def devices() -> list[torch.device]:
    """The CPU, and every CUDA or ROCm device."""
    return [
        torch.device("cpu"),
        *(torch.device("cuda", index) for index in range(torch.cuda.device_count())),
    ]


def render(report: Report) -> str:
    """Render the report as aligned plain text, one block per section."""
    width = max(len(name) for section in report.values() for name in section)
    lines: list[str] = []
    for title, section in report.items():
        lines += ["", title] if lines else [title]
        lines += [f"  {name:<{width}}  {text}" for name, text in section.items()]
    return "\n".join(lines)


def _version(distribution: str) -> str:
    """Version of a package: of ours even if it is not installed, of torch with its build (+cpu, +cu130)."""
    if distribution in ("grpo-kernels", "torch"):
        return str((grpo_kernels if distribution == "grpo-kernels" else torch).__version__)
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "absent"


def _cpu_name() -> str:
    """The processor's name where the system tells it, else the architecture."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [
                line.split(":", 1)[1].strip() for line in file if line.startswith("model name")
            ]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def _describe(device: torch.device) -> str:
    """Name, capability and memory of a GPU; the architecture of the CPU."""
    if device.type == "cpu":
        return platform.machine()
    gpu = torch.cuda.get_device_properties(device)
    runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return f"{gpu.name}, capability {gpu.major}.{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB, {runtime}"


def _backend(device: torch.device) -> str:
    """Return the backend that "auto" chooses for tensors on this device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report itself says the same
        backend, reason = choose_backend("auto", device)
    return f"{backend.name} ({reason})"


def _library() -> str:
    """Instruction set and origin of the C++ kernels; "none" if there are no kernels."""
    library = build.load()
    if library.refusal:
        return "none"
    text = f"{torch.ops.grpo_kernels_cpp.isa('')}, {library.path or library.origin}"
    return f"{text}; {library.warning}" if library.warning else text


def _default_workspace() -> str:
    """Return the bytes that `workspace_bytes=None` stands for."""
    least, most = (f"{size / 2**20:.0f} MiB" for size in (CUDA.workspaces[0], CUDA.workspaces[-1]))
    return f"{least} (on a GPU as much as chunks of {LARGE_CHUNK_ROWS} rows take, up to {most}, as far as it is free)"


def _settings() -> dict[str, str]:
    """The settings of torch, in this process, that change the results of products."""
    cuda, mkldnn = (
        torch.backends.cuda.matmul,
        cast(Any, torch.backends.mkldnn),
    )  # its type stub lacks matmul
    # allow_tf32 and get_float32_matmul_precision raise where the newer fp32_precision was set; this shows both
    settings = {
        "float32 products, cpu": ("mkldnn", mkldnn.matmul.fp32_precision),
        "float32 products, cuda": ("cuda", cuda.fp32_precision),
    }
    lines = {
        name: f"{PRECISIONS.get(value, value)} (torch.backends.{where}.matmul.fp32_precision: {value})"
        for name, (where, value) in settings.items()
    }
    refused = cuda.allow_fp16_accumulation
    lines["float16 products, cuda"] = (
        "refused, since they would be summed in float16" if refused else "summed in float32"
    ) + f" (torch.backends.cuda.matmul.allow_fp16_accumulation: {refused})"
    return lines
