"""The attack itself: half a minute of it, and whether it finds, replays and minimises what is planted."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels.call import loss as call
from tests.fuzz import __main__ as command
from tests.fuzz import categories, expectations, harness
from tests.fuzz.harness import Category
from tests.fuzz.losses import LOSS

SECONDS = 30.0
MOST = 60
START = 20240203


def test_half_a_minute_of_it_finds_nothing() -> None:
    found = harness.fuzz(categories.ALL, SECONDS, START, most=MOST)
    assert all(trials > 0 for trials, _ in found.values()), found
    failures = [failure for _, some in found.values() for failure in some]
    assert not failures, "\n".join(map(str, failures))


@pytest.fixture
def heavier_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault: under DAPO each token weighs a thousandth too much."""
    right = call.token_weights

    def wrong(config: Any, *rest: Any) -> Tensor:
        weights = right(config, *rest)
        return weights * 1.001 if config.loss_type == "dapo" else weights

    monkeypatch.setattr(call, "token_weights", wrong)


def first_failure() -> harness.Failure:
    """Of the first sixty seeds."""
    seeds = itertools.islice(harness.seeds(START), 60)
    return next(failure for seed in seeds if (failure := harness.trial(LOSS, seed)) is not None)


def test_a_planted_fault_is_found_replayed_and_minimised(
    heavier_weights: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = first_failure()
    seed = failure.seed
    assert command.main(["--replay", f"loss:{seed}"]) == 1
    told = capsys.readouterr().out
    assert f"loss:{seed} failed: AssertionError" in told
    assert f"python -m tests.fuzz --replay loss:{seed}" in told
    assert len(failure.smallest) <= 4 < len(failure.options)  # DAPO is what is chosen where nothing is
    assert failure.smallest.get("loss_type", "dapo") == "dapo"
    monkeypatch.undo()
    assert command.main(["--replay", f"loss:{seed}"]) == 0
    assert f"loss:{seed} passes" in capsys.readouterr().out


def test_minimised_keeps_what_the_failure_needs() -> None:
    def check(options: dict[str, int]) -> None:
        if options.get("a", 0) + options.get("b", 0) > 4:
            raise ValueError("too much")
        if "c" not in options:
            raise TypeError("another failure")

    draw = lambda draw: {"c": 1, "d": 2, "a": draw.randint(3, 4), "b": 2, "e": 5}  # noqa: E731
    category = Category("sums", draw, check)
    failure = harness.trial(category, 7)
    assert failure is not None and failure.smallest.keys() == {"a", "b"}
    assert failure.smallest_error == "ValueError: too much"
    assert category.options(7) == draw(random.Random("sums 7"))


def test_random_trials_cover_what_they_are_to_cover() -> None:
    """Of 600 drawn: every loss type, layout, and backend of a CPU."""
    drawn = [LOSS.options(seed) for seed in range(600)]
    assert len({x["loss_type"] for x in drawn}) == 9
    assert {x["backend"] for x in drawn} >= {"torch", "cpp"}
    for name in ("packed", "strides", "garbage", "scale", "lora", "no_mask", "engine", "sampling", "bias", "frozen"):
        assert sum(bool(x.get(name)) for x in drawn) >= 20, name
    assert {x["dtype"] for x in drawn} == {torch.float32, torch.float64, torch.bfloat16, torch.float16}


@pytest.mark.parametrize(
    "options",
    [
        {"n": 2, "a": "random", "sent_entropy": "zeros", "bias": True},  # d hidden of a small row beside a large one
        {"n": 2, "a": "random", "v": 130},  # d weight, where one row was expected to be twenty times the largest
    ],
)
def test_what_failed_once(options: dict[str, Any]) -> None:
    expectations.check({"name": "expected/61673036677", **options})


@pytest.mark.parametrize(
    "seed",
    [
        964942788219,  # probabilities below float32's least, times a divergence's slope of 80
        920299518003,  # SAPO's gate near 1 in float64
    ],
)
def test_losses_that_failed_once(seed: int) -> None:
    LOSS.check(LOSS.options(seed))
