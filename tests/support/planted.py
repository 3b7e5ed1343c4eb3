"""A fault planted in a copy of the sources."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("grpo_kernels", "csrc", "tests", "benchmarks", "pyproject.toml")
# a library built beforehand has no fault
IGNORED = shutil.ignore_patterns("__pycache__", "results", "*.so")


@dataclass(frozen=True)
class Fault:
    """`old`, which stands once in `file`, becomes `new`."""

    name: str
    file: str
    old: str
    new: str


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
