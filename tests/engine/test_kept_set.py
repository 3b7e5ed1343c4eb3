"""Log-probabilities over kept sets: values, gradients, what is read, what it costs. And GRPO on top of them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from grpo_kernels import linear_logprob
from grpo_kernels.engine.device import device_of
from tests.support.flat import flat
from tests.support.kept_scenes import BIG, HEADS, assert_near, by_full_logits, compute, scene
from tests.support.measure import count_flops
from tests.support.pretend_gpu import OnGPU, here, pretended


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", HEADS)
def test_equals_full_softmax_with_the_others_at_minus_infinity(name: str, dtype: torch.dtype) -> None:
    s = scene(name, dtype)
    got = compute(s)
    assert got["logps"].dtype == got["entropies"].dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert_near(got, by_full_logits(s), dtype, 1e-13 if dtype == torch.float64 else 2e-6)
    assert bool((got["logps"][s.mask == 0] == 0).all())
    assert bool((got["d_hidden"][s.mask == 0] == 0).all())


@pytest.mark.parametrize("kind", [torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_whole_vocabulary_is_that_without_kept_ids(dtype: torch.dtype, kind: torch.dtype) -> None:
    s = scene("all", dtype)
    s = s.but(kept=torch.randperm(60).to(kind).expand(2, 9, 60))
    leaves = s.leaves()
    scores = flat(linear_logprob)(**leaves, ids=s.ids, mask=s.mask, **s.options)
    torch.autograd.backward((scores.logps, scores.entropies), s.up)
    want = {**scores.given, **{f"d_{k}": x.grad for k, x in leaves.items()}}
    got, rounds = compute(s), device_of(s.ids.device).mixed_products(dtype)  # without kept_ids it rounds d logits
    for name, x in want.items():
        error = 2.0**-8 if rounds and name.startswith("d_") else 3e-6
        assert_near({name: got[name]}, {name: x.detach().double()}, dtype, error)


def test_gradcheck() -> None:
    s = scene("all", torch.float64)
    args = [x.double() for x in s.leaves().values()]

    def both(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight, bias = leaves
        kept = s.kept[:1, :4]
        options = {"kept_ids": kept, "bias": bias, "workspace_bytes": 2000, **s.options}
        scores = flat(linear_logprob)(hidden, weight, s.ids[:1, :4], **options)
        return scores.logps, scores.entropies

    leaves = [args[0][:1, :4].contiguous(), *args[1:]]
    assert torch.autograd.gradcheck(both, [x.detach().requires_grad_() for x in leaves], fast_mode=True)


@pytest.mark.parametrize("budget", [1, 2_000, 20_000])
def test_any_workspace_gives_the_same(budget: int) -> None:
    """Down to one that a single position's set does not fit into."""
    for dtype in (torch.float64, torch.bfloat16):
        s = scene("all", dtype)
        want = {name: x.double() for name, x in compute(s).items()}
        assert_near(compute(s, workspace_bytes=budget), want, dtype, 1e-13 if dtype == torch.float64 else 2e-6)


def test_order_and_repetition_of_kept_ids_do_not_matter() -> None:
    s = scene("all")
    doubled = torch.cat([s.kept.flip(-1), s.ids[..., None], s.kept.roll(3, -1)], dim=-1)
    want = compute(s)
    for other in (s.kept.flip(-1), s.kept.sort(-1).values):
        got = compute(s.but(kept=other))
        assert all(torch.equal(x, want[name]) for name, x in got.items())
    assert_near(compute(s.but(kept=doubled)), {k: x.double() for k, x in want.items()}, torch.float32, 1e-6)


def test_masked_positions_are_not_read() -> None:
    s = scene("temperature a token")
    out = s.mask == 0
    clean = compute(s)
    garbage = s.but(
        hidden=s.hidden.masked_fill(out[..., None], math.nan),
        ids=s.ids.masked_fill(out, -100),
        kept=s.kept.masked_fill(out[..., None], BIG),
        up=(s.up[0].masked_fill(out, math.nan), s.up[1].masked_fill(out, math.nan)),
        options={**s.options, "temperature": s.options["temperature"].masked_fill(out, -math.inf)},
    )
    assert all(torch.equal(x, clean[name]) for name, x in compute(garbage).items())


