"""The trial of a layout at a model's first calls leaves no trace, and its verdict holds as far as
it was tried."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
from torch.utils.checkpoint import checkpoint

from grpo_kernels import GRPOLoss
from grpo_kernels.transformers import causal_lm_logps, causal_lm_loss
from tests.support import all_architectures as every
from tests.support import tiny_architectures as tiny
from tests.support.training_step import (
    MODES,
    PADDED,
    SCORED,
    assert_right,
    assert_same,
    batch,
    family,
    lengthened,
    loss_of,
    said_by,
)

pytestmark = pytest.mark.usefixtures("forget_warnings")


llama = functools.partial(family, "llama")


def is_a_tree(model: Any, given: dict[str, Any]) -> bool:
    return bool(loss_of(model, given)[0].metrics["tokens/computed"] < 0.6)


class Around(nn.Module):
    """A layer with `change` around its forward: change(inner, x) -> output."""

    def __init__(self, inner: nn.Module, change: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.change, self.amount = inner, change, 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.inner, x)


def around_mlp(model: Any, change: Callable[[Any, Tensor], Tensor]) -> Any:
    model.model.layers[0].mlp = Around(model.model.layers[0].mlp, change)
    return model


def mixed(inner: Callable[[Tensor], Tensor], x: Tensor, amount: float = 0.5) -> Tensor:
    """Adds a part of the mean over the columns, as no causal layer does."""
    return inner(x + amount * x.mean(1, keepdim=True))


@pytest.mark.parametrize("training", [False, True])
def test_hooks_run_as_often_as_in_the_padded_forward(training: bool) -> None:
    """Those of parameters in the trial, too; a module's at most once each, and there is no tree."""
    model, given, calls = llama().train(training), batch(), list[str]()
    names = [name for name, _ in model.named_parameters()]
    for name, x in model.named_parameters():
        for register in (x.register_hook, x.register_post_accumulate_grad_hook):
            register(lambda _, n=name: calls.append(n))
    loss_of(model, given)
    assert sorted(calls) == sorted(2 * names)
    for x in model.model.layers:
        x.register_forward_hook(lambda *_: calls.append("forward"))
        x.register_forward_pre_hook(lambda *_: calls.append("before"))
        x.register_full_backward_hook(lambda *_: calls.append("backward"))
    calls.clear()
    _, got = loss_of(model, given)
    assert all(calls.count(x) <= len(model.model.layers) for x in ("forward", "before", "backward"))
    _, want = loss_of(model, given, **PADDED)
    assert_same(got, want)


def test_buffers_and_attributes_are_those_of_one_padded_forward() -> None:
    def observe(inner: Any, x: Tensor) -> Tensor:
        inner.calls += 1
        with torch.no_grad():
            inner.largest.copy_(torch.maximum(inner.largest, x.abs().amax()))
            inner.count.add_(1)
        return inner(x)

    given, found = batch(), []
    for options in (PADDED, {}):
        model = llama()
        seen = model.model.layers[0].mlp
        seen.calls = 0
        seen.register_buffer("largest", torch.zeros(()))
        seen.register_buffer("count", torch.zeros((), dtype=torch.long))
        _, gradients = loss_of(around_mlp(model, observe), given, **options)
        found.append((seen.largest.item(), int(seen.count), seen.calls, gradients))
    assert found[0][:3] == found[1][:3]
    assert_same(found[1][3], found[0][3])


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_first_call_recomputes_the_same(reentrant: bool) -> None:
    model, given = llama(), batch()
    _, want = loss_of(model, given, **PADDED)
    model.zero_grad()

    def loss(scale: Tensor) -> Tensor:
        loss_fn = GRPOLoss(loss_type="dapo")
        return scale * causal_lm_loss(model, loss_fn, **given, num_items_in_batch=50.0).loss

    found = checkpoint(loss, torch.ones((), requires_grad=True), use_reentrant=reentrant)
    found.backward()
    assert_same({name: x.grad for name, x in model.named_parameters()}, want)


def changed_constant(model: Any) -> Iterator[dict[str, Any]]:
    """Attention looks ahead, as an argument of the model says."""
    yield {}
    yield {"is_causal": False}


def changed_attribute(model: Any) -> Iterator[dict[str, Any]]:
    layer = around_mlp(model, lambda inner, x: mixed(inner, x, layer.amount)).model.layers[0].mlp
    for layer.amount in (0, 1):
        yield {}


def changed_object(model: Any) -> Iterator[dict[str, Any]]:
    """The method of an object, of another one each."""
    mlp = model.model.layers[0].mlp
    plain = mlp.forward
    for amount in (0.0, 0.5):
        owner = SimpleNamespace(of=functools.partial(mixed, plain, amount=amount))
        mlp.forward = types.MethodType(lambda own, x: own.of(x), owner)
        yield {}


def changed_hook(model: Any) -> Iterator[dict[str, Any]]:
    """One of all modules."""

    def mix(module: nn.Module, args: Any, x: Any) -> Any:
        return x + 0.1 * x.mean(1, keepdim=True) if type(module).__name__ == "LlamaMLP" else None

    yield {}
    with torch.nn.modules.module.register_module_forward_hook(mix):
        yield {}


def changed_training(model: Any) -> Iterator[dict[str, Any]]:
    """A layer that passes gradients on only within the first row."""
    for x in model.parameters():
        x.requires_grad_(False)
    model.model.norm.weight.requires_grad_(True)
    around_mlp(model, lambda inner, x: torch.cat([inner(x[:1]), inner(x[1:]).detach()]))
    yield {}
    for x in model.parameters():
        x.requires_grad_(True)
    yield {}


