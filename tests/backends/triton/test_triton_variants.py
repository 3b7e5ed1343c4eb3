"""What makes a kernel compile again, and what must not: no GPU is needed for that."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


def test_only_one_variant_however_many_rows_and_whatever_the_numbers() -> None:
    """Rows, addresses of a row's numbers, temperature, clip range, beta: one compilation a kernel and surrogate."""
    env = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.kernel_variants"], capture_output=True, text=True, env=env, check=False
    )
    assert run.returncode == 0, run.stderr
    for counts in json.loads(run.stdout):
        of_two = {"diverge_kernel": 1, "teacher_fused_kernel": 1}
        assert counts == {"stats_kernel": 1, "grad_kernel": 2, "fused_kernel": 2, **of_two}
