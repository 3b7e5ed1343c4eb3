"""Parts of what `make emulate` runs, in processes that import Triton without its interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

ARCHES = pytest.mark.parametrize("arch", ["sm_80", "sm_90"])


def run_part(part: str, arch: str) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.emulator",
        "--part",
        part,
        "--arch",
        arch,
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST", "TRITON_INTERPRET"))
    }
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90"])
def test_compiled_kernels(arch: str) -> None:
    run_part("quick", arch)


@pytest.mark.slow
@ARCHES
def test_more_of_the_compiled_kernels(arch: str) -> None:
    run_part("slow", arch)
