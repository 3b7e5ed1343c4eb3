"""A copy of the sources, to be changed."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("grpo_kernels", "csrc", "tests", "benchmarks", "pyproject.toml")
# a library built beforehand would not have the change
IGNORED = shutil.ignore_patterns("__pycache__", "results", "*.so")


def copy_sources(folder: Path) -> None:
    """Copy the package, its C++ sources, benchmarks and tests to `folder`."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=IGNORED)
        else:
            shutil.copy(source, folder / name)
