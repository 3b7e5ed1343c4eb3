"""How often a call waits for the GPU, counted without one (`pretend_gpu.py`): no more than
documented.

While a CUDA graph is captured a wait is an error; what runs through here then, can be captured.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import (
    Expectation,
    Head,
    LoRA,
    LossConfig,
    Run,
    grpo_loss,
    linear_divergence,
    linear_logps,
)
from tests.support.case_builder import seeded
from tests.support.pretend_gpu import OnGPU, Waits, here, pretended

B, T, H, V = 2, 5, 8, 19
MASK = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
OFF_POLICY = LossConfig(loss_type="grpo")
ALL_TERMS = LossConfig(loss_type="grpo", beta=0.1, entropy_coef=0.01)
SEQUENCE = LossConfig(loss_type="grpo", importance_sampling_level="sequence")
ON_TORCH = Run(backend="torch")
BOTH, HIDDEN, NEITHER = (True, True), (True, False), (False, False)
# name -> config, what trains (hidden, weight), engine, waits of forward and backward with a mask
CALLS = {
    "one_pass": (OFF_POLICY, BOTH, "one_pass", (2, 0)),
    "one_pass-all-terms": (ALL_TERMS, BOTH, "one_pass", (1, 0)),
    "frozen": (OFF_POLICY, HIDDEN, "frozen", (2, 0)),
    "frozen-coupled": (SEQUENCE, HIDDEN, "frozen", (2, 0)),
    "two_pass": (SEQUENCE, BOTH, "two_pass", (1, 1)),
    "two_pass-vespo": (LossConfig(loss_type="vespo"), BOTH, "two_pass", (1, 1)),
    "two_pass-gmpo": (
        LossConfig(loss_type="gmpo", top_entropy_quantile=0.5), BOTH, "two_pass", (1, 1)
    ),
    "two_pass-off-policy-mask": (
        LossConfig(off_policy_mask_threshold=0.1), BOTH, "two_pass", (1, 1)
    ),
    "lean": (SEQUENCE, BOTH, "lean", (1, 1)),
    "score": (ALL_TERMS, NEITHER, "score", (1, 0)),
}  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore:.*CUDA is not available")


def batch(
    *, dtype: torch.dtype = torch.float32, trains: tuple[bool, bool] = BOTH, there: bool = True
) -> dict[str, Any]:
    """Tensors of a call, `there` or on the CPU: the same numbers."""
    draw = seeded("no waits")
    given = {
        "hidden": torch.randn(B, T, H, generator=draw).to(dtype),
        "head": torch.randn(V, H, generator=draw).to(dtype),
        "completion_ids": torch.randint(V, (B, T), generator=draw),
        "advantages": torch.tensor([1.0, -0.5]),
        "old_per_token_logps": -3 * torch.rand(B, T, generator=draw),
        "ref_per_token_logps": -3 * torch.rand(B, T, generator=draw),
    }
    given = {name: OnGPU(x) if there else x for name, x in given.items()}
    given["hidden"].requires_grad_(trains[0])
    given["head"].requires_grad_(trains[1])
    return given


def call(
    name: str, waits: Waits, *, there: bool = True, mask: Tensor | None = None, **options: Any
) -> dict[str, Any]:
    """Forward and backward: results, and under "waits" how many each of them had."""
    config, trains, engine, _ = CALLS[name]
    given = batch(there=there, trains=trains, **options)
    waits.clear()
    run = Run(engine=engine, backend="torch")
    out = grpo_loss(**given, completion_mask=mask, config=config, run=run)
    assert out.engine == engine
    forward = len(waits)
    if out.loss.requires_grad:
        torch.autograd.backward(out.loss)
    grads = {x: given[x].grad for x in ("hidden", "head") if given[x].grad is not None}
    results = {"loss": out.loss, "logps": out.logps, "entropies": out.entropies, **grads}
    values = {key: here(x.detach()) for key, x in {**results, **out.metrics}.items()}
    return {**values, "waits": (forward, len(waits) - forward)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CALLS)
def test_captured(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mask nothing waits, and the numbers are those of the CPU."""
    want = call(name, Waits(), there=False, dtype=dtype)
    with pretended(monkeypatch, capturing=True) as waits:
        found = call(name, waits, dtype=dtype)
    assert found.pop("waits") == want.pop("waits") == (0, 0)
    assert found.keys() == want.keys()
    rounding = 1e-5 if dtype == torch.float32 else 2e-2  # d logits in bf16
    for key in found.keys() - {"rows/gradient"}:  # captured, all rows go through the products
        near = {"rtol": rounding, "atol": rounding, "equal_nan": True}
        torch.testing.assert_close(found[key], want[key], msg=key, **near)


