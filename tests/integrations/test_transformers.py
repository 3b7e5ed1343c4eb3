"""Calls of transformers' models, and `head_inputs`, against what the models themselves say: plain,
and within PEFT, accelerate and wrappers."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

pytest.importorskip("transformers")
from grpo_kernels import GRPOLoss, Head, KeptIds, LossOutput, linear_logps
from grpo_kernels.transformers import (
    causal_lm_divergence,
    causal_lm_logps,
    causal_lm_loss,
    describe_head,
    head_inputs,
)
from tests.support import tiny_architectures as tiny

# Their attention masks are no masks in float64: padding makes NaN there.
DTYPES = {"gemma2": torch.float32, "bloom": torch.float32}


@pytest.mark.parametrize("kind", tiny.TEXT)
def test_logprobs_are_those_of_the_models_logits(kind: str) -> None:
    model, ids, attention_mask, mask = tiny.scene(kind, DTYPES.get(kind, torch.float64))
    tiny.assert_as_model(model, ids, mask, attention_mask=attention_mask)
    assert describe_head(model).weight is model.get_output_embeddings()
    # turns of a conversation, over the whole sequence
    anywhere = attention_mask * (torch.rand(ids.shape) < 0.5)
    anywhere[2, 1:3], anywhere[:, 0], anywhere[0, 3] = 1, 0, 0  # padding predicts no token
    tiny.assert_as_model(model, ids, anywhere, attention_mask=attention_mask)


def test_vision_language_models_and_models_with_positions_of_their_own() -> None:
    """RoBERTa's begin after its padding id; Qwen-VL's have three dimensions with an image."""
    model, ids, inputs = tiny.gemma3_vl()
    tiny.assert_as_model(model, ids, torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6]), **inputs)

    model = tiny.text_model("roberta", pad_token_id=1)
    ids, mask = torch.randint(3, tiny.VOCAB, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    ids = ids.where(mask == 1, model.config.pad_token_id)
    parts = ids[:1], ids[1:, 4:]
    alone = [tiny.plain_logprobs(model, part)[0][:, -3:] for part in parts]
    got = causal_lm_logps(model, ids, mask, torch.ones(2, 3)).logps
    torch.testing.assert_close(got, torch.cat(alone))

    model, ids, inputs = tiny.qwen2_vl()
    ids[1] = ids[1].roll(3)
    inputs = {**inputs, "mm_token_type_ids": (ids == model.config.image_token_id).long()}
    inputs["attention_mask"][1, :3] = 0
    tiny.assert_as_model(model, ids, torch.ones(2, 4), **inputs)


def test_the_loss_is_that_of_the_hidden_states() -> None:
    model, ids, attention_mask, mask = tiny.scene("granite")
    names = ("old_per_token_logps", "ref_per_token_logps")
    inputs = {name: -4 + torch.randn(3, 5).double() for name in names}
    advantages = torch.tensor([1.0, -0.5, 0.3]).double()
    fields: dict[str, Any] = {"loss_type": "grpo", "beta": 0.1, "temperature": 0.7}
    out = causal_lm_loss(model, GRPOLoss(**fields), ids, attention_mask, mask, advantages, **inputs)
    out.loss.backward()
    ours = {name: x.grad.clone() for name, x in model.named_parameters()}
    model.zero_grad()
    hidden = model.model(input_ids=ids, attention_mask=attention_mask).last_hidden_state[:, -6:-1]
    head = Head(model.lm_head.weight, logit_scale=1 / 0.3)
    same = GRPOLoss(**fields)(hidden, head, ids[:, -5:], mask, advantages, **inputs)
    same.loss.backward()
    torch.testing.assert_close(out.loss, same.loss)
    assert out.engine == same.engine
    of_trunk = {"sequences/gradient", "tokens/computed", "tokens/gradient"}
    assert out.metrics.keys() == same.metrics.keys() | of_trunk
    for name, x in model.named_parameters():
        torch.testing.assert_close(ours[name], x.grad)


def test_over_the_sets_of_a_truncating_sampler() -> None:
    model, ids, attention_mask, mask = tiny.scene("gemma3_text")
    logits = model(input_ids=ids, attention_mask=attention_mask).logits[:, -6:-1].double() / 0.7
    kept = torch.cat([ids[:, -5:, None], logits.topk(6).indices], dim=-1)
    outside = torch.ones_like(logits, dtype=torch.bool).scatter(-1, kept, False)
    logps = logits.masked_fill(outside, -torch.inf).log_softmax(-1)
    want = logps.gather(-1, ids[:, -5:, None])[..., 0] * mask
    for _ in range(2):
        over_sets = {"temperature": 0.7, "kept_ids": kept}
        got = causal_lm_logps(model, ids, attention_mask, mask, **over_sets).logps
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    loss_fn, advantages = GRPOLoss(temperature=0.7), torch.tensor([1.0, 0.0, 0.3])
    given = {"old_per_token_logps": want, "kept_ids": KeptIds.from_padded(kept)}
    out = causal_lm_loss(model, loss_fn, ids, attention_mask, mask, advantages, **given)
    assert (out.engine, float(out.metrics["kept/size"])) == ("kept_sets", 7.0)
    torch.testing.assert_close(out.metrics["ratio"].item(), 1.0, rtol=1e-6, atol=0)


def test_a_mixture_of_experts_adds_its_load_balancing_loss() -> None:
    model, ids, attention_mask, mask = tiny.scene("qwen3_moe")
    args = (model, GRPOLoss(), ids, attention_mask, mask, torch.tensor([1.0, -1.0, 0.5]))
    plain = causal_lm_loss(*args).loss
    inputs = {"input_ids": ids, "attention_mask": attention_mask, "output_router_logits": True}
    aux_loss = model(**inputs).aux_loss.double()
    with_aux = causal_lm_loss(*args, output_router_logits=True).loss
    torch.testing.assert_close(with_aux - plain, model.config.router_aux_loss_coef * aux_loss)
    twice = causal_lm_loss(*args, output_router_logits=True, router_aux_loss_coef=2.0).loss
    torch.testing.assert_close(twice - plain, 2.0 * aux_loss)
    with pytest.warns(UserWarning, match="not used, since the model returned no aux_loss"):
        causal_lm_loss(*args, router_aux_loss_coef=2.0)
    with pytest.raises(TypeError, match="router_aux_loss_coef: expected a number, got '2'"):
        causal_lm_loss(*args, router_aux_loss_coef="2")


def body_calls(model: Any) -> list[bool]:
    """A list that grows with every forward of the model's body: whether it filled a cache."""
    calls = list[bool]()
    model.base_model.register_forward_hook(lambda *x: calls.append(bool(x[2].past_key_values)))
    return calls


