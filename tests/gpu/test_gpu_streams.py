"""Streams, devices, CUDA graphs, and how often a call waits for the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import LossConfig, Run, grpo_loss
from tests.support.on_device import BACKENDS, copy_of, leaves, same_bits

SHAPES = {"cuda": (512, 256, 32_003), "cpu": (24, 16, 70)}
SLEEP_CYCLES = 40_000_000  # some 20 ms: a launch on the wrong stream runs before its input is there
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("engine", ["one_pass", "two_pass", "lean"])
def test_runs_on_the_current_stream(device: torch.device, engine: str, backend: str) -> None:
    """The input is written late on a stream of its own; only what runs after it there sees it."""
    given = batch(device)
    step = loss_step(given, engine=engine, backend=backend)
    want = copy_of(step())
    if device.type == "cpu":
        assert same_bits(step(), want)
        return
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


@pytest.mark.parametrize("backend", BACKENDS)
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("engine", ["one_pass", "two_pass", "lean"])
def test_a_graph_of_the_loss_replays(
    gpu: torch.device, engine: str, config: str, backend: str, as_in_use: None
) -> None:
    """Forward and backward; every replay has the bits of an eager call on the same data."""
    given = batch(gpu)
    if config == "on-policy":
        given["old_per_token_logps"] = None
    step = loss_step(given, config=CONFIGS[config], engine=engine, backend=backend)
    side = torch.cuda.Stream()  # what is compiled and allocated once must not be in the graph
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for i in range(100):
        for name, x in batch(gpu, seed=i).items():
            if x is not None and given[name] is not None:
                given[name].detach().copy_(x.detach())
        graph.replay()
        found = copy_of(results)
        if i % 10 < 2:
            assert same_bits(found, copy_of(step())), f"replay {i}"


# How often a step waits for the device: with a mask, to learn how many positions count; without KL
# and entropy bonus, and in a second pass, to learn how many carry gradient.
# (engine/test_no_waits.py counts it without a device.)
WAITS = {
    ("auto", False, "on-policy"): 1,
    ("auto", False, "kl"): 0,
    ("auto", False, "entropy"): 0,
    ("auto", True, "on-policy"): 2,
    ("auto", True, "kl"): 1,
    ("one_pass", True, "off-policy"): 2,
    ("two_pass", True, "off-policy"): 2,
    ("lean", True, "off-policy"): 2,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("head", ["trains", "frozen", "no gradient"])
@pytest.mark.parametrize(("engine", "masked", "config"), WAITS)
def test_waits(
    gpu: torch.device, engine: str, masked: bool, config: str, head: str, backend: str,
    as_in_use: None,
) -> None:  # fmt: skip
    given = batch(gpu)
    given["head"].requires_grad_(head == "trains")
    given["hidden"].requires_grad_(head != "no gradient")
    if config == "on-policy":
        given["old_per_token_logps"] = None
    if masked:
        given["completion_mask"] = torch.ones_like(given["completion_ids"])
        given["completion_mask"][:, -1] = 0

    def step() -> None:
        config_of = CONFIGS.get(config, LossConfig())
        out = grpo_loss(**given, config=config_of, run=Run(engine, backend))
        if out.loss.requires_grad:
            out.loss.backward()

    step()  # what is compiled or allocated once may wait
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        step()
        torch.cuda.set_sync_debug_mode("default")
    found = [w for w in caught if "called a synchronizing" in str(w.message)]
    # without gradient only a mask is counted
    assert len(found) == (masked if head == "no gradient" else WAITS[engine, masked, config]), found
