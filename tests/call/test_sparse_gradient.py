"""`gradient="sparse"`: on average the exact gradient, within the error that it says, whatever computes it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from grpo_kernels import (
    GRPOLoss,
    LoRA,
    LossConfig,
    ReferenceHead,
    SparseGradient,
    attach,
    grpo_loss,
    linear_divergence,
    linear_logprob,
    topk_divergence,
)
from grpo_kernels.call import sparse as call_sparse
from grpo_kernels.engine import device
from tests.support.cases import fixed_cases
from tests.support.cheap_entries import entries_cost_nothing
from tests.support.measure import AllocationWatcher
from tests.support.reference import reference_loss
from tests.support.run_case import allowed_engines, arguments
from tests.support.tolerance import assert_matches, bounds_of

pytestmark = pytest.mark.usefixtures("cpp_library")
DRAWS, H, V = 10_000, 8, 300
BACKENDS = ("torch", "cpp")
CASES = [case for case in fixed_cases() if case.group in "ABCDEFGH"]


@pytest.fixture
def cheap_entries() -> Iterator[None]:
    with entries_cost_nothing():
        yield


def alike(n: int, vocab: int = V, width: int = H, seed: int = 0) -> dict[str, Tensor]:
    """`n` times the same token, whose gradient is drawn each time anew."""
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(width, generator=g) * 1.2
    return {
        "hidden": hidden.expand(1, n, width).clone().requires_grad_(),
        "weight": torch.randn(vocab, width, generator=g).requires_grad_(),
        "completion_ids": torch.full((1, n), 7),
        "advantages": torch.ones(1),
    }


def tokens(n: int, vocab: int, width: int = 16, scale: float = 2.0, seed: int = 0) -> dict[str, Tensor]:
    """`n` different ones, drawn from the policy."""
    g = torch.Generator().manual_seed(seed)
    hidden, weight = torch.randn(n, width, generator=g), torch.randn(vocab, width, generator=g)
    hidden *= scale / width**0.5
    ids = (hidden @ weight.t()).softmax(1).multinomial(1, generator=g).view(1, n)
    given = {"hidden": hidden[None].requires_grad_(), "weight": weight.requires_grad_(), "completion_ids": ids}
    return {**given, "advantages": torch.randn(1, generator=g) + 2.0}


def gradients(given: dict[str, Tensor], gradient: Any, **options: Any) -> tuple[Tensor, Tensor | None, Any]:
    """Of hidden states and weight; and the output."""
    leaves = {
        name: given[name].detach().clone().requires_grad_(given[name].requires_grad) for name in ("hidden", "weight")
    }
    out = grpo_loss(**{**given, **leaves}, completion_mask=None, gradient=gradient, **options)
    out.loss.backward()
    return leaves["hidden"].grad, leaves["weight"].grad, out


ENTROPY = LossConfig(entropy_coef=0.1, temperature=0.8)
FULL = LossConfig(beta=0.2, kl_estimator="full", loss_type="grpo")


@pytest.mark.usefixtures("cheap_entries")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("engine", ["one_pass", "two_pass", "frozen"])
@pytest.mark.parametrize("config", [LossConfig(), ENTROPY, FULL], ids=["plain", "entropy", "full KL"])
def test_the_mean_of_10_000_draws_is_the_gradient(backend: str, engine: str, config: LossConfig) -> None:
    given: dict[str, Any] = alike(DRAWS)
    if engine == "frozen":
        given["weight"].requires_grad_(False)
        config = replace(config, entropy_coef=0.0)  # which that engine does not have
        engine = "two_pass" if config.beta else engine
    if config.beta:
        g = torch.Generator().manual_seed(5)
        other = given["hidden"].detach() + 0.3 * torch.randn(H, generator=g)
        given["reference"] = ReferenceHead(other, given["weight"].detach())
    options = {"engine": engine, "backend": backend, "config": config}
    exact = gradients(given, "exact", **options)
    sparse = SparseGradient(0.3, weight=given["weight"].requires_grad, seed=3)
    d_hidden, d_weight, out = gradients(given, sparse, **options)
    assert out.engine == engine
    assert out.metrics["gradient/dense_rows"] == 0
    truth = exact[0][0, :1]
    error = (d_hidden[0] - truth).double()
    deviation = error.std(dim=0) / math.sqrt(DRAWS)
    assert bool((error.mean(dim=0).abs() <= 4.0 * deviation + 1e-6 * truth.abs().max()).all())
    size = float(truth.norm())
    realised = float(error.square().sum(dim=1).mean().sqrt()) / size
    assert 0.003 < realised <= 0.3 * 1.1
    predicted = float(out.metrics["gradient/d_hidden_error"])  # of the length that the certain entries give
    assert realised == pytest.approx(predicted, rel=0.15)
    if d_weight is not None and exact[1] is not None:
        # of N equal rows sqrt(N) of one's error is left: in units of its standard deviation it is about 1 an element
        of_one = float(out.metrics["gradient/d_weight_error"])
        left = float((d_weight - exact[1]).norm() / exact[1].norm())
        assert left <= 2.0 * of_one / math.sqrt(DRAWS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_exact_where_all_rows_are_dense(backend: str) -> None:
    """All fixed cases of the loss, at a tolerance that no threshold keeps; and what a row of zeros or NaN is."""
    dense = 0
    for number, case in enumerate(CASES[:: 1 if backend == "cpp" else 3]):
        engines = sorted(allowed_engines(case) - {"lean"})
        given = arguments(case)
        options = {
            "engine": engines[number % len(engines)],
            "backend": backend,
            "workspace_bytes": case.workspace_bytes,
        }
        sparse = SparseGradient(1e-30, weight=number % 2 == 0, seed=number)
        output = grpo_loss(**given, config=LossConfig(**case.config), **options, gradient=sparse)
        if not output.loss.requires_grad:
            continue
        output.loss.backward()
        grads = {name: None if given[name] is None else given[name].grad for name in ("hidden", "weight", "bias")}
        reference = reference_loss(case)
        assert_matches(output, grads, reference, case, bounds_of(reference, case))
        dense += int(output.metrics.pairs["gradient/dense_rows"][0]) if given["hidden"].requires_grad else 0
    assert dense > 500


@pytest.mark.usefixtures("cheap_entries")
@pytest.mark.parametrize(("n", "vocab"), [(400, 3000), (24, 262_144)])
def test_the_error_is_what_is_said_of_it_and_within_the_tolerance(n: int, vocab: int) -> None:
    """From nearly certain to nearly flat policies; 8 % are for what the certain entries miss of a row's length."""
    entropies, told = [], 0
    for scale, temperature in ((20.0, 1.0), (8.0, 1.0), (8.0, 2.0), (2.0, 1.0), (2.0, 4.0)):
        given, config = tokens(n, vocab, scale=scale), LossConfig(temperature=temperature)
        exact, _, out = gradients(given, "exact", config=config)
        entropies.append(float(out.entropies.mean()))
        for tolerance in (0.1, 0.02, 3e-3):
            found, _, out = gradients(given, SparseGradient(tolerance, seed=1), config=config)
            error = (found - exact)[0].norm(dim=1) / exact[0].norm(dim=1)
            rms, predicted = float(error.square().mean().sqrt()), float(out.metrics["gradient/d_hidden_error"])
            assert rms <= 1.08 * tolerance
            assert predicted <= tolerance
            if out.metrics["gradient/dense_rows"] == 0 and predicted > 0.3 * tolerance:
                assert float(error.mean()) == pytest.approx(predicted, rel=0.3)
                told += 1
    assert min(entropies) < 0.5
    assert max(entropies) > 7.8
    assert told >= 2


