"""What is measured on a GPU beside the cases: the device, the row kernels, a step's profile.

Copies, products and kernels are queued while the device sleeps: launching a kernel of 150
microseconds takes the host 60 to 110, which would count as its time otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.aot.kernels import Loss
from benchmarks.cases import SEED, BenchCase, make_inputs
from benchmarks.providers import build
from benchmarks.run import Results, measure_runs, step
from benchmarks.timing import Clock
from grpo_kernels import backends
from grpo_kernels.backends import Chunk, Coefficients, LogitTransform

SPREAD = 2.5  # standard deviation of the logits
COPY_BYTES = 2 * 2**30
SQUARE = 8192
ROWS, VOCAB = 1024, 151936
LIMIT = 180.0  # seconds, after which a part hangs
TOP = 25  # kernels of a profile


def measure_ceilings(device: torch.device, results: Results, *, toy: bool = False) -> None:
    n, size = (64, 2**16) if toy else (SQUARE, COPY_BYTES)
    source = torch.empty(size // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    left, right = (torch.randn(n, n, device=device).to(torch.bfloat16) for _ in range(2))
    runs: dict[str, Callable[[], Any]] = {
        "copy": lambda: target.copy_(source),
        "matmul": lambda: torch.mm(left, right),
    }
    clock = Clock(device, flush=True, queued=True)
    found = measure_runs(runs, clock, results, ("micro", "ceilings"), once=toy)
    for name, amount, unit in (
        ("copy", 2 * source.nbytes / 1e6, "gb_per_s"),
        ("matmul", 2 * n**3 / 1e9, "tflops"),
    ):
        if name in found:
            results.merge("micro", "ceilings", name, **{unit: round(amount / found[name], 1)})


def measure_rows(device: torch.device, results: Results, *, toy: bool = False) -> None:
    """The row backends on fp32 logits; bytes: each logit read once, each gradient written."""
    n, vocab = (8, 70) if toy else (ROWS, VOCAB)
    g = torch.Generator(device).manual_seed(SEED)
    logits = torch.randn(n, vocab, generator=g, device=device) * SPREAD
    ids = torch.randint(vocab, (n,), generator=g, device=device)
    for name in ("triton", "torch"):
        top = ("micro", "rows", name)
        with results.noting(*top, seconds=LIMIT):
            backend = backends.choose_backend(name, device)
            runs = _row_runs(backend, logits.clone(), ids)
            clock = Clock(device, flush=True, queued=True)
            steps = {run: x for run, (_, x) in runs.items()}
            for run, ms in measure_runs(steps, clock, results, top, once=toy).items():
                least = runs[run][0]
                rate = round(least * n * vocab / 1e6 / ms, 1)
                results.merge(*top, run, bytes_per_logit=least, gb_per_s=rate)


def _row_runs(
    backend: Any, logits: Tensor, ids: Tensor
) -> dict[str, tuple[int, Callable[[], Any]]]:
    chunk = Chunk(logits, ids, LogitTransform())
    out = torch.empty_like(logits, dtype=torch.bfloat16)
    stats = backend.stats(chunk, entropy=True)
    a, b = (torch.full_like(stats.logps, x) for x in (1e-3, 1e-4))
    loss = Loss("clipped").of_rows(lambda: torch.rand_like(stats.logps))
    runs: dict[str, tuple[int, Callable[[], Any]]] = {
        "stats": (4, lambda: backend.stats(chunk, entropy=True)),
        "stats_no_entropy": (4, lambda: backend.stats(chunk, entropy=False)),
        "grad": (6, lambda: backend.grad(chunk, stats, Coefficients(a), out)),
        "grad_entropy": (6, lambda: backend.grad(chunk, stats, Coefficients(a, b), out)),
    }
    if isinstance(backend, backends.FusedRowBackend):
        runs |= {
            "fused": (6, lambda: backend.fused(chunk, loss, out)),
            "fused_no_gradient": (4, lambda: backend.fused(chunk, loss, None)),
        }
    return runs


def profile_step(
    case: BenchCase, device: torch.device, results: Results, *, toy: bool = False
) -> None:
    """One step of ours on `case`: its kernels by time, and how much of the step is none of them."""
    path = ("profile", case.name)
    with results.noting(*path, seconds=LIMIT):
        inputs = make_inputs(case, device)
        run = partial(step, build("ours", inputs, "triton" if toy else "auto"))
        clock = Clock(device)
        for _ in range(3):
            inputs.clear_gradients()
            ms = clock.time(run)
        inputs.clear_gradients()
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if clock.on_gpu else [])
        with profile(activities=activities) as prof:
            run()
            if clock.on_gpu:
                torch.cuda.synchronize()
        # an operation's own entry counts its kernels again
        where = "CUDA" if clock.on_gpu else "CPU"
        averages = [x for x in prof.key_averages() if str(x.device_type).endswith(where)]
        spent = f"self_{'device' if clock.on_gpu else 'cpu'}_time_total"
        rows = [
            {"name": str(x.key)[:160], "calls": x.count, "ms": round(getattr(x, spent) / 1e3, 4)}
            for x in averages
            if getattr(x, spent) > 0
        ]
        rows.sort(key=lambda x: -x["ms"])
        total = sum(x["ms"] for x in rows)
        of_step = {"step_ms": round(ms, 3), "kernels_ms": round(total, 3), "distinct": len(rows)}
        results.merge(*path, status="ok", **of_step, kernels=rows[:TOP])
        inputs.clear_gradients()


PARTS = {"ceilings": measure_ceilings, "rows": measure_rows}
