"""Compiles the row kernels as launches would, and counts the variants: run as a module."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

from grpo_kernels.backends import (
    Chunk,
    Coefficients,
    DivergenceStats,
    FusedLoss,
    LogitTransform,
)
from grpo_kernels.backends.triton_rows.device import row_config
from grpo_kernels.backends.triton_rows.divergence import diverge_kernel, launch_diverge
from grpo_kernels.backends.triton_rows.fused import fused_kernel, launch_fused
from grpo_kernels.backends.triton_rows.grad import grad_kernel, launch_grad
from grpo_kernels.backends.triton_rows.reduce import launch_stats, stats_kernel

V = 1024
KERNELS = (stats_kernel, grad_kernel, fused_kernel, diverge_kernel)


def launch_all(n: int, at: int, swept: float) -> None:
    """Every kernel on `n` rows; numbers of rows lie `at` places off; `swept` is all else."""
    x, ids = torch.zeros(n, V), torch.zeros(n + at, dtype=torch.int64)[at:]
    ones = torch.ones(n + at)[at:]
    transform = LogitTransform(scale=1 + swept, softcap=30 + swept, inv_temperature=1 / (1 + swept))
    loss = FusedLoss(
        surrogate="clipped", kl="k3", corrects_kl=True, advantages=ones, d_policy=None,
        weights=ones, old=ones, ref=ones, gate=ones, beta=swept, d_entropy=0.1 + swept,
        constants=(1 - swept, 1 + swept, math.inf if swept else 2.0),
    )  # fmt: skip
    config = {kernel: row_config(kernel, V, "sm_90") for kernel in ("stats", "grad", "fused")}
    stats = launch_stats(Chunk(x, ids, transform), config["stats"], entropy=True, extras=())
    known, both = replace(stats, logps=ones), Coefficients(ones, ones)
    launch_grad(Chunk(x, ids, transform, at), known, both, x, config["grad"])
    on_policy = {"surrogate": None, "is_linear": True, "constants": (), "old": None, "gate": None}
    on_policy |= {"advantages": None, "d_policy": ones}
    for each in (loss, replace(loss, **on_policy)):
        launch_fused(Chunk(x, ids, transform), each, x, config["fused"])
    pair = Chunk(x, ids, transform, at, Chunk(x, ids, transform), (0.5 + swept) / 2)
    launch_diverge(pair, stats, stats, config["stats"])
    diverged = replace(stats, logps=ones, divergence=DivergenceStats(ones, ones, ones, ones))
    launch_grad(pair, diverged, Coefficients(ones, ones, ones), x, config["grad"])


def variants() -> dict[str, int]:
    return {k.fn.__name__: len(k.device_caches[0][0]) for k in KERNELS}


def main() -> None:
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


if __name__ == "__main__":
    main()
