"""The C++ compiler: find it, run it, and end it."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Timer

import torch

NAME = "grpo_kernels_cpp"  # the library, and the namespace of its ops
FLAGS = (
    "-std=c++17", "-O2", "-g0", "-fPIC", "-shared", "-fvisibility=hidden",
    "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",  # the same bits on every instruction set
    "-DTORCH_TARGET_VERSION=0x020b000000000000",  # the stable ABI of torch 2.11
)  # fmt: skip
COMPILERS = ("c++", "g++", "clang++")
COMPILER_SECONDS = 300.0
SILENT_SECONDS = 2.0  # of compiling, before a line says that the compiler is at work
OR_WHEEL = "or install a wheel made by `make wheel`"
BUILD = "python -m grpo_kernels.backends.cpp_rows.build"
_logger = logging.getLogger(__name__)


class Unavailable(Exception):
    """Reason why the library cannot be had, and the way to fix that, in one line."""


def source_files(folder: Path) -> list[Path]:
    """Return the files that are compiled and those that they include, sorted by name."""
    files = [path for path in sorted(folder.glob("*")) if path.suffix in (".cpp", ".h", ".inl")]
    if not any(path.suffix == ".cpp" for path in files):
        raise Unavailable(f"its sources are not in {folder}; install grpo_kernels again")
    return files


def compiler() -> list[str]:
    """Return the command that runs the C++ compiler: $CXX, or the first of `COMPILERS` on PATH."""
    words = os.environ.get("CXX", "")
    try:
        named = shlex.split(words)
    except ValueError as error:
        raise Unavailable(
            f"no C++ compiler: expected a command in CXX, got {words!r} ({error}); mend it"
        ) from None
    compilers = list(filter(None, map(shutil.which, named[:1] or COMPILERS)))
    if not compilers:
        sought = f"{named[0]}, which CXX names," if named else f"any of {', '.join(COMPILERS)}"
        raise Unavailable(
            f"no C++ compiler: {sought} is not on PATH; install one, name one in CXX, {OR_WHEEL}"
        )
    return [compilers[0], *named[1:]]


def compile_library(sources: Path, output: Path, extra: Sequence[str] = ()) -> None:
    """Compile every .cpp in `sources` in one call to the shared library `output`, with `extra` flags after `FLAGS`.

    The log says when it begins and ends, and at DEBUG the command and the compiler's output. After `SILENT_SECONDS`
    one line on stderr says that it is at work.

    Raises:
        Unavailable: no compiler, one that fails, or one that takes too long.
    """
    torch_folder = Path(torch.__file__).parent
    command = [
        *compiler(), *FLAGS, *extra, "-isystem", str(torch_folder / "include"),
        *(str(path) for path in source_files(sources) if path.suffix == ".cpp"), "-o", str(output),
        f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10",
        *(["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []),
    ]  # fmt: skip
    _logger.info(
        "compiling the C++ kernels with %s; once, unless torch or the sources change", command[0]
    )
    _logger.debug("the command: %s", shlex.join(command))
    start = time.perf_counter()
    line = "grpo_kernels: compiling the C++ kernels for the CPU, up to half a minute; once, then they are cached"
    notice = Timer(
        SILENT_SECONDS, print, [line], {"file": sys.stderr, "flush": True}
    )  # the log may have no reader
    notice.daemon = True
    notice.start()
    try:
        problem = _run(command, output)
    finally:
        notice.cancel()
    if problem:
        fix = f"try another compiler (CXX), {OR_WHEEL}; `{BUILD}` shows the command and what the compiler says"
        raise Unavailable(f"the compiler {problem}; {fix}")
    _logger.info("compiled the C++ kernels in %.1f s", time.perf_counter() - start)


def _run(command: Sequence[str], output: Path) -> str | None:
    """Run the compiler; return the reason why `output` was not written, or None if it was.

    If it takes too long or we are interrupted, end it and the processes that it started.
    """
    try:
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                said = process.communicate(timeout=COMPILER_SECONDS)[1]
            except BaseException:
                if process.returncode is None:  # not reaped yet, so that its id is still its own
                    with suppress(ProcessLookupError, PermissionError):
                        os.killpg(
                            process.pid, signal.SIGTERM
                        )  # at which a compiler removes its temporary files
                        time.sleep(0.2)
                        os.killpg(process.pid, signal.SIGKILL)
                raise
    except subprocess.TimeoutExpired:
        return f"took more than {COMPILER_SECONDS:g} s"
    except OSError as error:
        return f"does not run ({error})"
    if said:
        _logger.debug("the compiler said:\n%s", said.rstrip())
    if process.returncode != 0:
        return f"failed (exit status {process.returncode})"
    return None if output.is_file() else f"{command[0]} wrote no library, although it ended well"
