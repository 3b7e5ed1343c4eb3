"""K ids at each position: divergences from a teacher's and log-probabilities of any, beyond
`test_differential`; costs, refusals."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import Head, Run, linear_logps, topk_divergence
from tests.support.case_builder import Case, seeded
from tests.support.cases import HEADS, scored
from tests.support.measure import AllocationWatcher, count_flops
from tests.support.pretend_gpu import OnGPU, here, pretended
from tests.support.reference import head, on_grid
from tests.support.run_case import WHOLE, gradients_of, leaves_of, run_scores, scores

B, T, H, V, K = 2, 13, 8, 50, 5
REVERSE = {"divergence": "reverse_kl"}


def case_of(name="listed", listed=K, others=REVERSE, **options):
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


def test_what_does_not_exist_is_an_error_here_and_nan_elsewhere(monkeypatch):
    case, topk = case_of(), scored("topk/outside", mask="full")
    ids, topk_ids = case.listed_ids.clone(), ids_of(topk)
    ids[1, 3, 2] = topk_ids[1, 3, 2] = V
    given = case.hidden, case.weight, ids, case.listed_logps
    scored_ones = topk.hidden, topk.weight, topk.completion_ids
    message = r"_ids: expected ids in \[0, V\) = \[0, 50\), or -1 .* got 50"
    with pytest.raises(ValueError, match=f"^teacher{message}"):
        topk_divergence(*given)
    with pytest.raises(ValueError, match=f"^topk{message}"):
        linear_logps(*scored_ones, topk_ids=topk_ids)
    with pretended(monkeypatch):
        run = Run(backend="torch")
        divergence = divergence_of(*(OnGPU(x.clone()) for x in given), run=run)
        there = (OnGPU(x.clone()) for x in scored_ones)
        found = linear_logps(*there, topk_ids=OnGPU(topk_ids), run=run)
    for x in (here(divergence)[..., None], here(found.logps)[..., None], here(found.topk_logps)):
        assert x.isnan().all(-1).nonzero().tolist() == [[1, 3]]


def ids_of(case: Case) -> Tensor:
    """Any ids, the sampled one among them, some twice, some padding."""
    g = seeded(f"{case.name} more ids")
    ids = torch.randint(-3, V, (*case.completion_ids.shape, K), generator=g).clamp(min=-1)
    ids[0, :, 0], ids[1, :, -1], ids[2, 1] = case.completion_ids[0], ids[1, :, 0], -1
    return ids


def run_topk(case: Case, ids: Tensor, engine: str) -> tuple[Any, dict[str, Tensor | None]]:
    """The scores, and the gradients of all leaves of a sum that squares some of them."""
    leaves = leaves_of(case)
    found = scores(case, leaves, engine, WHOLE, topk_ids=ids)
    total_of(found.logps, found.entropies, found.topk_logps, ids).backward()
    return found, gradients_of(leaves)


def total_of(logps: Tensor, entropies: Tensor, topk: Tensor, ids: Tensor) -> Tensor:
    """Something of everything; where an id is padding, of nothing."""
    factor = torch.randn(topk.shape, generator=seeded("factor")).to(topk)
    inside = torch.where((ids >= 0) & topk.isfinite(), topk, 0.0)
    return (factor * inside).sum() + (inside**2).sum() + 0.3 * logps.sum() - entropies.sum()


@pytest.mark.parametrize("name", HEADS)
def test_values_and_gradients_of_log_probabilities(name: str, every_backend: str) -> None:
    for dtype in (torch.float64, torch.float32):
        case = scored(f"topk/{name}", dtype=dtype, workspace=2_000, **HEADS[name])
        ids, h = ids_of(case), head(case)
        listed = h.log_probs.gather(1, ids[h.counted].clamp(min=0))
        topk = on_grid(listed.masked_fill(ids[h.counted] < 0, -torch.inf), h.counted)
        others = [on_grid(x, h.counted) for x in (h.logps, h.entropies)]
        wanted = torch.autograd.grad(total_of(*others, topk, ids), [*h.leaves.values()])
        want = dict(zip(h.leaves, wanted, strict=True))
        close = 1e-11 if dtype == torch.float64 else 3e-5
        for engine in ("auto", "two_pass", "lean"):
            found, grads = run_topk(case, ids, engine)
            assert torch.equal(found.topk_logps.isinf(), topk.isinf())
            torch.testing.assert_close(found.topk_logps.double(), topk, rtol=close, atol=close)
            for leaf in (x for x in grads if grads[x] is not None):
                x = want[leaf]
                x = on_grid(x, h.counted) if leaf in ("hidden", "lora_input") else x
                size = float(x.abs().max())
                torch.testing.assert_close(grads[leaf].double(), x, rtol=0, atol=close * size)


def test_gradients_of_padding_go_nowhere() -> None:
    """NaN too, as that of a logsumexp of padding alone."""
    hidden, weight = torch.randn(2, 4, requires_grad=True), torch.randn(9, 4)
    ids = torch.tensor([[1, -1, 1], [-1, -1, -1]])
    found = linear_logps(hidden, weight, torch.tensor([1, 2]), topk_ids=ids)
    sums = found.topk_logps.logsumexp(-1)
    torch.where(torch.tensor([True, False]), found.logps - sums, found.logps).sum().backward()
    assert hidden.grad.isfinite().all() and hidden.grad[1].any()


FLOATS = torch.zeros(B, T, K)
TOO_LOW = {"divergence": "forward_kl", "log_prob_min_clamp": 9.0}
WRONG: list[tuple[bool, dict[str, Any], str]] = [  # True: of a divergence
    (True, {"divergence": "jsd"}, "divergence: expected one of forward_kl, reverse_kl, got 'jsd'"),
    (True, {"divergence": "reverse_kl", "tail": False}, "tail: expected True or None"),
    (True, {"tail": 1}, "tail: expected a bool or None, got 1"),
    (True, {"tail": True, "log_prob_min_clamp": -9.0}, "log_prob_min_clamp: expected None with a"),
    (True, TOO_LOW, "log_prob_min_clamp: expected a number < 0, got 9.0"),
    (True, {"loss_max_clamp": 0.0}, "loss_max_clamp: expected a finite number > 0"),
    (True, {"teacher_ids": FLOATS}, "teacher_ids: expected signed integer ids"),
    (True, {"teacher_ids": FLOATS[..., :0].long()}, "teacher_ids: expected shape"),
    (True, {"teacher_logps": FLOATS[..., 0]}, "teacher_logps: expected shape"),
    (False, {"expected": torch.ones(B, T)}, "expected: expected None with topk_ids"),
    (False, {"kept_ids": FLOATS.long()}, "kept_ids: expected None with topk_ids, got Tensor"),
    (False, {"topk_ids": FLOATS}, "topk_ids: expected signed integer ids"),
    (False, {"run": Run("one_pass")}, "engine: expected"),
]


@pytest.mark.parametrize(("diverges", "changes", "message"), WRONG, ids=[x[2][:30] for x in WRONG])
def test_wrong_arguments_are_named(diverges: bool, changes: dict[str, Any], message: str) -> None:
    case = case_of()
    call = partial(linear_logps, completion_ids=case.completion_ids, topk_ids=case.listed_ids)
    if diverges:
        given = {"teacher_ids": case.listed_ids, "teacher_logps": case.listed_logps}
        call = partial(topk_divergence, **given)
    with pytest.raises((TypeError, ValueError), match=message):
        call(case.hidden.requires_grad_(), case.weight, **changes)
