"""What the results were measured on."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from grpo_kernels.diagnostics import report

PACKAGES = (
    "torch", "triton", "trl", "transformers", "liger-kernel", "verl", "unsloth_zoo", "cut-cross-entropy",
    "quack-kernels", "nvidia-cutlass-dsl", "pytest-benchmark", "numpy",
)  # fmt: skip
CLOCKS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit", "temperature.gpu", "utilization.gpu")


def describe(root: Path, commit: str | None = None) -> dict[str, Any]:
    """Device, driver and versions; `commit` where the caller knows it better than the checkout does."""
    has_gpu = torch.cuda.is_available()
    found: dict[str, Any] = {
        "device": platform.processor() or platform.machine(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "commit": commit or git_commit(root),
        "driver": _nvidia_smi("driver_version").get("driver_version"),
    }
    if has_gpu:
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
        }
    return found


def describe_cpu() -> report.Report:
    """The environment as a bug report gives it, without places on this machine."""
    found = report.collect()
    found["backend"]["C++ library"] = found["backend"]["C++ library"].split(",")[0]
    return found


def peer_versions() -> dict[str, str]:
    """Of torch, of what the providers are made of, and of what measures; "absent" where not installed."""
    return {name: _version(name) or "absent" for name in PACKAGES}


def clocks() -> dict[str, str]:
    """Clocks, power and temperature at this moment, where nvidia-smi tells."""
    return _nvidia_smi(*CLOCKS)


def git_commit(root: Path) -> str | None:
    """The commit of the checkout, with "-dirty" if files differ from it; None where nothing tells."""
    if shutil.which("git"):
        try:
            named = _output("git", "-C", str(root), "rev-parse", "HEAD")
            changed = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
            return named + ("-dirty" if changed else "")
        except (OSError, subprocess.SubprocessError):
            pass
    return _commit_from_files(root / ".git")


def _commit_from_files(git: Path) -> str | None:
    try:
        if git.is_file():  # a worktree: "gitdir: PATH"
            git = (git.parent / git.read_text().split(":", 1)[1].strip()).resolve()
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        common = git / "commondir"
        folders = [git, *([(git / common.read_text().strip()).resolve()] if common.exists() else [])]
        for folder in folders:
            if (folder / name).exists():
                return (folder / name).read_text().strip()
            packed = folder / "packed-refs"
            for line in packed.read_text().splitlines() if packed.exists() else []:
                if line.endswith(" " + name):
                    return line.split()[0]
    except (OSError, IndexError):
        pass
    return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nvidia_smi(*fields: str) -> dict[str, str]:
    try:
        line = _output("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader").splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return {}
    return dict(zip(fields, (x.strip() for x in line.split(",")), strict=False))


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