@pytest.mark.usefixtures("cheap_entries")
def test_the_draws_do_not_depend_on_how_it_is_computed() -> None:
    """Chunks, threads, engine, backend: the same entries, so that results differ by rounding at most."""
    given = tokens(48, 2000, scale=5.0)
    sparse = lambda: SparseGradient(0.05, weight=True, seed=11)  # noqa: E731
    first = gradients(given, sparse(), backend="cpp")
    exact = gradients(given, "exact")
    apart = (first[0] - exact[0]).abs().max()
    assert apart > 0
    threads = torch.get_num_threads()
    other = ({"backend": "torch"}, {"backend": "triton"})
    for options in ({"workspace_bytes": 2**18}, {"engine": "two_pass"}, {"threads": 3}, *other):
        torch.set_num_threads(options.pop("threads", threads))
        try:
            again = gradients(given, sparse(), **{"backend": "cpp", **options})
        finally:
            torch.set_num_threads(threads)
        for x, y in zip(again[:2], first[:2], strict=True):
            assert float((x - y).abs().max()) <= 2e-3 * float(apart), options
        assert float(again[2].metrics["gradient/entries"]) == float(first[2].metrics["gradient/entries"])


@pytest.mark.usefixtures("cheap_entries")
def test_each_call_draws_anew_and_a_seed_repeats_them_all() -> None:
    given = tokens(30, 500, scale=4.0)

    def three(sparse: Any) -> list[Tensor]:
        return [gradients(given, sparse)[0] for _ in range(3)]

    a, b = three(SparseGradient(0.2, seed=5)), three(SparseGradient(0.2, seed=5))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not torch.equal(a[0], a[1])
    assert not torch.equal(a[1], a[2])
    torch.manual_seed(1)
    c = three("sparse") + three(SparseGradient(0.2))
    torch.manual_seed(1)
    d = three("sparse") + three(SparseGradient(0.2))
    assert all(torch.equal(x, y) for x, y in zip(c, d, strict=True))
    assert not torch.equal(c[3], c[4])


