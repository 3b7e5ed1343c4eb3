"""Random calls; a planted fault is noticed, and what fails is shrunk; calls that failed once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, seed, settings

from tests.fuzz import expectations, losses
from tests.fuzz.conftest import SAME
from tests.fuzz.draws import Options, calls

pytestmark = pytest.mark.filterwarnings("ignore")

PROFILE = settings() if settings.get_current_profile_name() == "fuzz" else SAME


@PROFILE
@given(options=calls(losses.draw))
def test_random_losses(options: Options) -> None:
    losses.check(options)


@PROFILE
@given(options=calls(expectations.draw))
def test_random_expectations(options: Options) -> None:
    expectations.check(options)


def test_a_planted_fault_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under DAPO each token weighs a thousandth too much."""
    right = losses.grpo_loss

    def wrong(*args: Any, config: Any, advantages: Any, **rest: Any) -> Any:
        factor = 1.001 if config.loss_type == "dapo" else 1.0
        return right(*args, config=config, advantages=factor * advantages, **rest)

    monkeypatch.setattr(losses, "grpo_loss", wrong)
    losses.check({"name": "fuzz/planted", "loss_type": "grpo"})
    with pytest.raises(AssertionError, match="fuzz/planted"):
        losses.check({"name": "fuzz/planted"})


def test_what_fails_is_shrunk() -> None:
    tried: list[Options] = []

    @seed(7)
    @settings(SAME, derandomize=False)
    @given(options=calls(losses.draw))
    def only_other_losses(options: Options) -> None:
        tried.append(options)
        assert "loss_type" in options  # DAPO is what is chosen where nothing is

    with pytest.raises(AssertionError):
        only_other_losses()
    smallest = tried[-1]
    assert smallest["backend"] == "torch" and "loss_type" not in smallest
    assert len(smallest) <= 16
    assert not smallest.keys() & {"packed", "strides", "garbage", "scale", "lora", "frozen"}


# d hidden of a small row beside a large one; d weight, where one row was expected to be twenty
# times the largest
EXPECTED_THAT_FAILED: list[Options] = [
    {"name": "expected/61673036677", "n": 2, "a": "random", "sent_entropy": "zeros", "bias": True},
    {"name": "expected/61673036677", "n": 2, "a": "random", "v": 130},
]
# Probabilities below float32's least, times a divergence's slope of 80; and SAPO's gate near 1 in
# float64.
LOSSES_THAT_FAILED: list[Options] = [
    {
        "name": "fuzz/666619833641", "mask": "full", "b": 2, "t": 2, "h": 8, "v": 200,
        "loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 1.5, "beta": 0.01,
        "kl_estimator": "full", "top_entropy_quantile": 0.18674926029850936, "zero_adv": True,
        "ratio": "masked", "entropy_coef": 0.05, "sampling": True, "temperature": 0.5,
        "dtype": torch.bfloat16, "spread": 20.0, "teacher": 0.1,
        "others": {"teacher_final_logit_softcapping": None, "teacher_logit_scale": -1.0},
        "engine": 34, "backend": "cpp", "packed": True, "garbage": 535490, "scale": 17.0,
        "no_mask": True,
    },
    {
        "name": "fuzz/321530804517", "mask": "full", "b": 2, "t": 5, "h": 8, "v": 2,
        "loss_type": "sapo", "kl_estimator": "k2", "sampling": True, "logit_scale": 2.0,
        "temperature": 0.9, "dtype": torch.float64, "engine": 34, "backend": "torch",
        "scale": 17.0, "lora": 4, "shift": 3.0, "noise": 1.0,
    },
]  # fmt: skip


@pytest.mark.parametrize("options", EXPECTED_THAT_FAILED)
def test_expectations_that_failed_once(options: Options) -> None:
    expectations.check(options)


@pytest.mark.parametrize("options", LOSSES_THAT_FAILED)
def test_losses_that_failed_once(options: Options) -> None:
    losses.check(options)
