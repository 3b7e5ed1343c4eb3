"""The C++ library with the CPU's row kernels: found or built, and loaded, when it is first needed; never at import.

In this order: the one beside this file (in a wheel made by ``make wheel``), the cache, a compiler. A cached file is
named by its own digest, since loading a truncated library kills the process, and is moved into its place when it is
complete, so processes need no lock.

``python -m grpo_kernels.backends.cpp_rows.build`` says where the library is; with ``--into DIR`` it is built there.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

NAME = "grpo_kernels_cpp"  # the library, and the namespace of its ops
FLAGS = (
    "-std=c++17", "-O2", "-g0", "-fPIC", "-shared", "-fvisibility=hidden",
    "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",  # the same bits on every instruction set
    "-DTORCH_TARGET_VERSION=0x020b000000000000",  # the stable ABI of torch 2.11
)  # fmt: skip
COMPILERS = ("c++", "g++", "clang++")
COMPILER_SECONDS = 300.0
PACKAGE = Path(__file__).resolve().parents[2]
PREBUILT = Path(__file__).resolve().with_name(f"{NAME}.so")
OR_WHEEL = "or install a wheel made by `make wheel`"
_lock = threading.Lock()


class Unavailable(Exception):
    """Why the library cannot be had, and the way to fix that."""


@dataclass(frozen=True)
class Library:
    """What `load` came to."""

    origin: str = ""  # "prebuilt", "cached", "built in 3.1 s", "loaded before"
    path: Path | None = None  # unknown if it was loaded before
    refusal: str | None = None  # why there is none, and the way to fix that


def load() -> Library:
    """Make ``torch.ops.grpo_kernels_cpp`` available, or say why not; tried once a process."""
    with _lock:
        return _load_once()


@functools.cache
def _load_once() -> Library:
    if hasattr(getattr(torch.ops, NAME), "isa"):  # someone's own build, such as one with sanitizers
        return Library("loaded before")
    try:
        return load_from(PREBUILT, source_folder())
    except Unavailable as why:
        return Library(refusal=str(why))


def load_from(prebuilt: Path, sources: Path) -> Library:
    """Load `prebuilt`, else what was built from `sources` before, else build that and load it.

    Raises:
        Unavailable: none of them works.
    """
    check_platform()
    troubles = []
    try:
        for path, origin in _candidates(prebuilt, sources):
            try:
                torch.ops.load_library(str(path))
                return Library(origin, path)
            except OSError as error:
                troubles.append(f"{path} does not load ({error.__cause__ or error})")
        troubles.append(f"try another compiler (CXX), {OR_WHEEL}")
    except (Unavailable, OSError) as why:
        troubles.append(str(why))
    raise Unavailable("; ".join(troubles))


def _candidates(prebuilt: Path, sources: Path) -> Iterator[tuple[Path, str]]:
    """Libraries and where they come from; what one would need is not touched if the one before it loads."""
    if prebuilt.is_file():
        yield prebuilt, "prebuilt"
    folder = cache_folder() / cache_key(sources)
    for path in folder.glob("*.so"):
        if path.stem == _digest(path):
            yield path, "cached"
    start = time.perf_counter()
    built = _build_into_cache(sources, folder)
    yield built, f"built in {time.perf_counter() - start:.1f} s"


def check_platform() -> None:
    """Refuse where no library can work."""
    if sys.platform == "win32":
        raise Unavailable("there is no Windows build; use WSL")
    if tuple(int(x) for x in torch.__version__.split(".")[:2]) < (2, 11):
        raise Unavailable(f"torch {torch.__version__} is older than 2.11, whose stable ABI is needed; upgrade torch")


def source_folder() -> Path:
    """csrc/: inside the package where that is installed, beside it in a checkout."""
    installed = PACKAGE / "csrc"
    return installed if installed.is_dir() else PACKAGE.with_name("csrc")


def cache_folder() -> Path:
    """Where builds are kept."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR") or os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(chosen or Path.home() / ".cache").absolute() / "grpo_kernels"
    except RuntimeError as error:
        raise Unavailable(f"no place for a cache ({error}); set TORCH_EXTENSIONS_DIR or HOME, {OR_WHEEL}") from None


def source_files(folder: Path) -> list[Path]:
    """What is compiled and what that includes, in one order."""
    files = [path for path in sorted(folder.glob("*")) if path.suffix in (".cpp", ".h", ".inl")]
    if not any(path.suffix == ".cpp" for path in files):
        raise Unavailable(f"its sources are not in {folder}; install grpo_kernels again")
    return files


def cache_key(sources: Path) -> str:
    """Of all that the library depends on: its sources, how and for what they are compiled."""
    target = (FLAGS, torch.__version__, platform.machine(), platform.libc_ver())
    contents = [(path.name, path.read_bytes()) for path in source_files(sources)]
    return hashlib.sha256(repr((target, contents)).encode()).hexdigest()[:16]


def compiler() -> list[str]:
    """The command that runs the C++ compiler: $CXX, or one on PATH."""
    named = shlex.split(os.environ.get("CXX", ""))
    found = list(filter(None, map(shutil.which, named[:1] or COMPILERS)))
    if not found:
        sought = f"{named[0]}, which CXX names," if named else f"any of {', '.join(COMPILERS)}"
        raise Unavailable(f"no C++ compiler: {sought} is not on PATH; install one, name one in CXX, {OR_WHEEL}")
    return [found[0], *named[1:]]


def compile_library(sources: Path, output: Path, extra: Sequence[str] = ()) -> None:
    """Compile every .cpp in `sources` in one call to the shared library `output`, with `extra` flags after `FLAGS`.

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
    fix = f"try another compiler (CXX), {OR_WHEEL}. The command was:\n  {shlex.join(command)}"
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=COMPILER_SECONDS, errors="replace"
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"the compiler took more than {COMPILER_SECONDS:g} s; {fix}") from None
    except OSError as error:
        raise Unavailable(f"the compiler does not run ({error}); {fix}") from None
    if done.returncode != 0 or not output.is_file():
        said = "".join(f"\n  {line}" for line in done.stderr.splitlines()[-8:])
        raise Unavailable(f"the compiler failed (exit status {done.returncode}); {fix}{said}")


def _build_into_cache(sources: Path, folder: Path) -> Path:
    try:
        for each in (folder.parent, folder):
            each.mkdir(mode=0o700, parents=True, exist_ok=True)  # what others could write would be run
        with tempfile.TemporaryDirectory(dir=folder) as work:
            output = Path(work, f"{NAME}.so")
            compile_library(sources, output)
            return output.replace(folder / f"{_digest(output)}.so")
    except OSError as error:
        fix = f"set TORCH_EXTENSIONS_DIR to a directory that can be, {OR_WHEEL}"
        raise Unavailable(f"the cache {folder.parent} cannot be written ({error}); {fix}") from None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print where the library is; 1, and why, if there is none."""
    parser = argparse.ArgumentParser(prog="python -m grpo_kernels.backends.cpp_rows.build")
    parser.add_argument("--into", type=Path, metavar="DIR", help="build it there")
    folder = parser.parse_args(arguments).into
    try:
        if folder is None:
            path = load_from(PREBUILT, source_folder()).path
        else:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder.absolute() / f"{NAME}.so"
            compile_library(source_folder(), path)
    except Unavailable as why:
        print(why, file=sys.stderr)
        return 1
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
