"""Streams, devices, CUDA graphs, and how often a call waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import LossConfig, Run, grpo_loss, linear_logps
from tests.support.on_device import Graphed, copy_of, leaves, same_bits, waits

SHAPES = {"cuda": (512, 256, 32_003), "cpu": (24, 16, 70)}
SLEEP_CYCLES = 40_000_000  # some 20 ms: a launch on the wrong stream runs before its input is there
REPLAYS = {"cuda": 100, "cpu": 3}
CONFIGS = {
    "on-policy": LossConfig(),
    "kl": LossConfig(beta=0.05),
    "entropy": LossConfig(entropy_coef=0.01),
}


def batch(
    device: torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> dict[str, Any]:
    """Arguments of `grpo_loss` for sequences of 8, every position counted."""
    n, h, v = SHAPES[device.type]
    hidden, weight, ids = leaves(device, n, h, v, dtype, seed)
    g = torch.Generator(device).manual_seed(seed + 1)
    old = torch.rand(n // 8, 8, generator=g, device=device) - 8.0
    return {
        "hidden": hidden.detach().view(-1, 8, h).requires_grad_(),
        "head": weight,
        "completion_ids": ids.view(-1, 8),
        "completion_mask": None,
        "advantages": torch.randn(n // 8, generator=g, device=device),
        "old_per_token_logps": old,
        "ref_per_token_logps": old - 0.1,
    }


def loss_step(
    given: dict[str, Any], config: LossConfig | None = None, **options: Any
) -> Callable[[], tuple[Tensor, ...]]:
    """Loss, log-probabilities and both gradients; `options` of `Run`."""

    def step() -> tuple[Tensor, ...]:
        out = grpo_loss(**given, config=config, run=Run(**options))
        trained = [x for x in (given["hidden"], given["head"]) if x.requires_grad]
        return out.loss, out.logps, *torch.autograd.grad(out.loss, trained)

    return step


@pytest.mark.parametrize("engine", ["one_pass", "two_pass", "lean"])
def test_runs_on_the_current_stream(gpu: torch.device, engine: str, backend: str) -> None:
    """The input is written late on a stream of its own; only what runs after it there sees it."""
    given = batch(gpu)
    step = loss_step(given, engine=engine, backend=backend)
    want = copy_of(step())
    hidden = given["hidden"].detach()
    right = hidden.clone()
    hidden.zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        hidden.copy_(right)
        found = step()
    stream.synchronize()
    assert same_bits(found, want)


def test_two_streams_at_once(device: torch.device, backend: str) -> None:
    """Two batches whose calls alternate between streams have the bits of one after the other."""
    steps = [loss_step(batch(device, seed=seed), backend=backend) for seed in (0, 1)]
    want = [copy_of(step()) for step in steps]
    on_gpu = device.type == "cuda"
    streams = [torch.cuda.Stream() if on_gpu else None for _ in steps]
    found: list[Any] = [None, None]
    if on_gpu:
        torch.cuda.synchronize()
    for _ in range(5 if on_gpu else 2):
        for i, (step, stream) in enumerate(zip(steps, streams, strict=True)):
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                found[i] = step()
    if on_gpu:
        torch.cuda.synchronize()
    assert same_bits(found, want)


def test_runs_on_the_tensors_device(gpu: torch.device, backend: str) -> None:
    """Another device than the tensors' is current, if there is one; else the same, by number."""
    tensors_on = torch.device(gpu.type, torch.cuda.device_count() - 1)
    given = batch(tensors_on)
    with torch.cuda.device(tensors_on):
        want = copy_of(loss_step(given, backend=backend)())
    with torch.cuda.device(0):
        found = loss_step(given, backend=backend)()
        assert torch.cuda.current_device() == 0
    assert all(x.device == tensors_on for x in found)
    assert same_bits(found, want)


def refill(given: dict[str, Any], seed: int) -> None:
    """Other values in the same tensors."""
    device = given["hidden"].device
    for name, x in batch(device, seed=seed).items():
        if x is not None and given[name] is not None:
            given[name].detach().copy_(x.detach())


def check_replays(
    given: dict[str, Any], step: Callable[[], tuple[Tensor, ...]], device: torch.device
) -> None:
    """Every replay of a graph of `step` has the bits of an eager call on the same data."""
    graph = Graphed(step, device)
    for i in range(REPLAYS[device.type]):
        refill(given, seed=i)
        found = copy_of(graph.replay())
        if i % 10 < 2:
            assert same_bits(found, copy_of(step())), f"replay {i}"


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("engine", ["one_pass", "two_pass", "lean"])
def test_a_graph_of_the_loss_replays(device, engine, config, backend, as_in_use):
    given = batch(device)
    if config == "on-policy":
        given["old_per_token_logps"] = None
    step = loss_step(given, config=CONFIGS[config], engine=engine, backend=backend)
    check_replays(given, step, device)


@pytest.mark.parametrize("engine", ["score", "two_pass"])
def test_a_graph_of_the_log_probabilities_replays(device, engine, backend, as_in_use):
    given = batch(device)
    hidden, weight, ids = (given[name] for name in ("hidden", "head", "completion_ids"))

    def step() -> tuple[Tensor, ...]:
        with torch.set_grad_enabled(engine == "two_pass"):
            found = linear_logps(hidden, weight, ids, run=Run(engine, backend))
        both = found.logps, found.entropies
        if engine == "score":
            return both
        return *both, *torch.autograd.grad(both[0].sum() + 0.1 * both[1].sum(), [hidden, weight])

    check_replays(given, step, device)


OF_WAITS = CONFIGS | {"off-policy": LossConfig()}
# How often a step waits for the device: with a mask, to learn how many positions count; without KL
# and entropy bonus, and in a second pass, to learn how many carry gradient.
# (engine/test_no_waits.py counts it without a device.)
WAITS = {
    ("auto", "no mask", "on-policy"): 1,
    ("auto", "no mask", "kl"): 0,
    ("auto", "no mask", "entropy"): 0,
    ("auto", "mask", "on-policy"): 2,
    ("auto", "mask", "kl"): 1,
    ("auto", "scoring", "kl"): 0,
    ("one_pass", "mask", "off-policy"): 2,
    ("two_pass", "mask", "off-policy"): 2,
    ("lean", "mask", "off-policy"): 2,
}


@pytest.mark.parametrize("head", ["trains", "frozen", "no gradient"])
@pytest.mark.parametrize(("engine", "kind", "config"), WAITS)
def test_waits(gpu, engine, kind, config, head, backend, as_in_use):
    given, run = batch(gpu), Run(engine, backend)
    given["head"].requires_grad_(head == "trains")
    given["hidden"].requires_grad_(head != "no gradient")
    if config == "on-policy":
        given["old_per_token_logps"] = None
    if kind == "mask":
        given["completion_mask"] = torch.ones_like(given["completion_ids"])
        given["completion_mask"][:, -1] = 0

    def step() -> None:
        if kind == "scoring":
            with torch.no_grad():
                linear_logps(given["hidden"], given["head"], given["completion_ids"], run=run)
            return
        out = grpo_loss(**given, config=OF_WAITS[config], run=run)
        if out.loss.requires_grad:
            out.loss.backward()

    step()  # what is compiled or allocated once may wait
    found = waits(step)
    # without gradient only a mask is counted
    counted = 1 if kind == "mask" else 0
    allowed = counted if head == "no gradient" else WAITS[engine, kind, config]
    assert len(found) == allowed, found
    if allowed == 0:  # the stricter form: the call fails where it waits
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
