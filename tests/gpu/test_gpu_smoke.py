"""The smoke test of ``python -m benchmarks.gpu``: kernels, engines, a bandwidth.

All but the bandwidth is held against float64, at V 9001 (whole steps of a tile and a tail; rows
that are not aligned; all that a head may have), 1088 and 151936. The sanitizers watch the small
ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from benchmarks.timing import Clock
from grpo_kernels.backends import Chunk, Coefficients, choose_backend
from grpo_kernels.backends.triton_rows import rows as row_work
from tests.support.case_builder import make_case
from tests.support.on_device import run_on
from tests.support.reference import reference_loss
from tests.support.row_cases import PLAIN, make_loss, make_transform, statistics, tensors_of
from tests.support.row_truth import FLOOR, U, divergence, gradient, loss_stats, rounding, truth
from tests.support.tolerance import assert_matches

pytestmark = pytest.mark.unit

Compared = tuple[str, Tensor, Tensor, Tensor | float]  # name, ours, float64's, error allowed
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ROWS = 16
VOCABS = (9001, 1088, 151936)
CPU_VOCABS = {9001: 1100, 1088: 1088}  # of Triton's interpreter
CPU_DTYPES = (FP32, FP16)  # the interpreter has no exact bf16


# `reference_grad` is `grad` with a reference. Those of `WRITES` also write over the logits.
KERNELS = ("stats", "diverge", "grad", "fused", "reference_grad", "scale")
WRITES = ("grad", "fused", "reference_grad", "scale")


def padded(x: Tensor, dtype: torch.dtype = FP32) -> Tensor:
    """`x` (n, V) in rows that are as far apart as the engine's, with NaN between them."""
    width = -(-(x.shape[1] + 1) // 64) * 64
    rows = torch.full((len(x), width), math.nan, dtype=dtype, device=x.device)
    rows[:, : x.shape[1]] = x
    return rows[:, : x.shape[1]]


def compared(
    kernel: str, device: torch.device, vocab: int, dtype: torch.dtype, in_place: bool
) -> Iterator[Compared]:
    """What a kernel makes of rows of two heads, whose logits are rounded to `dtype`."""
    torch.manual_seed(vocab)
    kernels = choose_backend("triton", device)
    is_odd = vocab % 16 != 0  # then with all that a head may have
    raw, other = 3.0 * torch.randn(2, ROWS, vocab, device=device)
    a, b, c = torch.randn(3, ROWS, device=device)
    # the first and the last among them; every other target is certain
    ids = torch.linspace(0, vocab - 1, ROWS).long().to(device)
    raw[torch.arange(0, ROWS, 2), ids[::2]] += 20.0
    rounded_to = None if dtype == FP32 else dtype
    transform = make_transform(ROWS, vocab, 3 if is_odd else 0, rounded_to, str(device))
    chunk, beta = Chunk(padded(raw), ids, transform), 0.5 if is_odd else 1.0
    pair = replace(chunk, reference=Chunk(padded(other), ids, PLAIN), jsd_beta=beta)
    out = chunk.logits if in_place else padded(torch.zeros_like(raw), dtype)
    if kernel == "scale":
        x, factor = raw.clone(), torch.tensor(0.3, device=device)
        want = raw.double() * factor.double()
        to = x if in_place else torch.empty_like(x, dtype=dtype)
        kernels.scale(x, factor, to)
        yield "product", to, want, rounding(want, FP32) + rounding(want, dtype)
        return
    stats = statistics(kernels, pair if kernel in ("diverge", "reference_grad") else chunk)
    at, found = truth(raw, ids, transform), tensors_of(stats)
    if kernel == "stats":
        for name, want in at.want.items():
            yield name, found[name], want, at.bound[name]
        yield "is_top1", found["is_top1"], (at.logs.argmax(1) == ids).double(), 0.5
        return
    of_pair = divergence(at, truth(other, ids, PLAIN), beta)
    if kernel == "diverge":
        yield "divergence", found["divergence value"], of_pair.value, of_pair.bound
        return
    if kernel == "fused":
        loss = make_loss(stats.logps, 9)
        fused = kernels.fused(chunk, loss, out)
        terms = loss_stats(loss, fused.logps, fused.loss_stats["log_ratio"])
        for term, (want, size) in terms.items():
            yield term, fused.loss_stats[term], want, 8 * U * size
        a, b = fused.loss_stats["d_logp"], torch.full_like(a, loss.d_entropy)
    elif kernel == "grad":
        kernels.grad(chunk, stats, Coefficients(a, b), out)
    else:
        kernels.grad(pair, stats, Coefficients(a, b, c), out)
    want, bound = gradient(at, ids, a, b)
    if kernel == "reference_grad":
        more = c[:, None] * of_pair.gradient
        bound = bound + c.abs()[:, None] * of_pair.gradient_bound
        bound = bound + 4 * U * (want.abs() + more.abs())
        want = want + more
    yield "d logits", out, want, bound + rounding(want, out.dtype)
    beyond = out.as_strided((ROWS, out.stride(0) - vocab), out.stride(), vocab)
    yield "padding", beyond.isnan(), torch.ones_like(beyond, dtype=torch.float64), 0.5


def worst(found: Iterator[Compared]) -> tuple[float, str]:
    """The largest error as a share of what is allowed, and what has it."""
    shares = []
    for name, got, want, bound in found:
        share = ((got.double() - want).abs() / (bound + FLOOR)).nan_to_num(nan=torch.inf)
        shares.append((share.max().item(), name))
    return max(shares)


FORMS = [*itertools.product(KERNELS, VOCABS, (FP32, BF16, FP16))]


@pytest.mark.parametrize(
    ("kernel", "vocab", "dtype"), FORMS, ids=lambda x: str(x).removeprefix("torch.")
)
def test_kernel(device, kernel, vocab, dtype, record_property, as_in_use):
    if device.type == "cpu":
        if vocab not in CPU_VOCABS or dtype not in CPU_DTYPES:
            pytest.skip("too much for Triton's interpreter, or bf16, which it rounds otherwise")
        vocab = CPU_VOCABS[vocab]
    for in_place in (False, True) if dtype == FP32 and kernel in WRITES else (False,):
        share, name = worst(compared(kernel, device, vocab, dtype, in_place))
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
    assert_matches(*found, reference, case)


def test_bandwidth(gpu: torch.device, record_property: Any, as_in_use: None) -> None:
    """GB/s at which `stats` reads fp32 logits that are not in the cache."""
    kernels, logits = choose_backend("triton", gpu), torch.randn(1024, VOCABS[-1], device=gpu)
    chunk = Chunk(logits, torch.zeros(len(logits), dtype=torch.int64, device=gpu), PLAIN)
    clock = Clock(gpu, flush=True, queued=True)
    ms = [clock.time(lambda: kernels.stats(chunk, entropy=True)) for _ in range(25)]
    record_property("gb_per_s", round(logits.nbytes / 1e6 / median(ms[2:]), 1))


def test_a_wrong_kernel_is_noticed() -> None:
    """An element in a row's tail that is off by a hundredth; one that is written past its end."""
    launch, cpu = row_work.launch_grad, torch.device("cpu")

    def wrong(place: int) -> Any:
        def launched(chunk: Any, *args: Any, **kwargs: Any) -> Any:
            out = args[2]
            launch(chunk, *args, **kwargs)
            if place < out.shape[1]:
                out[-1, place] *= 1.01
            else:
                out.as_strided((1,), (1,), place)[:] = 0.0

        return launched

    for place in (1099, 1100):
        with mock.patch.object(row_work, "launch_grad", wrong(place)):
            assert worst(compared("grad", cpu, 1100, FP32, False))[0] > 1, place
