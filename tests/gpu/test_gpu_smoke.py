"""The smoke test of ``python -m benchmarks.gpu``: kernels, engines, a bandwidth.

All but the bandwidth is held against float64, at V 9001 (whole steps of a tile and a tail; rows
that are not aligned; all that a head may have), 1088 and 151936. The sanitizers watch the small
ones.
"""

from __future__ import annotations

import importlib
import itertools
import math
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from benchmarks.timing import Clock
from grpo_kernels.backends import choose_backend, triton_rows
from grpo_kernels.backends.interface import (
    STATISTICS,
    Chunk,
    LogitTransform,
    RowStats,
    Teacher,
)
from grpo_kernels.backends.triton_rows import rows as row_work
from grpo_kernels.token_loss.record import TokenLoss
from tests.support.case_builder import make_case
from tests.support.on_device import run_on
from tests.support.reference import reference_loss
from tests.support.row_cases import statistics
from tests.support.tolerance import assert_matches, bounds_of

pytestmark = pytest.mark.unit

# name, ours, float64's, its size, error allowed of that
Compared = tuple[str, Tensor, Tensor, Tensor | float, float]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
STATISTIC = 2e-5  # allowed of a statistic, of 1 + its size
# allowed of d logits by their dtype: half a unit and more
GRADIENT = {FP32: 1e-4, BF16: 5e-3, FP16: 6e-4}
SCALE = 1024.0  # of the coefficients, so that gradients of a long row are normal numbers of fp16
ROWS = 16
VOCABS = (9001, 1088, 151936)
CPU_VOCABS = {9001: 1100, 1088: 1088}  # of Triton's interpreter
CPU_DTYPES = (FP32, FP16)  # the interpreter has no exact bf16
ROOT = Path(__file__).parents[2]


class Rows:
    """Rows of two heads' logits for one kernel, and what float64 makes of them.

    Attributes:
        chunk, pair: logits (n, V) in fp32, rounded to `dtype`; the same with the teacher's beside
            them.
        a, b, c: (n,) d loss / d logp, / d entropy and / d divergence.
        out: where the gradient goes: the chunk's logits if `in_place`, else rows of `dtype`.
        raw, all_logps, logps, entropies, divergence: float64, a graph from `raw` (n, V) on.
        size: (n, V) what terms of a gradient are made of.
    """

    def __init__(
        self, device: torch.device, vocab: int, dtype: torch.dtype, in_place: bool
    ) -> None:
        self.device, self.vocab, self.dtype = device, vocab, dtype
        torch.manual_seed(vocab)
        normal = lambda *shape: torch.randn(shape, device=device)  # noqa: E731
        raw, teacher_raw = 3.0 * normal(ROWS, vocab), 3.0 * normal(ROWS, vocab)
        self.a, self.b, self.c = SCALE * normal(3, ROWS)
        self.old_gap, self.ref_gap = 0.2 * normal(2, ROWS)
        transform, beta = LogitTransform(rounded_to=None if dtype == FP32 else dtype), 1.0
        if vocab % 16:  # all that a head may have
            inv_t, bias, beta = 1.0 + 0.1 * normal(ROWS, 1), normal(vocab), 0.5
            transform = replace(transform, scale=1.5, softcap=6.0, inv_temperature=inv_t, bias=bias)
        # the first and the last among them
        ids = torch.linspace(0, vocab - 1, ROWS).long().to(device)
        raw[torch.arange(0, ROWS, 2), ids[::2]] += 20.0  # every other target is certain
        teacher = Teacher(padded(teacher_raw), LogitTransform(), beta)
        self.pair = Chunk(padded(raw), ids, transform, teacher=teacher)
        self.chunk = replace(self.pair, teacher=None)
        self.out = self.chunk.logits if in_place else padded(torch.zeros_like(raw), dtype)

        self.raw = raw.double().requires_grad_()
        self.all_logps = log_probs(self.raw, transform)
        self.logps = self.all_logps.gather(1, ids[:, None])[:, 0]
        probs = self.all_logps.exp()
        teacher_logps = log_probs(teacher_raw.double(), LogitTransform())
        self.entropies = -(probs * self.all_logps).sum(1)
        self.divergence = divergence(self.all_logps, teacher_logps, beta)
        self.size = probs.detach() + teacher_logps.exp()

    def statistics(self, kernels: Any) -> RowStats:
        """Ours, of the pair."""
        return statistics(kernels, self.pair, ())

    def gradient(self, loss: Tensor) -> Iterator[Compared]:
        """`out` against d loss.sum() / d raw; the padding stays."""
        (want,) = torch.autograd.grad(loss.sum(), self.raw, retain_graph=True)
        size = want.abs() + SCALE * self.size + torch.finfo(self.out.dtype).smallest_normal
        yield "d logits", self.out, want, size, GRADIENT[self.out.dtype]
        beyond = self.out.as_strided(
            (ROWS, self.out.stride(0) - self.vocab), self.out.stride(), self.vocab
        )
        yield "padding", beyond.isnan(), torch.ones_like(beyond, dtype=torch.float64), 1.0, 0.5

    def of(self, stats: RowStats) -> Iterator[Compared]:
        """The statistics that every kernel returns."""
        assert stats.entropies is not None
        yield "logps", stats.logps, self.logps, 1.0 + self.logps.abs(), STATISTIC
        yield "entropies", stats.entropies, self.entropies, 1.0 + self.entropies.abs(), STATISTIC

    def token_loss(self) -> tuple[TokenLoss, Tensor, float]:
        """A clipped loss with KL: for the kernel; (n,) in float64; and d loss / d entropy."""
        old, ref = (self.logps.detach().float() + gap for gap in (self.old_gap, self.ref_gap))
        advantages, beta, bonus = self.a / SCALE, 0.04, -0.01 * SCALE
        loss = TokenLoss(
            surrogate="clipped", constants=(0.8, 1.2, math.inf), kl="k3", corrects_kl=False,
            advantages=advantages, d_logps=None, weights=torch.full_like(advantages, SCALE),
            old=old, ref=ref, gate=None, beta=beta, d_entropy=bonus,
        )  # fmt: skip
        ratio, ahead = (self.logps - old.double()).exp(), ref.double() - self.logps
        policy = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        return loss, SCALE * (policy + beta * (ahead.exp() - ahead - 1.0)), bonus


