"""`linear_logprob` with more ids at each position: against float64, repetitions, cost, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import Expectation, Head, Run, linear_logprob
from tests.support.case_builder import Case, seeded
from tests.support.measure import count_flops
from tests.support.pretend_gpu import OnGPU, here, pretended
from tests.support.reference_head import head, on_grid
from tests.support.reference_terms import settings
from tests.support.run_case import constants_of, gradients_of, leaves_of, lora_of
from tests.support.score_cases import HEADS, scored

B, T, V, K = 3, 7, 50, 6


def ids_of(case: Case, k: int = K) -> Tensor:
    """Any ids, the sampled one among them, some twice, some padding."""
    g = seeded(f"{case.name} more ids")
    ids = torch.randint(-3, V, (B, T, k), generator=g).clamp(min=-1)
    ids[0, :, 0], ids[1, :, -1], ids[2, 1] = case.completion_ids[0], ids[1, :, 0], -1
    return ids


def run(case: Case, ids: Tensor, **options: Any) -> tuple[Any, dict[str, Tensor | None]]:
    """The scores, and the gradients of all leaves of a sum that squares some of them."""
    leaves = leaves_of(case)
    of_head = Head(leaves["weight"], leaves["bias"], lora_of(case, leaves), **constants_of(case))
    temperature = settings(case).temperature if case.temperature is None else case.temperature
    found = linear_logprob(
        leaves["hidden"], of_head, case.completion_ids, completion_mask=case.completion_mask,
        temperature=temperature, topk_ids=ids, **options,
    )  # fmt: skip
    total_of(found.logps, found.entropies, found.topk_logps, ids).backward()
    return found, gradients_of(leaves)


def total_of(logps: Tensor, entropies: Tensor, topk: Tensor, ids: Tensor) -> Tensor:
    """Something of everything; where an id is padding, of nothing."""
    factor = torch.randn(topk.shape, generator=seeded("factor")).to(topk)
    inside = torch.where((ids >= 0) & topk.isfinite(), topk, 0.0)
    return (factor * inside).sum() + (inside**2).sum() + 0.3 * logps.sum() - entropies.sum()


@pytest.mark.parametrize("name", HEADS)
def test_values_and_gradients(name: str, every_backend: str) -> None:
    for dtype in (torch.float64, torch.float32):
        case = scored(f"topk/{name}", dtype=dtype, **HEADS[name])
        ids, h = ids_of(case), head(case)
        listed = h.log_probs.gather(1, ids[h.counted].clamp(min=0))
        topk = on_grid(listed.masked_fill(ids[h.counted] < 0, -torch.inf), h.counted)
        scores = [on_grid(x, h.counted) for x in (h.logps, h.entropies)]
        wanted = torch.autograd.grad(total_of(*scores, topk, ids), [*h.leaves.values()])
        want = dict(zip(h.leaves, wanted, strict=True))
        close = 1e-11 if dtype == torch.float64 else 3e-5
        for engine in ("auto", "two_pass", "lean"):
            found, grads = run(case, ids, run=Run(engine, workspace_bytes=2_000))
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
    found = linear_logprob(hidden, weight, torch.tensor([1, 2]), topk_ids=ids)
    sums = found.topk_logps.logsumexp(-1)
    torch.where(torch.tensor([True, False]), found.logps - sums, found.logps).sum().backward()
    assert hidden.grad.isfinite().all() and hidden.grad[1].any()


def test_cost() -> None:
    """That of log-probabilities: two passes, or one product where nothing trains."""
    case = scored("topk/cost", b=1, t=16, mask="full")
    ids = torch.randint(V, (1, 16, K))
    assert count_flops(lambda: run(case, ids)) == 8 * 16 * V * 16
    frozen = case.but(frozen=frozenset({"weight"}))
    assert count_flops(lambda: run(frozen, ids)) == 6 * 16 * V * 16
    given = case.hidden, case.weight, case.completion_ids
    assert count_flops(lambda: linear_logprob(*given, topk_ids=ids)) == 2 * 16 * V * 16


def test_what_does_not_exist_is_an_error_here_and_nan_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = scored("topk/outside", mask="full")
    ids = ids_of(case)
    ids[1, 3, 2] = V
    given = case.hidden, case.weight, case.completion_ids
    with pytest.raises(ValueError, match=r"topk_ids: expected ids in \[0, V\) .* got 50"):
        linear_logprob(*given, topk_ids=ids)
    with pretended(monkeypatch):
        found = linear_logprob(
            *(OnGPU(x.clone()) for x in given), topk_ids=OnGPU(ids), run=Run(backend="torch")
        )
    assert here(found.logps).isnan().nonzero().tolist() == [[1, 3]]
    assert here(found.topk_logps).isnan().all(-1).nonzero().tolist() == [[1, 3]]


FLOATS = torch.zeros(B, T, K)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"expected": torch.ones(B, T)}, "expected: expected None with topk_ids"),
    ({"expected": Expectation(None)}, "expected: expected None with topk_ids"),
    ({"kept_ids": FLOATS.long()}, "kept_ids: expected None with topk_ids, got Tensor"),
    ({"topk_ids": FLOATS}, "topk_ids: expected signed integer ids"),
    ({"topk_ids": FLOATS[..., :0].long()}, "topk_ids: expected shape"),
    ({"run": Run("frozen")}, "engine: expected"),
    ({"run": Run("one_pass")}, "engine: expected"),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=range(len(WRONG)))
def test_wrong_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    case = scored("topk/errors", mask="full")
    given: dict[str, Any] = {"topk_ids": ids_of(case), **changes}
    with pytest.raises((TypeError, ValueError), match=message):
        linear_logprob(case.hidden.requires_grad_(), case.weight, case.completion_ids, **given)