@pytest.mark.usefixtures("cheap_entries")
def test_metrics_are_there_when_the_gradient_is() -> None:
    """With two passes that is after the backward; a `SparseGradient` sums up all calls since its reset."""
    given = tokens(50, 1000, scale=6.0)
    sparse = SparseGradient(0.05, weight=True, seed=1)
    assert sparse.metrics() == {}
    names = {"gradient/dense_rows", "gradient/entries", "gradient/d_hidden_error", "gradient/d_weight_error"}
    found = []
    for engine in ("one_pass", "two_pass"):
        out = grpo_loss(**given, completion_mask=None, engine=engine, gradient=sparse)
        before = float(out.metrics["gradient/entries"])
        assert (before > 0) == (engine == "one_pass")
        out.loss.backward()
        assert names <= set(out.metrics)
        assert all(float(out.metrics[name]) > 0 for name in names - {"gradient/dense_rows"})
        found.append(out.metrics)
    every = sparse.metrics()
    assert set(every) == names
    assert every["gradient/entries"] == pytest.approx(sum(float(x["gradient/entries"]) for x in found) / 2)
    assert type(out.metrics).merge(found)["gradient/entries"] == pytest.approx(every["gradient/entries"])
    gathered = sparse.metrics(lambda x: torch.cat([x, x]))  # as of two ranks
    assert gathered == pytest.approx(every)
    sparse.reset()
    assert sparse.metrics() == {}
    assert "gradient/entries" not in grpo_loss(**given, completion_mask=None).metrics


@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_floating_point_operations_are_those_of_the_products_that_remain(frozen: bool, weight: bool) -> None:
    """In NVH: 2 of the logits, 2 of an exact d weight, nothing of what is sparse."""
    given = tokens(64, 4096, scale=14.0)
    given["weight"].requires_grad_(not frozen)
    counts = {}
    for gradient in ("exact", SparseGradient(0.1, weight=weight, seed=2)):
        for engine in ("auto", "two_pass"):
            with FlopCounterMode(display=False) as counter:
                *_, out = gradients(given, gradient, engine=engine)
            counts[gradient if gradient == "exact" else "sparse", engine] = counter.get_total_flops() / (64 * 4096 * 16)
    assert out.metrics["gradient/dense_rows"] == 0
    d_weight = 0.0 if frozen or weight else 2.0
    assert counts["exact", "auto"] == (4.0 if frozen else 6.0)
    assert counts["sparse", "auto"] == 2.0 + d_weight
    assert counts["exact", "two_pass"] == (6.0 if frozen else 8.0)
    assert counts["sparse", "two_pass"] == 4.0 + d_weight


