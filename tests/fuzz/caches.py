"""Hostile folders in the place of the compiled library's cache: nobody else's code is loaded, and the call is right.

The compiler is a stub that copies the library built before, and each trial is a process of its own, which loads the
real thing: a folder with what somebody left there, a call, and then its result and whether what was left there ran.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import random
import shlex
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from tests.fuzz.harness import Category, Options
from tests.fuzz.rank_pool import RankFailure, RankPool

SECONDS = 60.0  # of a call, which may compile the library on a busy machine
NOBODY = 65534
MODES = (0o777, 0o775, 0o770, 0o757, 0o1777, 0o702, 0o720)  # each lets somebody else write
CODE = '#include <stdio.h>\n__attribute__((constructor)) static void run(void) { fclose(fopen("%s", "w")); }\n'


@functools.cache
def built() -> Path:
    """The real library, which the stub of a compiler copies."""
    from grpo_kernels.backends.cpp_rows import build

    path = build.load().path
    assert path is not None, "no C++ library can be built here, so that none can be cached"
    return path


@functools.cache
def foreign(marker: Path) -> bytes:
    """A library that leaves a marker when it is loaded, and has none of the ops."""
    with tempfile.TemporaryDirectory() as folder:
        source, output = Path(folder) / "foreign.c", Path(folder) / "foreign.so"
        source.write_text(CODE % marker)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", output, source], check=True)
        return output.read_bytes()


def draw(random_: random.Random) -> Options:
    sometimes = lambda p, value: value if random_.random() < p else None  # noqa: E731
    options: Options = {
        "planted": sometimes(0.8, random_.choice([*PLANTED])),
        "also": sometimes(0.4, random_.choice([*PLANTED])),
        "outer_mode": sometimes(0.4, random_.choice(MODES)),
        "middle_mode": sometimes(0.4, random_.choice(MODES)),
        "inner_mode": sometimes(0.4, random_.choice(MODES)),
        "file_mode": sometimes(0.3, random_.choice((0o777, 0o666, 0o622, 0o644, 0o000))),
        "owner": sometimes(0.3, random_.choice(("file", "inner", "middle", "outer"))) if os.geteuid() == 0 else None,
        "place": sometimes(0.3, random_.choice([*PLACES])),
        "compiler": sometimes(0.4, random_.choice([*COMPILERS])),
        "filled": sometimes(0.3, True),
        "calls": sometimes(0.3, 3),
    }
    return {name: x for name, x in options.items() if x is not None}


def put(folder: Path, content: bytes, stem: str | None = None) -> Path:
    """A new file whose name is its digest, as the cache's are, or another one.

    Raises:
        FileExistsError: the name is taken, by a link to itself or a FIFO as well; none of them is followed.
    """
    path = folder / f"{stem or hashlib.sha256(content).hexdigest()[:16]}.so"
    with path.open("xb") as file:
        file.write(content)
    return path


def _special(make: Callable[[Path], object]) -> Callable[[Path, bytes], Path]:
    def plant(folder: Path, content: bytes) -> Path:
        path = folder / "0123456789abcdef.so"
        make(path)
        return path

    return plant


def _linked(folder: Path, content: bytes) -> Path:
    elsewhere = folder.parents[2] / "elsewhere.so"
    elsewhere.write_bytes(content)
    path = folder / f"{hashlib.sha256(content).hexdigest()[:16]}.so"
    path.symlink_to(elsewhere)
    return path


PLANTED: dict[str, Callable[[Path, bytes], Path]] = {
    "foreign library": put,
    "link to a foreign library": _linked,
    "foreign library of another name": lambda folder, content: put(folder, content, "0123456789abcdef"),
    "text": lambda folder, content: put(folder, b"not a library"),
    "nothing": lambda folder, content: put(folder, b""),
    "half of the library under its name": lambda folder, content: put(
        folder, built().read_bytes()[:9999], built().stem
    ),
    "folder": _special(lambda path: path.mkdir()),
    "dangling link": _special(lambda path: path.symlink_to("nowhere")),
    "link to itself": _special(lambda path: path.symlink_to(path.name)),
    "FIFO": _special(os.mkfifo),
    "link to a FIFO": _special(lambda path: (os.mkfifo(f"{path}.pipe"), path.symlink_to(f"{path}.pipe"))),
    "link to a device": _special(lambda path: path.symlink_to("/dev/zero")),
}
PLACES: dict[str, Callable[[Path], str]] = {
    "with spaces": lambda folder: str(folder / "a b 'c' \"d\""),
    "not ASCII": lambda folder: str(folder / "ключ 鍵"),
    "under a file": lambda folder: str(_touched(folder / "file") / "below"),
    "a file": lambda folder: str(_touched(folder / "file")),
    "a dangling link": lambda folder: str(_link(folder / "link", folder / "nowhere" / "deep")),
    "a link to a folder": lambda folder: str(_link(folder / "link", _made(folder / "real"))),
    "relative": lambda folder: os.path.relpath(folder / "relative"),
    "too long": lambda folder: str(folder / ("x" * 300)),
    "/proc": lambda folder: "/proc/nothing",
}
COMPILERS: dict[str, str] = {
    "unbalanced quote": "c++ 'x",
    "missing": "/nowhere/c++",
    "empty": " ",
    "fails": "sh:echo no >&2; exit 1",
    "writes nothing": "sh:exit 0",
    "writes text": 'sh:echo text > "$out"',
    "writes a foreign library": "",
    "prints other than UTF-8": "sh:printf '\\377\\376' >&2; exit 1",
}


def _touched(path: Path) -> Path:
    path.touch()
    return path


def _made(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def _link(path: Path, to: Path) -> Path:
    path.symlink_to(to)
    return path


def stub(folder: Path, body: str) -> str:
    """A compiler in sh; $out is the file that it is to write."""
    path = folder / "cxx"
    path.write_text(f'#!/bin/sh\nfor word; do [ "$last" = -o ] && out=$word; last=$word; done\n{body}\n')
    path.chmod(0o755)
    return shlex.quote(str(path))


def prepare(folder: Path, options: Options) -> tuple[dict[str, str], Path, bool]:
    """The environment, the marker, and whether what has code in it is somebody else's."""
    from grpo_kernels.backends.cpp_rows import build

    marker = folder / "loaded"
    place = PLACES[options["place"]](folder) if "place" in options else str(folder / "cache")
    compiler = COMPILERS.get(options.get("compiler", ""), f'sh:cp {shlex.quote(str(built()))} "$out"')
    environment = {
        "TORCH_EXTENSIONS_DIR": place,
        "CXX": stub(folder, compiler[3:]) if compiler.startswith("sh:") else compiler,
    }
    if options.get("compiler") == "writes a foreign library":
        source = put(folder, foreign(folder / "harmless"))
        environment["CXX"] = stub(folder, f'cp {shlex.quote(str(source))} "$out"')
    outer = Path(place).absolute()
    middle = outer / "grpo_kernels"
    inner = middle / build.cache_key(build.source_folder())
    try:
        inner.mkdir(mode=0o700, parents=True)
    except OSError:
        return environment, marker, True
    middle.chmod(0o700)
    paths = [PLANTED[options[key]](inner, foreign(marker)) for key in ("planted",) if key in options]
    if "also" in options and options["also"] != options.get("planted"):
        with contextlib.suppress(FileExistsError):
            paths.append(PLANTED[options["also"]](inner, foreign(marker)))
    if "filled" in options:
        with contextlib.suppress(FileExistsError):  # half of it is there
            put(inner, built().read_bytes())
    chain = {"outer": outer, "middle": middle, "inner": inner}
    for path in paths if "file_mode" in options else ():
        if not path.is_symlink():
            path.chmod(options["file_mode"])
    for key, path in chain.items():
        if f"{key}_mode" in options:
            path.chmod(options[f"{key}_mode"])
    owned = chain.get(options.get("owner", ""))
    for path in paths if options.get("owner") == "file" else [owned] if owned else []:
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    return environment, marker, is_foreign(options)


