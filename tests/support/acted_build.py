"""Processes, compilers in sh, and a loader that is acted, for the tests of how the C++ library is had."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import grpo_kernels
from grpo_kernels.backends.cpp_rows import build, cache

CHECKOUT = Path(grpo_kernels.__file__).parents[1]
GOOD, EMPTY = "a library", "without ops"  # what the acted loader takes
BAD = "of another libc"
LOSS = """
import json, os, torch, warnings
from grpo_kernels import Run, linear_logprob
hidden, weight, ids = torch.ones(5, 3), torch.ones(7, 3), torch.arange(5)
for backend in {backends!r}:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            logps = linear_logprob(hidden, weight, ids, run=Run(backend=backend)).logps
    print(json.dumps([[str(x.message) for x in caught if x.category is RuntimeWarning], logps.tolist(), os.listdir()]))
"""


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """What hangs fails."""

    def end(*_: object) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def lines(code: str, folder: Path = CHECKOUT, **environment: object) -> list[str]:
    """What a Python process of its own prints, in `folder`."""
    changed = (
        os.environ
        | {"PYTHONPATH": str(CHECKOUT)}
        | {name: str(value) for name, value in environment.items()}
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, env=changed
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def losses(backends: Sequence[str], folder: Path, cxx: Path) -> list[Any]:
    """A process's warnings of each backend, its log-probabilities, and what then lies in `folder`, the cache's."""
    code = LOSS.format(backends=backends)
    return [
        json.loads(line)
        for line in lines(code, folder, TORCH_EXTENSIONS_DIR=folder / "cache", CXX=cxx)
    ]


def script(path: Path, body: str) -> Path:
    """A compiler in sh; $out is the file it is to write."""
    path.write_text(
        f'#!/bin/sh\nfor word; do [ "$last" = -o ] && out=$word; last=$word; done\n{body}\n'
    )
    path.chmod(0o755)
    return path


def name_of(content: str) -> str:
    return f"{hashlib.sha256(content.encode()).hexdigest()[:16]}.so"


@dataclass
class World:
    """Folders of its own, and an acted compiler and loader: a process can register the real ops but once."""

    folder: Path
    patch: pytest.MonkeyPatch

    def __post_init__(self) -> None:
        self.home, self.temporary = self.folder / "home", self.folder / "temporary"
        for folder in (self.home, self.temporary):
            folder.mkdir(mode=0o700)
        self.sources, self.cache, self.prebuilt = (
            self.home / name for name in ("csrc", "cache", "prebuilt.so")
        )
        self.patch.setenv("TORCH_EXTENSIONS_DIR", str(self.cache))
        self.sources.mkdir()
        (self.sources / "ops.cpp").write_text("// 1")
        (self.sources / "row.h").write_text("// 2")
        self.patch.setattr(torch.ops, "load_library", self.load)
        self.patch.setattr(build, "has_ops", lambda source: Path(source).read_text() == GOOD)
        self.patch.setattr(tempfile, "tempdir", str(self.temporary))
        self.compiles(GOOD)

    def version_folder(self) -> Path:
        """Make the folder of the cache that `sources` are built in."""
        folder = self.cache / "grpo_kernels" / build.cache_key(self.sources)
        cache.own_folder(folder, made=2)
        return folder

    def put(self, content: str) -> Path:
        """A library in the cache."""
        path = self.version_folder() / name_of(content)
        path.write_text(content)
        path.chmod(0o700)
        return path

    def put_prebuilt(self, content: str) -> Path:
        self.prebuilt.write_text(content)
        return self.prebuilt

    def compiler(self, body: str) -> None:
        self.patch.setenv(
            "CXX",
            str(script(self.folder / "cxx", f'echo compile >> "{self.folder}/events"; {body}')),
        )

    def compiles(self, content: str) -> None:
        self.compiler(f'printf "{content}" > "$out"')

    def load(self, path: str) -> None:
        where = (
            "prebuilt"
            if Path(path) == self.prebuilt
            else "private"
            if self.temporary in Path(path).parents
            else "cached"
        )
        with (self.folder / "events").open("a") as file:
            file.write(f"load {where}\n")
        if Path(path).read_text() not in (GOOD, EMPTY):
            raise OSError(f"Could not load this library: {path}") from OSError("invalid ELF header")

    def events(self) -> str:
        """What was compiled and loaded, or tried, since this was asked last."""
        file = self.folder / "events"
        events = file.read_text().splitlines() if file.exists() else []
        file.write_text("")
        return ", ".join(events)

    def find(self) -> build.Library:
        try:
            return build.load_from(self.prebuilt, self.sources)
        except build.Unavailable as why:
            return build.Library(refusal=str(why))