@pytest.mark.usefixtures("cheap_entries")
@pytest.mark.parametrize("backend", BACKENDS)
def test_hostile_rows_harm_no_others(backend: str) -> None:
    """A hidden state of NaN, one of infinities, garbage where masked, banned ids, advantages of 0."""
    given = tokens(40, 700, scale=6.0)
    hidden = given["hidden"].detach().view(4, 10, 16).clone()
    ids, mask = given["completion_ids"].view(4, 10), torch.ones(4, 10)
    mask[1, 7:] = 0.0
    bias = torch.zeros(700)
    bias[[x for x in range(0, 700, 3) if x not in set(ids.flatten().tolist())]] = -math.inf
    advantages = torch.tensor([1.0, -1.0, 0.0, 1.0])
    options = {"advantages": advantages, "bias": bias, "backend": backend}

    def d_hidden(states: Tensor) -> tuple[Tensor, Tensor]:
        h, w = states.clone().requires_grad_(), given["weight"].detach().clone().requires_grad_()
        sparse = SparseGradient(0.1, weight=True, seed=4)
        grpo_loss(h, w, ids, mask, gradient=sparse, **options).loss.backward()
        return h.grad, w.grad

    clean, d_weight = d_hidden(hidden)
    assert not d_weight[torch.isinf(bias)].any()
    assert not clean[2].any()
    garbage = hidden.clone()
    garbage[1, 8], garbage[1, 9] = math.nan, math.inf
    assert all(torch.equal(x, y) for x, y in zip(d_hidden(garbage), (clean, d_weight), strict=True))
    poisoned = hidden.clone()
    poisoned[0, 3], poisoned[3, 5, 2] = math.nan, math.inf
    found, d_weight = d_hidden(poisoned)
    others = torch.ones(4, 10, dtype=torch.bool)
    others[0, 3] = others[3, 5] = False
    assert torch.equal(found[others], clean[others])
    assert found[0, 3].isnan().all()
    assert found[3, 5].isnan().any()
    assert d_weight.isnan().any()


def test_a_row_whose_numbers_have_no_reciprocal_is_dense() -> None:
    given = tokens(20, 300)
    given["advantages"] = torch.tensor([1e-38])
    exact, *_ = gradients(given, "exact")
    found, _, out = gradients(given, SparseGradient(0.1, seed=1))
    assert out.metrics["gradient/dense_rows"] == 1
    assert torch.equal(found, exact)


