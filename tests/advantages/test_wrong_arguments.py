"""Wrong arguments of every estimator: the message names the argument, what was expected and what came."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from grpo_kernels import advantages as adv

NAN, INF = float("nan"), float("inf")
R, M = torch.zeros(4), torch.ones(4, 3)
GOOD: dict[str, Any] = {
    "rewards": R, "completion_mask": M, "num_generations": 2, "values": M, "x": M, "baselines": R, "threshold": 1.0,
    "step_rewards": M, "step_ends": M.long(), "old_per_token_logps": -M, "sum_pi_squared": M,
    "teacher_logps": -M, "student_logps": -M,
}  # fmt: skip
TAKES = {name: {*inspect.signature(getattr(adv, name)).parameters} for name in adv.__all__}
PER_TOKEN = (
    "values", "x", "per_token_kl", "old_per_token_logps", "sum_pi_squared", "importance_sampling_ratio",
    "teacher_logps", "student_logps",
)  # fmt: skip
PER_ROW = ("baselines", "last_value")
# Argument, a wrong value of it, what comes after its name.
OF_ALL: list[tuple[type[Exception], str, Any, str]] = [
    *((ValueError, name, M[:, :2], r"expected shape \(B, T\) = \(4, 3\), got \(4, 2\)") for name in PER_TOKEN),
    *((ValueError, name, M * x, f"expected finite .* got {x}") for name in PER_TOKEN for x in (NAN, INF)),
    *((ValueError, name, R[:3], r"expected shape \(B,\) = \(4,\), got \(3,\)") for name in PER_ROW),
    *((ValueError, name, R + INF, "expected finite .* got inf") for name in PER_ROW),
    (TypeError, "rewards", [1.0, 2.0], "expected a tensor, got list"),
    (TypeError, "rewards", R.cfloat(), "expected real numbers, got torch.complex64"),
    (ValueError, "rewards", R.view(2, 2, 1), r"expected shape .* got \(2, 2, 1\)"),
    (ValueError, "rewards", R + torch.tensor([0.0, 0.0, INF, 0.0]), r"expected finite .* got inf at \(2, "),
    (ValueError, "rewards", R - INF, "expected finite .* got -inf"),
    (ValueError, "reward_weights", [1, 2], r"expected shape \(F,\) = \(1,\), got \(2,\)"),
    (ValueError, "reward_weights", [NAN], "expected finite values, got nan"),
    (TypeError, "reward_weights", "ab", "expected a tensor or a list of numbers, got 'ab'"),
    (TypeError, "reward_weights", [None], r"expected a tensor or a list of numbers, got \[None\]"),
    (ValueError, "num_generations", 3, "expected a divisor of the 4 .* got 3"),
    (ValueError, "num_generations", 0, "expected at least [12].*, got 0"),
    (TypeError, "num_generations", 2.0, "expected an int, got float"),
    (TypeError, "group_ids", R, "expected integers, got torch.float32"),
    (ValueError, "group_ids", [0] * 7, r"expected shape \(B,\) = \(4,\), got \(7,\)"),
    (ValueError, "scale", "groups", "expected one of .* got 'groups'"),
    (ValueError, "std", "biased", "expected one of .* got 'biased'"),
    (ValueError, "aggregation", "sum", "expected one of .* got 'sum'"),
    (ValueError, "epsilon", -1.0, "expected a finite number at least 0, got -1"),
    (ValueError, "epsilon", NAN, "expected a finite number at least 0, got nan"),
    (TypeError, "epsilon", "1", "expected a number, got str"),
    (ValueError, "completion_mask", R, r"expected shape \(B, T\), got \(4,\)"),
    (TypeError, "completion_mask", 3, "expected a tensor, got int"),
    (ValueError, "completion_mask", M * NAN, "expected 0 or a number that is not, got nan"),
    (ValueError, "step_rewards", R, r"expected shape \(B, S\), got \(4,\)"),
    (ValueError, "step_rewards", M * INF, "expected finite .* got inf"),
    (ValueError, "step_ends", M[:, :2].long(), r"expected shape \(B, S\) = \(4, 3\), got \(4, 2\)"),
    (TypeError, "step_ends", M, "expected integers, got torch.float32"),
    (ValueError, "step_ends", M.long() * 3, r"expected indices in \[0, T\) = \[0, 3\), got 3 at \(0, 0\)"),
    (ValueError, "step_ends", -M.long(), "expected indices .* got -1"),
    (ValueError, "gamma", 1.5, r"expected a finite number in \[0, 1\], got 1.5"),
    (ValueError, "lam", -0.1, r"expected a finite number in \[0, 1\], got -0.1"),
    (ValueError, "beta", NAN, "expected a finite number, got nan"),
    (ValueError, "old_per_token_logps", M / 2, "expected log-probabilities, at most 0, got 0.5"),
    (ValueError, "sum_pi_squared", -M, r"expected sums of squared .* \(not their logarithms\), got -1.0"),
    (ValueError, "sum_pi_squared", 1.5 * M, "expected sums of squared .* got 1.5"),
    (TypeError, "handle_zero_tail", 1, "expected a bool, got int"),
    (TypeError, "threshold", "1", "expected a number or a tensor, got str"),
    (TypeError, "threshold", True, "expected a number or a tensor, got bool"),
    (ValueError, "threshold", NAN, "expected a number other than NaN, got nan"),
    (ValueError, "threshold", R[:2], r"expected shape \(B,\) = \(4,\), got \(2,\)"),
    (ValueError, "threshold", R * NAN, r".* other than NaN, got nan at \(0,\)"),
    (TypeError, "threshold", torch.tensor(1j), "expected real numbers"),
    (ValueError, "advantages", R[:3], r"expected shape \(B,\) = \(4,\), got \(3,\)"),
    (ValueError, "advantages", M[:, :2], r"expected shape \(B, T\) = \(4, 3\)"),
    (ValueError, "clip", -1.0, "expected a finite number at least 0, got -1.0"),
    (ValueError, "coefficient", NAN, "expected a finite number at least 0"),
]  # fmt: skip
OF_ONE: list[tuple[type[Exception], str, dict[str, Any], str]] = [
    (ValueError, "group_advantages", {"rewards": M[:, :0]}, r"rewards: expected shape .* got \(4, 0\)"),
    (ValueError, "group_advantages", {"num_generations": 1}, "num_generations: expected at least 2 .* got 1"),
    (ValueError, "passk_advantages", {"scale": "batch"}, "scale: expected one of 'group', 'none', got 'batch'"),
    (ValueError, "process_advantages", {"step_rewards": [[1.0], [1.0, 2.0]], "step_ends": [[0], [0]]},
     r"step_ends: .*\[1, 2\] by row, got \[1, 1\]"),
    (ValueError, "process_advantages", {"completion_mask": None}, "completion_mask, length: .* got neither"),
    (ValueError, "process_advantages", {"length": 3}, "completion_mask, length: .* got both"),
    (ValueError, "process_advantages", {"completion_mask": M[:3]}, r"completion_mask: .* \(4, 3\), got \(3, 3\)"),
    (ValueError, "process_advantages", {"completion_mask": None, "length": -1}, "length: expected at least 0, got -1"),
    (TypeError, "process_advantages", {"completion_mask": None, "length": 3.0}, "length: expected an int, got float"),
    (TypeError, "gae", {"completion_mask": None}, "completion_mask: expected a tensor, got NoneType"),
    (ValueError, "gae", {"rewards": M[:, :2]}, r"rewards: .* \(4, 3\), got \(4, 2\)"),
    (ValueError, "gae", {"rewards": R * NAN}, "rewards: expected finite .* got nan"),
    (ValueError, "remax_advantages", {"rewards": M[:, :2]}, r"rewards: .* \(4, 3\), got \(4, 2\)"),
]  # fmt: skip


def call(name: str, **changes: Any) -> Any:
    return getattr(adv, name)(**{key: x for key, x in GOOD.items() if key in TAKES[name]} | changes)


@pytest.mark.parametrize("name", adv.__all__)
def test_the_arguments_of_these_tests_are_right(name: str) -> None:
    call(name)


@pytest.mark.parametrize(("error", "argument", "value", "message"), OF_ALL)
def test_a_wrong_argument_is_named(
    error: type[Exception], argument: str, value: Any, message: str
) -> None:
    """By every estimator that takes it; groups are named in one way at a time."""
    takers = [name for name in adv.__all__ if argument in TAKES[name]]
    assert takers
    for name in takers:
        changes = {argument: value} | ({"num_generations": None} if argument == "group_ids" else {})
        with pytest.raises(error, match=f"^{argument}: {message}"):
            call(name, **changes)


@pytest.mark.parametrize(("error", "name", "changes", "message"), OF_ONE)
def test_of_one_estimator(
    error: type[Exception], name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}"):
        call(name, **changes)


@pytest.mark.parametrize("name", [name for name in adv.__all__ if "group_ids" in TAKES[name]])
def test_groups_are_named_in_one_way(name: str) -> None:
    with pytest.raises(ValueError, match="exactly one of the two, got both"):
        call(name, group_ids=[0] * 4)
    if name != "reinforce_plus_plus":
        with pytest.raises(ValueError, match="exactly one of the two, got neither"):
            call(name, num_generations=None)


@pytest.mark.parametrize(
    "name", [name for name in adv.__all__ if {"rewards", "completion_mask"} <= TAKES[name]]
)
def test_as_many_rewards_as_rows_of_the_mask(name: str) -> None:
    with pytest.raises(ValueError, match=r"^rewards: .*= \(4,.*\), got \(3,\)"):
        call(name, rewards=R[:3])


@pytest.mark.parametrize("name", [name for name in adv.__all__ if "process_group" in TAKES[name]])
def test_what_is_no_process_group_is_refused_first_of_all(name: str) -> None:
    required = [
        x.name
        for x in inspect.signature(getattr(adv, name)).parameters.values()
        if x.default is x.empty
    ]
    with pytest.raises(
        TypeError, match=r"^process_group: expected a torch.distributed.ProcessGroup .* got str"
    ):
        getattr(adv, name)(**dict.fromkeys(required), process_group="x")
