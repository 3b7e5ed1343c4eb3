"""The helper for transformers' models within PEFT, FSDP2, DDP, accelerate, torch.compile; and what
it refuses."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

pytest.importorskip("transformers")
from grpo_kernels import GRPOLoss, LossOutput
from grpo_kernels.transformers import completion_logprobs
from tests.support import tiny_architectures as tiny
from tests.support.model_checks import assert_as_model, peft_model, scene, with_logits


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
    model, ids, attention_mask, mask = scene("granite")
    model = peft_model(model, **fields)
    assert_as_model(model, ids, mask, attention_mask=attention_mask)
    with_adapter = completion_logprobs(model, ids, attention_mask, mask).logps
    with model.disable_adapter():  # the reference model of a trainer with LoRA
        assert_as_model(model, ids, mask, attention_mask=attention_mask)
    parameters = [x for x in model.parameters() if x.requires_grad]
    ours = torch.autograd.grad((with_adapter * mask).sum(), parameters)
    plain = tiny.plain_logprobs(model, ids, attention_mask=attention_mask)[0][:, -5:]
    for x, y in zip(ours, torch.autograd.grad((plain * mask).sum(), parameters), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)  # its norms compute in float32


def test_prompt_tuning() -> None:
    """The head gets the virtual tokens, too, in columns before those of the batch."""
    peft = pytest.importorskip("peft")
    model, ids, attention_mask, mask = scene()
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(model, config)
    got = completion_logprobs(model, ids, attention_mask, mask).logps
    logits = model(input_ids=ids, attention_mask=attention_mask).logits
    assert logits.shape[1] == ids.shape[1] + 3
    want = logits[:, -6:-1].log_softmax(-1).gather(-1, ids[:, -5:, None]).squeeze(-1)
    torch.testing.assert_close(got, want * mask)
    prompt = model.prompt_encoder["default"].embedding.weight
    d_got, d_want = (torch.autograd.grad((x * mask).sum(), prompt)[0] for x in (got, want))
    torch.testing.assert_close(d_got, d_want, rtol=1e-5, atol=1e-5)


def test_dropout_of_an_adapter_on_the_head_is_not_mistaken_for_another_head() -> None:
    model, *batch = scene()
    model = peft_model(model, target_modules=["lm_head"], lora_dropout=0.5).train()
    first, second = (completion_logprobs(model, *batch).logps for _ in range(2))
    assert (first - second).abs().max() > 1e-3
    assert all(x.training for x in model.modules())


def test_a_head_that_accelerate_has_offloaded() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, *batch = scene()
    want = completion_logprobs(model, *batch).logps
    d_want = torch.autograd.grad(want.sum(), model.model.norm.weight)
    accelerate.cpu_offload(model.lm_head, execution_device="cpu")
    assert model.lm_head.weight.is_meta
    got = completion_logprobs(model, *batch).logps
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), model.model.norm.weight), d_want)


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


def test_hooks_on_the_head() -> None:
    """After it there are scores, which they may look at and not change."""
    model, *args = scene()
    seen: list[Tensor] = []
    model.lm_head.register_forward_pre_hook(lambda module, given: (1.5 * given[0],))
    model.lm_head.register_forward_hook(lambda module, given, output: seen.append(output))
    for _ in range(2):  # the second time without the check of the logits
        assert_as_model(model, args[0], args[2], attention_mask=args[1])
    assert seen
    model.lm_head.register_forward_hook(double)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"hooks on its head that change nothing.*\.double"):
            completion_logprobs(model, *args)


def with_head(model: Any, head: Any) -> Any:
    model.lm_head = head
    return model


def with_head_forward(model: Any, change: Callable[[Tensor], Tensor]) -> Any:
    plain = model.lm_head.forward
    model.lm_head.forward = lambda hidden: plain(change(hidden))
    return model


def with_forward(model: Any, forward: Callable[..., Any]) -> Any:
    model.forward = forward
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
REFUSED: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    # some ids can never be drawn, as Chameleon's image tokens
    (lambda x: with_logits(x, lambda y: y.index_fill(2, torch.arange(5, 9), -1e300)), ValueError,
        r"expected a scale, a soft-cap or a cut of the logits, but LlamaForCausalLM .* \(id 5\)"),
    (lambda x: with_logits(x, lambda y: y * next(growing)), ValueError, "expected one scale"),
    (lambda x: with_head_forward(x, torch.tanh), ValueError, "its log-probabilities differ"),
    (lambda x: with_head(x, nn.Sequential(nn.Linear(16, tiny.VOCAB)).double()), TypeError,
        r"got torch\.nn\.modules\.container\.Sequential"),
    (lambda x: x.model, TypeError, "returns None"),
    (lambda _: nn.Linear(2, 2), TypeError, "expected a transformers model, .* got Linear"),
    (lambda x: with_forward(x, lambda input_ids, **_: x.model(input_ids)), RuntimeError,
        "was not called"),
    (Rounds, ValueError, r"expected results of torch\.float64, .* cast them to torch\.bfloat16"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), REFUSED)
def test_what_cannot_be_expressed_is_refused(change: Any, error: Any, message: str) -> None:
    model, *batch = scene()
    head, before = model.lm_head, model.lm_head.forward
    with pytest.raises(error, match=message):
        completion_logprobs(change(model), *batch)
    assert head.forward == before or "differ" in message, "a call that fails leaves the head alone"


def test_names_of_wrappers_bodies_and_of_all_models_are_known() -> None:
    class Weighs(Rounds):
        def forward(self, *args: Any, weigh: float = 1.0, **inputs: Any) -> Any:
            return self._forward_module(*args, **inputs)

    model, *batch = scene("granitemoe")
    want = completion_logprobs(model, *batch).logps
    names = {"weigh": 2.0, "output_attentions": False, "position_ids": None}
    names |= {"use_cache": False, "return_dict": True}
    torch.testing.assert_close(completion_logprobs(Weighs(model), *batch, **names).logps, want)
    with pytest.raises(TypeError, match="weigh: GraniteMoeForCausalLM has no such input"):
        completion_logprobs(model, *batch, weigh=2.0)
    adapted = peft_model(tiny.text_model("llama"), target_modules=["q_proj"])
    mixture = {"adapter_names": ["default", "__base__", "default"]}
    mixed = completion_logprobs(adapted, *batch, **mixture).logps
    torch.testing.assert_close(mixed[::2], completion_logprobs(adapted, *batch).logps[::2])
    with adapted.disable_adapter():
        torch.testing.assert_close(mixed[1], completion_logprobs(adapted, *batch).logps[1])
    with pytest.raises(TypeError, match=r"adapter_name: .* did you mean adapter_names\?"):
        completion_logprobs(adapted, *batch, adapter_name="default")
    adapted = peft_model(tiny.text_model("llama"), target_modules=["lm_head"])
    with pytest.raises(ValueError, match="only hidden states, got adapter_names"):
        completion_logprobs(adapted, *batch, **mixture)


def applied(data: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    """``apply_to_collection(data, dtype=Tensor, function=convert)`` of lightning-utilities."""
    if isinstance(data, Tensor):
        return convert(data)
    if isinstance(data, Mapping):
        kind: Any = type(data)
        return kind(OrderedDict((key, applied(x, convert)) for key, x in data.items()))
    if isinstance(data, tuple):
        return tuple(applied(x, convert) for x in data)
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        fields = {field.name: getattr(data, field.name) for field in dataclasses.fields(data)}
        result: Any = copy.deepcopy(data, memo={id(x): x for x in fields.values()})
        for name, x in fields.items():
            setattr(result, name, applied(x, convert))  # not of a frozen dataclass
        return result
    return data


def test_a_module_may_return_what_the_loss_returned() -> None:
    weight, ids = torch.randn(19, 8, requires_grad=True), torch.randint(19, (2, 5))
    reference = {"ref_per_token_logps": -3 + torch.rand(2, 5)}
    loss_fn = GRPOLoss(loss_type="grpo", beta=0.1)
    want = loss_fn(torch.randn(2, 5, 8), weight, ids, None, torch.tensor([1.0, -0.5]), **reference)
    out = applied(want, torch.clone)
    assert isinstance(out, LossOutput)
    assert_close((out.loss, out.logps, out.entropies), (want.loss, want.logps, want.entropies))
    assert_close(*(torch.autograd.grad(x.loss, weight, retain_graph=True) for x in (out, want)))
    assert out.engine == want.engine
    assert_close(dict(out.metrics), dict(want.metrics))
    with pytest.raises(RuntimeError, match=r"metrics: .*return out\.metrics\.pairs"):
        _ = out.metrics.pairs
    assert_close(applied(want.metrics.pairs, torch.clone), want.metrics.pairs)
