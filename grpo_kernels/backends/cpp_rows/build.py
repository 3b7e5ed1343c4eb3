"""The C++ library with the CPU's row kernels: found or built, and loaded, when it is first needed; never at import.

In this order: the one beside this file (in a wheel made by ``make wheel``), the cache, a compiler. A cached file is
named by its own digest, since loading a truncated library kills the process, and is moved into its place when it is
complete. What others could have written is not loaded (`cache`): then the process builds one for itself alone.

``python -m grpo_kernels.backends.cpp_rows.build`` says where the library is, and shows the log; with
``--into DIR`` it is built there.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import logging
import os
import platform
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from grpo_kernels.backends.cpp_rows.cache import (
    Untrusted,
    check_folder,
    digest,
    libraries,
    locked,
    make_folder,
    work_folder,
)
from grpo_kernels.backends.cpp_rows.compiler import (
    BUILD,
    FLAGS,
    NAME,
    OR_WHEEL,
    Unavailable,
    compile_library,
    source_files,
)

LOCK_SECONDS = 120.0  # for another process's build, which takes some 6; then this one builds too
# What `CppRows` calls, and with how many arguments.
OPS = {"stats": 15, "diverge": 22, "grad": 28, "fused": 40, "isa": 1}
PACKAGE = Path(__file__).resolve().parents[2]
PREBUILT = Path(__file__).resolve().with_name(f"{NAME}.so")
_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):  # a thread that was building has no twin in the child, to release it
    os.register_at_fork(after_in_child=_renew_lock)


@dataclass(frozen=True)
class Library:
    """What `load` came to."""

    origin: str = ""  # "prebuilt", "cached", "built in 3.1 s", "built in 3.1 s for this process alone", "loaded before"
    path: Path | None = None  # unknown if it was loaded before; none if it was for this process alone
    refusal: str | None = None  # why there is none, and the way to fix that
    warning: str | None = None  # what was there and not used, and the way to fix that


def load() -> Library:
    """Make ``torch.ops.grpo_kernels_cpp`` available, or say why not; tried once a process."""
    with _lock:
        return _load_once()


@functools.cache
def _load_once() -> Library:
    try:
        if has_ops("the library that was loaded before"):  # someone's own build, such as one with sanitizers
            return Library("loaded before")
        return load_from(PREBUILT, source_folder())
    except Unavailable as why:
        return Library(refusal=str(why))


def load_from(prebuilt: Path, sources: Path) -> Library:
    """Load `prebuilt`, else what was built from `sources` before, else build that and load it.

    Raises:
        Unavailable: none of them works.
    """
    check_platform()
    troubles: list[str] = []
    try:
        if prebuilt.is_file() and _loads(prebuilt, troubles):
            return Library("prebuilt", prebuilt)
        try:
            return _from_cache(sources, troubles)
        except Untrusted as why:
            troubles.append(str(why))
            return _for_this_process(sources, troubles)
    except (Unavailable, Untrusted, OSError) as why:
        troubles.append(str(why))
    raise Unavailable("; ".join(troubles))


def _from_cache(sources: Path, troubles: list[str]) -> Library:
    """Load what is in the cache, or build it there, one process at a time.

    Raises:
        Untrusted: others can write there; nothing of it was loaded.
        Unavailable: nothing there works.
    """
    root = cache_folder()
    folder = Path(os.path.realpath(root.parent), root.name, cache_key(sources))
    tried: set[Path] = set()

    def find() -> Library | None:
        check_folder(folder, made=2)
        for path in libraries(folder, troubles):
            if path not in tried and _loads(path, troubles):
                return Library("cached", path)
            tried.add(path)
        return None

    try:
        if found := find():
            return found
        make_folder(folder)
        check_folder(folder, made=2)
        with locked(folder / "lock", LOCK_SECONDS):
            if found := find():
                return found
            start = time.perf_counter()
            path = _build_into(folder, sources)
    except OSError as error:
        fix = f"set TORCH_EXTENSIONS_DIR to a directory that can be, {OR_WHEEL}"
        raise Unavailable(f"the cache {root} cannot be written ({error}); {fix}") from None
    origin = f"built in {time.perf_counter() - start:.1f} s"
    said = "; ".join(troubles)
    _load_built(path, troubles)
    return Library(origin, path, warning=f"a C++ library is not used, and another was built: {said}" if said else None)


def _build_into(folder: Path, sources: Path) -> Path:
    """A new library in `folder`, whose name is its digest."""
    with work_folder(folder) as work:
        output = work / f"{NAME}.so"
        compile_library(sources, output)
        output.chmod(output.stat().st_mode & ~0o022)
        path = folder / f"{digest(output)}.so"
        if path.is_dir() and not path.is_symlink():  # which cannot be replaced by a file
            path.rename(work / "found there")
        return output.replace(path)


def _for_this_process(sources: Path, troubles: list[str]) -> Library:
    """Build where nobody else can write, load it, and leave nothing; the last of `troubles` is why not in the cache."""
    reason = troubles[-1]
    place = Path(os.path.realpath(tempfile.gettempdir()))
    check_folder(place, made=0)
    start = time.perf_counter()
    with work_folder(place) as work:
        output = work / f"{NAME}.so"
        compile_library(sources, output)
        origin = f"built in {time.perf_counter() - start:.1f} s for this process alone"
        _load_built(output, troubles)
    cost = "the C++ library was compiled for this process alone, as it will be for each, since its cache is not safe"
    return Library(origin, warning=f"{cost}: {reason}")


def _load_built(path: Path, troubles: list[str]) -> None:
    if not _loads(path, troubles):
        raise Unavailable(f"try another compiler (CXX), {OR_WHEEL}")


def _loads(path: Path, troubles: list[str]) -> bool:
    """Whether `path` could be loaded, and has the ops; if not, `troubles` gets the reason.

    Raises:
        Unavailable: no other file in its place can help.
    """
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        said = str(error.__cause__ or error)
        if path.parent != PREBUILT.parent and "failed to map segment" in said and "memory" not in said:
            fix = f"set TORCH_EXTENSIONS_DIR elsewhere, {OR_WHEEL}"
            raise Unavailable(f"{path.parent} is mounted noexec ({said}); {fix}") from None
        troubles.append(f"{path} does not load ({said})")
        return False
    if not has_ops(str(path)):
        troubles.append(f"{path} has none of the ops {', '.join(OPS)}")
        return False
    return True


def has_ops(source: str) -> bool:
    """Whether `OPS` are there, for the CPU.

    Raises:
        Unavailable: some or others of their names are, of `source`. They stand in the way of another library's, whose
            loading would end the process.
    """
    namespace = getattr(torch.ops, NAME)
    found: dict[str, int | None] = {}
    for name in OPS:
        if hasattr(namespace, name):
            overloads = [getattr(getattr(namespace, name), each) for each in getattr(namespace, name).overloads()]
            served = torch._C._dispatch_has_computed_kernel_for_dispatch_key(f"{NAME}::{name}", "CPU")
            found[name] = len(overloads[0]._schema.arguments) if len(overloads) == 1 and served else None
    if found and found != OPS:
        raise Unavailable(
            f"{source}: expected the ops {OPS} (name: arguments), got {found}; remove it and start again, {OR_WHEEL}"
        )
    return bool(found)


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


def cache_key(sources: Path) -> str:
    """Of all that the library depends on: its sources, how and for what they are compiled."""
    target = (FLAGS, torch.__version__, platform.machine(), platform.libc_ver())
    contents = [(path.name, path.read_bytes()) for path in source_files(sources)]
    return hashlib.sha256(repr((target, contents)).encode()).hexdigest()[:16]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print where the library is; 1, and why, if there is none."""
    parser = argparse.ArgumentParser(prog=BUILD)
    parser.add_argument("--into", type=Path, metavar="DIR", help="build it there")
    folder = parser.parse_args(arguments).into
    try:
        if folder is None:
            library = load_from(PREBUILT, source_folder())
            if library.warning:
                print(library.warning, file=sys.stderr)
            if library.path is None:
                return 1
            path = library.path
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
    logging.basicConfig(format="%(message)s")  # to stderr; stdout has the path alone
    logging.getLogger("grpo_kernels").setLevel(logging.DEBUG)
    sys.exit(main())
