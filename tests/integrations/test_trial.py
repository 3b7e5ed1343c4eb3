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
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo_kernels import GRPOLoss
from grpo_kernels.transformers import causal_lm_loss, completion_logprobs
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


def around_mlp(model: Any, change: Callable[[Any, Tensor], Tensor], layer: int = 0) -> Any:
    model.model.layers[layer].mlp = Around(model.model.layers[layer].mlp, change)
    return model


def mixed(inner: Callable[[Tensor], Tensor], x: Tensor, amount: float = 0.5) -> Tensor:
    """Adds a part of the mean over the columns, as no causal layer does."""
    return inner(x + amount * x.mean(1, keepdim=True))


def counting(model: Any, layer: int = 0) -> list[int]:
    """A list that grows with each forward of a layer."""
    calls, mlp = list[int](), model.model.layers[layer].mlp
    plain = mlp.forward
    mlp.forward = lambda x: (calls.append(1), plain(x))[1]
    return calls


# A guest in the user's model


@pytest.mark.parametrize("training", [False, True])
def test_hooks_run_as_often_as_in_the_padded_forward(training: bool) -> None:
    model, given, calls = llama().train(training), batch(), list[str]()
    names = [name for name, _ in model.named_parameters()]
    handles = [x.register_hook(lambda _, n=n: calls.append(n)) for n, x in model.named_parameters()]
    for name, x in model.named_parameters():
        hook = x.register_post_accumulate_grad_hook
        handles.append(hook(lambda _, n=name: calls.append(n)))
    loss_of(model, given)
    assert sorted(calls) == sorted(2 * names)
    modules = [x for x in model.model.modules() if not isinstance(x, nn.ModuleList)]
    for i, x in enumerate(modules):
        handles.append(x.register_forward_hook(lambda *_, n=str(i): calls.append(n)))
        handles.append(x.register_forward_pre_hook(lambda *_, n=str(i): calls.append(n)))
        handles.append(x.register_full_backward_hook(lambda *_, n=str(i): calls.append(n)))
    calls.clear()
    fresh, everywhere = llama().train(training), torch.nn.modules.module
    with everywhere.register_module_forward_hook(lambda *_: calls.append("all")):
        loss_of(fresh, given)
    assert calls.count("all") <= sum(1 for _ in fresh.modules())
    calls.clear()
    loss_of(model, given)
    seen = [calls.count(str(i)) for i in range(len(modules))]
    assert max(seen) <= 3, seen
    _, want = loss_of(model, given, **PADDED)
    for handle in handles:
        handle.remove()
    assert_same(loss_of(model, given)[1], want)


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


def test_random_numbers_are_as_if_nothing_had_been_tried() -> None:
    model, given = llama(attention_dropout=0.3).train(), batch()
    model.set_attn_implementation("eager")
    states = []
    for _ in range(2):
        torch.manual_seed(7)
        loss_of(model, given)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_the_mode_of_the_call_is_tried() -> None:
    """A norm over the batch goes by its mode."""
    given = batch()
    for training in (True, False):
        model, norm = llama(), nn.BatchNorm1d(tiny.HIDDEN)
        model.model.layers[0].norm = norm
        around_mlp(model, lambda inner, x, n=norm: inner(n(x.flatten(0, 1)).view_as(x)))
        for mode in (training, not training, training):
            assert_right(model.train(mode), given)


def test_autocasts_cache_gets_no_entry() -> None:
    """A cast of a weight that was made without graph would take the gradient of the caller's own
    forward."""
    given, found = batch(), []
    for options in (PADDED, {}):
        model = llama()
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(2):  # in one region
                _, gradients = loss_of(model, given, **options)
        found.append(gradients)
    for name, want in found[0].items():
        assert ((found[1][name] - want).norm() / want.norm()) < 0.1, name


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_first_call_recomputes_the_same(reentrant: bool) -> None:
    model, given = llama(), batch()
    _, want = loss_of(model, given, **PADDED)
    model.zero_grad()

    def loss(scale: Tensor) -> Tensor:
        return (
            causal_lm_loss(model, GRPOLoss(loss_type="dapo"), **given, num_items_in_batch=30.0).loss
            * scale
        )

    found = checkpoint(loss, torch.ones((), requires_grad=True), use_reentrant=reentrant)
    found.backward()
    assert_same({name: x.grad for name, x in model.named_parameters()}, want)


def test_another_default_device_changes_nothing() -> None:
    model, given = llama(), batch()
    _, want = loss_of(model, given, **PADDED)
    for order in ((True, False), (False, True)):
        model = llama()
        for is_meta in order:
            torch.set_default_device("meta" if is_meta else "cpu")
            try:
                out, got = loss_of(model, given)
            finally:
                torch.set_default_device("cpu")
            assert_same(got, want)
            assert out.metrics["tokens/computed"] < 0.6


# What a verdict depends on


def changed_constant(model: Any) -> Iterator[dict[str, Any]]:
    """Attention looks ahead, as an argument of the model says."""
    yield {}
    yield {"is_causal": False}


def changed_submodule(model: Any) -> Iterator[dict[str, Any]]:
    yield {}
    around_mlp(model, mixed)
    yield {}


