"""The C++ library with the CPU's row kernels: found or built, and loaded, when it is first needed; never at import.

`load` tries in this order: the library beside this file (in a wheel made by ``make wheel``), the cache, a compiler. The
cache has a folder for each `cache_key`, a digest of all that the library depends on. A library is compiled beside its
place there and moved into it by one rename. Its name is its digest, since loading a truncated library kills the
process. A cache that others can write is not used (`cache`): the process then builds a library for itself alone.

``python -m grpo_kernels.backends.cpp_rows.build`` says where the library is, and shows the log; with
``--into DIR`` it is built there.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import logging
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from grpo_kernels.backends.cpp_rows.cache import (
    Untrusted,
    digest,
    libraries,
    one_builder,
    own_folder,
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

OPS = {
    "stats": 15,
    "diverge": 22,
    "grad": 28,
    "fused": 40,
    "isa": 1,
}  # numbers of arguments, as `CppRows` calls them
PACKAGE = Path(__file__).resolve().parents[2]
PREBUILT = Path(__file__).resolve().with_name(f"{NAME}.so")
WORK = "building-"  # begins the name of the folder that a build works in
LONGEST_BUILD = 3600.0  # seconds, far above the few that it takes
_lock = threading.Lock()


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):  # in the child, no thread would release a lock that was held
    os.register_at_fork(after_in_child=_renew_lock)


@dataclass(frozen=True)
class Library:
    """Outcome of `load`."""

    origin: str = ""  # "prebuilt", "cached", "built in 3.1 s", "built in 3.1 s for this process alone", "loaded before"
    path: Path | None = (
        None  # unknown if it was loaded before; none if it was for this process alone
    )
    refusal: str | None = None  # why there is no library, and the way to fix that
    warning: str | None = None  # why another library was not used, and the way to fix that


def load() -> Library:
    """Make ``torch.ops.grpo_kernels_cpp`` available, or say why not; tried once a process."""
    with _lock:
        return _load_once()


@functools.cache
def _load_once() -> Library:
    try:
        if has_ops(
            "the library that was loaded before"
        ):  # someone's own build, such as one with sanitizers
            return Library("loaded before")
        return load_from(PREBUILT, source_folder())
    except Unavailable as why:
        return Library(refusal=str(why))


def load_from(prebuilt: Path, sources: Path) -> Library:
    """Load `prebuilt`, else a library built from `sources` before, else build one and load it.

    Raises:
        Unavailable: none of them works.
    """
    troubles: list[str] = []
    try:
        check_platform()
        if prebuilt.is_file() and _loads(prebuilt, troubles):
            return Library("prebuilt", prebuilt)
        try:
            return _from_cache(cache_folder(), sources, troubles)
        except Untrusted as why:
            troubles.append(f"{why}; until then every process compiles a library for itself alone")
        private = Path(tempfile.mkdtemp(prefix="grpo_kernels-"))
        try:
            library = _from_cache(private, sources, troubles)
        finally:
            shutil.rmtree(private, ignore_errors=True)
        return replace(library, origin=f"{library.origin} for this process alone", path=None)
    except (Unavailable, OSError) as why:
        raise Unavailable("; ".join([*troubles, str(why)])) from None


def _from_cache(root: Path, sources: Path, troubles: list[str]) -> Library:
    """Load a library from the cache `root`, or build it there; one process builds at a time.

    Raises:
        Untrusted: others can write there; nothing of it was loaded.
        Unavailable: nothing there works.
    """
    folder = Path(os.path.realpath(root.parent), root.name, cache_key(sources))
    try:
        own_folder(folder, made=2)
        if library := _cached(folder, troubles):
            return library
        with one_builder(folder):
            return _cached(folder, []) or _build(folder, sources, troubles)
    except OSError as error:
        fix = f"set TORCH_EXTENSIONS_DIR to a directory that can be, {OR_WHEEL}"
        raise Unavailable(f"the cache {root} cannot be written ({error}); {fix}") from None


def _cached(folder: Path, troubles: list[str]) -> Library | None:
    return next(
        (Library("cached", path) for path in libraries(folder, troubles) if _loads(path, troubles)),
        None,
    )


def _build(folder: Path, sources: Path, troubles: list[str]) -> Library:
    """Compile a library beside its place in `folder`, move it there, and load it."""
    if sys.platform == "linux" and os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise Unavailable(
            f"{folder} is mounted noexec; set TORCH_EXTENSIONS_DIR elsewhere, {OR_WHEEL}"
        )
    warning = f"the C++ library was compiled again: {'; '.join(troubles)}" if troubles else None
    start = time.perf_counter()
    _remove_left_over(folder)
    # a `TemporaryDirectory` is removed by any process forked meanwhile
    work = Path(tempfile.mkdtemp(dir=folder, prefix=WORK))
    try:
        new = work / f"{NAME}.so"
        compile_library(sources, new)
        new.chmod(0o700)
        path = new.replace(folder / f"{digest(new)}.so")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    origin = f"built in {time.perf_counter() - start:.1f} s"
    if not _loads(path, troubles):
        raise Unavailable(f"try another compiler (CXX), {OR_WHEEL}")
    return Library(origin, path, warning=warning)


def _remove_left_over(folder: Path) -> None:
    """Remove the work of builds that were killed: what no build can still be at."""
    for work in folder.glob(f"{WORK}*"):
        with contextlib.suppress(OSError):
            if time.time() - work.lstat().st_mtime > LONGEST_BUILD:
                shutil.rmtree(work, ignore_errors=True)


def _loads(path: Path, troubles: list[str]) -> bool:
    """Load `path`; return True if it has the ops. If not, `troubles` gets the reason.

    Raises:
        Unavailable: it has registered other ops, so that no other library can be loaded.
    """
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        troubles.append(f"{path} does not load ({error.__cause__ or error})")
        return False
    if not has_ops(str(path)):
        troubles.append(f"{path} has none of the ops {', '.join(OPS)}")
        return False
    return True


def has_ops(source: str) -> bool:
    """Return True if `OPS` are registered for the CPU, False if no op of our namespace is.

    Raises:
        Unavailable: `source` registered other ops in our namespace. Loading another library would end the process.
    """
    prefix, has_kernel = f"{NAME}::", torch._C._dispatch_has_computed_kernel_for_dispatch_key
    ours = [x for x in torch._C._jit_get_all_schemas() if x.name.startswith(prefix)]
    counts = {
        x.name.removeprefix(prefix): len(x.arguments) for x in ours if has_kernel(x.name, "CPU")
    }
    ops = {name: counts[name] for name in OPS if name in counts}
    if ours and ops != OPS:
        raise Unavailable(
            f"{source}: expected the ops {OPS} (name: arguments), got {ops}; remove it and start again, {OR_WHEEL}"
        )
    return bool(ours)


def check_platform() -> None:
    """Refuse where no library can work."""
    if sys.platform == "win32":
        raise Unavailable("there is no Windows build; use WSL")
    if tuple(int(x) for x in torch.__version__.split(".")[:2]) < (2, 11):
        raise Unavailable(
            f"torch {torch.__version__} is older than 2.11, whose stable ABI is needed; upgrade torch"
        )


def source_folder() -> Path:
    """Return csrc/: inside the package where that is installed, beside it in a checkout."""
    installed = PACKAGE / "csrc"
    return installed if installed.is_dir() else PACKAGE.with_name("csrc")


def cache_folder() -> Path:
    """Return the cache: the folder that has a folder for each `cache_key`."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR") or os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(chosen or Path.home() / ".cache").absolute() / "grpo_kernels"
    except RuntimeError as error:
        raise Unavailable(
            f"no place for a cache ({error}); set TORCH_EXTENSIONS_DIR or HOME, {OR_WHEEL}"
        ) from None


def cache_key(sources: Path) -> str:
    """Return a digest of all that the library depends on: sources, flags, torch and platform."""
    target = (FLAGS, torch.__version__, platform.machine(), platform.libc_ver())
    contents = [(path.name, path.read_bytes()) for path in source_files(sources)]
    return hashlib.sha256(repr((target, contents)).encode()).hexdigest()[:16]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the library's path and return 0; if there is none, print why and return 1."""
    parser = argparse.ArgumentParser(prog=BUILD)
    parser.add_argument("--into", type=Path, metavar="DIR", help="build it there")
    folder = parser.parse_args(arguments).into
    try:
        if folder is None:
            library = load_from(PREBUILT, source_folder())
        else:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder.absolute() / f"{NAME}.so"
            compile_library(source_folder(), path)
            library = Library(path=path)
    except Unavailable as why:
        library = Library(refusal=str(why))
    if said := library.refusal or library.warning:
        print(said, file=sys.stderr)
    if library.path is None:
        return 1
    print(library.path)
    return 0


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")  # to stderr; stdout has the path alone
    logging.getLogger("grpo_kernels").setLevel(logging.DEBUG)
    sys.exit(main())
