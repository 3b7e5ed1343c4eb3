"""After a call nothing of it is held: tensors and graphs are counted, without cyclic collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grpo_kernels import (
    Head,
    LoRA,
    Run,
    grpo_loss,
    linear_divergence,
    linear_logps,
    policy_expectation,
    presets,
    token_level,
)

CALLS = 20


class Saved:
    """A tensor that a node of a graph has saved; gone when the node is."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


@contextmanager
def counting() -> Iterator[Callable[[], tuple[int, int, int]]]:
    """Inside, no cycle is collected; the function counts tensors, their bytes, and tensors saved by
    live nodes."""
    saved: weakref.WeakSet[Saved] = weakref.WeakSet()

    def pack(tensor: Tensor) -> Saved:
        saved.add(found := Saved(tensor))
        return found

    def count() -> tuple[int, int, int]:
        tensors = [x for x in gc.get_objects() if issubclass(type(x), Tensor)]
        return len(tensors), sum(x.numel() * x.element_size() for x in tensors), len(saved)

    gc.collect()
    gc.disable()
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x.tensor):
            yield count
    finally:
        gc.enable()


def assert_nothing_is_held(call: Callable[[], Any]) -> None:
    with counting() as count:
        call()
        call()
        before = count()
        for _ in range(CALLS - 2):
            call()
        after = count()
    assert before == after, f"(tensors, bytes, saved) after call 2 and {CALLS}: {before}, {after}"


B, T, H, V, K = 2, 5, 8, 24, 6
IDS = torch.arange(B * T).view(B, T) % V
MASK = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]])
ADVANTAGES = torch.tensor([1.0, -0.5])
MODULE = nn.Linear(H, V)
KEPT = torch.cat([IDS[..., None], (IDS[..., None] + torch.arange(1, K)) % V], dim=-1)
OLD = {"old_per_token_logps": torch.full((B, T), -3.0)}


def operands() -> tuple[Tensor, Tensor]:
    return torch.randn(B, T, H, requires_grad=True), torch.randn(V, H, requires_grad=True)


def loss(hidden: Tensor, head: Any, **more: Any) -> Tensor:
    return grpo_loss(hidden, head, IDS, MASK, ADVANTAGES, **more).loss


def scores(hidden: Tensor, head: Any, **more: Any) -> Tensor:
    found = linear_logps(hidden, head, IDS, completion_mask=MASK, **more)
    return found.logps + found.entropies


def with_lora(weight: Tensor) -> Head:
    a, b = torch.randn(2, H, requires_grad=True), torch.randn(V, 2, requires_grad=True)
    return Head(weight, lora=LoRA(a, b, 0.5))


def expected(hidden: Tensor, head: Tensor) -> Tensor:
    """Rightly, then wrongly."""
    hint = policy_expectation(presets.DAPO, completion_mask=MASK, advantages=ADVANTAGES)
    found = [
        linear_logps(hidden, head, IDS, completion_mask=MASK, expected=x).logps
        for x in (hint, torch.ones(B, T))
    ]
    return -(sum(found) * ADVANTAGES[:, None] * MASK) / MASK.sum()


def divergence(hidden: Tensor, head: Tensor) -> Tensor:
    given = {"completion_ids": IDS, "entropy": True}
    return linear_divergence(hidden, head, operands(), MASK, **given).divergence


def unused(hidden: Tensor, head: Tensor) -> Tensor:
    """Forwards whose backward never comes."""
    for call in (loss, scores, divergence):
        call(hidden, head)
    return torch.zeros(1, requires_grad=True)


def refused(hidden: Tensor, head: Tensor) -> Tensor:
    """Gradients that may not be differentiated again."""
    for call in (loss, scores):
        torch.autograd.grad(call(hidden, head).sum(), hidden, create_graph=True)
    return torch.zeros(1, requires_grad=True)


CANDIDATES = {
    "sampling_topk_ids": IDS[..., None], "sampling_topk_logps": torch.full((B, T, 1), -1.0)
}  # fmt: skip
EXTRAS = ("log_sum_sq_probs", "mean_logits", "is_top1")
CASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **{f"loss, {x}": partial(loss, run=Run(backend=x)) for x in ("torch", "cpp")},
    **{f"loss, {x}": partial(loss, run=Run(x), **OLD) for x in ("one_pass", "two_pass", "lean")},
    "loss, frozen": lambda hidden, weight: loss(hidden, weight.detach()),
    "loss, LoRA": lambda hidden, weight: loss(hidden, with_lora(weight)),
    "loss, a module": lambda hidden, weight: loss(hidden, MODULE),
    "loss, kept sets": partial(loss, kept_ids=KEPT),
    "loss, candidates": partial(loss, **CANDIDATES),
    "objective by token": partial(loss, objective=token_level(lambda x: -x.logps * x.advantages)),
    "objective by sequence": partial(loss, objective=lambda x: -x.logps * x.logps.detach().mean()),
    "scores": scores,
    "scores, everything": partial(scores, extras=EXTRAS),
    "scores, kept sets": partial(scores, kept_ids=KEPT),
    "scores, more ids": partial(scores, topk_ids=IDS[..., None]),
    "expected": expected,
    "divergence": divergence,
    "unused": unused,
    "refused": refused,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_calls_with_tensors(name: str) -> None:
    assert_nothing_is_held(lambda: CASES[name](*operands()).sum().backward())


@pytest.mark.slow
def test_what_is_held_is_seen() -> None:
    """A closure that names itself holds the graph: the counts rise."""

    def call() -> None:
        result = scores(*operands())

        def again(n: int) -> Any:
            return result if n == 0 else again(n - 1)

        again(1)

    with pytest.raises(AssertionError, match="after call 2"):
        assert_nothing_is_held(call)
    gc.collect()


TRAINERS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "exact KL": {"kl_estimator": "full", "beta": 0.04},
    "several steps": {"num_iterations": 2, "beta": 0.04, "regroup": False},
    "patched": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_steps_of_a_trainer(name: str) -> None:
    trl = pytest.importorskip("trl")
    from transformers import TrainerCallback

    from grpo_kernels.trl import FusedGRPOTrainer, patch_trl, unpatch_trl
    from tests.support.trl_training import train

    class Counted(TrainerCallback):
        found: list[tuple[int, int, int]] = []  # noqa: RUF012

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.found.append(count())

    trainer = FusedGRPOTrainer
    if name == "patched":
        trainer = trl.GRPOTrainer
        patch_trl()
    try:
        with counting() as count:
            train(trainer, 6, callbacks=[Counted()], **TRAINERS[name])
    finally:
        unpatch_trl()
    for kind in (0, 2):  # tensors, saved tensors; TRL keeps two numbers of its logs
        counts = [x[kind] for x in Counted.found]
        assert max(counts[4:]) <= max(counts[2:4]), counts
