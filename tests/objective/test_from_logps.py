"""The loss on given log-probabilities is `grpo_loss`, without its projection."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from grpo_kernels import LossConfig, linear_logprob, policy_loss_from_logps
from tests.support.cases import CLIPPED, LOSSES, Case, make_case
from tests.support.reference import reference_loss
from tests.support.run_case import arguments, config_of, packed, run
from tests.support.tolerance import assert_matches

EVERYTHING: dict[str, Any] = {
    "beta": 0.05, "entropy_coef": 0.02, "top_entropy_quantile": 0.6, "sampling": True,
    "num_items": 9.0,
}  # fmt: skip


def case_of(loss_type: str, level: str, **changes: Any) -> Case:
    kind = {"loss_type": loss_type, "importance_sampling_level": level}
    more = {"off_policy_mask_threshold": 0.05, "ratio": "token"} if loss_type != "gmpo" else {}
    more |= {"delta": 1.5} if loss_type in CLIPPED else {}
    return make_case(f"given/{loss_type}/{level}", **kind, **EVERYTHING | more | changes)


def by_two_steps(case: Case, *, is_packed: bool = False) -> tuple[Any, dict[str, Tensor | None]]:
    """Scored by `linear_logprob`, then the loss on that; with the gradients of the head's
    tensors."""
    given = arguments(case)
    call = packed(case, given)[0] if is_packed else dict(given)
    of_head = ("hidden", "weight", "completion_ids", "bias", "reference")
    hidden, weight, ids, _, _ = (call.pop(x) for x in of_head)
    scores = linear_logprob(hidden, weight, ids, completion_mask=call["completion_mask"])
    out = policy_loss_from_logps(scores.logps, scores.entropies, **call, config=config_of(case))
    out.loss.backward()
    return out, {name: given[name].grad for name in ("hidden", "weight")}


@pytest.mark.parametrize(("loss_type", "level"), LOSSES)
def test_it_is_grpo_loss(loss_type: str, level: str) -> None:
    case = case_of(loss_type, level)
    out, grads = by_two_steps(case)
    assert_matches(out, grads, reference_loss(case), case)
    want, _ = run(case)
    assert out.engine == "given"
    assert_close(dict(out.metrics), dict(want.metrics))


def test_on_policy_empty_and_packed() -> None:
    for mask in ("holes", "none", "first_empty"):
        case = case_of("dapo", "token", old=False, mask=mask, dtype=torch.float64)
        assert_matches(*by_two_steps(case), reference_loss(case), case)
    case = case_of("grpo", "sequence", dtype=torch.float64)
    (want, d_want), (out, grads) = by_two_steps(case), by_two_steps(case, is_packed=True)
    assert_close(out.loss, want.loss)
    assert_close(grads, d_want)


def test_dtypes_masked_positions_and_a_second_derivative() -> None:
    """16-bit log-probabilities give the loss in fp32 and get their gradient in 16 bits; what is
    masked is not read."""
    rows = ([[-1.5, torch.nan]], [[2.0, torch.nan]])
    given = [torch.tensor(x, dtype=torch.bfloat16).requires_grad_() for x in rows]
    mask, advantages = torch.tensor([[1, 0]]), torch.tensor([2.0])
    out = policy_loss_from_logps(*given, mask, advantages, entropy_coef=0.5)
    assert out.loss.dtype == torch.float32
    d_logps, d_entropies = torch.autograd.grad(3 * out.loss, given, create_graph=True)
    assert d_logps.dtype == torch.bfloat16
    assert d_logps.tolist() == [[-6.0, 0.0]] and d_entropies.tolist() == [[-1.5, 0.0]]
    for x in given:
        with pytest.raises(RuntimeError, match=r"differentiating twice .* with torch"):
            torch.autograd.grad(d_logps.sum(), x, allow_unused=True, retain_graph=True)
    assert out.logps.tolist() == [[-1.5, 0.0]]
    with pytest.raises(RuntimeError, match=r"out.logps: .* only out.loss has one"):
        (out.loss + out.logps.sum()).backward()


@pytest.mark.usefixtures("forget_warnings")
@pytest.mark.parametrize(
    "bonus", [{"entropy_coef": 0.1}, {"objective": lambda x: -x.logps - x.entropies}]
)
def test_entropies_without_a_graph_are_warned_of(bonus: Any) -> None:
    logps, entropies = torch.full((1, 2), -1.0, requires_grad=True), torch.ones(1, 2)
    given: Any = (torch.ones(1, 2), torch.ones(1))
    with pytest.warns(UserWarning, match="entropies: the loss has a gradient in them"):
        policy_loss_from_logps(logps, entropies, *given, **bonus)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        policy_loss_from_logps(logps, entropies, *given)
        policy_loss_from_logps(logps.detach(), entropies, *given, **bonus)
        with torch.no_grad():
            policy_loss_from_logps(logps, entropies, *given, **bonus)
        policy_loss_from_logps(logps, entropies.requires_grad_(), *given, **bonus)


WRONG: list[tuple[str, Any, str]] = [
    ("logps", torch.zeros(4), r"logps: expected shape \(B, T\), got \(4,\)"),
    ("logps", torch.zeros(2, 3, dtype=torch.long), "logps: expected a floating-point tensor"),
    ("entropies", torch.zeros(2, 2), "entropies: expected shape"),
    ("config", LossConfig(beta=0.1), "ref_per_token_logps: expected a tensor since beta = 0.1"),
    ("cu_seqlens", torch.tensor([0, 6]), r"logps: expected shape \(N,\) with cu_seqlens"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG, ids=[x[2][:20] for x in WRONG])
def test_wrong_arguments(name: str, value: Any, message: str) -> None:
    zeros = torch.zeros(2, 3)
    good = {"logps": zeros, "entropies": zeros, "completion_mask": zeros + 1}
    good["advantages"] = torch.zeros(2)
    policy_loss_from_logps(**good)
    with pytest.raises((TypeError, ValueError), match=message):
        policy_loss_from_logps(**{**good, name: value})
