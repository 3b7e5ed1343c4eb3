"""DeepSpeed ZeRO-3 in gloo processes on a CPU: gradients equal those of one process in float64, for
every engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels
from grpo_kernels import LossConfig, grpo_loss
from tests.support import parallel_cases as cases
from tests.support.parallel_cases import LOSSES, Run, relative_error, truth
from tests.support.ranks import run_ranks
from tests.support.zero3 import CONFIG, deepspeed, needs_deepspeed

CPU = torch.device("cpu")
BOTH = ("off-policy", "sequence ratio")
# of the largest entry: DeepSpeed keeps gradients in float32, whatever the model's dtype
EXACT = 2e-7

pytestmark = needs_deepspeed


class Zero3:
    """A tiny model on this rank, divided."""

    def __init__(
        self, loss: str, *, inside: bool = True, last_empty: bool = False, **options: Any
    ) -> None:
        self.package = deepspeed()
        setup = cases.Setup(cases.ddp, inside)  # `wrap` is not used
        self.run = Run(setup, LOSSES[loss], CPU, torch.float64, last_empty=last_empty)
        self.start(cases.make_model(torch.float64, self.run.loss, **options))

    def start(self, model: Any, accumulate: int = 1) -> None:
        self.model, self.head = model, model.lm_head
        trained = [x for x in self.model.parameters() if x.requires_grad]
        config = {**CONFIG, "gradient_accumulation_steps": accumulate}
        optimizer = torch.optim.SGD(trained, lr=0.0)
        given = {"model": self.model, "config": config, "optimizer": optimizer}
        self.engine, *_ = self.package.initialize(**given)
        assert self.head.weight.numel() == 0

    def call(self, hidden: Tensor, weight: Tensor, gather: Any = None) -> Tensor:
        """`grpo_loss` itself."""
        given = cases.arguments(self.run.loss, self.run.batch, self.run.items)
        config, run = LossConfig(**self.run.loss.config), grpo_kernels.Run(gather=gather)
        return grpo_loss(hidden, weight, config=config, run=run, **given).loss

    def gradients(self, loss: Tensor) -> dict[str, Tensor]:
        """After its backward: by name, averaged over the ranks, whole."""
        self.engine.backward(loss)
        assert self.head.weight.numel() == 0
        found = self.whole()
        self.engine.destroy()
        return found

    def whole(self) -> dict[str, Tensor]:
        named = [(name, x) for name, x in self.model.named_parameters() if x.requires_grad]
        return {name: self.package.utils.safe_get_full_grad(x).clone() for name, x in named}


def by_module(loss: str, **options: Any) -> dict[str, Tensor]:
    """The loss takes the head's module."""
    zero3 = Zero3(loss, **options)
    return zero3.gradients(zero3.run.score(zero3.engine, zero3.head, zero3.run.batch))


def in_two_parts(loss: str, accumulate: int) -> dict[str, Tensor]:
    """Two micro-batches: DeepSpeed divides each loss by their number."""
    zero3 = Zero3(loss)
    zero3.engine.destroy()
    zero3.start(cases.make_model(torch.float64, zero3.run.loss), accumulate)
    head, (first, second) = zero3.head, cases.micro_batches(zero3.run.batch, accumulate)
    zero3.engine.backward(2.0 * zero3.run.score(zero3.engine, head, first))
    zero3.engine.step()  # which counts them
    return zero3.gradients(2.0 * zero3.run.score(zero3.engine, head, second))


def within_the_models_forward(loss: str) -> dict[str, Tensor]:
    """The function with ``lm_head.weight``: within the forward, ZeRO-3 sees that it is read."""
    zero3 = Zero3(loss)
    then = lambda hidden: zero3.call(hidden, zero3.head.weight)  # noqa: E731
    return zero3.gradients(zero3.engine(zero3.run.batch.tokens, then))


def gathered_by_hand(loss: str) -> dict[str, Tensor]:
    """What the message for an empty weight says: forward and backward in one context."""
    zero3 = Zero3(loss)
    hidden = zero3.engine(zero3.run.batch.tokens)
    says = r"weight: .*which is empty; under DeepSpeed ZeRO-3.*pass the head's module instead"
    with pytest.raises(ValueError, match=says):
        zero3.call(hidden, zero3.head.weight)
    with zero3.package.zero.GatheredParameters([zero3.head.weight]):
        zero3.engine.backward(zero3.call(hidden, zero3.head.weight))
    return zero3.whole()


def gathered_twice(loss: str) -> dict[str, Tensor]:
    """A frozen head outside all hooks, gathered for the forward, and again by the backward, which
    recomputes."""
    zero3 = Zero3(loss)
    hidden = zero3.engine(zero3.run.batch.tokens)
    gather = partial(zero3.package.zero.GatheredParameters, [zero3.head.weight])
    with gather():
        out = zero3.call(hidden, zero3.head.weight, gather=gather)
    return zero3.gradients(out)


def with_adapter(loss: str, where: str) -> dict[str, Tensor]:
    """PEFT's adapter on the body or the head, all else frozen."""
    zero3 = Zero3(loss, inside=False)
    zero3.engine.destroy()
    zero3.run.loss = cases.adapted_loss(where, loss)
    zero3.start(cases.adapted(where))
    return zero3.gradients(zero3.run.score(zero3.engine, zero3.head, zero3.run.batch))


def of_one_process(loss: str, where: str = "", **options: Any) -> dict[str, Tensor]:
    return cases.adapted_truth(where, LOSSES[loss]) if where else truth(LOSSES[loss], 2, **options)


EMPTY = {"last_empty": True}
CASES: list[tuple[Callable[..., dict[str, Tensor]], str, dict[str, Any], dict[str, Any]]] = [
    # how, the loss, options of the run, and options that the truth has as well
    *((by_module, x, {"inside": y}, {}) for x, y in itertools.product(LOSSES, (True, False))),
    *((by_module, loss, {}, options) for loss in BOTH for options in (EMPTY, {"tied": True})),
    (by_module, "sequence ratio", {}, {"bias": True}),
    (in_two_parts, "off-policy", {}, {"accumulate": 2}),
    *((within_the_models_forward, loss, {}, {}) for loss in BOTH),
    (gathered_by_hand, "sequence ratio", {}, {}),
    (gathered_twice, "frozen head, sequence ratio", {}, {}),
    *((with_adapter, x, {}, {"where": y}) for x, y in itertools.product(BOTH, cases.PLACES)),
]


def run_cases(rank: int, world_size: int) -> list[dict[str, Tensor]]:
    return [how(loss, **options, **both) for how, loss, options, both in CASES]


def test_gradients_are_those_of_one_process() -> None:
    for gradients in run_ranks(run_cases, 2):
        for found, (how, loss, options, both) in zip(gradients, CASES, strict=True):
            errors = relative_error(found, of_one_process(loss, **both))
            assert max(errors.values()) < EXACT, (how.__name__, loss, options, both, errors)
