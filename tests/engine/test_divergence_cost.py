"""What a second head costs: counted floating point operations, and bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_kernels import LossConfig, Run, grpo_loss, linear_divergence
from tests.support.flat import flat
from tests.support.measure import AllocationWatcher, count_flops

N, H, V = 96, 10, 64
MIB = 2**20
KINDS = ({}, {"divergence": "forward_kl"}, {"divergence": "jsd", "beta": 0.3})


def tensors(head: str, n: int = N, v: int = V, h: int = H) -> tuple[torch.Tensor, ...]:
    """Hidden states and weights of student and teacher, of the same width."""
    g = torch.Generator().manual_seed(1)
    made = [torch.randn(shape, generator=g) for shape in ((n, h), (v, h), (n, h), (v, h))]
    made[0].requires_grad_(head != "no grad")
    made[1].requires_grad_(head == "trainable")
    return tuple(made)


def nvh(head: str, gradient: Any = None, **options: Any) -> float:
    """Cost of forward and backward in units of NVH."""
    given, upstream = tensors(head), torch.full((N,), 0.3) if gradient is None else gradient

    def run() -> None:
        found = flat(linear_divergence)(*paired(given), **options).divergence
        if found.requires_grad:
            found.backward(upstream)

    return count_flops(run) / (N * V * H)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_divergence_costs_8_with_a_head_that_trains(kind: dict[str, Any]) -> None:
    assert [nvh(head, **kind) for head in ("trainable", "frozen", "no grad")] == [8, 6, 4]
    assert [nvh(head, engine="two_pass", **kind) for head in ("trainable", "frozen")] == [12, 10]
    assert [nvh(head, engine="lean", **kind) for head in ("trainable", "frozen")] == [12, 10]


def test_an_expectation_that_does_not_come_true_costs_a_second_pass_of_the_rows_it_misses() -> None:
    half = torch.full((N,), 0.3)
    half[: N // 4] = 0.9
    assert nvh("trainable", half) == 8 + 8 / 4
    assert nvh("trainable", half, expected=half) == 8
    assert nvh("frozen", half) == 6


def paired(given: Any) -> tuple[Any, ...]:
    """Both heads' tensors as `linear_divergence` takes them."""
    hidden, weight, *teacher = given
    return hidden, weight, tuple(teacher)


def with_exact_kl(given: Any, **options: Any) -> torch.Tensor:
    """A loss whose KL term is the divergence from a reference, of on-policy tokens."""
    hidden, weight, other, other_weight = given
    shape = (8, N // 8)
    config = LossConfig(beta=0.1, kl_estimator="full", **options.pop("config", {}))
    return grpo_loss(
        hidden.view(*shape, H), weight, torch.zeros(shape, dtype=torch.long), None, torch.ones(8),
        reference=(other.view(*shape, H), other_weight), config=config, **options,
    ).loss  # fmt: skip


@pytest.mark.parametrize(
    ("old", "level", "cost"), [(False, "token", 8), (True, "token", 8), (True, "sequence", 12)]
)
def test_the_exact_kl_of_a_loss_adds_the_projection_of_the_reference(
    old: bool, level: str, cost: int
) -> None:
    options: dict[str, Any] = {"config": {"importance_sampling_level": level}}
    if old:
        options["old_per_token_logps"] = torch.full((8, N // 8), -4.0)
    for head, engines in (("trainable", cost), ("frozen", cost - 2), ("no grad", 4)):
        given = tensors(head)

        def run(given: Any = given) -> None:
            loss = with_exact_kl(given, **options)
            if loss.requires_grad:
                loss.backward()

        assert count_flops(run) / (N * V * H) == engines


@pytest.mark.parametrize("engine", ["one_pass", "two_pass", "lean"])
def test_the_workspace_holds_both_logits(engine: str) -> None:
    n, v, h, workspace = 1024, 15013, 32, 4 * MIB
    given = tensors("trainable", n, v, h)
    run = Run(engine=engine, workspace_bytes=workspace)
    with AllocationWatcher() as watch:
        linear_divergence(*paired(given), run=run).divergence.sum().backward()
    gradients = 2 * 4 * (n * h + v * h)  # in the accumulator, and as they are returned
    assert watch.peak <= workspace + gradients + 60 * n * 4
    assert watch.largest < n * v / 8
