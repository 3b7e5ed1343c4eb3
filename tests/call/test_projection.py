"""`projection=` of `linear_logprob`: a sampler's product and its bits, gradients, refusals."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grpo_kernels import LoRA, Run, attach, linear_logprob
from tests.support.flat import flat
from tests.support.measure import AllocationWatcher

N, H, V = 37, 24, 301
DISPATCH = Run(projection="dispatch")
# A batch-invariant mode: it registers a kernel for aten::mm, as vLLM's, SGLang's and vexact's do.
REGISTERED = """
import torch
from grpo_kernels import Run, linear_logprob

calls = []

def mm(a, b):
    calls.append(tuple(b.shape))
    return torch.addmm(torch.zeros((), dtype=a.dtype), a, b)

library = torch.library.Library("aten", "IMPL")
library.impl("mm", mm, "CPU")
hidden, weight = torch.randn(5, 8), torch.randn(11, 8)
for projection, wanted in (("library", []), ("dispatch", [(8, 11)])):
    linear_logprob(hidden, weight, torch.arange(5), run=Run(projection=projection))
    assert calls == wanted, (projection, calls)
"""


def fixed_order(hidden: Tensor, weight: Tensor) -> Tensor:
    """A product that sums in one order, whatever the number of rows."""
    out = hidden.new_zeros(hidden.shape[0], weight.shape[1])
    for k in range(hidden.shape[1]):
        out = out + hidden[:, k, None] * weight[k]
    return out


def case(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(N, H, generator=g).to(dtype), torch.randn(V, H, generator=g).to(dtype)
    return hidden, weight, torch.randint(V, (N,), generator=g)


def test_a_registered_product_is_called() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REGISTERED], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_the_bits_are_those_of_a_sampler(dtype: torch.dtype, temperature: float) -> None:
    hidden, weight, ids = case(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    want = torch.log_softmax((hidden @ weight.t()).to(wide) / temperature, dim=-1)
    scores = linear_logprob(hidden, weight, ids, temperature=temperature, run=DISPATCH)
    assert torch.equal(scores.logps, want.gather(1, ids[:, None])[:, 0])
    torch.testing.assert_close(scores.entropies, -(want.exp() * want).sum(-1), rtol=1e-6, atol=1e-6)
    assert not torch.equal(scores.logps, linear_logprob(hidden, weight, ids, temperature=temperature).logps)


def test_a_product_in_a_fixed_order_gives_a_row_the_same_bits_in_any_batch() -> None:
    hidden, weight, ids = case()

    def logps(rows: Tensor, workspace_bytes: int | None = None) -> Tensor:
        run = Run(workspace_bytes=workspace_bytes, projection=fixed_order)
        return linear_logprob(hidden[rows], weight, ids[rows], entropy=False, run=run).logps

    every, order = torch.arange(N), torch.randperm(N)
    want = logps(every)
    assert torch.equal(logps(order), want[order])
    assert torch.equal(torch.cat([logps(x[None]) for x in every]), want)
    assert torch.equal(logps(every, workspace_bytes=40_000), want)
    assert torch.equal(logps(every.repeat(3)), want.repeat(3))
    masked = linear_logprob(hidden, weight, ids, mask=every % 2 == 0, run=Run(projection=fixed_order)).logps
    assert torch.equal(masked[::2], want[::2])
    assert not masked[1::2].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("projection", ["dispatch", fixed_order], ids=["dispatch", "function"])
def test_gradients(dtype: torch.dtype, projection: Any) -> None:
    """Of everything that the call takes, against the library's own products; the weight's is summed over chunks."""
    hidden, weight, ids = case(dtype)
    options: dict[str, Any] = {
        "bias": torch.randn(V).to(dtype),
        "mask": torch.rand(N) < 0.8,
        "temperature": 0.5 + torch.rand(N),
        "final_logit_softcapping": 5.0,
        "logit_scale": 0.5,
    }
    a, b = (torch.randn(N) for _ in range(2))
    found = []
    for more in ({}, {"projection": projection, "workspace_bytes": 60_000}):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, options["bias"])]
        given = {**options, **more, "bias": leaves[2]}
        scores = flat(linear_logprob)(leaves[0], leaves[1], ids, **given)
        logps, entropies = scores.logps, scores.entropies
        found.append([*torch.autograd.grad((a * logps + b * entropies).sum(), leaves), logps, entropies])
    bound = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 0.03)  # "dispatch" rounds the logits
    for want, got in zip(*found, strict=True):
        assert got.dtype == want.dtype
        assert (got - want).norm() <= bound * want.norm()


def test_only_what_trains_gets_a_gradient() -> None:
    hidden, weight, ids = case()
    linear_logprob(hidden.requires_grad_(), weight, ids, entropy=False, run=DISPATCH).logps[3].backward()
    assert hidden.grad is not None
    assert hidden.grad[3].any()
    assert not hidden.grad[4].any()
    assert not linear_logprob(hidden, weight, ids.new_zeros(N), mask=torch.zeros(N), run=DISPATCH).logps.any()


def test_memory_stays_within_the_workspace() -> None:
    hidden, weight, ids = (x.requires_grad_() if x.is_floating_point() else x for x in case())
    with AllocationWatcher() as watcher:
        run = Run(workspace_bytes=10 * V * 28, projection="dispatch")
        linear_logprob(hidden, weight, ids, run=run).logps.sum().backward()
    assert watcher.largest < 11 * max(V, H) + V * H


def test_a_head_that_scores() -> None:
    hidden, weight, ids = case()
    head = nn.Linear(H, V, bias=False)
    head.weight = nn.Parameter(weight)
    logps = attach(head).logprobs(hidden, ids, run=DISPATCH).logps
    assert torch.equal(logps, linear_logprob(hidden, weight, ids, run=DISPATCH).logps)


def test_refusals() -> None:
    hidden, weight, ids = case()
    adapter = LoRA(torch.zeros(2, H), torch.zeros(V, 2), 1.0)
    for name, value in {
        "lora": adapter,
        "vocab_size": V - 1,
        "expected": torch.ones(N),
        "engine": "score_dot",
        "backend": "torch",
        "logits_dtype": "input",
    }.items():
        with pytest.raises(ValueError, match=rf"^{name}: expected its default with projection = 'dispatch'"):
            flat(linear_logprob)(hidden, weight, ids, projection="dispatch", **{name: value})
    with pytest.raises(ValueError, match=r"^extras: expected its default with projection"):
        linear_logprob(hidden, weight, ids, run=DISPATCH, extras=("is_top1",))
    with pytest.raises(ValueError, match=r"^projection: expected 'library', 'dispatch' or a function, got 'vllm'"):
        linear_logprob(hidden, weight, ids, run=Run(projection="vllm"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^projection: expected 'library' with kept_ids, got 'dispatch'"):
        linear_logprob(hidden, weight, ids, kept_ids=ids[:, None], run=DISPATCH)
    with pytest.raises(ValueError, match=r"^projection: expected it to return \(37, 301\), got \(37, 24\)"):
        linear_logprob(hidden, weight, ids, run=Run(projection=lambda h, w: h))
    with pytest.raises(TypeError, match=r"^projection: expected it to return floating-point logits, got NoneType"):
        linear_logprob(hidden, weight, ids, run=Run(projection=lambda h, w: None))
    with pytest.raises(ValueError, match=r"^ids: "):
        linear_logprob(hidden, weight, ids + V, run=DISPATCH)
