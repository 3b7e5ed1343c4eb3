"""The parts by themselves: what the device can do, the row kernels' bandwidth, and scoring without logits.

Copies, products and kernels are queued while the device sleeps: launching a kernel of 150 microseconds takes the host
60 to 110, which would count as its time otherwise. Scoring is a whole call, timed as such.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.cases import SEED
from benchmarks.harness.events import Absence, Events
from benchmarks.harness.timing import Clock, interleaved, quantiles

SPREAD = 2.5  # standard deviation of the logits
COPY_BYTES = 2 * 2**30
SQUARE = 8192
ROWS, VOCAB = 1024, 151936
SCORE_SHAPES = ((8192, 4096, 151936), (1024, 4096, 151936), (8192, 1024, 151936))


def measure_ceilings(device: torch.device, events: Events, *, toy: bool = False) -> None:
    """A device-to-device copy and a square bf16 product with an fp32 result."""
    n, size = (64, 2**16) if toy else (SQUARE, COPY_BYTES)
    source = torch.empty(size // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    left, right = (torch.randn(n, n, device=device).to(torch.bfloat16) for _ in range(2))
    runs: dict[str, Callable[[], Any]] = {
        "copy": lambda: target.copy_(source),
        "matmul": lambda: torch.mm(left, right),
    }
    found = _measure(runs, Clock(device, flush=True, queued=True), events, ("ceilings",), toy=toy)
    for name, amount, unit in (("copy", 2 * source.nbytes / 1e6, "gb_per_s"), ("matmul", 2 * n**3 / 1e9, "tflops")):
        if name in found:
            events.result("ceilings", name, **{unit: round(amount / found[name], 1)})


def measure_rows(device: torch.device, events: Events, *, toy: bool = False) -> None:
    """The row backends on fp32 logits, as a product leaves them; bytes: each logit read once, each gradient written."""
    from grpo_kernels.backends import choose_backend

    n, vocab = (8, 70) if toy else (ROWS, VOCAB)
    g = torch.Generator(device).manual_seed(SEED)
    logits = torch.randn(n, vocab, generator=g, device=device) * SPREAD
    ids = torch.randint(vocab, (n,), generator=g, device=device)
    out = torch.empty(n, vocab, dtype=torch.bfloat16, device=device)
    for name in ("triton", "torch"):
        top = ("micro", "rows", name)
        with events.noting(*top, limit=120.0):
            backend, _ = choose_backend(name, device)
            runs, sizes = _row_runs(backend, logits, ids, out)
            with events.noting(*top, "fused", limit=120.0):
                runs |= _fused_runs(backend, logits, ids, out)
            found = _measure(runs, Clock(device, flush=True, queued=True), events, top, toy=toy)
            for run, ms in found.items():
                gigabytes = sizes[run] * n * vocab / 1e9
                events.result(*top, run, bytes_per_logit=sizes[run], gb_per_s=round(1e3 * gigabytes / ms, 1))


def _row_runs(
    backend: Any, logits: torch.Tensor, ids: torch.Tensor, out: torch.Tensor
) -> tuple[dict[str, Callable[[], Any]], dict[str, int]]:
    """What to run, and the least bytes a logit it moves."""
    from grpo_kernels.backends.interface import Chunk, LogitTransform

    transform = LogitTransform()
    work = logits.clone() if backend.name == "torch" else logits  # the torch backend's grad writes into its input
    stats = backend.stats(Chunk(logits, ids, transform), entropy=True)
    a, b = torch.full_like(stats.logps, 1e-3), torch.full_like(stats.logps, 1e-4)
    runs: dict[str, Callable[[], Any]] = {
        "stats": lambda: backend.stats(Chunk(logits, ids, transform), entropy=True),
        "stats_no_entropy": lambda: backend.stats(Chunk(logits, ids, transform), entropy=False),
        "grad": lambda: backend.grad(Chunk(work, ids, transform), stats, a, None, out),
        "grad_entropy": lambda: backend.grad(Chunk(work, ids, transform), stats, a, b, out),
    }
    sizes = {"stats": 4, "stats_no_entropy": 4, "grad": 6, "grad_entropy": 6}
    sizes |= {"fused": 6, "fused_no_gradient": 4, "single_pass": 6}
    return runs, sizes


def _fused_runs(
    backend: Any, logits: torch.Tensor, ids: torch.Tensor, out: torch.Tensor
) -> dict[str, Callable[[], Any]]:
    from grpo_kernels.backends.interface import Chunk, FusedRowBackend, LogitTransform, SinglePassRowBackend

    if not (isinstance(backend, FusedRowBackend) and isinstance(backend, SinglePassRowBackend)):
        raise Absence("this backend does not fuse")
    transform, loss = LogitTransform(), _clipped_loss(torch.full_like(logits[:, 0], -2.0))
    return {
        "fused": lambda: backend.fused(Chunk(logits, ids, transform), loss, out),
        "fused_no_gradient": lambda: backend.fused(Chunk(logits, ids, transform), loss, None),
        "single_pass": lambda: backend.single_pass(Chunk(logits, ids, transform), out, entropy=True),
    }


def _clipped_loss(logps: torch.Tensor) -> Any:
    from grpo_kernels.token_loss.record import TokenLoss

    ones = torch.ones_like(logps)
    return TokenLoss(
        surrogate="clipped",
        kl=None,
        corrects_kl=False,
        advantages=ones,
        d_logps=None,
        weights=ones / len(ones),
        old=logps - 0.1,
        ref=None,
        gate=None,
        constants=(0.8, 1.2, float("inf")),
        beta=0.0,
        d_entropy=0.0,
    )


def measure_scoring(device: torch.device, events: Events, *, toy: bool = False) -> None:
    """``score_dot`` against ``score``: the same numbers, without and with logits in memory."""
    g = torch.Generator(device).manual_seed(SEED)
    for n, h, v in ((16, 32, 70),) if toy else SCORE_SHAPES:
        top = ("micro", "scoring", f"{n}x{h}x{v}")
        with events.noting(*top, limit=120.0):
            hidden = torch.randn(n, h, generator=g, device=device).to(torch.bfloat16)
            weight = (torch.randn(v, h, generator=g, device=device) * (SPREAD / h**0.5)).to(torch.bfloat16)
            ids = torch.randint(v, (n,), generator=g, device=device)
            runs: dict[str, Callable[[], Any]] = {}
            logps: dict[str, torch.Tensor] = {}
            for engine in ("score", "score_dot"):
                run = _scoring(hidden, weight, ids, engine)
                with events.noting(*top, engine, limit=120.0):
                    logps[engine] = run()[0]
                    runs[engine] = run
            if len(logps) == 2:
                off = (logps["score"] - logps["score_dot"]).abs()
                events.result(*top, "difference", logp_max=float(off.max()))
            for engine, ms in _measure(runs, Clock(device), events, top, toy=toy).items():
                events.result(*top, engine, tflops=round(2.0 * n * h * v / 1e9 / ms, 1))


def _scoring(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor, engine: str) -> Callable[[], Any]:
    from grpo_kernels import linear_logprob

    def run() -> Any:
        with torch.no_grad():
            return linear_logprob(hidden, weight, ids, engine=engine, backend="triton")

    return run


def _measure(
    runs: dict[str, Callable[[], Any]], clock: Clock, events: Events, top: tuple[str, ...], *, toy: bool
) -> dict[str, float]:
    """Median milliseconds of each run, warmed up and interleaved; written under `top` too."""
    expected = {}
    for name, run in list(runs.items()):
        with events.noting(*top, name, limit=120.0):
            run()
            expected[name] = clock.time(run)
    ready = {name: run for name, run in runs.items() if name in expected}
    if not ready:
        raise Absence("nothing to measure")
    samples: dict[str, list[float]] = {}
    for so_far in interleaved(
        ready,
        clock,
        expected_ms=expected,
        before=lambda name: None,
        failed=lambda name, error: events.failed(error, *top, name),
        until=time.time() + 5.0,
        rounds=1 if toy else 20,
    ):
        samples.update(so_far)
    found = {}
    for name, values in samples.items():
        if values:
            events.result(*top, name, status="ok", ms=quantiles(values))
            found[name] = quantiles(values)["median"]
    return found
