"""Divergences from a teacher's K listed ids against float64 autograd on full logits; what they cost and refuse."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from grpo_kernels import Head, LoRA, Run, linear_divergence, topk_divergence
from grpo_kernels.base.distributed import gather_uneven
from tests.support.flat import flat
from tests.support.measure import AllocationWatcher, count_flops
from tests.support.pretend_gpu import OnGPU, here, pretended
from tests.support.ranks import run_ranks

B, T, H, V, K = 2, 13, 8, 50, 5
SCALE, TOLERANCE = 1.3, {torch.float64: 1e-12, torch.float32: 5e-6}
MEASURES: dict[str, dict[str, Any]] = {
    "forward": {"divergence": "forward_kl"},
    "forward, clamped": {"divergence": "forward_kl", "log_prob_min_clamp": -4.0, "loss_max_clamp": 0.4},
    "forward, tail": {"divergence": "forward_kl", "tail": True},
    "reverse": {"divergence": "reverse_kl"},
    "reverse, clamped": {"divergence": "reverse_kl", "loss_max_clamp": 0.5},
}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap, temperature a position": {"final_logit_softcapping": 5.0, "temperature": "positions"},
}


@dataclass(frozen=True)
class Scene:
    """One call; some entries are padding, some positions list nothing, some are masked."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor
    ids: Tensor
    logps: Tensor
    mask: Tensor
    up: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def leaves(self, dtype: torch.dtype | None = None, *, head: bool = True) -> list[Tensor]:
        every = (self.hidden, True), (self.weight, head), (self.bias, head)
        return [x.to(dtype or x.dtype, copy=True).requires_grad_(trains) for x, trains in every]

    def but(self, **changes: Any) -> Scene:
        return replace(self, **changes)


def scene(dtype: torch.dtype = torch.float32, seed: int = 0, **options: Any) -> Scene:
    g = torch.Generator().manual_seed(seed)
    ids = torch.rand(B, T, V, generator=g).topk(K, -1).indices
    logps = (2 * torch.randn(B, T, V, generator=g)).log_softmax(-1).gather(-1, ids)
    ids[0, 0, 2], ids[0, 2], logps[0, 1, 1] = -1, -1, -torch.inf
    hidden, weight, bias, up = (torch.randn(*x, generator=g) for x in ((B, T, H), (V, H), (V,), (B, T)))
    if options.get("temperature", 1.0) == "positions":
        options["temperature"] = torch.rand(B, T, generator=g) + 0.5
    mask = torch.rand(B, T, generator=g) > 0.2
    tensors = (x.to(dtype) for x in (hidden, weight, bias))
    return Scene(*tensors, ids, logps.to(dtype), mask, up.to(dtype), {"logit_scale": SCALE, **options})


def student_logps(leaves: list[Tensor], options: dict[str, Any]) -> Tensor:
    hidden, weight, bias = leaves
    z, cap, temperature = SCALE * (hidden @ weight.t() + bias), options.get("final_logit_softcapping"), 1.0
    z = z if cap is None else cap * torch.tanh(z / cap)
    temperature = options.get("temperature", 1.0)
    z = z / (temperature[..., None].double() if isinstance(temperature, Tensor) else temperature)
    return z.log_softmax(-1)


def by_full_logits(s: Scene, leaves: list[Tensor], least_rest: float) -> Tensor:
    """The definition, in float64."""
    how, logq = s.options, s.logps.double()
    listed = (s.ids >= 0) & (logq > -torch.inf)
    logp = student_logps(leaves, how).gather(-1, s.ids.clamp(min=0))
    logq = torch.where(listed, logq, 0.0)

    def total(x: Tensor) -> Tensor:
        return torch.where(listed, x, 0.0).sum(-1)

    p_rest, q_rest = ((1 - total(x.exp())).clamp(min=least_rest) for x in (logp, logq))
    least = how.get("log_prob_min_clamp")
    if least is not None:
        logp, logq = logp.clamp(min=least), logq.clamp(min=least)
    if how["divergence"] == "reverse_kl":
        found = total(logp.exp() * (logp - logq)) + p_rest * (p_rest / q_rest).log()
    else:
        found = total(logq.exp() * (logq - logp))
        if how.get("tail"):
            found = found + q_rest * (q_rest / p_rest).log()
    most = how.get("loss_max_clamp")
    found = found if most is None else found.clamp(min=-most, max=most)
    return torch.where(s.mask, found, 0.0)


