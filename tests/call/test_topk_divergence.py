"""Divergences from a teacher's K ids beyond `test_differential`; costs, refusals."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import Head, Run, topk_divergence
from tests.support.case_builder import Case
from tests.support.measure import AllocationWatcher, count_flops
from tests.support.pretend_gpu import OnGPU, here, pretended
from tests.support.reference import reference_scores
from tests.support.run_case import run_scores, upstream_of
from tests.support.score_cases import scored

B, T, H, V, K = 2, 13, 8, 50, 5
REVERSE = {"divergence": "reverse_kl"}


def case_of(
    name: str = "listed", listed: int = K, others: dict[str, Any] = REVERSE, **options: Any
) -> Case:
    return scored(name, b=B, t=T, h=H, v=V, listed=listed, others=others, **options)


def divergence_of(*given: Any, **options: Any) -> Tensor:
    return topk_divergence(*given, **options).divergence


def test_ids_of_no_mass() -> None:
    """A tail of nothing on both sides adds nothing; an id that the student rules out is infinite in
    the forward KL alone."""
    hidden = torch.eye(2, 3)[:1].requires_grad_()
    weight = torch.tensor([[60.0, 0, 0], [0, 0, 0], [-60.0, 0, 0]])
    ids, logps = torch.tensor([[0, 1]]), torch.tensor([[-1.0, -2.0]])
    banned = Head(weight, torch.tensor([0.0, -math.inf, 0.0]))
    for name in ("forward_kl", "reverse_kl"):
        options = {"divergence": name, "tail": True}
        found = divergence_of(hidden, weight, ids[:, :1], torch.zeros(1, 1), **options)
        (grad,) = torch.autograd.grad(found.sum(), hidden)
        assert float(found.detach()) == 0.0
        assert float(grad.abs().max()) < 1e-20
        found = divergence_of(hidden, banned, ids, logps, divergence=name)
        assert bool(found.isfinite().all()) == (name == "reverse_kl")


@pytest.mark.parametrize("distance", [1e-4, 1e-6])
@pytest.mark.parametrize("name", ["reverse_kl", "forward_kl"])
def test_small_divergences_do_not_cancel(name: str, distance: float) -> None:
    """Down to 1e-12 and less, in fp32; the tail is most of the mass."""
    hidden, weight = torch.randn(40, H), torch.randn(V, H)
    exact = hidden.double() @ weight.double().t()
    teacher = (exact + distance * torch.randn(exact.shape)).log_softmax(-1)
    ids = teacher.topk(K, -1).indices
    logp, logq = exact.log_softmax(-1).gather(-1, ids), teacher.gather(-1, ids)
    p, q = ((torch.cat([x.exp(), 1 - x.exp().sum(-1, keepdim=True)], -1)) for x in (logp, logq))
    terms = p * (p / q).log() + q - p if name == "reverse_kl" else q * (q / p).log() + p - q
    got = divergence_of(hidden, weight, ids, logq, divergence=name, tail=True)
    assert bool((got >= 0).all())
    assert float((got - terms.sum(-1)).abs().max()) < 3e-6 * distance + 1e-13


def test_repetition_padding_and_order_do_not_matter() -> None:
    case = case_of(dtype=torch.float64)
    want, order = run_scores(case), torch.randperm(K)
    ids, logps = case.listed_ids, case.listed_logps
    more = torch.cat([ids[..., order], ids[..., :2], torch.full((B, T, 3), -1)], -1)
    # a repetition of what counts has any mass; a first one without mass hides nothing
    again = torch.where(logps[..., :2] == -torch.inf, -torch.inf, -0.1).double()
    logps = torch.cat([logps[..., order], again, torch.full((B, T, 3), 7.0)], -1)
    got = run_scores(case.but(listed_ids=more, listed_logps=logps))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


def test_autocast_and_rounded_logits() -> None:
    """The divergence is that of the logits, fp32 or rounded, of bfloat16 operands."""
    case = case_of(others={"tail": True})
    rounded = case.to(torch.bfloat16).but(listed_logps=case.listed_logps).to(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, coarse = (
            run_scores(case.but(config=x))[0]["divergences"]
            for x in ({}, {"logits_dtype": "input"})
        )
    want = reference_scores(rounded, upstream_of(rounded)).divergences
    assert float((found - want).abs().max()) < 5e-6
    assert 1e-4 < float((coarse - found).abs().max()) < 0.1


COSTS = {
    "auto": (6, 4), "one_pass": (6, 4), "two_pass": (8, 6), "lean": (8, 6), "frozen": (None, 4),
}  # fmt: skip


@pytest.mark.parametrize("engine", COSTS)
def test_cost(engine: str) -> None:
    case = case_of(mask="full")
    case = case.but(completion_mask=torch.arange(T).expand(B, T) < 8)  # the rows are a whole block
    for frozen, cost in zip((frozenset(), frozenset({"weight"})), COSTS[engine], strict=True):
        if cost is not None:
            flops = count_flops(lambda x=frozen: run_scores(case.but(frozen=x), engine))
            assert flops == cost * 16 * V * H
    every = frozenset({"weight", "hidden"})
    assert count_flops(lambda: run_scores(case.but(frozen=every))) == 2 * 16 * V * H


def test_memory_stays_within_the_workspace() -> None:
    n, vocab, k, budget = 512, 4096, 64, 2**20
    hidden, weight = torch.randn(n, 16, requires_grad=True), torch.randn(vocab, 16)
    ids, logps = torch.rand(n, vocab).topk(k, -1).indices, torch.full((n, k), -5.0)
    call = {"divergence": "reverse_kl", "run": Run(workspace_bytes=budget)}
    topk_divergence(hidden, weight, ids, logps, **call)
    with AllocationWatcher() as watcher:
        topk_divergence(hidden, weight, ids, logps, **call)
    # d hidden; the ids and logps in order, and what it takes to sort them
    inputs = n * (16 * 4 + 8 * k * 8)
    assert watcher.peak < budget + inputs


def test_what_does_not_exist_is_an_error_here_and_nan_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = case_of()
    ids = case.listed_ids.clone()
    ids[1, 3, 2] = V
    given = case.hidden, case.weight, ids, case.listed_logps
    with pytest.raises(
        ValueError, match=r"teacher_ids: expected ids in \[0, V\) = \[0, 50\), or -1 .* got 50"
    ):
        topk_divergence(*given)
    with pretended(monkeypatch):
        found = divergence_of(*(OnGPU(x.clone()) for x in given), run=Run(backend="torch"))
    assert here(found).isnan().nonzero().tolist() == [[1, 3]]


FLOATS = torch.zeros(B, T, K)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"divergence": "jsd"}, "divergence: expected one of forward_kl, reverse_kl, got 'jsd'"),
    ({"divergence": "reverse_kl", "tail": False}, "tail: expected True or None"),
    ({"tail": 1}, "tail: expected a bool or None, got 1"),
    ({"tail": True, "log_prob_min_clamp": -9.0}, "log_prob_min_clamp: expected None with a tail"),
    ({"loss_max_clamp": 0.0}, "loss_max_clamp: expected a finite number > 0"),
    ({"expected": torch.ones(3)}, "expected: expected shape"),
    ({"teacher_ids": FLOATS}, "teacher_ids: expected signed integer ids"),
    ({"teacher_ids": FLOATS[..., :0].long()}, "teacher_ids: expected shape"),
    ({"teacher_logps": FLOATS[..., 0]}, "teacher_logps: expected shape"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[x[1][:30] for x in WRONG])
def test_wrong_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    case = case_of()
    given = {"teacher_ids": case.listed_ids, "teacher_logps": case.listed_logps, **changes}
    with pytest.raises((TypeError, ValueError), match=message):
        topk_divergence(case.hidden, case.weight, **given)