def test_the_check_costs_nothing_and_leaves_nothing() -> None:
    model, ids, attention_mask, mask = tiny.scene("gemma3_text")
    calls, attributes, random = body_calls(model), set(vars(model.lm_head)), torch.get_rng_state()
    hooks = len(model.lm_head._forward_hooks)
    batch = ids, attention_mask, mask
    first, again = (causal_lm_logps(model.train(), *batch).logps for _ in range(2))
    assert calls == [False, False]
    assert torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(x.training for x in model.modules())
    assert "forward" not in vars(model)
    assert set(vars(model.lm_head)) == attributes
    assert len(model.lm_head._forward_hooks) == hooks


def test_a_config_that_is_wrong_or_changes_is_measured() -> None:
    # its logits_scaling is a factor; elsewhere the name is a divisor
    model, ids, attention_mask, mask = tiny.scene("hyperclovax")
    calls = body_calls(model)
    for expected in (2, 3):
        causal_lm_logps(model, ids, attention_mask, mask)
        assert len(calls) == expected
    assert describe_head(model).logit_scale == 3.0
    model.config.logits_scaling = 0.4
    tiny.assert_as_model(model, ids, mask, attention_mask=attention_mask)
    assert describe_head(model).logit_scale == pytest.approx(0.4)


def test_padding_rows_of_the_head_are_cut_off_as_the_model_does() -> None:
    model, ids, attention_mask, mask = tiny.scene()
    model = tiny.with_logits(model, lambda logits: logits[..., :90])
    forward = model.forward
    tiny.assert_as_model(model, ids.clamp(max=89), mask, attention_mask=attention_mask)
    assert describe_head(model).vocab_size == 90
    assert model.forward is forward


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_and_autocast(autocast: bool) -> None:
    dtype = torch.float32 if autocast else torch.bfloat16
    model, ids, attention_mask, mask = tiny.scene("gemma3_text", dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logps = causal_lm_logps(model, ids, attention_mask, mask).logps
        want = tiny.plain_logprobs(model, ids, attention_mask=attention_mask)[0][:, -5:]
    assert logps.dtype == torch.float32
    assert (logps - want)[mask.bool()].abs().max() < 0.05


@pytest.mark.parametrize(
    "kind", ["gemma3_text", "hyperclovax", "cohere", "gptj", "gpt2", "adapter"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_what_is_handed_over_gives_the_models_log_probabilities(kind, dtype):
    model = tiny.text_model("llama" if kind == "adapter" else kind, dtype)
    if kind == "adapter":
        model = tiny.peft_model(model, target_modules=["q_proj", "lm_head"]).to(dtype)
    ids, attention_mask = tiny.text_batch()
    ids, attention_mask = ids[2:], attention_mask[2:]
    parameters = [x for x in model.parameters() if x.requires_grad]
    plain = tiny.plain_logprobs(model, ids, attention_mask=attention_mask)[0][:, 1:]
    # some models compute norms and logits in float32
    bound = 1e-5 if dtype == torch.float64 else 0.05
    for _ in range(2):
        with head_inputs(model) as found:
            output = model(input_ids=ids, attention_mask=attention_mask)
        assert (found.hidden.dtype, found.hidden.shape[-1]) == (dtype, tiny.HIDDEN)
        assert torch.equal(output.logits, found.hidden)
        assert vars(found.of_model) == vars(describe_head(model))
        states = found.hidden[:, :-1]
        logps = linear_logps(states, found.head(states), ids[:, 1:], entropy=False).logps
        torch.testing.assert_close(logps.double(), plain.double(), rtol=bound, atol=bound)
        if dtype == torch.float64:
            keep = {"retain_graph": True}
            got, want = (torch.autograd.grad(x.sum(), parameters, **keep) for x in (logps, plain))
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_one_forward_is_expected() -> None:
    """A call within another is refused; the outer one goes on, and the model is as before."""
    model, ids, *_ = tiny.scene()
    none = "one forward of the model inside, got none"
    with pytest.raises(RuntimeError, match=none), head_inputs(model):
        pass
    with head_inputs(model):
        with pytest.raises(RuntimeError, match="head is not in use"), head_inputs(model):
            pass
        model(input_ids=ids)
        with pytest.raises(RuntimeError, match="calls its head once"):
            model(input_ids=ids)
    assert model(input_ids=ids).logits.shape[-1] == tiny.VOCAB


def test_the_models_own_output_comes_back_without_logits() -> None:
    model, *args = tiny.scene("qwen3_moe")
    ids, attention_mask, _ = args
    wanted: dict[str, Any] = {"output_router_logits": True, "output_hidden_states": True}
    placed = tiny.positions_of_generate(model, ids, attention_mask)
    plain = model(input_ids=ids, attention_mask=attention_mask, **placed, **wanted)
    for _ in range(2):
        scores, output = causal_lm_logps(model, *args, return_output=True, **wanted)
        assert type(output) is type(plain)
        assert (output.logits, "logits" in output) == (None, False)
        torch.testing.assert_close(output.aux_loss, plain.aux_loss)
        torch.testing.assert_close(output.hidden_states[-1], plain.hidden_states[-1])
        torch.testing.assert_close(scores.given, causal_lm_logps(model, *args, **wanted).given)
    router = model.model.layers[0].mlp.gate.weight
    gradients = (torch.autograd.grad(x.aux_loss, router)[0] for x in (output, plain))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["q_proj", "lm_head"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
    ids=["body", "head", "a trained copy of the head"],
)
def test_peft(fields: dict[str, Any]) -> None:
    model, ids, attention_mask, mask = tiny.scene("granite")
    model = tiny.peft_model(model, **fields)
    tiny.assert_as_model(model, ids, mask, attention_mask=attention_mask)
    with_adapter = causal_lm_logps(model, ids, attention_mask, mask).logps
    with model.disable_adapter():  # the reference model of a trainer with LoRA
        tiny.assert_as_model(model, ids, mask, attention_mask=attention_mask)
    parameters = [x for x in model.parameters() if x.requires_grad]
    ours = torch.autograd.grad((with_adapter * mask).sum(), parameters)
    plain = tiny.plain_logprobs(model, ids, attention_mask=attention_mask)[0][:, -5:]
    for x, y in zip(ours, torch.autograd.grad((plain * mask).sum(), parameters), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)  # its norms compute in float32


def test_prompt_tuning() -> None:
    """The head gets the virtual tokens, too, in columns before those of the batch."""
    peft = pytest.importorskip("peft")
    model, ids, attention_mask, mask = tiny.scene()
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(model, config)
    got = causal_lm_logps(model, ids, attention_mask, mask).logps
    logits = model(input_ids=ids, attention_mask=attention_mask).logits
    assert logits.shape[1] == ids.shape[1] + 3
    want = logits[:, -6:-1].log_softmax(-1).gather(-1, ids[:, -5:, None]).squeeze(-1)
    torch.testing.assert_close(got, want * mask)
    prompt = model.prompt_encoder["default"].embedding.weight
    d_got, d_want = (torch.autograd.grad((x * mask).sum(), prompt)[0] for x in (got, want))
    torch.testing.assert_close(d_got, d_want, rtol=1e-5, atol=1e-5)


def test_dropout_of_an_adapter_on_the_head_is_not_mistaken_for_another_head() -> None:
    model, *batch = tiny.scene()
    model = tiny.peft_model(model, target_modules=["lm_head"], lora_dropout=0.5).train()
    first, second = (causal_lm_logps(model, *batch).logps for _ in range(2))
    assert (first - second).abs().max() > 1e-3
    assert all(x.training for x in model.modules())


def test_a_head_that_accelerate_has_offloaded() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, *batch = tiny.scene()
    want = causal_lm_logps(model, *batch).logps
    d_want = torch.autograd.grad(want.sum(), model.model.norm.weight)
    accelerate.cpu_offload(model.lm_head, execution_device="cpu")
    assert model.lm_head.weight.is_meta
    got = causal_lm_logps(model, *batch).logps
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), model.model.norm.weight), d_want)


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


