"""torch.compile without graph breaks or recompilation, and autocast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from grpo_kernels import Run, grpo_loss, linear_logprob
from tests.support.on_device import BACKENDS, gradients, leaves, relative, same_bits

MOST_GRAPHS = 2  # the first length by itself, then any
LENGTHS = range(3, 23)


def linear(hidden: Tensor, weight: Tensor, ids: Tensor, advantages: Tensor) -> Tensor:
    scores = linear_logprob(hidden, weight, ids)
    assert scores.logps is not None
    assert scores.entropies is not None
    return (scores.logps * advantages[:, None]).sum() - 0.01 * scores.entropies.sum()


def loss(hidden: Tensor, weight: Tensor, ids: Tensor, advantages: Tensor) -> Tensor:
    return grpo_loss(hidden, weight, ids, None, advantages).loss


@pytest.mark.parametrize("function", [linear, loss])
def test_compiles_whole_for_all_lengths(
    device: torch.device, function: Callable[..., Tensor], as_in_use: None
) -> None:
    """One graph for the first length and one for all others, without breaks; the results are the eager ones."""
    on_gpu = device.type == "cuda"
    h, v = (256, 32_003) if on_gpu else (16, 70)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(function, fullgraph=True, backend="inductor" if on_gpu else "eager")
    for t in LENGTHS if on_gpu else LENGTHS[:5]:
        hidden, weight, ids = leaves(device, 4 * t, h, v, torch.bfloat16, seed=t)
        hidden = hidden.detach().view(4, t, h).requires_grad_()
        rest = (ids.view(4, t), torch.linspace(-0.5, 1, 4, device=device))
        results = []
        for call in (compiled, function):
            out = call(hidden, weight, *rest)
            results.append((out.detach(), *gradients(out, [hidden, weight])))
        for got, want in zip(*results, strict=True):
            assert relative(got, want.double()) < 6e-3
    assert counters["stats"]["unique_graphs"] <= MOST_GRAPHS, dict(counters["stats"])
    assert not counters["graph_break"], dict(counters["graph_break"])
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("engine", ["one_pass", "two_pass", "lean"])
def test_autocast_to_bf16(device: torch.device, engine: str, backend: str) -> None:
    """fp32 tensors under autocast: the products' operands are bf16, the gradients fp32; as with rounded tensors."""
    n, h, v = (512, 256, 32_003) if device.type == "cuda" else (16, 16, 70)
    hidden, weight, ids = leaves(device, n, h, v, torch.float32)
    hidden = hidden.detach().view(-1, 8, h).requires_grad_()
    advantages = torch.linspace(-1, 1, n // 8, device=device)
    run = Run(engine, backend)
    with torch.autocast(device.type, torch.bfloat16):
        out = grpo_loss(hidden, weight, ids.view(-1, 8), None, advantages, run=run)
    out.loss.backward()
    rounded = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    want = grpo_loss(*rounded, ids.view(-1, 8), None, advantages, run=run)
    want.loss.backward()
    assert out.loss.dtype == torch.float32
    assert same_bits((out.loss, out.per_token_logps), (want.loss, want.per_token_logps))
    for got, right in zip((hidden, weight), rounded, strict=True):
        assert got.grad is not None
        assert right.grad is not None
        assert got.grad.dtype == torch.float32
        assert relative(got.grad, right.grad.double()) < 6e-3
