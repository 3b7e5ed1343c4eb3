"""Parts of what `make emulate` runs, in processes that import Triton without its interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

PARTS = [("quick", "sm_90"), *(
    pytest.param(part, arch, marks=pytest.mark.slow)
    for part, arch in (("quick", "sm_80"), ("slow", "sm_80"), ("slow", "sm_90"))
)]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("part", "arch"), PARTS)
def test_compiled_kernels(part: str, arch: str) -> None:
    command = f"-m tests.emulator --part {part} --arch {arch} -q -p no:cacheprovider".split()
    hidden = ("PYTEST", "TRITON_INTERPRET")
    env = {name: x for name, x in os.environ.items() if not name.startswith(hidden)}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
