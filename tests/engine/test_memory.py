"""The workspace is bounded, whatever the number of tokens and the vocabulary; docs/dev/design.md,
"Memory", has the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels
from grpo_kernels import LoRA, Run, linear_logps
from tests.support.flat import flat
from tests.support.measure import AllocationWatcher
from tests.support.pretend_gpu import OnGPU, pretended

MIB = 2**20


def inputs(n: int, h: int, v: int, dtype: torch.dtype, zero: float) -> tuple[torch.Tensor, ...]:
    advantages = torch.ones(8)
    advantages[: int(8 * zero)] = 0.0
    return (
        torch.randn(8, n // 8, h).to(dtype).requires_grad_(),
        torch.randn(v, h).to(dtype).requires_grad_(),
        torch.randint(v, (8, n // 8)),
        torch.ones(8, n // 8),
        advantages,
    )


SHAPES = [  # N, H, V, workspace, dtype, share of sequences with advantage 0
    (2048, 32, 8192, 4 * MIB, torch.float32, 0.0),
    (1024, 64, 30011, 8 * MIB, torch.float32, 0.5),
    (2048, 128, 50257, 12 * MIB, torch.bfloat16, 0.0),
    (1024, 24, 12345, 4 * MIB, torch.float64, 0.0),
]


@pytest.mark.parametrize(("n", "h", "v", "workspace", "dtype", "zero"), SHAPES)
@pytest.mark.parametrize("engine", ["one_pass", "two_pass"])
def test_peak_and_largest_allocation(n, h, v, workspace, dtype, zero, engine):
    args = inputs(n, h, v, dtype, zero)
    size = 8 if dtype == torch.float64 else 4
    with AllocationWatcher() as watch:
        out = grpo_kernels.grpo_loss(*args, run=Run(engine=engine, workspace_bytes=workspace))
        forward_peak = watch.peak
        out.loss.backward()
    assert watch.largest < n * v / 8

    stored = int(n * (1 - zero)) * h * size + v * h * size
    vectors = 40 * n * size  # per-token numbers
    bound = workspace + vectors + (stored if engine == "one_pass" else 0)
    assert forward_peak <= bound
    # the chunk is as large as the budget lets it be: within 5% of the formula
    assert forward_peak >= 0.95 * (bound - vectors) - 2 * v * size
    returned = n * h * dtype.itemsize + v * h * dtype.itemsize
    assert watch.peak <= workspace + vectors + stored + returned


def test_scoring_at_the_default_budget_holds_no_eighth_of_the_logits() -> None:
    n, h, v = 8192, 4, 151936
    hidden, weight, ids = torch.randn(n, h), torch.randn(v, h), torch.randint(v, (n,))
    with AllocationWatcher() as watch:
        grpo_kernels.linear_logps(hidden, weight, ids)
    assert watch.largest < n * v / 8
    assert watch.peak <= 512 * MIB + 40 * n * 4


# The gradient by slices of the vocabulary (`lean`): beyond what the caller holds a backward takes
# the workspace, d hidden (n, H) in fp32, the gradients it returns, and some forty numbers a token.

SLICED = [  # N, H, V, workspace
    (2048, 32, 8192, 4 * MIB),
    (64, 512, 8000, 4 * MIB),  # the slice of d weight takes most
    (2048, 512, 1000, 4 * MIB),  # all hidden states alone would take the budget
    (10000, 16, 500, 2 * MIB),  # more rows than are taken at a time
]
# of torch.autocast("cuda", enabled=False)
PRETENDED = pytest.mark.filterwarnings("ignore:.*CUDA is not available")


def head_of(n: int, h: int, v: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(n, h).to(dtype), torch.randn(v, h).to(dtype), torch.randint(v, (n,))


def peak_of_backward(leaves: list[Tensor], ids: Tensor, budget: int, **options: Any) -> int:
    """The most bytes that the backward makes at once, with those it returns."""
    hidden, weight = (x.requires_grad_() for x in leaves)
    options = {"engine": "lean", "workspace_bytes": budget, "entropy": False, **options}
    logps = flat(linear_logps)(hidden, weight, ids, **options).logps
    upstream = torch.ones_like(logps)
    with AllocationWatcher() as watch:
        torch.autograd.backward(logps, upstream)
    return watch.peak


@PRETENDED
@pytest.mark.slow
@pytest.mark.parametrize("where", ["torch", "cpp", "a GPU"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "h", "v", "budget"), SLICED)
def test_stays_within_its_budget(n, h, v, budget, dtype, where, monkeypatch):
    """On a GPU with 16-bit d logits beside the logits, and rows in whole tiles."""
    hidden, weight, ids = head_of(n, h, v, dtype)
    if where == "a GPU":
        with pretended(monkeypatch):
            there = [OnGPU(hidden), OnGPU(weight)]
            peak = peak_of_backward(there, OnGPU(ids), budget, backend="torch")
    else:
        peak = peak_of_backward([hidden, weight], ids, budget, backend=where)
    stored = n * h * 4 + v * h * dtype.itemsize
    assert peak <= budget + stored + n * h * dtype.itemsize + 40 * n * 4
    assert peak >= 0.6 * min(budget, 4 * n * v) + stored  # and makes use of it


def test_an_adapter_is_counted() -> None:
    n, h, v, r, budget = 2048, 64, 4000, 64, 6 * MIB
    hidden, weight, ids = head_of(n, h, v, torch.bfloat16)
    a, b = torch.randn(r, h).requires_grad_(), torch.randn(v, r).requires_grad_()
    peak = peak_of_backward([hidden, weight], ids, budget, lora=LoRA(a, b))
    # sums; hidden's gradient, and of the adapter's input
    of_rows = n * (h + r) * 4 + n * h * (2 + 2 + 4) + n * r * 4
    assert peak <= budget + of_rows + v * h * 2 + v * r * 4 + 40 * n * 4