def run(s: Scene, *, head: bool = True, **execution: Any) -> tuple[Tensor, list[Tensor | None]]:
    leaves = s.leaves(head=head)
    hidden, weight, bias = leaves
    call = flat(topk_divergence)
    found = call(hidden, weight, s.ids, s.logps, bias=bias, mask=s.mask, **s.options, **execution).divergence
    found.backward(s.up.to(found.dtype))
    return found, [x.grad for x in leaves]


def divergence_of(*given: Any, **options: Any) -> Tensor:
    return topk_divergence(*given, **options).divergence


def assert_exact(s: Scene, found: Tensor, grads: list[Tensor | None], tolerance: float) -> None:
    leaves = s.leaves(torch.float64)
    want = by_full_logits(s, leaves, torch.finfo(s.logps.dtype).eps)
    want.backward(s.up.double())
    assert float((found - want).detach().abs().max()) < tolerance
    for got, x in zip(grads, leaves, strict=True):
        if got is not None:
            assert float((got - x.grad).abs().max()) < tolerance * float(x.grad.abs().max())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MEASURES)
def test_every_engine_gives_the_definition(name: str, shape: str, dtype: torch.dtype) -> None:
    s = scene(dtype, **MEASURES[name], **SHAPES[shape])
    even = s.but(up=torch.full_like(s.up, 0.7))  # what is expected
    for backend in ("auto", "torch"):
        for engine, head in (("one_pass", True), ("two_pass", True), ("lean", True), ("frozen", False)):
            some = even if engine == "one_pass" and backend == "auto" else s
            budget = 20_000 if engine == "lean" else None
            found, grads = run(some, head=head, engine=engine, backend=backend, workspace_bytes=budget)
            assert_exact(some, found, grads, TOLERANCE[dtype])
            assert head or grads[1:] == [None, None]


def test_the_whole_vocabulary_is_linear_divergence() -> None:
    hidden, teacher = torch.randn(6, H).double(), torch.randn(6, H).double()
    weight, ids = torch.randn(V, H).double(), torch.arange(V).expand(6, V)
    logps = (teacher @ weight.t()).log_softmax(-1)
    for name in ("forward_kl", "reverse_kl"):
        want = linear_divergence(hidden, weight, teacher, weight, divergence=name).divergence
        for tail in (None, True):
            got = divergence_of(hidden, weight, ids, logps, divergence=name, tail=tail)
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)


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


def test_a_tail_of_nothing_on_both_sides_adds_nothing() -> None:
    hidden, weight = torch.eye(2, 3)[:1].requires_grad_(), torch.tensor([[60.0, 0, 0], [0, 0, 0], [-60.0, 0, 0]])
    ids, logps = torch.tensor([[0]]), torch.tensor([[0.0]])
    for name in ("forward_kl", "reverse_kl"):
        found = divergence_of(hidden, weight, ids, logps, divergence=name, tail=True)
        (grad,) = torch.autograd.grad(found.sum(), hidden)
        assert float(found.detach()) == 0.0
        assert float(grad.abs().max()) < 1e-20


def test_a_student_that_rules_an_id_out() -> None:
    hidden, weight = torch.ones(1, 2, requires_grad=True), torch.randn(4, 2)
    bias, ids, logps = torch.tensor([0.0, -math.inf, 0.0, 0.0]), torch.tensor([[0, 1]]), torch.tensor([[-1.0, -2.0]])
    found = divergence_of(hidden, Head(weight, bias), ids, logps, divergence="reverse_kl")
    found.sum().backward()
    assert bool(found.isfinite().all())
    assert bool(hidden.grad.isfinite().all())
    assert float(divergence_of(hidden, Head(weight, bias), ids, logps)) == math.inf