def test_hooks_on_the_head() -> None:
    """After it there are scores, which they may look at and not change."""
    model, *args = tiny.scene()
    seen: list[Tensor] = []
    model.lm_head.register_forward_pre_hook(lambda module, given: (1.5 * given[0],))
    model.lm_head.register_forward_hook(lambda module, given, output: seen.append(output))
    for _ in range(2):  # the second time without the check of the logits
        tiny.assert_as_model(model, args[0], args[2], attention_mask=args[1])
    assert seen
    model.lm_head.register_forward_hook(double)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"hooks on its head that change nothing.*\.double"):
            causal_lm_logps(model, *args)


def with_new(model: Any, name: str, value: Any) -> Any:
    setattr(model, name, value)
    return model


def with_head_forward(model: Any, change: Callable[[Tensor], Tensor]) -> Any:
    plain = model.lm_head.forward
    model.lm_head.forward = lambda hidden: plain(change(hidden))
    return model


class Rounds(nn.Module):
    """As Lightning's Fabric names the module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._forward_module = module

    def forward(self, **inputs: Any) -> Any:
        found = self._forward_module(**inputs)
        return {**found, "results": {x: y.bfloat16() for x, y in found["results"].items()}}


growing = itertools.count(2)  # another scale every time
BANNED = torch.arange(5, 9)  # can never be drawn, as Chameleon's image tokens
REFUSED: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (lambda x: tiny.with_logits(x, lambda y: y.index_fill(2, BANNED, -1e300)), ValueError,
        r"expected a scale, a soft-cap or a cut of the logits, but LlamaForCausalLM .* \(id 5\)"),
    (lambda x: tiny.with_logits(x, lambda y: y * next(growing)), ValueError, "expected one scale"),
    (lambda x: with_head_forward(x, torch.tanh), ValueError, "its log-probabilities differ"),
    (lambda x: with_new(x, "lm_head", nn.Sequential(nn.Linear(16, tiny.VOCAB)).double()), TypeError,
        r"got torch\.nn\.modules\.container\.Sequential"),
    (lambda x: x.model, TypeError, "returns None"),
    (lambda _: nn.Linear(2, 2), TypeError, "expected a transformers model, .* got Linear"),
    (lambda x: with_new(x, "forward", lambda input_ids, **_: x.model(input_ids)), RuntimeError,
        "was not called"),
    (Rounds, ValueError, r"expected results of torch\.float64, .* cast them to torch\.bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), REFUSED)
def test_what_cannot_be_expressed_is_refused(change: Any, error: Any, message: str) -> None:
    model, *batch = tiny.scene()
    head, before = model.lm_head, model.lm_head.forward
    with pytest.raises(error, match=message):
        causal_lm_logps(change(model), *batch)
    assert head.forward == before or "differ" in message, "a call that fails leaves the head alone"


def test_names_of_wrappers_bodies_and_of_all_models_are_known() -> None:
    class Weighs(Rounds):
        def forward(self, *args: Any, weigh: float = 1.0, **inputs: Any) -> Any:
            return self._forward_module(*args, **inputs)

    model, *batch = tiny.scene("granitemoe")
    want = causal_lm_logps(model, *batch).logps
    names = {"weigh": 2.0, "output_attentions": False, "position_ids": None}
    names |= {"use_cache": False, "return_dict": True}
    torch.testing.assert_close(causal_lm_logps(Weighs(model), *batch, **names).logps, want)
    with pytest.raises(TypeError, match=r"weigh: .*, nor an input of GraniteMoeForCausalLM"):
        causal_lm_logps(model, *batch, weigh=2.0)
    adapted = tiny.peft_model(tiny.text_model("llama"), target_modules=["q_proj"])
    mixture = {"adapter_names": ["default", "__base__", "default"]}
    mixed = causal_lm_logps(adapted, *batch, **mixture).logps
    torch.testing.assert_close(mixed[::2], causal_lm_logps(adapted, *batch).logps[::2])
    with adapted.disable_adapter():
        torch.testing.assert_close(mixed[1], causal_lm_logps(adapted, *batch).logps[1])
    with pytest.raises(TypeError, match=r"adapter_name: .* did you mean adapter_names\?"):
        causal_lm_logps(adapted, *batch, adapter_name="default")
    adapted = tiny.peft_model(tiny.text_model("llama"), target_modules=["lm_head"])
    with pytest.raises(ValueError, match="only hidden states, got adapter_names"):
        causal_lm_logps(adapted, *batch, **mixture)


def cloned(data: Any) -> Any:
    """As Lightning's Fabric converts what a module returns, a container at a time."""
    if isinstance(data, Tensor):
        return data.clone()
    if isinstance(data, Mapping):
        kind: Any = type(data)
        return kind({name: cloned(x) for name, x in data.items()})
    if isinstance(data, tuple):
        return tuple(map(cloned, data))
    if not dataclasses.is_dataclass(data):
        return data
    fields = {field.name: getattr(data, field.name) for field in dataclasses.fields(data)}
    result: Any = copy.deepcopy(data, memo={id(x): x for x in fields.values()})
    for name, x in fields.items():
        setattr(result, name, cloned(x))  # not of a frozen dataclass
    return result


