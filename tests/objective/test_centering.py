"""Score centering: values and gradients against float64 over all logits, cost, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import GRPOLoss, Run, grpo_loss
from tests.support.case_builder import Case, make_case
from tests.support.cases import HEADS
from tests.support.flat import flat
from tests.support.measure import count_flops
from tests.support.run_case import arguments, config_of, packed, run
from tests.support.sampler import PREFIX, candidates, centered_loss

B, T, H, V, K = 3, 6, 16, 50, 8
TRUNCATES, MASKS = ({f"{PREFIX}mode": f"token_{x}"} for x in ("truncate", "mask"))
WEIGHTS: dict[str, dict[str, Any]] = {
    "1": {},
    "ratio": {f"{PREFIX}clip_max": None, **MASKS},
    "truncated": {f"{PREFIX}clip_max": 1.2, **TRUNCATES},
    "clipped": {f"{PREFIX}clip_max": 1.3, f"{PREFIX}clip_min": 0.8, **TRUNCATES},
    "masked": {f"{PREFIX}clip_max": 1.5, f"{PREFIX}clip_min": 0.7, **MASKS},
}
LOSSES: tuple[dict[str, Any], ...] = (
    {},
    {"loss_type": "grpo", "beta": 0.1, "adv": "token"},
    {"loss_type": "dr_grpo", "entropy_coef": 0.05, "zero_adv": True},
    {"loss_type": "bnpo", "top_entropy_quantile": 0.6},
    {"loss_type": "luspo", "off_policy_mask_threshold": 0.05},
)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def case_of(name: str, k: int = K, weight: str = "1", **options: Any) -> Case:
    shape = {"b": B, "t": T, "h": H, "v": V, "old": False} | WEIGHTS[weight] | options
    if WEIGHTS[weight]:
        shape[f"{PREFIX}correction"] = True
    return candidates(make_case(f"centering/{name}/{weight}", **shape), k)


def error(found: Tensor | None, truth: Tensor) -> float:
    assert found is not None
    return float((found.double() - truth).abs().max())


def check(case: Case, *engines: str) -> None:
    """At most twice the error of plain torch in the same dtype, and some roundings."""
    dtype = case.hidden.dtype
    loss, truth = centered_loss(case)
    plain, plain_grads = centered_loss(case, dtype)
    eps = torch.finfo(dtype).eps
    for engine in engines:
        out, grads = run(case, engine)
        assert engine in ("auto", out.engine)
        size = 1.0 + abs(float(loss))
        wide = torch.finfo(out.loss.dtype).eps
        assert error(out.loss, loss) <= 2 * error(plain, loss) + 16 * wide * size, engine
        for name, want in truth.items():
            if name in case.frozen:
                continue
            bound = 2 * error(plain_grads[name], want) + 4 * eps * float(want.abs().max())
            assert error(grads[name], want) <= bound + 1e-12, f"{engine}: {name}"


@pytest.mark.parametrize("name", HEADS)
def test_values_and_gradients(name: str, every_backend: str) -> None:
    i = [*HEADS].index(name)
    weight = [*WEIGHTS][i % 5]
    for j, dtype in enumerate(DTYPES):
        options = {**LOSSES[(i + j) % 5], **HEADS[name], "dtype": dtype, "temperatures": False}
        options["workspace"] = (2**29, 2_000, 1)[(i + j) % 3]
        coupled = (i + j) % 5 in (3, 4)
        engines = ("auto", "lean") if coupled else ("auto", "two_pass", "lean")
        k = K if j else (1, 2, K, 50)[i % 4]
        check(case_of(f"{name}/{j}", k, weight, **options), *engines)


@pytest.mark.parametrize("weight", WEIGHTS)
def test_the_gradient_is_that_of_the_whole_expectation(weight: str) -> None:
    """Of the sampler's distribution with a tail in proportion to the policy."""
    case = case_of("whole", weight=weight, dtype=torch.float64)
    _, want = centered_loss(case, whole=True)
    for name, x in run(case)[1].items():
        if x is not None:
            torch.testing.assert_close(x, want[name], rtol=1e-9, atol=1e-12)


