"""Find or build the C++ library with the CPU's row kernels when it is first needed.

`load` tries in this order: the library beside this file (in a wheel made by ``make wheel``), the
cache, a compiler. The cache names each library by its `cache_key`, a digest of everything that the
library depends on. The compiler writes to a temporary file in the cache, and one rename moves the
finished library into place. So no process can load a partly written library.

``python -m grpo_kernels.backends.cpp_rows.build`` prints the library's path and shows the log; with
``--into DIR`` it builds the library there.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

if sys.platform != "win32":
    import fcntl

NAME = "grpo_kernels_cpp"  # the library, and the namespace of its ops
FLAGS = (
    *("-std=c++17", "-O2", "-g0", "-fPIC", "-shared", "-fvisibility=hidden"),
    # the same bits on all instruction sets
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    "-DTORCH_TARGET_VERSION=0x020b000000000000",  # the stable ABI of torch 2.11
)
COMPILERS = ("c++", "g++", "clang++")
COMPILER_SECONDS = 300.0
PACKAGE = Path(__file__).resolve().parents[2]
PREBUILT = Path(__file__).resolve().with_name(f"{NAME}.so")
OR_WHEEL = "or install a wheel made by `make wheel`"
BUILD = "python -m grpo_kernels.backends.cpp_rows.build"
_logger = logging.getLogger(__name__)


class Unavailable(Exception):
    """The library cannot be built: the reason and the way to fix it, in one line."""


@dataclass(frozen=True)
class Library:
    """Outcome of `find` and `load`."""

    origin: str = ""  # "prebuilt", "cached", "built in 3.1 s", "loaded before"
    path: Path | None = None  # None if it was loaded before, or if there is no library
    refusal: str | None = None  # why there is no library, and the way to fix that


@functools.cache
def load() -> Library:
    """Make ``torch.ops.grpo_kernels_cpp`` available, or say why not; tried once per process."""
    # someone's own build, such as one with sanitizers
    return Library("loaded before") if has_ops() else find()


def find() -> Library:
    """Load `PREBUILT`, else the cached library of this `cache_key`; else build one and load it.

    If none loads, the result has a `Library.refusal`.
    """
    if sys.platform == "win32":
        return Library(refusal="there is no Windows build; use WSL")
    troubles: list[str] = []
    if _loads(PREBUILT, troubles):
        return Library("prebuilt", PREBUILT)
    try:
        folder = cache_folder()
        path = folder / f"{cache_key()}.so"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _loads(path, troubles):
            return Library("cached", path)
        with _one_builder(folder):
            if _loads(path, []):  # built by another process meanwhile
                return Library("cached", path)
            start = time.perf_counter()
            descriptor, beside = tempfile.mkstemp(dir=folder, prefix="building-", suffix=".so")
            os.close(descriptor)
            try:
                compile_library(Path(beside))
                os.replace(beside, path)
            finally:
                Path(beside).unlink(missing_ok=True)
        if _loads(path, troubles):
            return Library(f"built in {time.perf_counter() - start:.1f} s", path)
        fix = f"try another compiler (CXX) or another TORCH_EXTENSIONS_DIR, {OR_WHEEL}"
    except Unavailable as why:
        fix = str(why)
    except OSError as error:
        fix = (
            f"the cache {folder} cannot be written ({error}); set TORCH_EXTENSIONS_DIR to a "
            f"directory that can be, {OR_WHEEL}"
        )
    return Library(refusal="; ".join([*troubles, fix]))


def _loads(path: Path, troubles: list[str]) -> bool:
    """Load `path` if it exists; if it does not provide the ops, append the reason to `troubles`."""
    if not path.is_file():
        return False
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        troubles.append(f"{path} does not load ({error.__cause__ or error})")
        return False
    if not has_ops():
        troubles.append(f"{path} has not the ops of {NAME}")
        return False
    return True


def has_ops() -> bool:
    """True if the library's ops are registered."""
    return hasattr(getattr(torch.ops, NAME), "fused")


