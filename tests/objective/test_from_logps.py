"""The loss on given log-probabilities is `grpo_loss`, without its projection."""

from __future__ import annotations

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
    "beta": 0.05, "entropy_coef": 0.02, "off_policy_mask_threshold": 0.05,
    "top_entropy_quantile": 0.6,
}  # fmt: skip


def case_of(loss_type: str, level: str, **changes: Any) -> Case:
    options = {"ratio": "token", "sampling": True, "num_items": 9.0, **EVERYTHING, **changes}
    if loss_type == "gmpo":
        options |= {"off_policy_mask_threshold": None, "ratio": None}
    if loss_type in CLIPPED:
        options["delta"] = 1.5
    return make_case(
        f"given/{loss_type}/{level}",
        loss_type=loss_type,
        importance_sampling_level=level,
        **options,
    )


def by_two_steps(case: Case, *, is_packed: bool = False) -> tuple[Any, dict[str, Tensor | None]]:
    """Scored by `linear_logprob`, then the loss on that; with the gradients of the head's
    tensors."""
    given = arguments(case)
    call = packed(case, given)[0] if is_packed else dict(given)
    hidden, weight, ids, _, _ = (
        call.pop(x) for x in ("hidden", "weight", "completion_ids", "bias", "reference")
    )
    scores = linear_logprob(hidden, weight, ids, mask=call["completion_mask"])
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
    assert out.metrics.keys() == want.metrics.keys()
    for name in want.metrics:
        assert_close(out.metrics[name], want.metrics[name], msg=name)


@pytest.mark.parametrize("mask", ["holes", "none", "first_empty"])
def test_on_policy_and_empty(mask: str) -> None:
    case = case_of("dapo", "token", old=False, mask=mask, dtype=torch.float64)
    out, grads = by_two_steps(case)
    assert_matches(out, grads, reference_loss(case), case)


def test_packed_is_padded() -> None:
    case = case_of("grpo", "sequence", dtype=torch.float64)
    want, d_want = by_two_steps(case)
    out, grads = by_two_steps(case, is_packed=True)
    assert_close(out.loss, want.loss)
    assert_close(grads, d_want)


def test_dtypes_masked_positions_and_a_second_derivative() -> None:
    """16-bit log-probabilities give the loss in fp32 and get their gradient in 16 bits; what is
    masked is not read."""
    logps, entropies = (
        torch.tensor([[x, torch.nan]], dtype=torch.bfloat16).requires_grad_() for x in (-1.5, 2.0)
    )
    mask = torch.tensor([[1, 0]])
    config = LossConfig(entropy_coef=0.5)
    out = policy_loss_from_logps(logps, entropies, mask, torch.tensor([2.0]), config=config)
    assert out.loss.dtype == torch.float32
    d_logps, d_entropies = torch.autograd.grad(3 * out.loss, (logps, entropies), create_graph=True)
    assert d_logps.dtype == torch.bfloat16
    assert d_logps.tolist() == [[-6.0, 0.0]] and d_entropies.tolist() == [[-1.5, 0.0]]
    with pytest.raises(RuntimeError, match="differentiating twice"):
        d_logps.sum().backward()
    with pytest.raises(RuntimeError, match="differentiating twice"):
        torch.autograd.grad(d_logps.sum(), entropies, allow_unused=True)
    assert out.per_token_logps.tolist() == [[-1.5, 0.0]] and not out.per_token_logps.requires_grad


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logps": torch.zeros(4)}, r"logps: expected shape \(B, T\), got \(4,\)"),
        ({"logps": torch.zeros(2, 3, dtype=torch.long)}, "logps: expected a floating-point tensor"),
        ({"entropies": None}, "entropies: expected a tensor, got NoneType"),
        ({"entropies": torch.zeros(2, 2)}, "entropies: expected shape"),
        (
            {"config": LossConfig(beta=0.1)},
            "ref_per_token_logps: expected a tensor since beta = 0.1",
        ),
        ({"config": 3}, "config: expected a LossConfig"),
        ({"advantages": torch.zeros(3)}, "advantages: expected shape"),
        ({"completion_mask": torch.ones(2)}, "completion_mask: expected shape"),
        ({"old_per_token_logps": torch.zeros(2)}, "old_per_token_logps: expected shape"),
        ({"num_items_in_batch": -1.0}, "num_items_in_batch"),
        ({"cu_seqlens": torch.tensor([0, 6])}, r"logps: expected shape \(N,\) with cu_seqlens"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], message: str) -> None:
    zeros = torch.zeros(2, 3)
    good = {
        "logps": zeros,
        "entropies": zeros,
        "completion_mask": torch.ones(2, 3),
        "advantages": torch.zeros(2),
    }
    policy_loss_from_logps(**good)
    with pytest.raises((TypeError, ValueError), match=message):
        policy_loss_from_logps(**{**good, **changes})
