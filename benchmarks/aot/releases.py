"""Other releases of Triton than the installed one, each in a folder of its own below `.venv`."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".venv"


def environment(release: str) -> dict[str, str]:
    """The environment of a process that imports `release` of Triton, which is installed if it is not there."""
    if version("triton") == release:
        return dict(os.environ)
    path = [str(installed(release)), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def installed(release: str) -> Path:
    """The folder of `release`, without what it depends on: that is installed already."""
    folder = FOLDER / f"triton-{release}"
    stamp = folder / ".installed"
    if not stamp.exists():
        print(f"installing Triton {release} into {folder}", flush=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
        options = ["--no-deps", "--no-compile", "--upgrade", "--target", str(folder)]
        subprocess.run([*pip, *options, f"triton=={release}"], check=True)
        stamp.touch()
    return folder