@contextlib.contextmanager
def _one_builder(folder: Path) -> Iterator[None]:
    """Lock `folder` itself, so that one process builds in it and the other processes find the
    result.

    The lock ends with its holder and leaves no file. It only saves work: on a file system without
    locks each process builds.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _say(f"waiting for another process, which compiles the C++ kernels in {folder}")
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        # closing is not enough: a process forked meanwhile also holds the descriptor open
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def source_folder() -> Path:
    """The folder csrc/: inside an installed package, beside the package in a checkout."""
    installed = PACKAGE / "csrc"
    return installed if installed.is_dir() else PACKAGE.with_name("csrc")


def source_files() -> list[Path]:
    """The files that are compiled and those that they include, sorted by name."""
    folder = source_folder()
    files = [path for path in sorted(folder.glob("*")) if path.suffix in (".cpp", ".h", ".inl")]
    if not any(path.suffix == ".cpp" for path in files):
        raise Unavailable(f"its sources are not in {folder}; install grpo_kernels again")
    return files


def cache_folder() -> Path:
    """The folder of the cache; it need not exist yet."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR") or os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(chosen or Path.home() / ".cache").absolute() / "grpo_kernels"
    except RuntimeError as error:
        raise Unavailable(
            f"no place for a cache ({error}); set TORCH_EXTENSIONS_DIR or HOME, {OR_WHEEL}"
        ) from None


def cache_key() -> str:
    """A digest of everything that the library depends on: sources, flags, torch and platform."""
    target = (FLAGS, torch.__version__, platform.machine(), platform.libc_ver())
    contents = [(path.name, path.read_bytes()) for path in source_files()]
    return hashlib.sha256(repr((target, contents)).encode()).hexdigest()[:16]


def compiler() -> list[str]:
    """The command that runs the C++ compiler: $CXX, or the first of `COMPILERS` on PATH."""
    named = os.environ.get("CXX", "").split()
    compilers = list(filter(None, map(shutil.which, named[:1] or COMPILERS)))
    if not compilers:
        sought = f"{named[0]}, which CXX names," if named else f"any of {', '.join(COMPILERS)}"
        raise Unavailable(
            f"no C++ compiler: {sought} is not on PATH; install one, name one in CXX, {OR_WHEEL}"
        )
    return [compilers[0], *named[1:]]


def compile_library(output: Path, extra: Sequence[str] = ()) -> None:
    """Compile the sources to the shared library `output`, in one call of the compiler.

    A line on stderr announces the compilation. At level DEBUG the log shows the command and the
    compiler's output.

    Args:
        extra: flags after `FLAGS`.

    Raises:
        Unavailable: the sources or a compiler are missing, or the compiler fails or takes too long.
    """
    units = [str(path) for path in source_files() if path.suffix == ".cpp"]
    root = Path(torch.__file__).parent
    command = [*compiler(), *FLAGS, *extra, "-isystem", str(root / "include"), *units]
    command += ["-o", str(output), f"-L{root / 'lib'}", "-ltorch_cpu", "-lc10"]
    command += ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
    _logger.debug("the command: %s", shlex.join(command))
    _say("compiling the C++ kernels for the CPU, up to half a minute; once, then they are cached")
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            errors="replace",
            timeout=COMPILER_SECONDS,
        )
    except subprocess.TimeoutExpired:
        problem = f"took more than {COMPILER_SECONDS:g} s"
    except OSError as error:
        problem = f"does not run ({error})"
    else:
        if done.stderr:
            _logger.debug("the compiler said:\n%s", done.stderr.rstrip())
        problem = f"failed (exit status {done.returncode})" if done.returncode else ""
        if not problem and not (output.is_file() and output.stat().st_size > 0):
            problem = f"{command[0]} wrote no library, although it ended well"
    if problem:
        raise Unavailable(
            f"the compiler {problem}; try another compiler (CXX), {OR_WHEEL}; `{BUILD}` shows the "
            "command and what the compiler says"
        )


def _say(line: str) -> None:
    print(f"grpo_kernels: {line}", file=sys.stderr, flush=True)  # the log may have no handler


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the library's path and return 0; if there is none, print why and return 1."""
    parser = argparse.ArgumentParser(prog=BUILD)
    parser.add_argument("--into", type=Path, metavar="DIR", help="build it there")
    folder = parser.parse_args(arguments).into
    if folder is None:
        library = find()
    else:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder.absolute() / f"{NAME}.so"
        library = Library(path=path)
        try:
            compile_library(path)
        except Unavailable as why:
            library = Library(refusal=str(why))
    if library.refusal:
        print(library.refusal, file=sys.stderr)
        return 1
    print(library.path)
    return 0


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")  # to stderr; stdout has the path alone
    logging.getLogger("grpo_kernels").setLevel(logging.DEBUG)
    sys.exit(main())
