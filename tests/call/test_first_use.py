"""What the log says of the backend and the engine that serve a call, and `LossOutput.backend`."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch

import grpo_kernels
from grpo_kernels import GRPOLoss, Run, linear_logprob, policy_loss_from_logps
from grpo_kernels.call import first_use
from tests.support.flat import flat
from tests.support.small_batch import small_batch

TORCH = Run(backend="torch")
REASON = "the cheapest where hidden states and head train, and a token's share of the gradient is known"


def training_batch() -> dict[str, torch.Tensor]:
    return {name: x.requires_grad_() if name in ("hidden", "weight") else x for name, x in small_batch().items()}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """A process in which nothing was called yet."""
    monkeypatch.setattr(first_use, "_logged", set())
    return caplog


def test_the_first_call_says_backend_and_engine_and_why_and_no_other_does(said: pytest.LogCaptureFixture) -> None:
    batch = training_batch()
    with said.at_level(logging.INFO, "grpo_kernels"):
        for backend in ("torch", "torch", "auto"):
            flat(GRPOLoss(run=Run(backend=backend)))(**batch)
        linear_logprob(batch["hidden"], batch["weight"], batch["completion_ids"])
    (line,) = said.messages
    assert line == f"on cpu: backend torch (asked for), engine one_pass ({REASON} before the forward)"


def test_without_an_expectation_that_is_the_reason_for_a_second_pass(said: pytest.LogCaptureFixture) -> None:
    batch = training_batch()
    with said.at_level(logging.INFO, "grpo_kernels"):
        linear_logprob(batch["hidden"], batch["weight"], batch["completion_ids"], run=TORCH)
    (line,) = said.messages
    assert line.endswith(f"engine two_pass ({REASON} only in the backward, since no expected= was given)")


def test_the_first_call_that_trains_is_said_after_one_that_scores(said: pytest.LogCaptureFixture) -> None:
    batch = training_batch()
    given = batch["hidden"], batch["weight"], batch["completion_ids"]
    with said.at_level(logging.INFO, "grpo_kernels"):
        for _ in range(2):
            with torch.no_grad():  # a trainer's old log-probabilities
                linear_logprob(*given, run=TORCH)
            flat(GRPOLoss(run=TORCH))(**batch)
    engines = [line.partition("engine ")[2].split(" (")[0] for line in said.messages]
    assert engines == ["score", "one_pass"]


def test_for_debugging_each_backend_and_engine_is_said_once(said: pytest.LogCaptureFixture) -> None:
    batch = training_batch()
    with said.at_level(logging.DEBUG, "grpo_kernels"):
        for engine in ("auto", "two_pass", "auto", "lean"):
            flat(GRPOLoss(run=Run(engine, "torch")))(**batch)
        with torch.no_grad():
            linear_logprob(batch["hidden"], batch["weight"], batch["completion_ids"], run=TORCH)
    engines = [line.partition("engine ")[2].split(" (")[0] for line in said.messages]
    assert engines == ["one_pass", "two_pass", "lean", "score"]
    assert said.messages[1].endswith("engine two_pass (asked for)")
    assert said.messages[3].endswith("engine score (no gradient is wanted)")


def test_a_line_that_nobody_could_read_is_said_again(said: pytest.LogCaptureFixture) -> None:
    batch = training_batch()
    for level in (logging.WARNING, logging.INFO):
        with said.at_level(level, "grpo_kernels"):
            flat(GRPOLoss(run=TORCH))(**batch)
    assert len(said.messages) == 1


def test_a_compiled_graph_is_whole_and_says_what_it_runs_on(said: pytest.LogCaptureFixture) -> None:
    batch = training_batch()
    with said.at_level(logging.DEBUG, "grpo_kernels"):
        out = torch.compile(flat(GRPOLoss(run=TORCH)), fullgraph=True, backend="eager")(**batch)
        out.loss.backward()
    assert (out.engine, out.backend) == ("one_pass", "torch")
    assert [line for line in said.messages if "chosen when the graph was compiled" in line]


@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_the_output_says_which_backend_it_was(backend: str) -> None:
    batch = training_batch()
    out = flat(GRPOLoss(run=Run(backend=backend)))(**batch)
    assert out.backend == backend
    given = out.per_token_logps, out.entropies, batch["completion_mask"], batch["advantages"]
    assert policy_loss_from_logps(*given).backend == "torch"


def test_the_library_says_nothing_where_nobody_asked(tmp_path) -> None:
    code = """
import torch, grpo_kernels
hidden, weight, ids = torch.ones(5, 3), torch.ones(7, 3), torch.arange(5)
grpo_kernels.linear_logprob(hidden, weight, ids, run=grpo_kernels.Run(backend="torch"))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [type(x) for x in logging.getLogger(grpo_kernels.__name__).handlers] == [logging.NullHandler]