def test_a_module_may_return_what_the_loss_returned() -> None:
    weight, ids = torch.randn(19, 8, requires_grad=True), torch.randint(19, (2, 5))
    reference = {"ref_per_token_logps": -3 + torch.rand(2, 5)}
    loss_fn = GRPOLoss(loss_type="grpo", beta=0.1)
    want = loss_fn(torch.randn(2, 5, 8), weight, ids, None, torch.tensor([1.0, -0.5]), **reference)
    out = cloned(want)
    assert isinstance(out, LossOutput)
    assert_close((out.loss, out.logps, out.entropies), (want.loss, want.logps, want.entropies))
    assert_close(*(torch.autograd.grad(x.loss, weight, retain_graph=True) for x in (out, want)))
    assert out.engine == want.engine
    assert_close(dict(out.metrics), dict(want.metrics))
    with pytest.raises(RuntimeError, match=r"metrics: .*return out\.metrics\.pairs"):
        _ = out.metrics.pairs
    assert_close(cloned(want.metrics.pairs), want.metrics.pairs)


# Two models: `causal_lm_divergence` and the exact KL term of `causal_lm_loss`


def two_models(student: str, teacher: str, dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    """Two models of different weights, and a batch as `scene` has it; ``"adapter"`` is a LoRA on
    body and head of the student. The ``"shared"`` head of both trains, and the teacher's use of it
    is a constant."""
    own = tiny.text_model("llama" if student in ("adapter", "shared") else student, dtype)
    if student == "adapter":
        own = tiny.peft_model(own, target_modules=["q_proj", "lm_head"]).to(dtype)
    other = tiny.text_model(teacher, dtype)
    with torch.no_grad():
        for x in other.parameters():
            x.mul_(1.1).add_(0.02 * torch.randn_like(x))
    if student == "shared":
        other.lm_head = own.lm_head
    ids, attention_mask = tiny.text_batch()
    return own, other, ids, attention_mask, tiny.last_columns(attention_mask)


def plain(student: Any, teacher: Any, count: int, divergence: str, **inputs: Tensor) -> Tensor:
    places = tiny.positions_of_generate(student, inputs["input_ids"], inputs["attention_mask"])
    of_student = student(**inputs, **places).logits.double()
    with torch.no_grad():
        of_teacher = teacher(**inputs, **places).logits.double()
    p, q = (x[:, -count - 1 : -1].log_softmax(-1) for x in (of_student, of_teacher))
    if divergence == "forward_kl":
        p, q = q, p
    if divergence != "jsd":
        return (p.exp() * (p - q)).sum(-1)
    middle = torch.logaddexp(p, q) - torch.tensor(2.0).log()
    return 0.5 * (q.exp() * (q - middle) + p.exp() * (p - middle)).sum(-1)


@pytest.mark.parametrize(
    ("student", "teacher", "divergence"),
    [
        ("llama", "llama", "reverse_kl"),
        ("qwen3", "gemma3_text", "forward_kl"),  # the teacher has a soft-cap and a scale
        ("granite", "cohere", "jsd"),
        ("adapter", "llama", "reverse_kl"),
        ("shared", "llama", "reverse_kl"),
        ("gpt2", "gpt2", "forward_kl"),
    ],
)
@pytest.mark.parametrize("layout", ["tree", "trim", "padded"])
def test_divergences(student: str, teacher: str, divergence: Any, layout: Any) -> None:
    own, other, ids, attention_mask, mask = two_models(student, teacher)
    ids[2, :6] = ids[1, :6]  # a shared prefix
    inputs = {"input_ids": ids, "attention_mask": attention_mask}
    want = plain(own, other, mask.shape[1], divergence, **inputs)
    parameters = [x for x in own.parameters() if x.requires_grad]
    counts = mask.bool()
    want_grads = torch.autograd.grad(want[counts].sum(), parameters, allow_unused=True)
    for _ in range(2):
        scores = causal_lm_divergence(
            own, other, ids, attention_mask, mask, divergence=divergence, layout=layout
        )
        assert (scores.divergence[~counts] == 0).all()
        near: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(scores.divergence[counts].double(), want[counts], **near)
        got = torch.autograd.grad(scores.divergence.sum(), parameters, allow_unused=True)
        torch.testing.assert_close(got, want_grads, rtol=1e-4, atol=1e-5)
        assert scores.logps.shape == mask.shape
        assert scores.given.keys() == {"divergence", "entropies", "logps"}
    assert all(x.grad is None for x in other.parameters())


@pytest.mark.usefixtures("forget_warnings")
def test_the_exact_kl_term_of_a_loss() -> None:
    """Without advantages, the loss is beta times the mean KL; the reference gets no gradient."""
    own, other, ids, attention_mask, mask = two_models("llama", "gemma3_text")
    inputs = {"input_ids": ids, "attention_mask": attention_mask}
    of_token = plain(own, other, mask.shape[1], "reverse_kl", **inputs)
    want, parameters = of_token[mask.bool()].mean(), [*own.parameters()]
    want_grads = torch.autograd.grad(want, parameters)
    given: tuple[Any, ...] = ids, attention_mask, mask, torch.zeros(3)
    for _ in range(2):
        loss_fn = GRPOLoss(beta=0.1, kl_estimator="full")
        out = causal_lm_loss(own, loss_fn, *given, reference=other)
        torch.testing.assert_close(out.loss.double(), 0.1 * want, rtol=1e-5, atol=1e-6)
        got = torch.autograd.grad(out.loss, parameters)
        torch.testing.assert_close(got, tuple(0.1 * x for x in want_grads), rtol=1e-4, atol=1e-6)
    assert all(x.grad is None for x in other.parameters())
    other.register_forward_pre_hook(lambda *_: pytest.fail("the reference ran"))
    with pytest.warns(UserWarning, match="no effect in a loss with beta = 0"):
        out = causal_lm_loss(own, GRPOLoss(kl_estimator="full"), *given, reference=other)
    assert out.loss == 0


def test_a_larger_vocabulary_and_options() -> None:
    """Both distributions are over the ids that both heads have."""
    own, other, ids, attention_mask, mask = two_models("llama", "llama")
    other.resize_token_embeddings(tiny.VOCAB + 6)
    scores = causal_lm_divergence(
        own, other, ids, attention_mask, mask,
        divergence="jsd", beta=0.0, temperature=2.0, entropy=True,
    )  # fmt: skip
    logits = [x(input_ids=ids, attention_mask=attention_mask).logits for x in (own, other)]
    columns = slice(-mask.shape[1] - 1, -1)
    p, q = ((x[:, columns, : tiny.VOCAB].double() / 2).log_softmax(-1) for x in logits)
    counts = mask.bool()
    for got, want in (
        (scores.divergence, (q.exp() * (q - p)).sum(-1)),  # beta 0: the forward KL
        (scores.entropies, -(p.exp() * p).sum(-1)),
        (scores.logps, p.gather(-1, ids[:, -mask.shape[1] :, None])[..., 0]),
    ):
        torch.testing.assert_close(got[counts].double(), want[counts], rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("forget_warnings")
def test_a_teacher_with_dropout_is_warned_of_in_train_mode() -> None:
    own, other, *inputs = two_models("llama", "llama", torch.float32)
    with warnings.catch_warnings(action="error"):
        causal_lm_divergence(own, other.train(), *inputs)
        for layer in other.model.layers:
            layer.self_attn.attention_dropout = 0.1
        causal_lm_divergence(own.train(), other.eval(), *inputs)
    with pytest.warns(UserWarning, match=r"teacher: it is in train mode .* call teacher\.eval"):
        causal_lm_divergence(own, other.train(), *inputs)


def test_mistakes_with_two_models() -> None:
    own, other, *inputs = two_models("llama", "llama", torch.float32)
    wrong: Any
    for wrong, kind, message in (
        ({"temprature": 2.0}, TypeError, "temprature: .*did you mean temperature"),
        ({"kind": "jsd"}, TypeError, r"kind: not an argument of .*; did you mean divergence\?"),
        ({"loss_fn": GRPOLoss()}, TypeError, "loss_fn: .*= take loss_fn.config.temperature"),
    ):
        with pytest.raises(kind, match=f"^{message}"):
            causal_lm_divergence(own, other, *inputs, **wrong)
    with pytest.raises(TypeError, match=r"^teacher: expected a transformers model"):
        causal_lm_divergence(own, torch.nn.Linear(2, 2), *inputs)
    with pytest.raises(TypeError, match=r"^student: expected a causal language model"):
        causal_lm_divergence(own.model, other, *inputs)
    adapted = tiny.peft_model(other, target_modules=["lm_head"]).float()
    adapted.register_forward_pre_hook(lambda *_: pytest.fail("the teacher ran"))
    with pytest.raises(ValueError, match=r"^teacher.*adapter"):
        causal_lm_divergence(own, adapted, *inputs)
