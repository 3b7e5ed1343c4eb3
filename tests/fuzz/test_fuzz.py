"""A few attacks, always the same; a planted fault is found, shrunk and repeated; calls that failed
once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import settings

from tests.fuzz import __main__ as command
from tests.fuzz import attack, losses
from tests.fuzz.expectations import EXPECTED
from tests.fuzz.losses import LOSS

pytestmark = pytest.mark.unit

SAME = settings(attack.SETTINGS, derandomize=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", command.CATEGORIES)
def test_nothing_fails(name: str) -> None:
    command.CATEGORIES[name].run(SAME)


def test_a_planted_fault_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under DAPO each token weighs a thousandth too much."""
    right = losses.grpo_loss

    def wrong(*args: Any, config: Any, advantages: Any, **rest: Any) -> Any:
        factor = 1.001 if config.loss_type == "dapo" else 1.0
        return right(*args, config=config, advantages=factor * advantages, **rest)

    monkeypatch.setattr(losses, "grpo_loss", wrong)
    LOSS.check({"name": "fuzz/planted", "loss_type": "grpo"})
    with pytest.raises(AssertionError, match="fuzz/planted"):
        LOSS.check({"name": "fuzz/planted"})


def test_what_fails_is_shrunk_and_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def only_other_losses(options: dict[str, Any]) -> None:
        assert "loss_type" in options  # DAPO is what is chosen where nothing is

    monkeypatch.setattr(command, "SETTINGS", settings(SAME, derandomize=False, max_examples=20))
    monkeypatch.setitem(command.CATEGORIES, "loss", attack.Attack(LOSS.draw, only_other_losses))
    again = ["--minutes", "0", "--category", "loss", "--seed", "7"]
    assert command.main(again) == 1
    told = capsys.readouterr().out
    assert f"python -m tests.fuzz {' '.join(again)}" in told
    smallest = told[told.index("Failing test case") :]
    assert "'backend': 'torch'" in smallest and "loss_type" not in smallest
    assert smallest.count("': ") <= 16
    plain = ("packed", "strides", "garbage", "scale", "lora", "frozen")
    assert not [name for name in plain if f"'{name}'" in smallest]
    monkeypatch.setitem(command.CATEGORIES, "loss", attack.Attack(LOSS.draw, lambda options: None))
    assert command.main(again) == 0


# d hidden of a small row beside a large one; d weight, where one row was expected to be twenty
# times the largest
EXPECTED_THAT_FAILED: list[dict[str, Any]] = [
    {"name": "expected/61673036677", "n": 2, "a": "random", "sent_entropy": "zeros", "bias": True},
    {"name": "expected/61673036677", "n": 2, "a": "random", "v": 130},
]
# Probabilities below float32's least, times a divergence's slope of 80; and SAPO's gate near 1 in
# float64.
LOSSES_THAT_FAILED: list[dict[str, Any]] = [
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
FAILED_ONCE = [
    *((EXPECTED, x) for x in EXPECTED_THAT_FAILED), *((LOSS, x) for x in LOSSES_THAT_FAILED)
]  # fmt: skip


@pytest.mark.parametrize(("category", "options"), FAILED_ONCE)
def test_what_failed_once(category: attack.Attack, options: dict[str, Any]) -> None:
    category.check(options)