def test_what_is_not_finite_stays_with_its_own_ids() -> None:
    """Padding has no row of its own in the head that garbage could reach."""
    s = scene().but(mask=torch.ones(2, 9))
    for where in ((s.kept >= 0).sum(-1) > 1).nonzero().tolist():
        at = tuple(where)
        hidden = s.hidden.clone()
        hidden[at] = math.nan
        got = compute(s.but(hidden=hidden))
        assert bool(got["logps"][at].isnan())
        assert int(got["logps"].isnan().sum()) == 1
        reached = set(got["d_weight"].isnan().any(1).nonzero()[:, 0].tolist())
        assert reached == set(s.kept[at].tolist()) - {-1}


def test_an_id_alone_in_its_set_is_certain_and_costs_nothing() -> None:
    s = scene()
    alone = s.but(kept=torch.where(s.kept == s.ids[..., None], s.kept, -1))
    got: dict[str, Tensor] = {}
    assert count_flops(lambda: got.update(compute(alone))) == 0
    assert all(bool((x == 0).all()) for x in got.values())


def test_entropy_is_optional_and_each_gradient_comes_alone() -> None:
    s = scene("all")
    leaves = s.leaves()
    given = {"ids": s.ids, "kept_ids": s.kept, "mask": s.mask, **s.options}
    scores = flat(linear_logprob)(**leaves, **given, entropy=False)
    assert scores.entropies is None
    scores.logps.backward(s.up[0])
    first = {f"d_{name}": x.grad for name, x in leaves.items()}
    second = compute(s.but(up=(torch.zeros(2, 9), s.up[1])))
    both = by_full_logits(s)
    total = {name: (x + second[name]).double() for name, x in first.items()}
    assert_near(total, {name: both[name] for name in total}, torch.float32, 4e-6)


@pytest.mark.parametrize("frozen", ["hidden", "weight", "bias"])
def test_frozen_tensors_get_no_gradient(frozen: str) -> None:
    s = scene("all")
    want, leaves = compute(s), s.leaves()
    leaves[frozen].requires_grad_(False)
    scores = flat(linear_logprob)(**leaves, ids=s.ids, kept_ids=s.kept, mask=s.mask, **s.options)
    torch.autograd.backward((scores.logps, scores.entropies), s.up)
    for name, x in leaves.items():
        assert x.grad is None if name == frozen else torch.equal(x.grad, want[f"d_{name}"]), name


def test_backward_again_gives_the_same_and_differentiating_it_raises() -> None:
    leaves, s = scene().leaves(), scene()
    logps = flat(linear_logprob)(**leaves, ids=s.ids, kept_ids=s.kept, mask=s.mask).logps
    wanted = [*leaves.values()]
    first = torch.autograd.grad(logps.sum(), wanted, retain_graph=True)
    again = torch.autograd.grad(logps.sum(), wanted, create_graph=True)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    with pytest.raises(RuntimeError, match="differentiating twice"):
        again[0].sum().backward(retain_graph=True)
    for leaf in wanted:
        with pytest.raises(RuntimeError, match="differentiating twice"):
            torch.autograd.grad(again[0].sum(), leaf, allow_unused=True, retain_graph=True)