def changed_forward(model: Any, of_object: bool = False) -> Iterator[dict[str, Any]]:
    """A partial function, or the method of an object, with another number each."""
    mlp = model.model.layers[0].mlp
    plain = mlp.forward
    for amount in (0.0, 0.5):
        mlp.forward = functools.partial(mixed, plain, amount=amount)
        if of_object:
            mlp.forward = types.MethodType(
                lambda own, x: own.of(x), SimpleNamespace(of=mlp.forward)
            )
        yield {}


def changed_attribute(model: Any, amounts: Any = (0.0, 0.5)) -> Iterator[dict[str, Any]]:
    layer = around_mlp(model, lambda inner, x: mixed(inner, x, layer.amount)).model.layers[0].mlp
    for amount in amounts:
        layer.amount = amount
        yield {}


def changed_rope(model: Any) -> Iterator[dict[str, Any]]:
    yield {}
    rope = {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 8}
    fields = {"rope_parameters": {**rope, "rope_theta": 1e4}, "max_position_embeddings": 8}
    other = llama(**fields)
    model.config.update(fields)
    model.model.rotary_emb = other.model.rotary_emb
    yield {}


def changed_hook(model: Any, everywhere: bool = False) -> Iterator[dict[str, Any]]:
    def mix(module: nn.Module, args: Any, x: Any) -> Any:
        return x + 0.1 * x.mean(1, keepdim=True) if type(module).__name__ == "LlamaMLP" else None

    yield {}
    register = model.model.layers[0].mlp.register_forward_hook
    with torch.nn.modules.module.register_module_forward_hook(mix) if everywhere else register(mix):
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


@pytest.mark.parametrize(
    "change",
    [
        changed_constant,
        changed_submodule,
        changed_forward,
        functools.partial(changed_forward, of_object=True),
        changed_attribute,
        functools.partial(changed_attribute, amounts=(0, 1)),
        changed_rope,
        changed_hook,
        functools.partial(changed_hook, everywhere=True),
        changed_training,
    ],
    ids=str.split(
        "constant submodule partial object attribute switch rope hook global-hook training"
    ),
)
def test_what_a_verdict_depends_on_may_change(
    change: Callable[[Any], Iterator[dict[str, Any]]],
) -> None:
    """Right before and after, in every layout, and after the change is in none of them a tree."""
    for options in MODES.values():
        model = llama()
        for i, more in enumerate(change(model)):
            given = batch()
            _, want = loss_of(model, given, **PADDED, **more)
            out, got = loss_of(model, given, **options, **more)
            assert_same(got, want)
            assert i == 0 or out.metrics["tokens/computed"] == 1 or options["layout"] == "trim"


@pytest.mark.parametrize("what", ["hook", "forward"])
def test_what_is_made_anew_in_each_step_means_no_trial_in_each(what: str) -> None:
    model, calls = llama(), list[int]()
    mlp = model.model.layers[1].mlp
    plain = mlp.forward
    _, want = loss_of(model, batch(), **PADDED)
    for _ in range(12):
        calls.clear()
        if what == "forward":
            mlp.forward = lambda x: (calls.append(1), plain(x))[1]
            assert_same(loss_of(model, batch())[1], want)
            continue
        with mlp.register_forward_hook(lambda *_: calls.append(1)):
            assert_same(loss_of(model, batch())[1], want)
        assert len(calls) == 1
    assert len(calls) == 1
    loss_of(model, batch())
    assert is_a_tree(model, batch()), "the verdict outlives no hook"


