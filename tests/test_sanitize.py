"""`make sanitize` in its short form."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from grpo_kernels.backends.cpp_rows import build
from tests.sanitize import ROOT

pytestmark = pytest.mark.unit


@pytest.mark.slow
def test_short_form_finds_nothing() -> None:
    asked = [*build.compiler(), "-print-file-name=libasan.so"]
    if not Path(subprocess.run(asked, capture_output=True, text=True).stdout.strip()).is_absolute():
        pytest.skip("needs GCC and its AddressSanitizer")
    command = [sys.executable, "-m", "tests.sanitize", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert "reads and writes too far, and unaligned ones, are seen" in done.stdout
    assert "0 of 1 runs failed" in done.stdout
