"""What kept sets cost: operations of the kept ids, not of the vocabulary, within the workspace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import Run, linear_logprob
from tests.support.measure import AllocationWatcher, count_flops

N, H, V, K = 24, 16, 500, 8


def uniform(n: int = N, k: int = K) -> dict[str, Tensor]:
    """n positions, k ids kept at each."""
    kept = torch.rand(n, V).argsort(-1)[:, :k].contiguous()
    return {
        "hidden": torch.randn(n, H).requires_grad_(),
        "head": torch.randn(V, H).requires_grad_(),
        "ids": kept[:, 0],
        "kept_ids": kept,
    }


def test_flops() -> None:
    """2NKH forward, and 2NKH for each of d hidden and d weight, of the positions that have any
    gradient."""
    product, given = 2 * N * K * H, uniform()
    frozen = {**given, "head": given["head"].detach()}
    up = torch.ones(N)
    half = torch.where(torch.arange(N) < N // 2, 1.0, 0.0)
    for args, upstream, want in (
        (given, None, 1),
        (given, up, 3),
        (frozen, up, 2),
        (given, half, 2),
        (given, 0 * up, 1),
    ):

        def run(args: Any = args, upstream: Tensor | None = upstream) -> None:
            logps = linear_logprob(**args, run=Run(workspace_bytes=20_000)).logps
            if upstream is not None:
                logps.backward(upstream)

        assert count_flops(run) == want * product


def test_flops_of_ragged_sets_go_with_their_sizes() -> None:
    """One large set does not make the others pay: at most twice what the ids kept would cost."""
    given = uniform(n=64, k=256)
    sizes = torch.randint(2, 6, (64,))
    sizes[7] = 256
    given["kept_ids"] = torch.where(torch.arange(256) < sizes[:, None], given["kept_ids"], -1)
    flops = count_flops(lambda: linear_logprob(**given))
    assert 1 <= flops / (2 * H * int(sizes.sum())) <= 2
    assert flops < 2 * 64 * 256 * H / 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ragged", [False, True])
def test_memory(dtype: torch.dtype, ragged: bool) -> None:
    """Within the workspace, beside 8 bytes an entry; of the vocabulary's size is nothing but d
    weight."""
    n, h, v, k, budget = 256, 32, 20_000, 40, 200_000
    kept = torch.randint(0, v, (n, k), dtype=torch.int32)
    if ragged:
        kept[torch.arange(k) > torch.randint(k, (n, 1))] = -1
    hidden, weight = torch.randn(n, h).to(dtype).requires_grad_(), torch.randn(v, h).to(dtype)
    entries, rows, states = 8 * n * k, 60 * n, n * h * dtype.itemsize
    run = Run(workspace_bytes=budget)
    assert n * k * h * 4 > 6 * budget  # all of the gathered rows would not fit
    for trains in (False, True):
        weight = weight.detach().requires_grad_(trains)
        with AllocationWatcher() as watch:
            scores = linear_logprob(hidden, weight, kept[:, 0], kept_ids=kept, run=run)
            assert watch.peak <= budget + entries + rows
            assert watch.largest < v * h / 8
            (scores.logps.sum() + scores.entropies.sum()).backward()
        head = v * h * (4 + (dtype.itemsize if dtype.itemsize == 2 else 0)) if trains else 0
        assert watch.peak <= budget + entries + rows + 2 * states + head
        assert watch.largest == v * h if trains else watch.largest < v * h / 8
    with torch.no_grad(), AllocationWatcher() as watch:
        linear_logprob(hidden, weight, kept[:, 0], kept_ids=kept, run=run)
    assert watch.peak <= budget + rows  # nothing is kept for a backward that cannot come