def log_probs(raw: Tensor, transform: LogitTransform) -> Tensor:
    """log softmax of the scaled logits (n, V), in float64; a rounding has the slope 1."""
    x = raw if transform.bias is None else raw + transform.bias
    if transform.rounded_to is not None:
        x = x + (x.detach().float().to(transform.rounded_to).double() - x.detach())
    x = transform.scale * x
    if transform.softcap is not None:
        x = transform.softcap * torch.tanh(x / transform.softcap)
    return (x * transform.inv_temperature).log_softmax(1)


def divergence(logps: Tensor, teacher_logps: Tensor, beta: float) -> Tensor:
    """(n,): KL(student || teacher) for beta = 1; the Jensen-Shannon divergence between 0 and 1."""
    if beta == 1.0:
        return (logps.exp() * (logps - teacher_logps)).sum(1)
    mixture = torch.logaddexp(logps + math.log(1.0 - beta), teacher_logps + math.log(beta))
    of_student, of_teacher = (x.exp() * (x - mixture) for x in (logps, teacher_logps))
    return ((1.0 - beta) * of_student + beta * of_teacher).sum(1)


def padded(x: Tensor, dtype: torch.dtype = FP32) -> Tensor:
    """`x` (n, V) in rows that are as far apart as the engine's, with NaN between them."""
    rows = torch.full(
        (len(x), -(-(x.shape[1] + 1) // 64) * 64), math.nan, dtype=dtype, device=x.device
    )
    rows[:, : x.shape[1]] = x
    return rows[:, : x.shape[1]]


def compare_stats(case: Rows, kernels: Any) -> Iterator[Compared]:
    stats = kernels.stats(case.chunk, entropy=True, extras=STATISTICS)
    yield from case.of(stats)
    squares = (2.0 * case.all_logps).logsumexp(1)
    found = stats.extras["log_sum_sq_probs"]
    yield "log_sum_sq_probs", found, squares, 1.0 + squares.abs(), STATISTIC
    is_top1 = (case.all_logps.argmax(1) == case.chunk.ids).double()
    yield "is_top1", stats.extras["is_top1"], is_top1, 1.0, 0.5


def compare_diverge(case: Rows, kernels: Any) -> Iterator[Compared]:
    found = case.statistics(kernels).divergence
    assert found is not None
    yield "divergence", found.value, case.divergence, 1.0 + case.divergence, STATISTIC


def compare_grad(case: Rows, kernels: Any) -> Iterator[Compared]:
    stats = kernels.stats(case.chunk, entropy=True)
    kernels.grad(case.chunk, stats, case.a, case.b, case.out)
    yield from case.gradient(case.a * case.logps + case.b * case.entropies)


def compare_fused(case: Rows, kernels: Any) -> Iterator[Compared]:
    loss, want, bonus = case.token_loss()
    stats = kernels.fused(case.chunk, loss, case.out)
    yield from case.of(stats)
    yield "loss", stats.terms["loss"], want, 4.0 * SCALE, STATISTIC
    yield from case.gradient(want + bonus * case.entropies)


def compare_teacher_grad(case: Rows, kernels: Any) -> Iterator[Compared]:
    kernels.grad(case.pair, case.statistics(kernels), case.a, case.b, case.out, case.c)
    of_student = case.a * case.logps + case.b * case.entropies
    yield from case.gradient(of_student + case.c * case.divergence)


def compare_scale(case: Rows, kernels: Any) -> Iterator[Compared]:
    x, factor = case.raw.detach().float(), torch.tensor(0.3, device=case.device)
    want = case.raw.detach() * factor.double()
    out = x if case.out is case.chunk.logits else torch.empty_like(x, dtype=case.dtype)
    kernels.scale(x, factor, out)
    size = want.abs() + torch.finfo(case.dtype).smallest_normal
    yield "product", out, want, size, GRADIENT[case.dtype]


# By the name of the kernel; `teacher_grad` is `grad` with a teacher. Those of `WRITES` write
# a gradient, also over the logits.
KERNELS: dict[str, Callable[[Rows, Any], Iterator[Compared]]] = {
    "stats": compare_stats,
    "diverge": compare_diverge,
    "grad": compare_grad,
    "fused": compare_fused,
    "teacher_grad": compare_teacher_grad,
    "scale": compare_scale,
}
WRITES = ("grad", "fused", "teacher_grad", "scale")


def triton_kernels(device: torch.device) -> Any:
    """The Triton backend; an error says why there is none."""
    return choose_backend("triton", device)[0]


def ways(kernel: str, dtype: torch.dtype) -> tuple[bool, ...]:
    """Whether the gradient is written in the place of the logits, for each way that there is."""
    return (False, True) if dtype == FP32 and kernel in WRITES else (False,)


def worst(compared: Iterator[Compared]) -> tuple[float, str]:
    """The largest error as a share of what is allowed, and what has it."""
    shares = []
    for name, got, want, size, allowed in compared:
        share = ((got.double() - want) / (allowed * size)).detach().abs().nan_to_num(nan=torch.inf)
        shares.append((share.max().item(), name))
    return max(shares)


FORMS = [*itertools.product(KERNELS, VOCABS, (FP32, BF16, FP16))]


@pytest.mark.parametrize(
    ("kernel", "vocab", "dtype"), FORMS, ids=lambda x: str(x).removeprefix("torch.")
)
def test_kernel(
    device: torch.device,
    kernel: str,
    vocab: int,
    dtype: torch.dtype,
    record_property: Any,
    as_in_use: None,
) -> None:
    if device.type == "cpu":
        if vocab not in CPU_VOCABS or dtype not in CPU_DTYPES:
            pytest.skip("too much for Triton's interpreter, or bf16, which it rounds otherwise")
        vocab = CPU_VOCABS[vocab]
    for in_place in ways(kernel, dtype):
        case = Rows(device, vocab, dtype, in_place)
        share, name = worst(KERNELS[kernel](case, triton_kernels(device)))
        record_property("error", f"{share:.2g} of what is allowed, in {name}")
        assert share <= 1, f"{share:.2g} of what is allowed, in {name}"


@pytest.mark.parametrize("vocab", VOCABS[1:])
@pytest.mark.parametrize("engine", ["score", "frozen", "one_pass", "two_pass", "lean"])
def test_engine(device: torch.device, engine: str, vocab: int, as_in_use: None) -> None:
    """A whole call, and its backward if any, against all logits in float64."""
    if device.type == "cpu" and vocab not in CPU_VOCABS:
        pytest.skip("too much for Triton's interpreter")
    frozen = {"score": ("weight", "hidden"), "frozen": ("weight",)}.get(engine, ())
    h, dtype = (128, BF16) if device.type == "cuda" else (16, FP32)
    case = make_case(f"smoke {engine}", b=4, t=8, h=h, v=vocab, dtype=dtype, frozen=frozen)
    reference = reference_loss(case)
    found = run_on(case, device, engine, "triton")
    assert_matches(*found, reference, case, bounds_of(reference, case))


def test_bandwidth(gpu: torch.device, record_property: Any, as_in_use: None) -> None:
    """GB/s at which `stats` reads fp32 logits that are not in the cache."""
    kernels, logits = triton_kernels(gpu), torch.randn(1024, VOCABS[-1], device=gpu)
    chunk = Chunk(logits, torch.zeros(len(logits), dtype=torch.int64, device=gpu), LogitTransform())
    clock = Clock(gpu, flush=True, queued=True)
    ms = [clock.time(lambda: kernels.stats(chunk, entropy=True)) for _ in range(25)]
    record_property("gb_per_s", round(logits.nbytes / 1e6 / median(ms[2:]), 1))


def kernel_functions() -> set[str]:
    """Every function of the backend that Triton compiles and that is named a kernel."""
    modules = [
        importlib.import_module(f"{triton_rows.__name__}.{x.name}")
        for x in pkgutil.iter_modules(triton_rows.__path__)
    ]
    return {name for module in modules for name in vars(module) if name.endswith("_kernel")}


def test_a_wrong_kernel_is_noticed() -> None:
    """An element in a row's tail that is off by a hundredth; one that is written past its end."""
    launch, cpu = row_work.launch_grad, torch.device("cpu")

    def wrong(place: int) -> Any:
        def launched(chunk: Any, *args: Any, **kwargs: Any) -> Any:
            out = args[3]
            launch(chunk, *args, **kwargs)
            if place < out.shape[1]:
                out[-1, place] *= 1.01
            else:
                out.as_strided((1,), (1,), place)[:] = 0.0

        return launched

    for place in (1099, 1100):
        with mock.patch.object(row_work, "launch_grad", wrong(place)):
            compared = compare_grad(Rows(cpu, 1100, FP32, False), triton_kernels(cpu))
            assert worst(compared)[0] > 1, place


PRETENDED = """
from types import SimpleNamespace
import pytest, triton
from triton.backends.compiler import GPUTarget
from benchmarks.aot.launches import caught
from tests.gpu import test_gpu_smoke as smoke
from tests.support import pretend_gpu
hopper = GPUTarget("cuda", 90, 32)
triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: hopper))
gpu = pretend_gpu.GPU
with (
    pytest.MonkeyPatch.context() as patch,
    pretend_gpu.pretended(patch, memory=False),
    caught() as launches,
):
    kernels = smoke.triton_kernels(gpu)
    for name, vocab, dtype in smoke.FORMS:
        for in_place in smoke.ways(name, dtype):
            smoke.worst(smoke.KERNELS[name](smoke.Rows(gpu, vocab, dtype, in_place), kernels))
print(*sorted({x.kernel.__name__ for x in launches}))
"""


def test_the_sizes_of_a_gpu_launch_every_kernel() -> None:
    """On tensors that say they are on a GPU. A new kernel that no check launches fails here."""
    plain = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PRETENDED], cwd=ROOT, env=plain, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(done.stdout.split()) == kernel_functions()