def test_autocast_rounds_the_operands_and_nothing_else() -> None:
    s = scene("all")
    rounded = s.but(hidden=s.hidden.bfloat16().float(), weight=s.weight.bfloat16().float(), bias=s.bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = compute(s)
    assert_near(got, by_full_logits(rounded), torch.float32, 3e-6)


def test_mixed_dtypes_are_used_as_stored() -> None:
    s = scene()
    for hidden, weight in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        mixed = s.but(hidden=s.hidden.to(hidden), weight=s.weight.to(weight))
        got, want = compute(mixed), by_full_logits(mixed)
        for name, kind in (("d_hidden", hidden), ("d_weight", weight)):
            assert got[name].dtype == kind
            assert_near({name: got[name]}, {name: want[name]}, kind, 2e-6)
        assert_near({"logps": got["logps"]}, {"logps": want["logps"]}, torch.float32, 2e-6)


@pytest.mark.parametrize(("shape", "k"), [((0,), 3), ((2, 0), 3), ((0, 4), 0), ((2, 3), 0), ((2, 3), 4)])
def test_nothing_to_score_is_an_attached_zero(shape: tuple[int, ...], k: int) -> None:
    hidden, weight = torch.randn(*shape, 5, requires_grad=True), torch.randn(7, 5, requires_grad=True)
    ids, kept = torch.full(shape, BIG), torch.full((*shape, k), BIG)
    scores = linear_logprob(hidden, weight, ids, kept_ids=kept, mask=torch.zeros(shape))
    logps, entropies = scores.logps, scores.entropies
    assert logps.shape == entropies.shape == shape and logps.requires_grad
    (logps.sum() + entropies.sum()).backward()
    assert not hidden.grad.any() and not weight.grad.any()


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "not in its set": (
        {"ids": torch.tensor([[1, 2], [9, 4]])},
        ValueError,
        r"ids: expected an id of the position's kept set, got 9 at position \(1, 0\)",
    ),
    "an empty set": (
        {"kept_ids": torch.tensor([[[1, 5], [2, -1]], [[3, 3], [-1, -1]]])},
        ValueError,
        r"kept_ids: expected a set where the mask counts, got none at position \(1, 1\); without_set='full'",
    ),
    "padding is no id": (
        {"ids": torch.tensor([[1, -1], [3, 4]])},
        ValueError,
        r"ids: expected an id of the position's kept set, got -1 at position \(0, 1\)",
    ),
    "beyond the vocabulary": (
        {"kept_ids": torch.tensor([[[1, 5], [2, 10]], [[3, 3], [4, 6]]])},
        ValueError,
        r"kept_ids: expected ids in \[0, V\) = \[0, 10\) or -1, got 10 at position \(0, 1\)",
    ),
    "no padding": (
        {"kept_ids": torch.tensor([[[1, 5], [2, -2]], [[3, 3], [4, 6]]])},
        ValueError,
        r"kept_ids: expected ids .* or -1, got -2 at position \(0, 1\)",
    ),
    "shape": ({"kept_ids": torch.zeros(2, 3, 4, dtype=torch.long)}, ValueError, r"kept_ids: expected shape .*K\)"),
    "no width": ({"kept_ids": torch.tensor(1)}, ValueError, r"kept_ids: expected shape .*K\)"),
    "floats": ({"kept_ids": torch.zeros(2, 2, 4)}, TypeError, "kept_ids: expected signed integer ids"),
    "unsigned": ({"kept_ids": torch.zeros(2, 2, 4, dtype=torch.uint8)}, TypeError, "kept_ids: .*got torch.uint8"),
    "a list": ({"kept_ids": [[1]]}, TypeError, "kept_ids: expected a tensor, got list"),
    "temperature": ({"temperature": 0.0}, ValueError, "temperature: expected a finite number > 0"),
    "temperatures": ({"temperature": torch.zeros(2, 2)}, ValueError, "temperature: expected finite numbers > 0"),
    "cap": ({"final_logit_softcapping": -1.0}, ValueError, "final_logit_softcapping"),
    "mask": ({"mask": torch.ones(4)}, ValueError, "mask: expected shape"),
    "bias": ({"bias": torch.ones(3)}, ValueError, "bias: expected shape"),
    "workspace": ({"workspace_bytes": 0}, ValueError, "workspace_bytes: expected a number of bytes > 0"),
}


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
    """To raise would wait for the device. The sizes of the sets are waited for, once, and which rows to go back for."""
    s = scene()
    ids, kept = s.ids.clone(), s.kept.clone()
    ids[0, 3], ids[1, 1], kept[1, 4, 0] = BIG, 59 if 59 not in s.kept[1, 1] else 58, 60
    kept[1, 1] = torch.where(kept[1, 1] == ids[1, 1], -1, kept[1, 1])
    with pretended(monkeypatch) as waits:
        hidden, weight = OnGPU(s.hidden.clone()).requires_grad_(), OnGPU(s.weight.clone()).requires_grad_()
        scores = linear_logprob(hidden, weight, OnGPU(ids), kept_ids=OnGPU(kept))
        assert waits == ["tolist"]
    wrong = torch.zeros(2, 9, dtype=torch.bool)
    wrong[0, 3] = wrong[1, 1] = wrong[1, 4] = True
    for x in (scores.logps, scores.entropies):
        assert torch.equal(here(x).isnan(), wrong)
    want = linear_logprob(s.hidden, s.weight, s.ids, kept_ids=s.kept, mask=~wrong).logps
    assert_close(here(scores.logps).detach()[~wrong], want[~wrong])


def test_under_compile_the_graph_breaks_and_the_result_is_the_same() -> None:
    s = scene("all")

    def total(hidden: Tensor) -> Tensor:
        scores = linear_logprob(hidden * 2.0, s.weight, s.ids, kept_ids=s.kept, mask=s.mask)
        return scores.logps.sum() * 3.0

    assert_close(torch.compile(total, backend="eager")(s.hidden), total(s.hidden), rtol=0, atol=0)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="grpo_kernels"):
        torch.compile(total, backend="eager", fullgraph=True)(s.hidden)