def test_repetition_padding_and_order_do_not_matter() -> None:
    s = scene(torch.float64, divergence="reverse_kl")
    want = run(s)
    order = torch.randperm(K)
    more = torch.cat([s.ids[..., order], s.ids[..., :2], torch.full((B, T, 3), -1)], -1)
    logps = torch.cat([s.logps[..., order], torch.full((B, T, 2), -0.1), torch.full((B, T, 3), 7.0)], -1).double()
    hides_none = s.logps[..., :2] > -torch.inf  # a repetition of what counts; a first -inf hides nothing
    logps[..., K : K + 2].masked_fill_(~hides_none, -torch.inf)
    got = run(s.but(ids=more, logps=logps))
    for x, y in zip((got[0], *got[1]), (want[0], *want[1]), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)


def test_masked_positions_are_not_read() -> None:
    s = scene(divergence="reverse_kl", **SHAPES["softcap, temperature a position"])
    out = ~s.mask
    clean = run(s)
    garbage = s.but(
        hidden=s.hidden.masked_fill(out[..., None], math.nan),
        ids=s.ids.masked_fill(out[..., None], 2**40),
        logps=s.logps.masked_fill(out[..., None], math.nan),
        up=s.up.masked_fill(out, math.nan),
    )
    got = run(garbage)
    assert torch.equal(got[0], clean[0])
    assert all(torch.equal(x, y) for x, y in zip(got[1], clean[1], strict=True))


def test_nothing_counted_is_zero_with_gradients() -> None:
    s = scene(divergence="reverse_kl")
    nothing = s.but(mask=torch.zeros_like(s.mask), ids=torch.full_like(s.ids, -1))
    for mask in (nothing.mask, s.mask):
        found, grads = run(nothing.but(mask=mask))
        assert not found.any() and not any(x.any() for x in grads)


@pytest.mark.parametrize("engine", ["auto", "two_pass", "lean"])
def test_a_lora_on_the_head(engine: str) -> None:
    s, g = scene(torch.float64, divergence="reverse_kl"), torch.Generator().manual_seed(1)
    a, b = (torch.randn(*x, generator=g).double() for x in ((3, H), (V, 3)))
    found, grads = {}, {}
    for name in ("ours", "merged"):
        hidden, factors = s.hidden.clone().requires_grad_(), [x.clone().requires_grad_() for x in (a, b)]
        merged = s.weight + 0.5 * factors[1] @ factors[0]
        head = (s.weight, LoRA(*factors, 0.5)) if name == "ours" else (merged, None)
        scores = flat(topk_divergence)(
            hidden, head[0], s.ids, s.logps, bias=s.bias, mask=s.mask, lora=head[1], engine=engine, **s.options
        )
        found[name] = scores.divergence
        found[name].backward(s.up)
        grads[name] = [x.grad for x in (hidden, *factors)]
    torch.testing.assert_close(found["ours"], found["merged"], rtol=1e-11, atol=1e-12)
    for x, y in zip(grads["ours"], grads["merged"], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-11)


