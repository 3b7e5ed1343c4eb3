"""`python -m tests.soak`: thousands of calls a workload, with a flat count of tensors, threads, descriptors and memory.

After a warm-up, in which caches fill and pools start, nothing may be left over: tensors, threads and descriptors are
counted exactly, resident memory to within `NOISE` over the last half of the calls.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn

from grpo_kernels import LoRA, LossConfig, grpo_loss, linear_logprob
from grpo_kernels import advantages as adv
from grpo_kernels.rewards import compute_rewards
from tests.support.case_builder import make_case
from tests.support.run_case import arguments

CALLS, WARM_UP = 2000, 200
NOISE = 3 * 2**20  # bytes: an arena that grows once
CASE = make_case("soak", b=3, t=5, h=8, v=40)
GSPO = {"loss_type": "grpo", "importance_sampling_level": "sequence"}


@dataclass(frozen=True)
class Held:
    """What the process holds."""

    tensors: int
    threads: int
    descriptors: int
    resident: int

    @staticmethod
    def now() -> Held:
        gc.collect()
        tensors = sum(type(x) in (Tensor, nn.Parameter) for x in gc.get_objects())
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return Held(tensors, threading.active_count(), len(os.listdir("/proc/self/fd")), resident)

    def leaks(self, middle: Held, end: Held) -> list[str]:
        """What has grown since this, the state after the warm-up."""
        counts = {name: (getattr(self, name), getattr(end, name)) for name in ("tensors", "threads", "descriptors")}
        found = [f"{name} {before} -> {after}" for name, (before, after) in counts.items() if after > before]
        grown = end.resident - middle.resident
        return found + ([f"resident memory + {grown / 2**20:.1f} MiB in the last half"] if grown > NOISE else [])


def train(**options: Any) -> None:
    """One loss and its backward."""
    given = arguments(CASE.but(frozen=frozenset(options.pop("frozen", ()))))
    grpo_loss(**given | options).loss.backward()


def expected(scale: float, wrong: int) -> None:
    """A log-probability whose gradient was expected, in all but `wrong` rows."""
    given = arguments(CASE)
    coming = torch.linspace(-1.0, 2.0, 15).view(3, 5)
    told = (scale * coming).flatten()
    told[:wrong] = 9.0
    logps, _ = linear_logprob(given["hidden"], given["weight"], given["completion_ids"], expected=told.view(3, 5))
    (logps * coming).sum().backward()


def dropped() -> None:
    """A graph that nobody goes back through."""
    given = arguments(CASE)
    linear_logprob(given["hidden"], given["weight"], given["completion_ids"], expected=torch.ones(3, 5))
    grpo_loss(**given)


def adapter() -> None:
    a, b = torch.ones(2, 8, requires_grad=True), torch.ones(40, 2, requires_grad=True)
    train(lora=LoRA(a, b, 0.1))


async def scores(prompts: list[str], **rest: Any) -> list[float]:
    await asyncio.sleep(0)
    return [1.0] * len(prompts)


async def fails(prompts: list[str], **rest: Any) -> list[float]:
    await asyncio.sleep(0)
    raise ValueError("no score")


def rewards() -> None:
    compute_rewards([scores, scores, lambda prompts, **rest: [0.5] * len(prompts)], ["p"] * 3, ["c"] * 3)


def rewards_that_fail() -> None:
    with contextlib.suppress(RuntimeError):
        compute_rewards([scores, fails], ["p"] * 3, ["c"] * 3)


def estimators() -> None:
    x, mask = torch.linspace(-1.0, 1.0, 12).view(4, 3), torch.ones(4, 3)
    adv.group_advantages(x[:, 0], 2)
    adv.gae(x, x, mask, whiten_advantages=True)
    adv.optimal_token_baseline(x[:, 0], mask, x - 2.0, x.square(), group_ids=[0, 1, 0, 1])


def refusals() -> None:
    """Errors keep the frames of the call that raised them; nothing else may."""
    given = arguments(CASE)
    for change in ({"completion_ids": given["completion_ids"] + 99}, {"engine": "fast"}, {"advantages": torch.ones(9)}):
        with contextlib.suppress(ValueError):
            grpo_loss(**given | change)


@torch.compile(backend="aot_eager")
def compiled_loss(hidden: Tensor, weight: Tensor, ids: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    return grpo_loss(hidden, weight, ids, mask, advantages).loss


def compiled() -> None:
    given = arguments(CASE)
    names = ("hidden", "weight", "completion_ids", "completion_mask", "advantages")
    compiled_loss(*(given[name] for name in names)).backward()


WORKLOADS: dict[str, Callable[[], None]] = {
    "one_pass": lambda: train(engine="one_pass"),
    "one_pass, torch": lambda: train(engine="one_pass", backend="torch"),
    "two_pass": lambda: train(config=LossConfig(**GSPO)),
    "lean": lambda: train(engine="lean", workspace_bytes=4000),
    "frozen": lambda: train(frozen=("weight",), config=LossConfig(**GSPO)),
    "adapter": adapter,
    "expected": lambda: expected(0.5, 0),
    "wrongly expected": lambda: expected(-3.0, 7),
    "dropped": dropped,
    "compiled": compiled,
    "rewards": rewards,
    "rewards that fail": rewards_that_fail,
    "advantages": estimators,
    "refusals": refusals,
}


def soak(workload: Callable[[], None], calls: int, warm_up: int) -> list[str]:
    """What `calls` calls left over, in words; nothing if nothing."""

    def repeat(times: int) -> Held:
        for _ in range(times):
            workload()
        return Held.now()

    gc.collect()
    gc.freeze()  # what was there before is neither searched nor counted
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            start = repeat(warm_up)
            middle = repeat(calls // 2)
            return start.leaks(middle, repeat(calls - calls // 2))
    finally:
        gc.unfreeze()


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if nothing was left over."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--calls", type=int, default=CALLS)
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=[*WORKLOADS])
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    leaking = 0
    for name in given.workload:
        start = time.perf_counter()
        left = soak(WORKLOADS[name], given.calls, WARM_UP)
        leaking += bool(left)
        print(f"{name:<18} {given.calls} calls {time.perf_counter() - start:6.1f} s  {'; '.join(left) or 'flat'}")
    return int(leaking > 0)


if __name__ == "__main__":
    sys.exit(main())
