"""Triton in processes without its interpreter: what is compiled for GPUs that are not there; and
where it is installed and can launch nothing, which is said once, and the torch backend serves."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from grpo_kernels.backends import Chunk, Coefficients, DivergenceStats, FusedLoss, LogitTransform
from grpo_kernels.backends.triton_rows.device import row_config
from grpo_kernels.backends.triton_rows.divergence import diverge_kernel, launch_diverge
from grpo_kernels.backends.triton_rows.fused import fused_kernel, launch_fused
from grpo_kernels.backends.triton_rows.grad import grad_kernel, launch_grad
from grpo_kernels.backends.triton_rows.reduce import launch_stats, stats_kernel

pytestmark = pytest.mark.unit

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


def printed(*arguments: str, **changes: str) -> str:
    """What Python prints with these arguments, and these changes of the environment."""
    env = {name: x for name, x in os.environ.items() if name not in ("TRITON_INTERPRET", "CC")}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env | changes)
    assert done.returncode == 0, done.stderr
    return done.stdout


V = 1024
KERNELS = (stats_kernel, grad_kernel, fused_kernel, diverge_kernel)


def launch_all(n: int, at: int, swept: float) -> None:
    """Every kernel on `n` rows; numbers of rows lie `at` places off; `swept` is all else."""
    x, ids = torch.zeros(n, V), torch.zeros(n + at, dtype=torch.int64)[at:]
    ones = torch.ones(n + at)[at:]
    transform = LogitTransform(scale=1 + swept, softcap=30 + swept, inv_temperature=1 / (1 + swept))
    loss = FusedLoss(
        surrogate="clipped", kl_estimator="k3", corrects_kl=True, advantages=ones, d_policy=None,
        weights=ones, old=ones, ref=ones, gate=ones, beta=swept, d_entropy=0.1 + swept,
        constants=(1 - swept, 1 + swept, math.inf if swept else 2.0),
    )  # fmt: skip
    config = {kernel: row_config(kernel, V, "sm_90") for kernel in ("stats", "grad", "fused")}
    stats = launch_stats(Chunk(x, ids, transform), config["stats"], entropy=True, extras=())
    known, both = replace(stats, logps=ones), Coefficients(ones, ones)
    launch_grad(Chunk(x, ids, transform), known, both, x, config["grad"])
    on_policy = {"surrogate": None, "is_linear": True, "constants": (), "old": None, "gate": None}
    on_policy |= {"advantages": None, "d_policy": ones}
    for each in (loss, replace(loss, **on_policy)):
        launch_fused(Chunk(x, ids, transform), each, x, config["fused"])
    pair = Chunk(x, ids, transform, Chunk(x, ids, transform), (0.5 + swept) / 2)
    launch_diverge(pair, stats, stats, config["stats"])
    diverged = replace(stats, logps=ones, divergence=DivergenceStats(ones, ones, ones, ones))
    launch_grad(pair, diverged, Coefficients(ones, ones, ones), x, config["grad"])


def variants() -> dict[str, int]:
    return {k.fn.__name__: len(k.device_caches[0][0]) for k in KERNELS}


def print_variants() -> None:
    """What `launch_all` compiles; run as a module, without Triton's interpreter."""
    hopper = GPUTarget("cuda", 90, 32)
    asked = {"get_current_target": lambda: hopper, "get_current_device": lambda: 0}
    driver.set_active(SimpleNamespace(**asked, get_current_stream=lambda device=None: 0))
    run = jit.JITFunction.run
    jit.JITFunction.run = lambda self, *args, grid, warmup, **kwargs: run(
        self, *args, grid=grid, warmup=True, **kwargs
    )
    found = []
    for n, at, swept in ((64, 0, 0.0), (1, 1, 0.2), (17, 2, 1.0)):
        launch_all(n, at, swept)
        found.append(variants())
    print(json.dumps(found))


@pytest.mark.slow
def test_only_one_variant_however_many_rows_and_whatever_the_numbers() -> None:
    """Rows, alignment of a row's numbers, temperature, clip range, beta: one compilation."""
    wanted = {"stats": 1, "grad": 2, "fused": 2, "diverge": 1}
    for counts in json.loads(printed("-m", __name__)):
        assert counts == {f"{name}_kernel": count for name, count in wanted.items()}


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


# Triton's own code fails here as it would in an image where it cannot launch: its driver is told
# that there is a GPU, and compiles what it launches with.

BEFORE = """
import sysconfig, warnings
import torch
from triton.backends.nvidia import driver as nvidia

nvidia.CudaDriver.is_active = staticmethod(lambda: True)
started, start = [], nvidia.CudaUtils.__init__

def counted(self):
    started.append(self)
    start(self)

nvidia.CudaUtils.__init__ = counted
"""
AFTER = """
from grpo_kernels.backends import choose_backend, why_torch
device = torch.device("cuda")
with warnings.catch_warnings(record=True, action="default") as caught:
    for _ in range(3):
        backend = choose_backend("auto", device)
    print(backend.name, "|", why_torch(device))
    print(len(caught), "|", *(str(x.message) for x in caught))
try:
    print(choose_backend("triton", device).name)
except ValueError as error:
    print(error)
print(choose_backend("torch", device).name, why_torch(device, torch.float64))
print(len(started))
"""
NO_DRIVER_LIBRARY = "nvidia.library_dirs = lambda: []\n"  # of which this machine need not have any
NO_HEADERS = """
paths = sysconfig.get_paths
sysconfig.get_paths = lambda *a, **k: {**paths(*a, **k), "include": "/no"}
"""


def run(folder: Path, change: str, **more: str) -> list[str]:
    """The lines that the code prints, after a `change` of the machine."""
    code = BEFORE + change + AFTER
    return printed("-c", code, TRITON_CACHE_DIR=str(folder), **more).splitlines()


NO_COMPILER = "Triton needs a C compiler, and there is no gcc or clang: install gcc"
NO_FILE = "Triton cannot start: FileNotFoundError: [Errno 2] No such file"
NEEDS_HEADERS = "Triton needs Python's headers, and there is no Python.h in /no: install"
ODD = "Triton cannot start: IndexError: list index out of range"


@pytest.mark.parametrize(
    ("change", "env", "reason"),
    [
        (NO_DRIVER_LIBRARY, {"PATH": "/no"}, NO_COMPILER),
        pytest.param(NO_DRIVER_LIBRARY, {"CC": "/no/cc"}, NO_FILE, marks=pytest.mark.slow),
        pytest.param(NO_DRIVER_LIBRARY + NO_HEADERS, {}, NEEDS_HEADERS, marks=pytest.mark.slow),
        pytest.param("nvidia.libcuda_dirs = lambda: [][0]\n", {}, ODD, marks=pytest.mark.slow),
    ],
)
def test_it_is_said_once_and_torch_serves(tmp_path, change, env, reason):
    auto, warned, named, torch, started = run(tmp_path, change, **env)
    assert auto.startswith(f"torch | not triton: {reason}")
    assert warned.startswith("1 | grpo_kernels: on the GPU, losses and log-probabilities run in")
    assert reason in warned
    assert named.startswith(f"backend: expected one that can serve here, got 'triton': {reason}")
    assert torch.startswith("torch not triton: its kernels compute in float32")
    assert started == "1"


def test_where_it_starts_it_serves(tmp_path: Path) -> None:
    change = "from types import SimpleNamespace; import triton\n"
    change += "triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: None))\n"
    auto, warned, named, _, _ = run(tmp_path, change)
    assert auto == "triton | None"
    assert warned == "0 |"
    assert named == "triton"


if __name__ == "__main__":
    print_variants()
