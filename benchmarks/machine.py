"""The machine that the results were measured on, and how busy it was."""

from __future__ import annotations

import datetime
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from grpo_kernels.commands import report

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (  # torch, what the providers are made of, and what measures
    "torch", "triton", "trl", "transformers", "liger-kernel", "verl", "unsloth_zoo",
    "cut-cross-entropy", "numpy",
)  # fmt: skip
CLOCKS = (
    "clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit", "temperature.gpu",
    "utilization.gpu",
)  # fmt: skip


def about(*, on_gpu: bool, commit: str | None = None) -> dict[str, Any]:
    found = report.collect()
    # without places on this machine
    found["backend"]["C++ library"] = found["backend"]["C++ library"].split(",")[0]
    found["devices"] |= _nvidia_smi("driver_version")
    return {
        "format": 2, "device": torch.cuda.get_device_name(0) if on_gpu else "cpu",
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit or git_commit(ROOT), "machine": found,
        "versions": {name: report.version(name) for name in PACKAGES},
    }  # fmt: skip


def write_whole(path: Path, text: str) -> None:
    """Write the file anew; whoever reads it sees the old one or the new one, whole."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    os.replace(part, path)


def clocks() -> dict[str, str]:
    return _nvidia_smi(*CLOCKS)


def git_commit(root: Path) -> str | None:
    try:
        named = _output("git", "-C", str(root), "rev-parse", "HEAD")
        changed = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
        return named + ("-dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _nvidia_smi(*fields: str) -> dict[str, str]:
    try:
        query = f"--query-gpu={','.join(fields)}"
        line = _output("nvidia-smi", query, "--format=csv,noheader").splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return {}
    return dict(zip(fields, (x.strip() for x in line.split(",")), strict=False))


def _output(*command: str) -> str:
    kept = {"capture_output": True, "text": True, "timeout": 20, "check": True}
    return subprocess.run(command, **kept).stdout.strip()


class Watch:
    def __init__(self) -> None:
        self._before = self._read()

    def others(self) -> float | None:
        """Share of all cores since the start; None where the system does not tell."""
        if self._before is None or (now := self._read()) is None:
            return None
        wall, busy, own = (b - a for a, b in zip(self._before, now, strict=True))
        return round(max(0.0, busy - own) / max(wall, 1e-9) / (os.cpu_count() or 1), 3)

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        """Seconds: on the wall, of all cores at work, of this process's."""
        try:
            numbers = map(int, Path("/proc/stat").read_text().split()[1:9])
            user, nice, system, _, _, irq, softirq, steal = numbers
        except (OSError, ValueError):
            return None
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return time.perf_counter(), busy, time.process_time()