@pytest.mark.parametrize("name", CALLS)
def test_waits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask costs one."""
    want, documented = call(name, Waits(), there=False, mask=MASK), CALLS[name][3]
    with pretended(monkeypatch) as waits:
        found = call(name, waits, mask=OnGPU(MASK))
        assert found.pop("waits") == documented
        assert call(name, waits)["waits"] == (documented[0] - 1, documented[1])
    del want["waits"]
    torch.testing.assert_close(found, want, equal_nan=True)


@pytest.mark.parametrize("name", ["one_pass", "score"])
def test_a_mask_of_floats_is_looked_at_in_the_same_wait(name, monkeypatch, forget_warnings):
    want = call(name, Waits(), there=False, mask=MASK)
    with pretended(monkeypatch) as waits:
        found = call(name, waits, mask=OnGPU(1.0 * MASK))
        assert found.pop("waits") == CALLS[name][3]
        with pytest.warns(UserWarning, match="completion_mask: it holds values other than 0 and 1"):
            odd = call(name, waits, mask=OnGPU(torch.where(MASK == 0, 0.0, -2.0)))
        given = [batch()[x].detach() for x in ("hidden", "head", "completion_ids")]
        scores = partial(linear_logps, *given, run=ON_TORCH)
        nan, additive = OnGPU(MASK / MASK), OnGPU(torch.where(MASK == 0, -torch.inf, 0.0))
        for message, wrong in (
            ("got an additive attention mask", lambda: call(name, waits, mask=additive)),
            ("without NaN, got NaN", lambda: call(name, waits, mask=nan)),
            ("without NaN, got NaN", lambda: scores(completion_mask=nan)),
        ):
            with pytest.raises(ValueError, match=f"^completion_mask: .* {message}"):
                wrong()
    del want["waits"], odd["waits"]
    torch.testing.assert_close(found, want, equal_nan=True)
    torch.testing.assert_close(odd, want, equal_nan=True)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_packed_reads_its_bounds_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = torch.tensor([0, 4, 10])
    with pretended(monkeypatch) as waits:
        given = {name: x.detach() for name, x in batch().items()}
        for name in given.keys() - {"head", "advantages"}:
            given[name] = given[name].flatten(0, 1)
        bounds = OnGPU(bounds) if device == "cuda" else bounds
        grpo_loss(**given, completion_mask=None, cu_seqlens=bounds, config=SEQUENCE, run=ON_TORCH)
    assert waits == (["tolist"] if device == "cuda" else [])


def constant(index: Tensor, logps: Tensor, entropies: Tensor | None) -> Tensor:
    return torch.full_like(logps, 0.5)


HALF = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 0, 0, 0]], dtype=torch.bool)
RISING = torch.arange(5.0).expand(B, T)
TWO_PASS, LEAN = Run("two_pass", "torch"), Run("lean", "torch")
# what trains, options, gradient of the scores and factor of the entropies -> waits of forward and
# backward
LOGPROBS: dict[str, tuple[Any, ...]] = {
    "score": (NEITHER, {}, MASK, 0.0, (1, 0)),
    "two_pass": (BOTH, {}, MASK, 1.0, (1, 1)),
    "two_pass-logps": (BOTH, {}, MASK, 0.0, (1, 1)),
    "frozen": (HIDDEN, {}, MASK, 0.0, (1, 0)),
    "frozen-entropies": (HIDDEN, {}, MASK, 1.0, (1, 2)),
    "right": (BOTH, {"expected": Expectation(constant)}, MASK, 0.0, (1, 1)),
    "right-some": (BOTH, {"expected": Expectation(constant, live=HALF)}, HALF, 0.0, (2, 1)),
    "wrong": (BOTH, {"expected": Expectation(constant)}, RISING, 0.0, (1, 2)),
}
DIVERGENCES: dict[str, tuple[Any, ...]] = {
    "score": (NEITHER, {}, MASK, 0.0, (1, 0)),
    "frozen": (HIDDEN, {}, RISING, 0.0, (1, 0)),
    "one_pass": (BOTH, {}, MASK, 0.0, (1, 1)),
    "one_pass-any": (BOTH, {}, RISING, 0.0, (1, 2)),
    "two_pass": (BOTH, {"run": TWO_PASS}, RISING, 0.0, (1, 1)),
    "lean": (BOTH, {"run": LEAN}, RISING, 0.0, (1, 1)),
}


def scores_of(given: dict[str, Any], *, diverges: bool, **options: Any) -> Any:
    options = {"run": ON_TORCH, **options}
    if diverges:
        teacher = 0.5 * given["hidden"].detach(), given["head"].detach()
        return linear_divergence(given["hidden"], given["head"], teacher, **options)
    return linear_logps(given["hidden"], given["head"], given["completion_ids"], **options)


@pytest.mark.parametrize(
    ("diverges", "name"), [*((False, x) for x in LOGPROBS), *((True, x) for x in DIVERGENCES)]
)
def test_scores(diverges: bool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a mask. What is expected costs a look at what came, and, where it was wrong, one at how
    much."""
    rows = DIVERGENCES if diverges else LOGPROBS
    trains, options, gradient, of_entropies, documented = rows[name]
    with pretended(monkeypatch) as waits:
        expected = options.get("expected")
        if expected is not None and expected.live is not None:
            options = {"expected": replace(expected, live=OnGPU(expected.live))}
        mask = OnGPU(MASK)
        scores = scores_of(batch(trains=trains), diverges=diverges, completion_mask=mask, **options)
        forward = len(waits)
        loss = ((scores.divergence if diverges else scores.logps) * OnGPU(gradient)).sum()
        if of_entropies:
            loss = loss + of_entropies * scores.entropies.sum()
        if loss.requires_grad:
            torch.autograd.backward(loss)
    assert (forward, len(waits) - forward) == documented


