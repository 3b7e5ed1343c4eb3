"""The cases on a GPU, the most important first; and the parts by themselves.

Parts are what the device can do, the bandwidth of the row kernels, scoring without logits, and a profile of a step.
Copies, products and kernels are queued while the device sleeps: launching a kernel of 150 microseconds takes the host
60 to 110, which would count as its time otherwise. Scoring is a whole call, timed as such.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.cases import SEED, Absence, BenchCase, make_inputs
from benchmarks.plan import ANCHORS, GOAL_CASES, gpu_cases, passes
from benchmarks.providers import build
from benchmarks.run import How, Results, Step, measure_case, measure_runs
from benchmarks.timing import Clock
from grpo_kernels import linear_logprob
from grpo_kernels.backends import choose_backend
from grpo_kernels.backends.interface import Chunk, FusedRowBackend, LogitTransform, SinglePassRowBackend
from grpo_kernels.token_loss.record import TokenLoss

SPREAD = 2.5  # standard deviation of the logits
COPY_BYTES = 2 * 2**30
SQUARE = 8192
ROWS, VOCAB = 1024, 151936
SCORE_SHAPES = ((8192, 4096, 151936), (1024, 4096, 151936), (8192, 1024, 151936))
LIMIT = 180.0  # seconds, after which a part hangs
PEER_SECONDS = 8.0  # for the rounds of a peer and its anchors; building and checking it takes about as long
PROFILED = ("main", "frozen")  # a missed goal has to be explained
TOP = 25  # kernels of a profile


class Item(NamedTuple):
    """One thing to measure: a case with some providers, or a part by itself."""

    kind: str  # "case", "profile", "ceilings", "rows" or "scoring"
    case: str = ""
    providers: tuple[str, ...] = ()


def plan(
    cases: Sequence[str] | None, providers: Sequence[str] | None, *, profiles: bool = False, parts: bool = True
) -> list[Item]:
    """The items, the most important first: the goals, what explains them, other peers, other cases.

    Args:
        cases: names of some cases; None: all.
        providers: names of some, which come with ours and the products; None: all.
        profiles: whether steps of ours are profiled.
        parts: whether the device and the row kernels are measured by themselves.
    """
    chosen = [case for case in gpu_cases() if not cases or case.name in cases]
    goals = [_items(case, providers) for case in chosen if case.name in GOAL_CASES]
    found = [of_case[0] for of_case in goals]
    if profiles:
        found += [Item("profile", of_case[0].case) for of_case in goals if of_case[0].case in PROFILED]
    if parts:
        found += [Item(kind) for kind in ("ceilings", "rows", "scoring")]
    for place in range(1, max(map(len, goals), default=0)):
        found += [item for of_case in goals for item in of_case[place : place + 1]]
    return found + [item for case in chosen if case.name not in GOAL_CASES for item in _items(case, providers)]


def _items(case: BenchCase, providers: Sequence[str] | None) -> list[Item]:
    """An item for each pass over the case; the first whatever is left in it."""
    of_passes = [tuple(x for x in names if not providers or x in providers or x in ANCHORS) for names in passes(case)]
    kept = [names for i, names in enumerate(of_passes) if i == 0 or set(names) - set(ANCHORS)]
    return [Item("case", case.name, names) for names in kept]


def run_bench(results: Results, items: Sequence[Item], *, seconds: float, flush: bool, toy: bool) -> None:
    """Measure `items` within `seconds`; what is known is in `results` at once."""
    until = time.time() + seconds
    device = torch.device("cpu" if toy else "cuda")
    if toy:
        torch.set_num_threads(1)
    how = How(
        device, "triton" if toy else "auto", one_by_one=True, flush=flush, once=toy, seconds=PEER_SECONDS, until=until
    )
    parts = {"ceilings": measure_ceilings, "rows": measure_rows, "scoring": measure_scoring}
    cases = {case.name: case.toy() if toy else case for case in gpu_cases()}
    for item in items:
        if time.time() > until:
            results.merge("not_begun", **{" ".join((item.kind, item.case)).strip(): "no time left"})
        elif item.kind == "case":
            with results.noting("cases", item.case):
                measure_case(cases[item.case], item.providers, results, how)
        elif item.kind == "profile":
            profile_step(cases[item.case], device, results, toy=toy)
        else:
            with results.noting(*(() if item.kind == "ceilings" else ("micro",)), item.kind):
                parts[item.kind](device, results, toy=toy)


def measure_ceilings(device: torch.device, results: Results, *, toy: bool = False) -> None:
    """A device-to-device copy and a square bf16 product with an fp32 result."""
    n, size = (64, 2**16) if toy else (SQUARE, COPY_BYTES)
    source = torch.empty(size // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    left, right = (torch.randn(n, n, device=device).to(torch.bfloat16) for _ in range(2))
    runs: dict[str, Callable[[], Any]] = {
        "copy": lambda: target.copy_(source),
        "matmul": lambda: torch.mm(left, right),
    }
    found = measure_runs(runs, Clock(device, flush=True, queued=True), results, ("ceilings",), once=toy)
    for name, amount, unit in (("copy", 2 * source.nbytes / 1e6, "gb_per_s"), ("matmul", 2 * n**3 / 1e9, "tflops")):
        if name in found:
            results.merge("ceilings", name, **{unit: round(amount / found[name], 1)})


def measure_rows(device: torch.device, results: Results, *, toy: bool = False) -> None:
    """The row backends on fp32 logits, as a product leaves them; bytes: each logit read once, each gradient written."""
    n, vocab = (8, 70) if toy else (ROWS, VOCAB)
    g = torch.Generator(device).manual_seed(SEED)
    logits = torch.randn(n, vocab, generator=g, device=device) * SPREAD
    ids = torch.randint(vocab, (n,), generator=g, device=device)
    out = torch.empty(n, vocab, dtype=torch.bfloat16, device=device)
    for name in ("triton", "torch"):
        top = ("micro", "rows", name)
        with results.noting(*top, seconds=LIMIT):
            backend, _ = choose_backend(name, device)
            runs, sizes = _row_runs(backend, logits, ids, out)
            with results.noting(*top, "fused"):
                runs |= _fused_runs(backend, logits, ids, out)
            found = measure_runs(runs, Clock(device, flush=True, queued=True), results, top, once=toy)
            for run, ms in found.items():
                gigabytes = sizes[run] * n * vocab / 1e9
                results.merge(*top, run, bytes_per_logit=sizes[run], gb_per_s=round(1e3 * gigabytes / ms, 1))


def _row_runs(
    backend: Any, logits: Tensor, ids: Tensor, out: Tensor
) -> tuple[dict[str, Callable[[], Any]], dict[str, int]]:
    """What to run, and the least bytes a logit it moves."""
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


def _fused_runs(backend: Any, logits: Tensor, ids: Tensor, out: Tensor) -> dict[str, Callable[[], Any]]:
    if not (isinstance(backend, FusedRowBackend) and isinstance(backend, SinglePassRowBackend)):
        raise Absence("this backend does not fuse")
    ones = torch.ones_like(logits[:, 0])
    loss = TokenLoss(
        surrogate="clipped", kl=None, corrects_kl=False, advantages=ones, d_logps=None, weights=ones / len(ones),
        old=-2.1 * ones, ref=None, gate=None, constants=(0.8, 1.2, math.inf), beta=0.0, d_entropy=0.0,
    )  # fmt: skip
    transform = LogitTransform()
    return {
        "fused": lambda: backend.fused(Chunk(logits, ids, transform), loss, out),
        "fused_no_gradient": lambda: backend.fused(Chunk(logits, ids, transform), loss, None),
        "single_pass": lambda: backend.single_pass(Chunk(logits, ids, transform), out, entropy=True),
    }


def measure_scoring(device: torch.device, results: Results, *, toy: bool = False) -> None:
    """``score_dot`` against ``score``: the same numbers, without and with logits in memory."""
    g = torch.Generator(device).manual_seed(SEED)
    for n, h, v in ((16, 32, 70),) if toy else SCORE_SHAPES:
        top = ("micro", "scoring", f"{n}x{h}x{v}")
        with results.noting(*top, seconds=LIMIT):
            hidden = torch.randn(n, h, generator=g, device=device).to(torch.bfloat16)
            weight = (torch.randn(v, h, generator=g, device=device) * (SPREAD / h**0.5)).to(torch.bfloat16)
            ids = torch.randint(v, (n,), generator=g, device=device)
            runs: dict[str, Callable[[], Any]] = {}
            logps: dict[str, Tensor] = {}
            for engine in ("score", "score_dot"):
                run = _scoring(hidden, weight, ids, engine)
                with results.noting(*top, engine):
                    logps[engine] = run()[0]
                    runs[engine] = run
            if len(logps) == 2:
                off = (logps["score"] - logps["score_dot"]).abs()
                results.merge(*top, "difference", logp_max=float(off.max()))
            for engine, ms in measure_runs(runs, Clock(device), results, top, once=toy).items():
                results.merge(*top, engine, tflops=round(2.0 * n * h * v / 1e9 / ms, 1))


def _scoring(hidden: Tensor, weight: Tensor, ids: Tensor, engine: str) -> Callable[[], Any]:
    def run() -> Any:
        with torch.no_grad():
            return linear_logprob(hidden, weight, ids, engine=engine, backend="triton")

    return run


def profile_step(case: BenchCase, device: torch.device, results: Results, *, toy: bool = False) -> None:
    """One step of ours on `case`: its kernels by time, and how much of the step is none of them."""
    path = ("profile", case.name)
    with results.noting(*path, seconds=LIMIT):
        inputs = make_inputs(case, device)
        step = Step(build("ours", inputs, "triton" if toy else "auto"))
        clock = Clock(device)
        for _ in range(3):
            inputs.clear_gradients()
            ms = clock.time(step)
        inputs.clear_gradients()
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if clock.on_gpu else [])
        with profile(activities=activities) as prof:
            step()
            if clock.on_gpu:
                torch.cuda.synchronize()
        where = "CUDA" if clock.on_gpu else "CPU"  # an operation's own entry counts its kernels again
        averages = [x for x in prof.key_averages() if str(x.device_type).endswith(where)]
        rows = [row for x in averages if (row := _row(x, clock.on_gpu))["ms"] > 0]
        rows.sort(key=lambda x: -x["ms"])
        total = sum(x["ms"] for x in rows)
        results.merge(
            *path, status="ok", step_ms=round(ms, 3), kernels_ms=round(total, 3), distinct=len(rows), kernels=rows[:TOP]
        )
        inputs.clear_gradients()


def _row(average: Any, on_gpu: bool) -> dict[str, Any]:
    microseconds = average.self_device_time_total if on_gpu else average.self_cpu_time_total
    return {"name": str(average.key)[:160], "calls": average.count, "ms": round(microseconds / 1e3, 4)}