def is_foreign(options: Options) -> bool:
    """Whether somebody else could have put the file there: the folders that the library made, and the file itself."""
    if options.get("owner") in ("file", "inner", "middle"):
        return True
    linked = any(options.get(key, "").startswith("link to a foreign") for key in ("planted", "also"))
    writable = options.get("file_mode", 0o600) & 0o022
    return bool(linked or writable or "middle_mode" in options or "inner_mode" in options)


def call(rank: int, environment: dict[str, str], calls: int) -> list[float]:
    """The task of the process: log-probabilities from the backend that is chosen for it."""
    os.environ.update(environment)
    from grpo_kernels import linear_logprob

    hidden, weight = torch.ones(3, 2), torch.arange(10.0).view(5, 2) / 10
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(calls):
            logps, _ = linear_logprob(hidden, weight, torch.tensor([0, 4, 2]))
    return logps.tolist()


POOL = RankPool(world_size=1, seconds=SECONDS)


def check(options: Options) -> None:
    """The call is right within the time, and nobody else's code ran."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment, marker, foreign_ = prepare(folder, options)
        try:
            (logps,) = POOL.run(call, environment, options.get("calls", 1))
        except RankFailure as failure:
            raise AssertionError(f"the call: {failure}") from None
        finally:
            POOL.close()  # a process loads the library once
            for path in folder.rglob("*"):
                if path.is_dir() and not path.is_symlink():
                    path.chmod(0o700)
        z = torch.arange(10.0).view(5, 2).sum(1) / 10
        want = torch.log_softmax(z, 0)[[0, 4, 2]].tolist()
        assert all(abs(x - y) < 1e-5 for x, y in zip(logps, want, strict=True)), f"got {logps}, want {want}"
        assert not (foreign_ and marker.exists()), "somebody else's library was loaded"


CACHE = Category("cache", draw, check, close=POOL.close)
