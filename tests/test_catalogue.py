"""Known failure modes of losses from hidden states, beyond the values and gradients of
`test_differential`: what must hold instead."""

from __future__ import annotations

import math

import pytest
import torch
from torch.testing import assert_close

from grpo_kernels import Run, grpo_loss
from tests.support.case_builder import PER_TOKEN, Case, make_case
from tests.support.cases import LOSSES, loss
from tests.support.reference_terms import TERMS
from tests.support.run_case import run

NAN, INF = math.nan, math.inf
RATIO = "importance_sampling_ratio"
pytestmark = pytest.mark.usefixtures("every_backend")


def with_nan(case: Case, name: str) -> Case:
    x = getattr(case, name).clone()
    x[1, 2] = NAN
    return case.but(**{name: x})


def test_packed_of_nothing() -> None:
    for lengths in ([0], [0, 0, 0], []):
        hidden, weight = (torch.randn(n, 4, requires_grad=True) for n in (0, 6))
        bounds, none = torch.tensor([0, *lengths]), torch.zeros(0)
        advantages = torch.randn(len(lengths))
        out = grpo_loss(hidden, weight, none.long(), none, advantages, cu_seqlens=bounds)
        out.loss.backward()
        assert float(out.loss.detach()) == 0.0 and weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize(
    ("loss_type", "level"),
    [("grpo", "token"), ("grpo", "sequence"), *((x, "token") for x in ("cispo", "vespo", "gmpo"))],
)
def test_banned_target_on_policy(loss_type: str, level: str) -> None:
    """The loss is NaN, since no policy samples what it bans; the ratio is 1, and the gradient what
    it tends to."""
    case = make_case("banned", mask="holes", old=False, bias=True, **loss(loss_type, level))
    case = case.but(advantages=torch.tensor([1.0, -0.5, 0.0]))
    banned, ids, bias = 3, case.completion_ids.clone(), case.bias.clone()
    ids[ids == banned] = banned + 1
    ids[case.completion_mask.cumsum(1) == 1] = banned  # the first that counts of each sequence
    bias[banned] = -1e4  # and no other token notices
    case = case.but(completion_ids=ids, bias=bias)
    out, limit = run(case)
    assert bool(out.loss.isfinite())
    bias[banned] = -INF
    for engine in ("one_pass", "two_pass", "lean", "frozen"):
        frozen = {"weight", "bias"} if engine == "frozen" else set()
        out, grads = run(case.but(bias=bias, frozen=frozenset(frozen)), engine)
        assert out.engine == engine
        assert bool(out.loss.isnan()) and float(out.metrics["ratio"]) == 1.0
        for name in limit.keys() - frozen:
            assert_close(grads[name], limit[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("loss_type", "level"), LOSSES)
def test_nan_at_a_counted_position_surfaces(loss_type: str, level: str) -> None:
    """A hidden state's in the loss and in its row's logp, entropy and gradient; on-policy, too,
    where the coefficients would be known without any log-probability. An argument's is refused."""
    options = {"mask": "full", "bias": True, **loss(loss_type, level)}
    ratio = None if loss_type == "gmpo" else "token"  # which takes no ratio
    off_policy = make_case("nan", beta=0.1, adv="token", ratio=ratio, **options)
    for name in (*PER_TOKEN[:2], *([] if ratio is None else [RATIO])):
        with pytest.raises(ValueError, match=f"^{name}: expected numbers .*, got NaN for 1 of 21"):
            run(with_nan(off_policy, name))
    rows = torch.zeros(3, 7, dtype=torch.bool)
    rows[1, 2] = True
    for case in (off_policy, make_case("nan on-policy", old=False, **options)):
        out, grads = run(with_nan(case, "hidden"))
        assert bool(out.loss.isnan()) and bool(grads["weight"].isnan().any())
        assert torch.equal(out.logps.isnan(), rows)
        assert torch.equal(out.entropies.isnan(), rows)
        if level == "token" and not TERMS[loss_type].per_sequence:
            assert bool(grads["hidden"][[0, 2]].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_gradient_has_one_rounding_however_many_chunks(dtype, every_backend):
    """Accumulated in fp32: d weight is off by one rounding, for 4 sequences or 256."""
    for batch in (4, 64, 256) if every_backend == "torch" else (4, 16):  # the interpreter is slow
        hidden, weight = torch.randn(batch, 8, 32).to(dtype), torch.randn(200, 32).to(dtype)
        given = torch.randint(200, (batch, 8)), torch.ones(batch, 8), torch.randn(batch)
        exact = weight.double().requires_grad_()
        weight.requires_grad_()
        grpo_loss(hidden, weight, *given, run=Run(workspace_bytes=64 * 1024)).loss.backward()
        grpo_loss(hidden.double(), exact, *given).loss.backward()
        best = (exact.grad.to(dtype).double() - exact.grad).norm()
        assert (weight.grad.double() - exact.grad).norm() <= 1.02 * best
