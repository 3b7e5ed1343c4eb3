"""A script in a process that has its imports already: a fork of a server that loads them once."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from pathlib import Path

import torch

from tests.support.ranks import server_context


def run_script(path: Path, options: list[str], folder: Path) -> tuple[int, str]:
    """Exit code and output of ``python path *options``, printed to a file in `folder`."""
    printed = folder / f"{path.stem}.txt"
    process = server_context().Process(target=_main, args=(path, options, printed))
    process.start()
    process.join(600.0)
    if process.is_alive():
        process.kill()
        process.join()
    code = process.exitcode
    return (-1 if code is None else code), printed.read_text() if printed.exists() else ""


def _main(path: Path, options: list[str], printed: Path) -> None:
    file = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1) for stream in (1, 2))
    os.environ.update(HF_HUB_OFFLINE="1")
    torch.set_num_threads(1)
    sys.argv, sys.path[:0] = [str(path), *options], [str(path.parent)]
    try:
        runpy.run_path(str(path), run_name="__main__")
    except BaseException:
        traceback.print_exc()
        raise
