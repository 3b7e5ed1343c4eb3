"""Log-probabilities over kept sets beyond the cases of `test_differential`: bits, what is read,
what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from grpo_kernels import linear_logprob
from tests.support.case_builder import Case
from tests.support.flat import flat
from tests.support.measure import count_flops
from tests.support.pretend_gpu import OnGPU, here, pretended
from tests.support.reference import reference_scores
from tests.support.run_case import check_scores, run_scores, upstream_of
from tests.support.score_cases import HEADS, scored
from tests.support.tolerance import assert_scores

BIG = 10**6  # an id that does not exist


def case_of(name: str = "plain", **options: Any) -> Case:
    return scored(f"kept {name}", b=2, t=9, h=12, v=60, kept=14, **HEADS[name], **options)


def compute(case: Case, **options: Any) -> dict[str, Tensor]:
    """Results and gradients by name."""
    results, grads = run_scores(case, **options)
    return results | {f"d_{name}": x for name, x in grads.items() if x is not None}


def arguments(case: Case) -> dict[str, Any]:
    """Those of `linear_logprob` with a plain head."""
    names = {"hidden": "hidden", "head": "weight", "ids": "completion_ids", "kept_ids": "kept_ids"}
    return {name: getattr(case, field) for name, field in names.items()} | {
        "mask": case.completion_mask
    }


def assert_same_bits(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert_close(got, want, rtol=0, atol=0)


def test_order_and_repetition_of_kept_ids_do_not_matter() -> None:
    case = case_of("all")
    kept, ids, want = case.kept_ids, case.completion_ids[..., None], compute(case)
    for other in (kept.flip(-1), kept.sort(-1).values):
        assert_same_bits(compute(case.but(kept_ids=other)), want)
    check_scores(case.but(kept_ids=torch.cat([kept.flip(-1), ids, kept.roll(3, -1)], dim=-1)))


def test_what_is_not_finite_stays_with_its_own_ids() -> None:
    """Padding has no row of its own in the head that garbage could reach."""
    case = case_of(mask="full")
    for where in ((case.kept_ids >= 0).sum(-1) > 1).nonzero().tolist():
        at = tuple(where)
        hidden = case.hidden.clone()
        hidden[at] = math.nan
        got = compute(case.but(hidden=hidden))
        assert bool(got["logps"][at].isnan())
        assert int(got["logps"].isnan().sum()) == 1
        reached = set(got["d_weight"].isnan().any(1).nonzero()[:, 0].tolist())
        assert reached == set(case.kept_ids[at].tolist()) - {-1}


def test_an_id_alone_in_its_set_is_certain_and_costs_nothing() -> None:
    case, got = case_of(), {}
    alone = torch.where(case.kept_ids == case.completion_ids[..., None], case.kept_ids, -1)
    assert count_flops(lambda: got.update(compute(case.but(kept_ids=alone)))) == 0
    assert all(bool((x == 0).all()) for x in got.values())


def test_each_gradient_comes_alone() -> None:
    given = arguments(case_of())
    leaves = [given[name].requires_grad_() for name in ("hidden", "head")]
    scores = linear_logprob(**given)
    logps, entropies = scores.logps.sum(), scores.entropies.sum()
    totals = (logps, entropies, logps + entropies)
    first, second, both = (torch.autograd.grad(x, leaves, retain_graph=True) for x in totals)
    for x, y, z in zip(first, second, both, strict=True):
        assert_close(x + y, z, rtol=1e-5, atol=4e-6)


def test_backward_again_gives_the_same_and_differentiating_it_raises() -> None:
    given = arguments(case_of())
    leaves = [given[name].requires_grad_() for name in ("hidden", "head")]
    logps = linear_logprob(**given).logps
    first = torch.autograd.grad(logps.sum(), leaves, retain_graph=True)
    again = torch.autograd.grad(logps.sum(), leaves, create_graph=True)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    with pytest.raises(RuntimeError, match="differentiating twice"):
        again[0].sum().backward(retain_graph=True)
    for leaf in leaves:
        with pytest.raises(RuntimeError, match="differentiating twice"):
            torch.autograd.grad(again[0].sum(), leaf, allow_unused=True, retain_graph=True)


def test_autocast_rounds_the_operands_and_nothing_else() -> None:
    case = case_of("all")
    rounded = case.but(hidden=case.hidden.bfloat16().float(), weight=case.weight.bfloat16().float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run_scores(case)
    assert_scores(rounded, reference_scores(rounded, upstream_of(case)), *got)


def test_mixed_dtypes_are_used_as_stored() -> None:
    case = case_of()
    for hidden, weight in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        check_scores(case.but(hidden=case.hidden.to(hidden), weight=case.weight.to(weight)))


@pytest.mark.parametrize(
    ("shape", "k"), [((0,), 3), ((2, 0), 3), ((0, 4), 0), ((2, 3), 0), ((2, 3), 4)]
)
def test_nothing_to_score_is_an_attached_zero(shape: tuple[int, ...], k: int) -> None:
    hidden, weight = (
        torch.randn(*shape, 5, requires_grad=True),
        torch.randn(7, 5, requires_grad=True),
    )
    ids, kept = torch.full(shape, BIG), torch.full((*shape, k), BIG)
    scores = linear_logprob(hidden, weight, ids, kept_ids=kept, mask=torch.zeros(shape))
    logps, entropies = scores.logps, scores.entropies
    assert logps.shape == entropies.shape == shape and logps.requires_grad
    (logps.sum() + entropies.sum()).backward()
    assert not hidden.grad.any() and not weight.grad.any()


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "not in its set": ({"ids": torch.tensor([[1, 2], [9, 4]])}, ValueError,
        r"ids: expected an id of the position's kept set, got 9 at position \(1, 0\)"),
    "an empty set": ({"kept_ids": torch.tensor([[[1, 5], [2, -1]], [[3, 3], [-1, -1]]])},
        ValueError,
        r"kept_ids: expected a set where the mask counts, got none at position \(1, 1\); "
        "without_set='full'"),
    "padding is no id": ({"ids": torch.tensor([[1, -1], [3, 4]])}, ValueError,
        r"ids: expected an id of the position's kept set, got -1 at position \(0, 1\)"),
    "beyond the vocabulary": ({"kept_ids": torch.tensor([[[1, 5], [2, 10]], [[3, 3], [4, 6]]])},
        ValueError,
        r"kept_ids: expected ids in \[0, V\) = \[0, 10\) or -1, got 10 at position \(0, 1\)"),
    "no padding": ({"kept_ids": torch.tensor([[[1, 5], [2, -2]], [[3, 3], [4, 6]]])}, ValueError,
        r"kept_ids: expected ids .* or -1, got -2 at position \(0, 1\)"),
    "shape": ({"kept_ids": torch.zeros(2, 3, 4, dtype=torch.long)}, ValueError,
        r"kept_ids: expected shape .*K\)"),
    "no width": ({"kept_ids": torch.tensor(1)}, ValueError, r"kept_ids: expected shape .*K\)"),
    "floats": ({"kept_ids": torch.zeros(2, 2, 4)}, TypeError,
        "kept_ids: expected signed integer ids"),
    "unsigned": ({"kept_ids": torch.zeros(2, 2, 4, dtype=torch.uint8)}, TypeError,
        "kept_ids: .*got torch.uint8"),
    "a list": ({"kept_ids": [[1]]}, TypeError, "kept_ids: expected a tensor, got list"),
    "temperature": ({"temperature": 0.0}, ValueError, "temperature: expected a finite number > 0"),
    "temperatures": ({"temperature": torch.zeros(2, 2)}, ValueError,
        "temperature: expected finite numbers > 0"),
    "cap": ({"final_logit_softcapping": -1.0}, ValueError, "final_logit_softcapping"),
    "mask": ({"mask": torch.ones(4)}, ValueError, "mask: expected shape"),
    "bias": ({"bias": torch.ones(3)}, ValueError, "bias: expected shape"),
    "workspace": ({"workspace_bytes": 0}, ValueError,
        "workspace_bytes: expected a number of bytes > 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    changes, kind, message = WRONG[name]
    good: dict[str, Any] = {
        "hidden": torch.randn(2, 2, 3),
        "weight": torch.randn(10, 3),
        "ids": torch.tensor([[1, 2], [3, 4]]),
        "kept_ids": torch.tensor([[[1, 5], [2, -1]], [[3, 3], [4, 6]]]),
    }
    flat(linear_logprob)(**good)
    with pytest.raises(kind, match=message):
        flat(linear_logprob)(**{**good, **changes})


def test_on_a_gpu_wrong_ids_make_their_position_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """To raise would wait for the device. The sizes of the sets are waited for, once, and which
    rows to go back for."""
    case = case_of()
    ids, kept = case.completion_ids.clone(), case.kept_ids.clone()
    ids[0, 3], kept[1, 4, 0] = BIG, 60
    kept[1, 1] = torch.where(kept[1, 1] == ids[1, 1], -1, kept[1, 1])
    kept[1, 1, 0] = ids[1, 1] ^ 1  # another
    with pretended(monkeypatch) as waits:
        hidden, weight = (
            OnGPU(case.hidden.clone()).requires_grad_(),
            OnGPU(case.weight.clone()).requires_grad_(),
        )
        scores = linear_logprob(hidden, weight, OnGPU(ids), kept_ids=OnGPU(kept))
        assert waits == ["tolist"]
    wrong = torch.zeros(2, 9, dtype=torch.bool)
    wrong[0, 3] = wrong[1, 1] = wrong[1, 4] = True
    for x in (scores.logps, scores.entropies):
        assert torch.equal(here(x).isnan(), wrong)
    want = linear_logprob(**arguments(case) | {"mask": ~wrong}).logps
    assert_close(here(scores.logps).detach()[~wrong], want[~wrong])