def test_the_floor_of_a_tail() -> None:
    """Of three ids with p = (1 - 2e-9, 1e-9, 1e-9) two are listed: rho is 1e-3 over 1e-6."""
    p, q = (torch.tensor(x).double() for x in ((1 - 2e-9, 1e-9, 1e-9), (0.799, 0.2)))
    ids = {"sampling_topk_ids": torch.arange(2)[None, None]}
    given = torch.zeros(1, 1, dtype=torch.long), None, torch.ones(1)
    listed = ids | {"sampling_topk_logps": q.log()[None, None]}
    loss = grpo_loss(torch.ones(1, 1, 1).double(), p.log()[:, None], *given, **listed).loss
    want = -1.0 + ((q - 1e3 * p[:2]) * p[:2].log()).sum()
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=0)


def test_packed_masked_and_empty() -> None:
    case = case_of("packed", weight="truncated", dtype=torch.float64)
    out, grads = run(case)
    outside = (case.completion_mask == 0)[..., None]
    dirty = case.but(
        sampling_topk_ids=case.sampling_topk_ids.masked_fill(outside, 10**9),
        sampling_topk_logps=case.sampling_topk_logps.masked_fill(outside, math.nan),
    )
    assert torch.equal(run(dirty)[0].loss, out.loss)
    given = arguments(case)
    joined, _ = packed(case, given)
    flat_out = flat(GRPOLoss(config_of(case)))(**joined)
    torch.testing.assert_close(flat_out.loss, out.loss)
    flat_out.loss.backward()
    torch.testing.assert_close(given["weight"].grad, grads["weight"])
    nothing = case.but(completion_mask=torch.zeros_like(case.completion_mask))
    for engine in ("auto", "two_pass", "lean"):
        loss, grads = run(nothing, engine)
        assert loss.loss == 0 and not grads["weight"].any() and not grads["hidden"].any()


def test_cost() -> None:
    """One pass; rows whose advantage is 0 are projected, and no more."""
    case = case_of("cost", b=2, t=16, mask="full")  # sequences of whole blocks of rows
    for frozen, cost in ((frozenset(), 4), (frozenset({"weight"}), 2)):
        for graded in range(3):
            now = case.but(frozen=frozen, advantages=(torch.arange(2) < graded).float())
            assert count_flops(lambda x=now: run(x)) == (64 + cost * 16 * graded) * V * H


FLOATS, NONE = torch.zeros(B, T, K), torch.zeros(B, T, 0, dtype=torch.long)
REFERENCE = torch.zeros(B, T, H), torch.zeros(V, H)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"sampling_topk_logps": None},
     "sampling_topk_logps: expected a tensor, like its partner, got None"),
    ({"sampling_topk_ids": NONE}, "sampling_topk_ids: expected shape"),
    ({"sampling_topk_ids": FLOATS.long() + V}, r"sampling_topk_ids: expected ids in \[0, V\)"),
    ({"sampling_topk_logps": FLOATS[..., 0]}, "sampling_topk_logps: expected shape"),
    ({"sampling_topk_logps": FLOATS},
     "sampling_topk_logps: expected log-probabilities of one distribution"),
    ({"old_per_token_logps": FLOATS[..., 0]}, "old_per_token_logps: expected None with sampling"),
    ({"importance_sampling_ratio": FLOATS[..., 0]},
     "importance_sampling_ratio: expected None with sampling_topk_ids"),
    ({"kept_ids": FLOATS.long()}, "kept_ids: expected None with sampling_topk_ids"),
    ({"objective": lambda tokens: tokens.logps}, "objective: expected None with sampling_topk_ids"),
    ({"loss_type": "cispo", "epsilon_high": 5.0},
     "loss_type: expected 'grpo', .* got 'cispo' with 'token'"),
    ({"beta": 0.1, "kl_estimator": "full", "reference": REFERENCE},
     "kl_estimator: expected 'k1', 'k2' or 'k3' with sampling_topk_ids"),
    ({f"{PREFIX}correction": True},
     "vllm_importance_sampling_mode: expected 'token_truncate' or 'token_mask' with"),
    ({"run": Run("frozen")}, "engine: expected"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=lambda x: str([*x])[:24])
def test_wrong_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    case = case_of("errors", mask="full")
    names = ("sampling_topk_ids", "sampling_topk_logps", "sampling_per_token_logps")
    given = {name: getattr(case, name) for name in names} | changes
    head = case.hidden, case.weight.requires_grad_()
    with pytest.raises((TypeError, ValueError), match=message):
        grpo_loss(*head, case.completion_ids, None, case.advantages, **given)