CHANGES = (changed_constant, changed_attribute, changed_object, changed_hook, changed_training)


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_verdict_depends_on_may_change(change: Any) -> None:
    """Right before and after, in every layout, and after the change is in none of them a tree."""
    for options in MODES.values():
        model = llama()
        for i, more in enumerate(change(model)):
            given = batch()
            _, want = loss_of(model, given, **PADDED, **more)
            out, got = loss_of(model, given, **options, **more)
            assert_same(got, want)
            assert i == 0 or out.metrics["tokens/computed"] == 1 or options["layout"] == "trim"


def test_what_is_made_anew_in_each_step_means_no_trial_in_each() -> None:
    model, calls = llama(), list[int]()
    mlp = model.model.layers[1].mlp
    plain = mlp.forward
    _, want = loss_of(model, batch(), **PADDED)
    for _ in range(12):
        calls.clear()
        mlp.forward = lambda x: (calls.append(1), plain(x))[1]
        assert_same(loss_of(model, batch())[1], want)
    assert len(calls) == 1
    loss_of(model, batch())
    assert is_a_tree(model, batch()), "the verdict outlives no such forward"


def test_a_difference_that_is_no_rounding_is_not_allowed() -> None:
    """Experts that choose their tokens: padding changes them as much as a layout does."""

    def choose(inner: Any, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        chosen = flat.sum(1).topk(max(1, len(flat) // 2)).indices
        gate = torch.zeros(len(flat), 1).index_fill(0, chosen, 1.0)
        return inner(x) * gate.view(*x.shape[:2], 1)

    model = around_mlp(llama(), choose)
    assert_right(model, batch(), modes=MODES.values())


def test_what_begins_late_is_seen_when_it_begins() -> None:
    """A window that stands in the mask alone: attention is not told of it."""
    model = every.build("olmoe", sliding_window=30)
    for times, in_tree in ((1, True), (2, True), (8, False), (1, True), (6, False), (3, False)):
        given = lengthened(batch(), times)
        assert_right(model, given)
        assert is_a_tree(model, given) == in_tree, times


def test_a_longer_batch_tries_again_a_handful_of_times() -> None:
    model, tried, calls = llama(max_position_embeddings=2048), 0, list[int]()
    mlp = model.model.layers[0].mlp
    plain = mlp.forward
    mlp.forward = lambda x: (calls.append(1), plain(x))[1]
    for times in range(1, 17):
        calls.clear()
        assert is_a_tree(model, lengthened(batch(), times))
        tried += len(calls) > 2
    assert tried <= 5


@pytest.mark.parametrize("in_a_tuple", [False, True])
def test_an_argument_of_attention_that_is_not_known_is_not_dropped(in_a_tuple: bool) -> None:
    model = llama()
    attention = model.model.layers[1].self_attn
    attend = attention.forward

    def handing(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        of_tokens = hidden_states.mean((0, 2))[None].sigmoid()
        given = (of_tokens,) if in_a_tuple else of_tokens
        return attend(hidden_states, *args, block_indices=given, **kwargs)

    attention.forward = handing
    said = said_by(lambda: loss_of(model, batch()))
    assert len(said) == 1 and "block_indices" in said[0]


@pytest.mark.parametrize("after", [0, 2])
def test_a_forward_that_raises_in_the_default_layout_gives_way(after: int) -> None:
    model, given = llama(), batch()
    forward, trees = model.model.layers[0].forward, list[int]()

    def failing(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("segments") is not None:
            trees.append(1)
            if len(trees) > after:
                raise IndexError("of a kernel that does not serve this shape")
        return forward(hidden, *args, **kwargs)

    model.model.layers[0].forward = failing
    assert_right(model, given, "IndexError", "layout='trim' is used", modes=[{}] * 3)


def test_the_device_of_the_inputs_decides() -> None:
    """As accelerate leaves an embedding on meta until its own forward; nor does a default count."""
    model, given = llama(), batch()
    _, want = loss_of(model, given)
    fresh = llama()
    weight = fresh.model.embed_tokens.weight
    fresh.model.embed_tokens.weight = nn.Parameter(weight.detach().to("meta"), requires_grad=False)
    fresh.model.embed_tokens.forward = lambda ids: nn.functional.embedding(ids, weight)
    torch.set_default_device("meta")
    try:
        out, got = loss_of(fresh, given)
    finally:
        torch.set_default_device("cpu")
    assert_same(got, {name: want[name] for name in got})
    assert out.metrics["tokens/computed"] < 0.6


def test_scores_in_inference_mode_come_first() -> None:
    model, given = llama(), {name: batch()[name] for name in SCORED}
    with torch.inference_mode():
        first = causal_lm_logps(model, **given).logps
        inside = causal_lm_logps(model, **{name: x.clone() for name, x in given.items()}).logps
    want = causal_lm_logps(model, **given, layout="padded").logps
    torch.testing.assert_close(first.clone(), want, rtol=3e-6, atol=3e-6)
    torch.testing.assert_close(inside.clone(), want, rtol=3e-6, atol=3e-6)
    assert is_a_tree(model, batch())


def test_a_body_without_a_config_runs_as_given() -> None:
    class Body(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.embed_tokens = inner, inner.embed_tokens

        def forward(self, **inputs: Any) -> Any:
            return self.inner(**inputs)

    model = llama()
    model.model = Body(model.model)
    assert_right(model, batch(), "config")


def test_types_of_tokens_that_differ_are_no_tree() -> None:
    """Gemma 3 lets tokens of an image see each other."""
    torch.manual_seed(0)
    model, given = tiny.gemma3_vl()[0].float().eval(), batch()
    given["token_type_ids"] = torch.zeros_like(given["input_ids"])
    assert assert_right(model, given).metrics["tokens/computed"] < 0.6
    given["token_type_ids"][:, 9:12] = 1
    for _ in range(2):
        assert_right(model, given)
