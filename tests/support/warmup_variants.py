"""The variants of kernels that a warm-up compiles, and those that real batches need: run as a module.

Nothing is compiled: CPU tensors stand for a GPU's, the engines do with them what they do there, and launches are
caught. What they would have written is NaN, so that no row is without a gradient for its values. Prints how many
variants of each kernel the warm-up has, and which launches of the batches are of none of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.aot.launches import Launch, caught
from grpo_kernels import Head, LossConfig, Run, grpo_loss, linear_divergence, linear_logprob
from grpo_kernels.backends.triton_rows import rows
from grpo_kernels.diagnostics import warmup
from grpo_kernels.diagnostics.head_shape import HeadShape
from grpo_kernels.engine import device

H, CPU = 32, torch.device("cpu")


def converted(left: Tensor, right: Tensor, out: Tensor, *, add: bool) -> None:
    found = left.to(out.dtype) @ right.to(out.dtype)
    out.copy_(out + found if add else found)


@contextmanager
def like_a_gpu() -> Iterator[list[Launch]]:
    kind = replace(device.CUDA, mixed_mm=converted, free=None, is_capturing=lambda: False)
    with (
        mock.patch.dict(device._KINDS, cpu=kind),
        mock.patch.object(rows, "INTERPRETED", True),
        mock.patch.object(rows, "arch_of", return_value="sm_90"),
        caught() as launches,
    ):
        yield launches


def variants(launches: list[Launch]) -> dict[str, str]:
    """The kernel of each variant, by all that it is compiled for."""
    described = (
        (x.kernel.__name__, x.signature, x.constexprs, x.attrs, x.options) for x in launches
    )
    return {repr(x): x[0] for x in described}


def batches(vocab: int, softcap: float | None, *, teacher: bool) -> None:
    """Several chunks, a mask, and rows without gradient; old and reference log-probabilities that begin anywhere."""
    b, t = 7, 61
    hidden = torch.randn(b, t, H).bfloat16().requires_grad_()
    weight = torch.randn(vocab, H).bfloat16().requires_grad_()
    ids, mask = torch.randint(vocab, (b, t)), torch.arange(t) < torch.randint(1, t, (b, 1))
    logps = torch.randn(2 * b * t + 3)
    old, ref = logps[1 : b * t + 1].view(b, t), logps[b * t + 3 :].view(b, t)
    advantages = torch.tensor([1.0, -1.0, 0.0, 0.5, 0.0, 2.0, -0.1])
    constants: dict[str, Any] = {"final_logit_softcapping": softcap}
    head, scaled = Head(weight, **constants), Head(weight, logit_scale=1.5, **constants)
    run = Run(backend="triton", workspace_bytes=2**20)
    calls: tuple[tuple[dict[str, Any], dict[str, Any], Any], ...] = (
        ({}, {}, "auto"),
        ({"epsilon": 0.1, "temperature": 0.7}, {"old_per_token_logps": old}, "auto"),
        ({"beta": 0.1}, {"old_per_token_logps": old, "ref_per_token_logps": ref}, "auto"),
        ({"importance_sampling_level": "sequence"}, {"old_per_token_logps": old}, "auto"),
        ({"entropy_coef": 0.1}, {"old_per_token_logps": old}, "two_pass"),
        ({"entropy_coef": 0.1}, {"old_per_token_logps": old}, "auto"),
        *(
            [({}, {"old_per_token_logps": old}, "lean")] if vocab % 128 == 0 else []
        ),  # else its slices differ
    )
    for config, given, engine in calls:
        options = {"config": LossConfig(**config), "run": replace(run, engine=engine), **given}
        out = grpo_loss(hidden, scaled, ids, mask, advantages, **options)
        torch.autograd.backward(out.loss * 0.3)
    with torch.no_grad():
        linear_logprob(hidden, head, ids, mask=mask, run=run)
    linear_logprob(hidden, Head(weight.detach(), **constants), ids, run=run).logps.sum().backward()
    if not teacher:
        return
    other = (
        torch.randn(b, t, 2 * H).bfloat16(),
        Head(torch.randn(vocab, 2 * H).bfloat16(), **constants),
    )
    found = linear_divergence(hidden, head, *other, run=run)
    (found.divergence * torch.randn(b, t)).sum().backward()
    options = {"old_per_token_logps": old, "reference": other, "run": run}
    for level in ("token", "sequence"):
        exact = LossConfig(beta=0.1, kl_estimator="full", importance_sampling_level=level)
        (
            2.0 * grpo_loss(hidden, head, ids, mask, advantages, config=exact, **options).loss
        ).backward()


def compared(vocab: int, softcap: float | None, *, teacher: bool) -> dict[str, Any]:
    head = HeadShape(vocab, H, torch.bfloat16, softcap=softcap)
    with like_a_gpu() as launches:
        for step in warmup.steps(head, CPU, "triton", teacher=teacher).values():
            step()
        warm = variants(launches)
        launches.clear()
        batches(vocab, softcap, teacher=teacher)
        needed = variants(launches)
    kernels = [*warm.values()]
    return {
        "warm": {name: kernels.count(name) for name in sorted({*kernels})},
        "needed": sorted({*needed.values()}),
        "missing": [x for x in needed if x not in warm],
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what is not initialised
    print(json.dumps([compared(1024, None, teacher=True), compared(9001, 30.0, teacher=False)]))
