"""What is compiled for GPUs that are not there: in processes without Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

pytestmark = pytest.mark.unit

pytest.importorskip("triton")

ACCESSES = """
import json, re, sys
import torch
from benchmarks.aot.checks import compile_for
from benchmarks.aot.launches import caught
from benchmarks.aot.matrix import TARGETS, empty
from grpo_kernels.backends.triton_rows.grad import launch_scale

found = {}
for arch in TARGETS:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with caught() as launches:
            launch_scale(empty(151936, 4096), empty(), empty(151936, 4096, dtype=dtype))
        asm = compile_for(launches[0], arch).asm
        text = asm["amdgcn"] if "amdgcn" in asm else asm["ptx"]
        accesses = re.findall(r"(?:ld|st)\\.global[.\\w]*|global_(?:load|store)_\\w+", text)
        found[f"{arch} {dtype} {dtype.itemsize}"] = accesses
print(json.dumps(found))
"""


def printed(*arguments: str) -> str:
    """What Python prints with these arguments."""
    env = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_only_one_variant_however_many_rows_and_whatever_the_numbers() -> None:
    """Rows, alignment of a row's numbers, temperature, clip range, beta: one compilation."""
    for counts in json.loads(printed("-m", "tests.support.kernel_variants")):
        assert counts == {
            "stats_kernel": 1,
            "grad_kernel": 2,
            "fused_kernel": 2,
            "diverge_kernel": 1,
        }


@pytest.mark.slow
def test_the_scaling_kernel_accesses_128_bits_on_every_target() -> None:
    """A block is read and written so; its numbers once more for the masked end, one by one."""
    found = json.loads(printed("-c", ACCESSES))
    assert len(found) == 12
    for target, accesses in found.items():
        counts, is_amd = Counter(accesses), target.startswith("gfx")
        of_thread = 4096 // (8 * (64 if is_amd else 32))  # numbers
        reads, writes = (
            ("global_load_dwordx4", "global_store_dwordx4")
            if is_amd
            else ("ld.global.v4.b32", "st.global.v4.b32")
        )
        assert counts[reads] == of_thread * 4 // 16, (target, counts)
        assert counts[writes] == of_thread * int(target[-1]) // 16, (target, counts)