def test_autocast_and_rounded_logits() -> None:
    """The operands are bfloat16, the logits fp32 or rounded: the divergence is that of those logits."""
    s = scene(divergence="forward_kl", tail=True)
    rounded = s.but(hidden=s.hidden.bfloat16(), weight=s.weight.bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = run(s)
    assert_exact(rounded, found, [None] * 3, 5e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        coarse, _ = run(s, logits_dtype="input")
    assert 1e-4 < float((coarse - found).abs().max()) < 0.1


COSTS = {"auto": (6, 4), "one_pass": (6, 4), "two_pass": (8, 6), "lean": (8, 6), "frozen": (None, 4)}


@pytest.mark.parametrize("engine", COSTS)
def test_cost(engine: str) -> None:
    s = scene(divergence="reverse_kl")
    s = s.but(up=torch.ones(B, T), mask=torch.arange(T).expand(B, T) < 8)  # the rows are a whole block
    for head, cost in zip((True, False), COSTS[engine], strict=True):
        if cost is not None:
            assert count_flops(lambda head=head: run(s, head=head, engine=engine)) == cost * 16 * V * H
    with torch.no_grad():
        assert count_flops(lambda: topk_divergence(s.hidden, s.weight, s.ids, s.logps)) == 2 * B * T * V * H


def test_memory_stays_within_the_workspace() -> None:
    n, vocab, k, budget = 512, 4096, 64, 2**20
    hidden, weight = torch.randn(n, 16, requires_grad=True), torch.randn(vocab, 16)
    ids, logps = torch.rand(n, vocab).topk(k, -1).indices, torch.full((n, k), -5.0)
    call = {"divergence": "reverse_kl", "run": Run(workspace_bytes=budget)}
    topk_divergence(hidden, weight, ids, logps, **call)
    with AllocationWatcher() as watcher:
        topk_divergence(hidden, weight, ids, logps, **call)
    inputs = n * (16 * 4 + 8 * k * 8)  # d hidden; the ids and logps in order, and what it takes to sort them
    assert watcher.peak < budget + inputs


def sharded(rank: int, world_size: int) -> None:
    for i, (name, engine) in enumerate([*zip(MEASURES, ("auto", "two_pass", "lean", "one_pass", "auto"), strict=True)]):
        s = scene(torch.float64, **MEASURES[name], **SHAPES[[*SHAPES][i % 2]])
        size = V // 2 + (3 if rank == 0 else -3)
        own = slice(0, size) if rank == 0 else slice(V - size, V)
        part = s.but(weight=s.weight[own], bias=s.bias[own])
        found, (hidden, *head) = run(part, engine=engine, process_group=dist.group.WORLD)
        sizes = [V // 2 + 3, V // 2 - 3]
        assert_exact(s, found, [hidden, *(gather_uneven(x, sizes, dist.group.WORLD) for x in head)], 1e-11)
    uneven = s.but(logps=s.logps + rank)
    with pytest.raises(ValueError, match="teacher_logps"):
        run(uneven.but(weight=s.weight[own], bias=s.bias[own]), process_group=dist.group.WORLD)


def test_a_divided_vocabulary() -> None:
    run_ranks(sharded, 2)


def test_what_does_not_exist_is_an_error_here_and_nan_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    s = scene()
    ids = s.ids.clone()
    ids[1, 3, 2] = V
    s = s.but(mask=torch.ones(B, T, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"teacher_ids: expected ids in \[0, V\) = \[0, 50\), or -1 .* got 50"):
        topk_divergence(s.hidden, s.weight, ids, s.logps)
    with pretended(monkeypatch):
        given = (OnGPU(x.clone()) for x in (s.hidden, s.weight, ids, s.logps))
        found = divergence_of(*given, run=Run(backend="torch"))
    at = here(found).isnan().nonzero().tolist()
    assert at == [[1, 3]]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"divergence": "jsd"}, ValueError, "divergence: expected one of forward_kl, reverse_kl, got 'jsd'"),
        ({"divergence": "reverse_kl", "tail": False}, ValueError, "tail: expected True or None"),
        ({"tail": 1}, TypeError, "tail: expected a bool or None, got 1"),
        ({"tail": True, "log_prob_min_clamp": -9.0}, ValueError, "log_prob_min_clamp: expected None with a tail"),
        ({"loss_max_clamp": 0.0}, ValueError, "loss_max_clamp: expected a finite number > 0"),
        ({"outputs": ("student_mass",)}, TypeError, "outputs: no argument of topk_divergence any more"),
        ({"expected": torch.ones(3)}, ValueError, "expected: expected shape"),
        ({"teacher_ids": torch.zeros(B, T, K)}, TypeError, "teacher_ids: expected signed integer ids"),
        ({"teacher_ids": torch.zeros(B, T, 0, dtype=torch.long)}, ValueError, "teacher_ids: expected shape"),
        ({"teacher_logps": torch.zeros(B, T)}, ValueError, "teacher_logps: expected shape"),
        ({"run": Run("score_dot")}, ValueError, "engine: expected"),
    ],
    ids=str,
)
def test_wrong_arguments_are_named(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    s = scene()
    given = {"teacher_ids": s.ids, "teacher_logps": s.logps, **changes}
    with pytest.raises(error, match=message):
        topk_divergence(*s.leaves()[:2], given.pop("teacher_ids"), given.pop("teacher_logps"), **given)