@pytest.mark.usefixtures("cheap_entries")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_and_an_adapter_on_the_head(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(3)
    given: dict[str, Any] = {
        n: x if n == "completion_ids" else x.detach().to(dtype) for n, x in tokens(80, 900, scale=6.0).items()
    }
    given["hidden"].requires_grad_(), given["weight"].requires_grad_()
    a, b = torch.randn(4, 16, generator=g).to(dtype), torch.randn(900, 4, generator=g).to(dtype)
    found = {}
    for name, gradient in (("exact", "exact"), ("sparse", SparseGradient(0.05, weight=True, seed=1))):
        adapter = [x.clone().requires_grad_() for x in (a, b)]
        grads = gradients({**given, "lora": LoRA(*adapter, 0.5)}, gradient)
        found[name] = [*grads[:2], *(x.grad for x in adapter)]
    for x, y in zip(found["sparse"], found["exact"], strict=True):
        assert float((x - y).norm()) <= 0.07 * float(y.norm())
    assert not torch.equal(found["sparse"][0], found["exact"][0])


@pytest.mark.usefixtures("cheap_entries")
def test_every_function_that_projects_takes_it() -> None:
    given = tokens(60, 1000, scale=6.0)
    hidden, weight, ids = given["hidden"], given["weight"], given["completion_ids"]
    teacher = torch.randn(1, 60, 16, generator=torch.Generator().manual_seed(1))
    top = (teacher @ weight.detach().t()).log_softmax(-1).topk(4)
    head = nn.Linear(16, 1000, bias=False)
    head.weight = nn.Parameter(weight.detach().clone())
    head = attach(head)
    ones = torch.ones(1, 60)
    calls = {
        "logprob": lambda h, w, **o: linear_logprob(h, w, ids, **o)[0],
        "expected": lambda h, w, **o: linear_logprob(h, w, ids, expected=ones, **o)[0],
        "entropy": lambda h, w, **o: linear_logprob(h, w, ids, **o)[1],
        "divergence": lambda h, w, **o: linear_divergence(h, w, teacher, weight.detach(), **o),
        "top k": lambda h, w, **o: topk_divergence(h, w, top.indices, top.values, **o),
        "attached": lambda h, _, **o: head.logprobs(h, ids, **o)[0],
        "attached loss": lambda h, _, **o: head.loss(h, ids, None, given["advantages"], **o).loss,
        "module": lambda h, w, **o: GRPOLoss(**o)(h, w, completion_ids=ids, completion_mask=None, advantages=ones).loss,
    }
    for name, call in calls.items():
        found = []
        for gradient in ("exact", SparseGradient(0.05, seed=1)):
            h, w = (x.detach().clone().requires_grad_() for x in (hidden, weight))
            result = call(h, w, gradient=gradient)
            result.sum().backward()
            found.append((result.detach(), h.grad, w.grad))
        assert torch.equal(found[0][0], found[1][0]), name
        assert 1e-6 < float((found[0][1] - found[1][1]).norm() / found[0][1].norm()) <= 0.06, name
        if found[0][2] is not None:
            torch.testing.assert_close(found[0][2], found[1][2])


@pytest.mark.usefixtures("cheap_entries")
def test_what_arrives_otherwise_than_expected_is_on_average_right_too() -> None:
    """The stored gradient scaled, and that of what is left, both of them drawn."""
    given = alike(4000)
    coefficients = 1.0 + torch.arange(4000).remainder(2)[None]
    found = []
    for gradient in ("exact", SparseGradient(0.3, seed=1)):
        hidden = given["hidden"].detach().clone().requires_grad_()
        options = {"expected": torch.ones(1, 4000), "gradient": gradient}
        logps, _ = linear_logprob(hidden, given["weight"], given["completion_ids"], **options)
        (logps * coefficients).sum().backward()
        found.append(hidden.grad[0])
    error = (found[1] - found[0]).double()
    deviation = error.std(dim=0) / math.sqrt(4000)
    assert bool((error.mean(dim=0).abs() <= 4.0 * deviation).all())
    assert float(deviation.max()) > 0


def test_workspace_holds() -> None:
    n, vocab, budget = 512, 20_000, 8 * 2**20
    given = tokens(n, vocab, width=32, scale=12.0)
    for weight in (False, True):
        sparse = SparseGradient(0.02, weight=weight, seed=1)
        with AllocationWatcher() as watch:
            out = grpo_loss(**given, completion_mask=None, gradient=sparse, workspace_bytes=budget)
        assert watch.peak <= budget + 4 * (n + vocab) * 32 + 40 * 4 * n + 8 * vocab
        assert float(out.metrics["gradient/entries"]) > 5


def test_wrong_values_are_refused_and_useless_ones_warned_of() -> None:
    given = tokens(8, 100)
    for wrong in ("spars", None, 0.1, True):
        with pytest.raises(ValueError, match="gradient: expected 'exact', 'sparse' or a SparseGradient, got"):
            gradients(given, wrong)
        with pytest.raises(ValueError, match="gradient: expected"):
            GRPOLoss(gradient=wrong)
    with pytest.raises(ValueError, match="gradient: expected 'exact' with engine = 'lean'"):
        gradients(given, "sparse", engine="lean")
    with pytest.raises(ValueError, match="tolerance: expected"):
        SparseGradient(0.0)
    with pytest.raises(TypeError, match="weight: expected True or False, got 1"):
        SparseGradient(weight=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="seed: expected an int or None, got 'a'"):
        SparseGradient(seed="a")  # type: ignore[arg-type]
    call_sparse._warn_of_no_use.cache_clear()
    given["hidden"] = given["hidden"].detach()
    with pytest.warns(RuntimeWarning, match="a sparse gradient has no use where hidden wants no gradient"):
        gradients(given, "sparse")
    with torch.no_grad():
        state = torch.get_rng_state()
        grpo_loss(**tokens(8, 100), completion_mask=None, gradient="sparse")
        assert torch.equal(state, torch.get_rng_state())  # nothing is drawn where nothing trains


def test_a_graph_that_is_captured_has_no_sparse_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(device._KINDS, "cpu", replace(device.CPU, is_capturing=lambda: True))
    with pytest.raises(ValueError, match="gradient: expected 'exact' while a CUDA graph is captured"):
        gradients(tokens(8, 100), "sparse")


@pytest.mark.usefixtures("cheap_entries")
def test_torch_compile_leaves_its_graph_for_it() -> None:
    given = tokens(40, 400, scale=5.0)
    sparse = SparseGradient(0.1, seed=1)
    want, *_ = gradients(given, SparseGradient(0.1, seed=1))
    hidden = given["hidden"].detach().clone().requires_grad_()

    def step(hidden: Tensor) -> Tensor:
        return grpo_loss(**{**given, "hidden": hidden}, completion_mask=None, gradient=sparse).loss * 1.0

    torch.compile(step, backend="eager")(hidden).backward()
    assert torch.equal(hidden.grad, want)