def test_a_difference_that_is_no_rounding_is_not_allowed() -> None:
    """Experts that choose their tokens: padding changes them as much as a layout does."""

    def choose(inner: Any, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        chosen = flat.sum(1).topk(max(1, len(flat) // 2)).indices
        gate = torch.zeros(len(flat), 1).index_fill(0, chosen, 1.0)
        return inner(x) * gate.view(*x.shape[:2], 1)

    model = around_mlp(llama(), choose)
    assert_right(model, batch(), modes=MODES.values())


# A verdict has a length


def test_what_begins_late_is_seen_when_it_begins() -> None:
    """A window that stands in the mask alone: attention is not told of it."""
    model = every.build("olmoe", sliding_window=30)
    for times, in_tree in ((1, True), (2, True), (8, False), (1, True), (6, False), (3, False)):
        given = lengthened(batch(), times)
        assert_right(model, given)
        assert is_a_tree(model, given) == in_tree, times


def test_a_longer_batch_tries_again_a_handful_of_times() -> None:
    model, tried = llama(max_position_embeddings=2048), 0
    calls = counting(model)
    for times in range(1, 33):
        given = lengthened(batch(), times)
        calls.clear()
        assert is_a_tree(model, given)
        tried += len(calls) > 2
    assert tried <= 6
    model, tried = llama(max_position_embeddings=512), 0
    calls = counting(model)
    for length in range(20, 60):  # of one row
        ids = torch.randint(3, 90, (1, length))
        calls.clear()
        completion_logprobs(model, ids, torch.ones_like(ids), torch.ones_like(ids[:, 4:]))
        tried += len(calls) > 1
    assert tried <= 8


@pytest.mark.parametrize("in_a_tuple", [False, True])
def test_an_argument_of_attention_that_is_not_known_is_not_dropped(
    in_a_tuple: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def reading(
        module: nn.Module, query: Tensor, *args: Any, block_indices: Any = None, **kwargs: Any
    ) -> Any:
        tensor = block_indices[0] if isinstance(block_indices, tuple) else block_indices
        output, weights = plain(module, query, *args, **kwargs)
        return (output if tensor is None else output * tensor[..., None, None]), weights

    monkeypatch.setitem(type(ALL_ATTENTION_FUNCTIONS)._global_mapping, "sdpa", reading)
    model = llama()
    model.set_attn_implementation("sdpa")
    attention = model.model.layers[1].self_attn
    attend = attention.forward

    def handing(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        of_tokens = hidden_states.mean((0, 2))[None].sigmoid()
        given = (of_tokens,) if in_a_tuple else of_tokens
        return attend(hidden_states, *args, block_indices=given, **kwargs)

    attention.forward = handing
    said = said_by(lambda: loss_of(model, batch()))
    assert len(said) == 1 and "block_indices" in said[0]


# A layout that fails gives way


@pytest.mark.parametrize("after", [0, 2])
def test_a_forward_that_raises_in_the_default_layout_gives_way(after: int) -> None:
    """In its trial, or later, in the call itself."""
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


def test_what_the_padded_forward_raises_is_raised() -> None:
    model = llama()
    model.model.layers[0].register_forward_pre_hook(
        lambda *_: (_ for _ in ()).throw(KeyError("mine"))
    )
    with pytest.raises(KeyError, match="mine"):
        loss_of(model, batch())


def test_the_device_of_the_inputs_decides() -> None:
    """As accelerate leaves an embedding on meta until its own forward."""
    model, given = llama(), batch()
    _, want = loss_of(model, given)
    fresh = llama()
    weight = fresh.model.embed_tokens.weight
    fresh.model.embed_tokens.weight = nn.Parameter(weight.detach().to("meta"), requires_grad=False)
    fresh.model.embed_tokens.forward = lambda ids: nn.functional.embedding(ids, weight)
    got = loss_of(fresh, given)[1]
    assert_same(got, {name: want[name] for name in got})
    assert is_a_tree(fresh, given)


def test_scores_in_inference_mode_come_first() -> None:
    model, given = llama(), {name: batch()[name] for name in SCORED}
    with torch.inference_mode():
        first = completion_logprobs(model, **given).logps
        inside = completion_logprobs(model, **{name: x.clone() for name, x in given.items()}).logps
    want = completion_logprobs(model, **given, layout="padded").logps
    torch.testing.assert_close(first.clone(), want, rtol=3e-6, atol=3e-6)
    torch.testing.assert_close(inside.clone(), want, rtol=3e-6, atol=3e-6)
    assert is_a_tree(model, batch())


def test_forwards_of_any_kind_and_bodies_without_a_config() -> None:
    """What cannot be looked at runs as the padded forward would, or is looked at all the same."""

    class Bare:
        """A callable that takes no weak references."""

        __slots__ = ("inner",)

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __call__(self, x: Tensor) -> Tensor:
            return self.inner(x)

    class Body(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner, self.embed_tokens = inner, inner.embed_tokens

        def forward(self, **inputs: Any) -> Any:
            return self.inner(**inputs)

    model, scripted = llama(), llama()
    model.model.layers[0].mlp.forward = Bare(model.model.layers[0].mlp.forward)
    assert_right(model, batch())
    mlp = nn.Sequential(nn.Linear(tiny.HIDDEN, 32), nn.SiLU(), nn.Linear(32, tiny.HIDDEN))
    scripted.model.layers[0].mlp = torch.jit.script(mlp)
    assert_right(scripted, batch())
    model.model = Body(model.model)
    assert_right(model, batch(), "config")


def test_deep_models_in_sixteen_bits_keep_the_tree() -> None:
    """Rounding grows with the depth."""
    model = tiny.text_model("llama", torch.bfloat16, num_hidden_layers=24)
    assert is_a_tree(model, batch())


def test_layers_that_are_dropped_at_random_are_said() -> None:
    rates = {"layerdrop": 0.6, "dropout": 0.0, "attention_dropout": 0.0}
    model = tiny.text_model("opt", torch.float32, **rates).train()
    torch.manual_seed(0)
    assert len(said_by(lambda: [loss_of(model, batch()) for _ in range(6)])) <= 1


def test_types_of_tokens_that_differ_are_no_tree() -> None:
    """Gemma 3 lets tokens of an image see each other: zeros are a tree, and a later batch with ones
    is not."""
    torch.manual_seed(0)
    model, given = tiny.gemma3_vl()[0].float().eval(), batch()
    given["token_type_ids"] = torch.zeros_like(given["input_ids"])
    assert assert_right(model, given).metrics["tokens/computed"] < 0.6
    given["token_type_ids"][:, 9:12] = 1
    for _ in range(2):
        assert_right(model, given)
