"""What the log says of the backend and the engine that serve a call, and `LossOutput.backend`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import pytest
import torch

from grpo_kernels import GRPOLoss, Run, linear_logprob, policy_loss_from_logps
from grpo_kernels.call import first_use
from grpo_kernels.typing import BackendName, EngineName
from tests.support.flat import flat
from tests.support.small_batch import small_batch

TORCH = Run(backend="torch")
REASON = (
    "the cheapest where hidden states and head train, and a token's share of the gradient is known"
)


def training_batch() -> dict[str, torch.Tensor]:
    return {
        name: x.requires_grad_() if name in ("hidden", "weight") else x
        for name, x in small_batch().items()
    }


@pytest.fixture
def said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> pytest.LogCaptureFixture:
    """A process in which nothing was called yet."""
    monkeypatch.setattr(first_use, "_logged", set())
    return caplog


def train(engine: EngineName = "auto", backend: BackendName = "torch") -> None:
    flat(GRPOLoss(run=Run(engine, backend)))(**training_batch())


def log_probabilities() -> None:
    batch = training_batch()
    linear_logprob(batch["hidden"], batch["weight"], batch["completion_ids"], run=TORCH)


def score() -> None:
    with torch.no_grad():  # a trainer's old log-probabilities
        log_probabilities()


ONE_PASS = f"one_pass ({REASON} before the forward)"
TWO_PASS = f"two_pass ({REASON} only in the backward, since no expected= was given)"
SCORE = "score (no gradient is wanted)"


@pytest.mark.parametrize(
    ("level", "calls", "engines"),
    [
        # what a trainer does: once for training, once for scoring
        (
            logging.INFO,
            [train, train, partial(train, backend="auto"), log_probabilities],
            [ONE_PASS],
        ),
        (logging.INFO, [log_probabilities], [TWO_PASS]),
        (logging.INFO, [score, train, score, train], [SCORE, ONE_PASS]),
        # for debugging, each engine once
        (
            logging.DEBUG,
            [train, partial(train, "two_pass"), train, partial(train, "lean"), score],
            [ONE_PASS, "two_pass (asked for)", "lean (asked for)", SCORE],
        ),
    ],
)
def test_backend_and_engine_and_why_are_said_once(
    level: int, calls: list[Callable[[], None]], engines: list[str], said: pytest.LogCaptureFixture
) -> None:
    with said.at_level(level, "grpo_kernels"):
        for call in calls:
            call()
    assert said.messages == [
        f"on cpu: backend torch (asked for), engine {engine}" for engine in engines
    ]


def test_a_line_that_nobody_could_read_is_said_again(said: pytest.LogCaptureFixture) -> None:
    for level in (logging.WARNING, logging.INFO):
        with said.at_level(level, "grpo_kernels"):
            train()
    assert len(said.messages) == 1


@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_the_output_says_which_backend_it_was(backend: str) -> None:
    batch = training_batch()
    out = flat(GRPOLoss(run=Run(backend=backend)))(**batch)
    assert out.backend == backend
    given = out.per_token_logps, out.entropies, batch["completion_mask"], batch["advantages"]
    assert policy_loss_from_logps(*given).backend == "torch"


def test_the_library_leaves_logging_to_the_application() -> None:
    """(That a call prints nothing: tests/test_package.py.)"""
    assert [type(x) for x in logging.getLogger("grpo_kernels").handlers] == [logging.NullHandler]
