"""How much memory a provider needs beyond its inputs and the gradients it returns, in a process of its own.

The provider runs once at toy size, so that what it imports, compiles and starts is there. Then, with the real inputs in
memory, the kernel's high-water mark of resident memory is set back (Linux: 5 to ``/proc/self/clear_refs``), one step
runs, and the extra memory is the mark's rise less the bytes of the gradients. Scratch space of libraries counts.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu.cases import CpuCase, make_inputs
from benchmarks.cpu.providers import build
from benchmarks.gpu.child import environment, run

SECONDS = 600.0
MIB = 2**20


def extra_memory(case: CpuCase, provider: str, backend: str, threads: int) -> dict[str, Any]:
    """``extra_mib`` of one step of `provider`, or ``memory_reason`` why there is none."""
    if sys.platform != "linux":
        return {"memory_reason": "measured on Linux only"}
    given = json.dumps({"case": asdict(case), "provider": provider, "backend": backend, "threads": threads})
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.cpu.memory", given]
        ran = run(command, env=environment(toy=False), seconds=SECONDS, log=Path(folder) / "log")
    if ran.code != 0:
        return {"memory_reason": f"exit status {ran.code}: {ran.output[-500:]}"}
    return {"extra_mib": float(ran.output.split()[-1])}


def measure(case: CpuCase, provider: str, backend: str, threads: int) -> float:
    """MiB, in this process; Linux only."""
    torch.set_num_threads(threads)
    build(provider, make_inputs(case.toy()), backend)()
    inputs = make_inputs(case)
    step = build(provider, inputs, backend)
    gc.collect()
    _give_back_freed_memory()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    step()
    rise = _status_bytes("VmHWM") - before
    return (rise - sum(x.nbytes for x in inputs.leaves)) / MIB


def _give_back_freed_memory() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    print(f"{measure(**{**options, 'case': CpuCase(**options['case'])}):.1f}")
