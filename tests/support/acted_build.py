"""Processes, compilers in sh, and a loader that is acted, for the tests of how the C++ library is had."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

import grpo_kernels
from grpo_kernels.backends.cpp_rows import build, cache

CHECKOUT = Path(grpo_kernels.__file__).parents[1]
GOOD, EMPTY = "a library", "without ops"  # what the acted loader takes
GOOD_NAME = f"{hashlib.sha256(GOOD.encode()).hexdigest()[:16]}.so"
LOAD = """
from grpo_kernels.backends.cpp_rows.build import load
print(load().origin, load().path, sep="\\n")
"""
LOSS = """
import json, torch, warnings
from grpo_kernels import Run, linear_logprob
hidden, weight, ids = torch.ones(5, 3), torch.ones(7, 3), torch.arange(5)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        logps = linear_logprob(hidden, weight, ids, run=Run(backend={backend!r})).logps
print(json.dumps([[str(x.message) for x in caught if x.category is RuntimeWarning], logps.tolist()]))
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


def start(code: str, **environment: object) -> subprocess.Popen[str]:
    """A Python process of its own, in the checkout."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=CHECKOUT,
        env=os.environ | {name: str(value) for name, value in environment.items()},
    )


def lines(process: subprocess.Popen[str]) -> list[str]:
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    return out.splitlines()


def script(path: Path, body: str) -> Path:
    """A compiler in sh; $out is the file it is to write."""
    path.write_text(f'#!/bin/sh\nfor word; do [ "$last" = -o ] && out=$word; last=$word; done\n{body}\n')
    path.chmod(0o755)
    return path


@dataclass
class World:
    """Folders of its own, and an acted compiler and loader: a process can register the real ops but once."""

    folder: Path
    patch: pytest.MonkeyPatch
    attempts: list[Path] = field(default_factory=list)  # what was loaded, or tried

    def __post_init__(self) -> None:
        self.sources, self.cache, self.temporary = (self.folder / name for name in ("csrc", "cache", "temporary"))
        self.prebuilt = self.folder / "prebuilt.so"
        self.patch.setenv("TORCH_EXTENSIONS_DIR", str(self.cache))
        self.sources.mkdir()
        (self.sources / "ops.cpp").write_text("// 1")
        (self.sources / "row.h").write_text("// 2")
        self.patch.setattr(torch.ops, "load_library", self.load)
        self.patch.setattr(build, "has_ops", lambda source: Path(source).read_text() == GOOD)
        self.temporary.mkdir(mode=0o700)
        self.patch.setattr(tempfile, "tempdir", str(self.temporary))
        self.compiler(f'printf "{GOOD}" > "$out"')

    def version_folder(self) -> Path:
        """Make the folder of the cache that `sources` are built in."""
        folder = self.cache / "grpo_kernels" / build.cache_key(self.sources)
        cache.own_folder(folder, made=2)
        return folder

    def compiler(self, body: str) -> None:
        self.patch.setenv("CXX", str(script(self.folder / "cxx", body)))

    def load(self, path: str) -> None:
        self.attempts.append(Path(path))
        if Path(path).read_text() not in (GOOD, EMPTY):
            raise OSError(f"Could not load this library: {path}") from OSError("invalid ELF header")

    def find(self) -> build.Library:
        return build.load_from(self.prebuilt, self.sources)

    def refusal(self) -> str:
        with pytest.raises(build.Unavailable) as caught:
            self.find()
        return str(caught.value)
