"""The helper for transformers' models within PEFT, FSDP2, DDP, accelerate, torch.compile; and what
it refuses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

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
        assert (
            completion_logprobs(model, ids, attention_mask, mask).logps - with_adapter
        ).abs().max() > 0.01
    parameters = [x for x in model.parameters() if x.requires_grad]
    ours = torch.autograd.grad((with_adapter * mask).sum(), parameters)
    plain = tiny.plain_logprobs(model, ids, attention_mask=attention_mask)[0][:, -5:]
    for x, y in zip(ours, torch.autograd.grad((plain * mask).sum(), parameters), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)  # its norms compute in float32


def test_dropout_of_an_adapter_on_the_head_is_not_mistaken_for_another_head() -> None:
    model, *batch = scene()
    model = peft_model(model, target_modules=["lm_head"], lora_dropout=0.5).train()
    first, second = (completion_logprobs(model, *batch).logps for _ in range(2))
    assert (first - second).abs().max() > 1e-3
    assert all(x.training for x in model.modules())


def test_accelerate_places_what_the_head_is_given() -> None:
    hooks = pytest.importorskip("accelerate.hooks")

    class Counts(hooks.ModelHook):  # type: ignore[misc, name-defined]
        calls = 0

        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return args, kwargs

    (model, ids, attention_mask, mask), hook = scene(), Counts()
    hooks.add_hook_to_module(model.lm_head, hook)
    for _ in range(2):
        completion_logprobs(model, ids, attention_mask, mask)
    assert hook.calls == 2
    assert_as_model(model, ids, mask, attention_mask=attention_mask)


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
    """What they do before it happens; after it there are scores, which they may look at and not
    change."""
    model, *args = scene()
    seen: list[Tensor] = []
    handles = [
        model.lm_head.register_forward_pre_hook(lambda module, given: (1.5 * given[0],)),
        model.lm_head.register_forward_hook(lambda module, given, output: seen.append(output)),
    ]
    for _ in range(2):  # the second time without the check of the logits
        assert_as_model(model, args[0], args[2], attention_mask=args[1])
    assert seen
    handles.append(model.lm_head.register_forward_hook(double))
    for _ in range(2):
        with pytest.raises(
            TypeError,
            match=r"expected forward hooks on its head that change nothing, got .*\.double",
        ):
            completion_logprobs(model, *args)
    for handle in handles:
        handle.remove()
    model = peft_model(tiny.text_model("llama"), target_modules=["lm_head"])
    with pytest.raises(
        ValueError, match="expected its head to get only hidden states, got adapter_names"
    ):
        completion_logprobs(model, *args, adapter_names=["default", "__base__", "default"])


@pytest.mark.slow
@pytest.mark.usefixtures("forget_warnings")
def test_a_compiled_model_notices_that_its_head_is_another_for_the_call() -> None:
    model, ids, attention_mask, mask = scene("qwen2", num_hidden_layers=1)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        before = compiled(input_ids=ids, attention_mask=attention_mask).logits
        with pytest.warns(
            UserWarning, match="the whole model is compiled; compile its layers instead"
        ):
            got = completion_logprobs(compiled, ids, attention_mask, mask).logps
        assert torch.equal(compiled(input_ids=ids, attention_mask=attention_mask).logits, before)
    assert torch.equal(
        got, completion_logprobs(model, ids, attention_mask, mask, layout="padded").logps
    )


def masked(logits: Tensor) -> Tensor:
    """Some ids can never be drawn, as Chameleon's image tokens."""
    logits = logits.clone()
    logits[:, :, 5:9] = torch.finfo(logits.dtype).min
    return logits


def with_head(model: Any, head: nn.Module) -> Any:
    model.lm_head = head
    return model


def bent(model: Any) -> Any:
    plain = model.lm_head.forward
    model.lm_head.forward = lambda hidden: plain(hidden.tanh())
    return model


def without_its_head(model: Any) -> Any:
    model.forward = lambda input_ids, **_: model.model(input_ids)
    return model


TWO = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, tiny.VOCAB)).double()
LIST = nn.ModuleList([nn.Linear(16, tiny.VOCAB)] * 2)
growing = itertools.count(2)  # another scale every time
ONE_SCALE = r"model: expected one scale, .* got another in each run"
A_SCALE = "model: expected a scale, a soft-cap or a cut of the logits, but LlamaForCausalLM"
REFUSED: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (lambda x: with_logits(x, masked), ValueError, A_SCALE),
    (lambda x: with_logits(x, lambda logits: logits * next(growing)), ValueError, ONE_SCALE),
    (bent, ValueError, "but its log-probabilities differ"),
    (lambda x: with_head(x, TWO), TypeError, r"got torch\.nn\.modules\.container\.Sequential"),
    (lambda x: with_head(x, LIST), TypeError, "ModuleList"),
    (lambda x: x.model, TypeError, "returns None"),
    (lambda _: nn.Linear(2, 2), TypeError, "expected a transformers model, .* got Linear"),
    (without_its_head, RuntimeError, "was not called"),
]


@pytest.mark.parametrize(("change", "error", "message"), REFUSED)
def test_heads_that_cannot_be_expressed_are_refused(
    change: Callable[[Any], Any], error: type[Exception], message: str
) -> None:
    model, *batch = scene()
    head = model.lm_head
    with pytest.raises(error, match=message):
        completion_logprobs(change(model), *batch)
    assert "forward" not in vars(head) or change is bent, (
        "a call that fails has to leave the head as it was"
    )


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_results_are_not_rounded_on_their_way_out() -> None:
    class Rounds(Wrapper):
        def forward(self, **inputs: Any) -> Any:
            found = self.module(**inputs)
            return {**found, "results": {x: y.bfloat16() for x, y in found["results"].items()}}

    model, *batch = scene()
    with pytest.raises(
        ValueError, match=r"expected results of torch\.float64, .* has cast them to torch\.bfloat16"
    ):
        completion_logprobs(Rounds(model), *batch)


def test_names_of_wrappers_bodies_and_of_all_models_are_known() -> None:
    class Weighs(Wrapper):
        def forward(self, *args: Any, weigh: float = 1.0, **inputs: Any) -> Any:
            return self.module(*args, **inputs)

    model, *batch = scene("granitemoe")
    want = completion_logprobs(model, *batch).logps
    names = {"weigh": 2.0, "output_attentions": False, "position_ids": None}
    names |= {"use_cache": False, "return_dict": True}
    torch.testing.assert_close(completion_logprobs(Weighs(model), *batch, **names).logps, want)
    with pytest.raises(TypeError, match="weigh: GraniteMoeForCausalLM has no such input"):
        completion_logprobs(model, *batch, weigh=2.0)
    adapted = peft_model(tiny.text_model("llama"), target_modules=["q_proj"])
    mixed = completion_logprobs(
        adapted, *batch, adapter_names=["default", "__base__", "default"]
    ).logps
    torch.testing.assert_close(mixed[::2], completion_logprobs(adapted, *batch).logps[::2])
    with adapted.disable_adapter():
        torch.testing.assert_close(mixed[1], completion_logprobs(adapted, *batch).logps[1])
    with pytest.raises(TypeError, match=r"adapter_name: .* did you mean adapter_names\?"):
        completion_logprobs(adapted, *batch, adapter_name="default")
