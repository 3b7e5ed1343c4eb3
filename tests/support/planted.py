"""Plants a fault in a copy of the sources, and runs the tests that should fail until the first
does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("grpo_kernels", "csrc", "tests", "benchmarks", "pyproject.toml")
IGNORED = shutil.ignore_patterns(
    "__pycache__", "results", "*.so"
)  # a library built beforehand has no fault
ROWS = ("tests/backends/triton/test_triton_rows.py",)
SECONDS = 600  # for one fault; far more than the tests take


@dataclass(frozen=True)
class Fault:
    """`old`, which stands once in `file`, becomes `new`; `tests` are pytest's arguments."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ROWS


def copy_sources(folder: Path) -> None:
    """Copy the package, its C++ sources, benchmarks and tests to `folder`."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=IGNORED)
        else:
            shutil.copy(source, folder / name)


def plant(fault: Fault, folder: Path) -> None:
    """Copy the sources to `folder`, with the fault in them."""
    copy_sources(folder)
    file = folder / fault.file
    text = file.read_text()
    assert text.count(fault.old) == 1, f"{fault.name}: expected {fault.old!r} once in {fault.file}"
    file.write_text(text.replace(fault.old, fault.new))


def survives(fault: Fault) -> tuple[bool, str, float]:
    """Whether no test fails; the line that says which did; seconds."""
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        plant(fault, Path(name))
        caches = dict.fromkeys(("TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR"), f"{name}/cache")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": name, **caches}
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            *fault.tests,
        ]
        try:
            done = subprocess.run(
                command, cwd=name, env=environment, capture_output=True, text=True, timeout=SECONDS
            )
        except subprocess.TimeoutExpired:
            return True, f"nothing failed within {SECONDS} s", time.perf_counter() - begun
    said = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    # 1: tests failed; below 0: killed by a signal, as by a read outside of a tensor. Anything else
    # proves nothing.
    caught = (done.returncode == 1 and bool(said)) or done.returncode < 0
    if "the compiler failed" in done.stdout:
        return True, "it does not compile", time.perf_counter() - begun
    last = (
        said[0]
        if said
        else f"exit status {done.returncode}: {(done.stdout + done.stderr)[-200:]!r}"
    )
    return not caught, last.split(" - ")[0], time.perf_counter() - begun
