"""Ranges of the phases in torch.profiler's traces."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from grpo_kernels import Run, grpo_loss
from grpo_kernels.base import profiling

LOSS = "grpo_kernels::loss"
CALLS = {"one_pass": (LOSS,), "two_pass": (LOSS, "PolicyLossBackward")}
CALLS |= {"lean": CALLS["two_pass"]}


def step(engine: Any) -> None:
    hidden, weight = (
        torch.randn(2, 9, 8, requires_grad=True),
        torch.randn(33, 8, requires_grad=True),
    )
    ids, mask, run = (
        torch.randint(33, (2, 9)),
        torch.ones(2, 9),
        Run(engine=engine, backend="torch"),
    )
    grpo_loss(hidden, weight, ids, mask, torch.tensor([1.0, -1.0]), run=run).loss.backward()


@pytest.mark.parametrize("engine", CALLS)
def test_a_trace_has_the_phases_of_a_call_with_their_products_inside(engine: str) -> None:
    step(engine)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        step(engine)
    events = trace.events()
    phases = ("logits", "rows", "gradients")
    ranges = {name: [x for x in events if x.name == f"grpo_kernels::{name}"] for name in phases}
    assert all(ranges.values()), {name: len(found) for name, found in ranges.items()}
    assert set(CALLS[engine]) <= {x.name for x in events}
    products = [x for x in events if x.name in ("aten::mm", "aten::addmm", "aten::bmm")]
    around = [*ranges["logits"], *ranges["gradients"]]
    assert products
    for product in products:
        at = product.time_range
        assert any(x.time_range.start <= at.start and at.end <= x.time_range.end for x in around), (
            product
        )


def test_without_a_profiler_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def record(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr(profiling, "record_function", record)
    step("one_pass")
    with (
        pytest.raises(AssertionError, match="grpo_kernels::loss"),
        profile(activities=[ProfilerActivity.CPU]),
    ):
        step("one_pass")
