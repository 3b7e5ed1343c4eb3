"""Child processes: started so that none outlives us, run for a bounded time, ended with all they started."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
PR_SET_PDEATHSIG = 1  # of Linux's prctl


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    code: int | None  # None: it ran past its time and was stopped
    seconds: float
    output: str


def run(command: Sequence[str], *, env: dict[str, str], seconds: float, log: Path, patience: float = 10.0) -> Ran:
    """Run `command` from the root of the checkout for at most `seconds`, then interrupt it, and at last kill it."""
    started = time.time()
    with log.open("w") as out:
        process = start(command, env=env, out=out)
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            stop(process, patience=patience)
    return Ran(code, round(time.time() - started, 1), log.read_text(errors="replace"))


def start(command: Sequence[str], *, env: dict[str, str], out: IO[str]) -> subprocess.Popen[bytes]:
    """`command` in the root of the checkout, in a process group of its own."""
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=_end_with_parent if sys.platform == "linux" else None,
    )


def environment(*, toy: bool) -> dict[str, str]:
    """Of a child process: this checkout on the path, and at toy size Triton's interpreter and one thread."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(x for x in (str(ROOT), os.environ.get("PYTHONPATH", "")) if x)}
    env |= {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if toy:
        env |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return env


def stop(process: subprocess.Popen[Any], *, patience: float = 0.0) -> None:
    """End `process` and what it started: an interrupt and `patience` seconds first, if there is patience."""
    for kind, wait in ((signal.SIGINT, patience), (signal.SIGKILL, 10.0)):
        if process.poll() is not None or (kind == signal.SIGINT and not patience):
            continue
        try:
            os.killpg(process.pid, kind)
            process.wait(wait)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            pass


def _end_with_parent() -> None:
    """Have the kernel kill this process when the one that started it is gone, killed or not."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
