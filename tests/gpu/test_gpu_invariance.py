"""The same bits again: run after run, and for a row whatever else is in its batch.

That is promised of every dtype and backend where the library multiplies the same number of rows;
where it is another number, of fp32 with the Triton kernels (docs/dev/design.md, "Numbers"), and
of the others that they agree to `CLOSE`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import LossConfig, Run, grpo_loss, linear_logps
from tests.support.on_device import copy_of, leaves, same_bits

pytestmark = pytest.mark.usefixtures("as_in_use")

DTYPES = [torch.bfloat16, torch.float32, torch.float16]
RERUNS = {"cuda": 20, "cpu": 2}
ENGINES = ("one_pass", "two_pass", "lean")
BIG = [
    (700, 4096, 151_936, torch.bfloat16),
    (700, 512, 32_003, torch.bfloat16),
    (300, 96, 4097, torch.float32),
]
TINY = (20, 16, 70)
CLOSE = 1e-5  # of a log-probability: the order of a sum over H in fp32


def scored(hidden: Tensor, weight: Tensor, ids: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        found = linear_logps(hidden, weight, ids, run=Run(backend=backend))
    return found.logps, found.entropies


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_run_has_the_same_bits(device, engine, dtype, backend):
    n, h, v = (1024, 512, 32_003) if device.type == "cuda" else TINY
    n -= n % 4
    hidden, weight, ids = leaves(device, n, h, v, dtype)
    hidden = hidden.detach().view(-1, 4, h).requires_grad_()
    config = LossConfig(beta=0.05, entropy_coef=0.01)
    old = torch.full((n // 4, 4), -8.0, device=device)
    advantages = torch.linspace(-1, 1, n // 4, device=device)

    def step() -> Any:
        out = grpo_loss(
            hidden, weight, ids.view(-1, 4), None, advantages, config=config,
            old_per_token_logps=old, ref_per_token_logps=old, run=Run(engine, backend),
        )  # fmt: skip
        gradients = torch.autograd.grad(out.loss, [hidden, weight])
        return out.loss, out.logps, out.entropies, *gradients

    first = copy_of(step())
    for i in range(RERUNS[device.type] - 1):
        assert same_bits(step(), first), f"run {i + 2}"


@pytest.mark.parametrize(("n", "h", "v", "dtype"), BIG, ids=str)
def test_a_row_does_not_depend_on_its_batch(device, n, h, v, dtype, backend):
    """Alone, in parts of any size, permuted, repeated, in chunks."""
    if device.type == "cpu":
        n, h, v = TINY
    hidden, weight, ids = (x.detach() for x in leaves(device, n, h, v, dtype))
    whole, every = scored(hidden, weight, ids, backend), torch.arange(n, device=device)
    parts = {"permuted": torch.randperm(n, device=device), "repeated": every[:7].repeat(3)}
    for size in (1, 2, 5, 64, 127, 128, 129, 256, 300, 511):
        if size < n:
            parts |= {f"{size} first": every[:size], f"{size} last": every[n - size :]}
    wrong = []
    for name, index in parts.items():
        found, want = scored(hidden[index], weight, ids[index], backend), [x[index] for x in whole]
        gap = max(float((x - y).abs().max()) for x, y in zip(found, want, strict=True))
        is_exact = dtype == torch.float32 and backend == "triton"
        if not (same_bits(found, want) if is_exact else gap <= CLOSE):
            wrong.append((name, gap))
    assert not wrong, wrong


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masked_positions_and_padding_change_no_bit(device, dtype, backend):
    n, h, v = (640, 512, 32_003) if device.type == "cuda" else (16, 16, 70)
    hidden, weight, ids = (x.detach() for x in leaves(device, n, h, v, dtype))
    hidden, ids = hidden.view(-1, 8, h), ids.view(-1, 8)
    mask = torch.rand(ids.shape, device=device) > 0.3
    run = Run(backend=backend)
    alone = linear_logps(hidden[mask], weight, ids[mask], run=run)
    pad = lambda x, value: torch.cat([x, x.new_full((len(x), 3, *x.shape[2:]), value)], 1)  # noqa: E731
    wide = linear_logps(
        pad(hidden, torch.nan), weight, pad(ids, -100), completion_mask=pad(mask, False), run=run
    )
    for name in ("logps", "entropies"):
        got, want = getattr(wide, name), getattr(alone, name)
        assert same_bits(got[:, :8][mask], want)
        assert not got[:, 8:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_ratio_is_exactly_one_on_policy(device, engine, dtype, backend):
    """Old log-probabilities of calls without gradient, by sequence: loss and gradient as on-policy.

    Exactly, or, where that is not promised, as nearly as log-probabilities are.
    """
    b, t, h, v = (24, 40, 512, 32_003) if device.type == "cuda" else (3, 4, 16, 70)
    hidden, weight, ids = leaves(device, b * t, h, v, dtype)
    hidden, ids = hidden.detach().view(b, t, h).requires_grad_(), ids.view(b, t)
    old = torch.stack([scored(hidden[i], weight, ids[i], backend)[0] for i in range(b)])
    advantages = torch.linspace(-1, 1, b, device=device)

    def step(old_per_token_logps: Tensor | None) -> tuple[Any, tuple[Tensor, ...]]:
        old = {"old_per_token_logps": old_per_token_logps}
        out = grpo_loss(hidden, weight, ids, None, advantages, **old, run=Run(engine, backend))
        return out, torch.autograd.grad(out.loss, [hidden, weight])

    out, grads = step(old)
    on_policy, wanted = step(None)
    if dtype == torch.float32 and backend == "triton":
        assert float(out.metrics["ratio"]) == 1.0
        assert torch.equal(out.loss, on_policy.loss)
        assert same_bits(grads, wanted)
        return
    assert abs(float(out.metrics["ratio"]) - 1.0) <= CLOSE
    assert abs(float(out.loss - on_policy.loss)) <= CLOSE
    for got, want in zip(grads, wanted, strict=True):
        assert float((got - want).double().norm()) <= 2e-3 * float(want.double().norm())


def test_rows_are_the_same_in_every_engine(device: torch.device, backend: str) -> None:
    n, h, v = (640, 512, 32_003) if device.type == "cuda" else (16, 16, 70)
    hidden, weight, ids = leaves(device, n, h, v, torch.bfloat16)
    want = scored(hidden, weight, ids, backend)
    given = hidden.view(-1, 8, h), weight, ids.view(-1, 8), None, torch.ones(n // 8, device=device)
    for engine in ENGINES:
        out = grpo_loss(*given, run=Run(engine, backend))
        assert same_bits((out.logps.flatten(), out.entropies.flatten()), want), engine