@pytest.mark.parametrize("trains", [BOTH, HIDDEN, NEITHER])
def test_divergences_can_be_captured(trains, monkeypatch):
    want = scores_of(batch(trains=NEITHER, there=False), diverges=True).divergence
    with pretended(monkeypatch, capturing=True) as waits:
        found = scores_of(batch(trains=trains), diverges=True).divergence
        if found.requires_grad:
            torch.autograd.backward(found.sum())
    assert not waits
    torch.testing.assert_close(here(found.detach()), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "some"])
@pytest.mark.parametrize("engine", ["one_pass", "two_pass", "lean"])
def test_candidates_cost_no_wait(engine, mask, monkeypatch):
    """In a loss, and as scores; without a mask both are captured."""
    ids = torch.randint(V, (B, T, 3), generator=seeded("candidates"))
    logps, as_without = torch.full((B, T, 3), -2.0), 0 if mask is None else 2
    with pretended(monkeypatch, capturing=mask is None) as waits:
        given = batch()
        del given["old_per_token_logps"], given["ref_per_token_logps"]
        mask = given["completion_mask"] = None if mask is None else OnGPU(mask)
        listed = {"sampling_topk_ids": OnGPU(ids), "sampling_topk_logps": OnGPU(logps)}
        run = Run(engine=engine, backend="torch")
        torch.autograd.backward(grpo_loss(**given, **listed, run=run).loss)
        assert len(waits) == as_without
        if engine != "one_pass":
            waits.clear()
            tensors = (given[x] for x in ("hidden", "head", "completion_ids"))
            scores = linear_logps(*tensors, completion_mask=mask, topk_ids=OnGPU(ids), run=run)
            torch.autograd.backward(scores.topk_logps.sum())
            assert len(waits) == as_without


@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "some"])
def test_an_adapter_costs_no_wait(mask: Tensor | None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pretended(monkeypatch, capturing=mask is None) as waits:
        given = batch(trains=HIDDEN)
        lora = LoRA(OnGPU(torch.randn(3, H)).requires_grad_(), OnGPU(torch.randn(V, 3)))
        head, run = Head(given["head"], lora=lora), Run(engine="two_pass", backend="torch")
        mask = None if mask is None else OnGPU(mask)
        scores = linear_logps(
            given["hidden"], head, given["completion_ids"], completion_mask=mask, run=run
        )
        torch.autograd.backward((scores.logps + scores.entropies).sum())
        assert len(waits) == (0 if mask is None else 2)  # as without one
        assert lora.a.grad is not None


def test_an_id_that_does_not_exist_makes_its_row_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """To raise would take a wait."""
    with pretended(monkeypatch) as waits:
        given = batch(trains=NEITHER)
        ids = OnGPU(torch.tensor([[0, V, 1, 2, 3], [4, 5, -1, 6, 7]]))
        logps = linear_logps(given["hidden"], given["head"], ids, run=ON_TORCH).logps
    assert waits == []
    assert here(logps).isnan().nonzero().tolist() == [[0, 1], [1, 2]]
