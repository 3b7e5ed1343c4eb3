"""The helper for transformers' models within PEFT, FSDP2, DDP, accelerate, torch.compile; and what it refuses."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from grpo_kernels import GRPOLoss, LossConfig
from grpo_kernels.base.checks import warn_once
from grpo_kernels.integrations.transformers import causal_lm_loss, completion_logprobs, describe_head
from tests.support import tiny_architectures as tiny
from tests.support.model_checks import assert_as_model, last_columns, peft_model, text_batch


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
    model = peft_model(tiny.text_model("granite"), **fields)
    ids, attention_mask = text_batch()
    mask = last_columns(attention_mask)
    assert_as_model(model, ids, mask, attention_mask=attention_mask)
    with_adapter = completion_logprobs(model, ids, attention_mask, mask).logps
    with model.disable_adapter():  # the reference model of a trainer with LoRA
        assert_as_model(model, ids, mask, attention_mask=attention_mask)
        assert (completion_logprobs(model, ids, attention_mask, mask).logps - with_adapter).abs().max() > 0.01
    parameters = [x for x in model.parameters() if x.requires_grad]
    ours = torch.autograd.grad((with_adapter * mask).sum(), parameters)
    plain = tiny.plain_logprobs(model, ids, attention_mask=attention_mask)[0][:, -5:]
    for x, y in zip(ours, torch.autograd.grad((plain * mask).sum(), parameters), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)  # its norms compute in float32


def test_dropout_of_an_adapter_on_the_head_is_not_mistaken_for_another_head() -> None:
    model = peft_model(tiny.text_model("llama"), target_modules=["lm_head"], lora_dropout=0.5).train()
    ids, attention_mask = text_batch()
    first, second = (
        completion_logprobs(model, ids, attention_mask, last_columns(attention_mask)).logps for _ in range(2)
    )
    assert (first - second).abs().max() > 1e-3
    assert all(x.training for x in model.modules())


def test_accelerate_places_what_the_head_is_given() -> None:
    hooks = pytest.importorskip("accelerate.hooks")

    class Counts(hooks.ModelHook):  # type: ignore[misc, name-defined]
        calls = 0

        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return args, kwargs

    model, hook = tiny.text_model("llama"), Counts()
    hooks.add_hook_to_module(model.lm_head, hook)
    ids, attention_mask = text_batch()
    for _ in range(2):
        completion_logprobs(model, ids, attention_mask, last_columns(attention_mask))
    assert hook.calls == 2
    assert_as_model(model, ids, last_columns(attention_mask), attention_mask=attention_mask)


def test_a_head_that_accelerate_has_offloaded() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = tiny.text_model("llama")
    ids, attention_mask = text_batch()
    want = completion_logprobs(model, ids, attention_mask, last_columns(attention_mask)).logps
    d_want = torch.autograd.grad(want.sum(), model.model.norm.weight)
    accelerate.cpu_offload(model.lm_head, execution_device="cpu")
    assert model.lm_head.weight.is_meta
    got = completion_logprobs(model, ids, attention_mask, last_columns(attention_mask)).logps
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), model.model.norm.weight), d_want)


def double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


def test_hooks_on_the_head() -> None:
    """What they do before it happens; after it there are scores, which they may look at and not change."""
    model = tiny.text_model("llama")
    ids, attention_mask = text_batch()
    args = (ids, attention_mask, last_columns(attention_mask))
    seen: list[Tensor] = []
    handles = [
        model.lm_head.register_forward_pre_hook(lambda module, given: (1.5 * given[0],)),
        model.lm_head.register_forward_hook(lambda module, given, output: seen.append(output)),
    ]
    for _ in range(2):  # the second time without the check of the logits
        assert_as_model(model, ids, args[2], attention_mask=attention_mask)
    assert seen
    handles.append(model.lm_head.register_forward_hook(double))
    for _ in range(2):
        with pytest.raises(TypeError, match=r"expected forward hooks on its head that change nothing, got .*\.double"):
            completion_logprobs(model, *args)
    for handle in handles:
        handle.remove()
    model = peft_model(tiny.text_model("llama"), target_modules=["lm_head"])
    with pytest.raises(ValueError, match="expected its head to be given hidden states alone, got adapter_names"):
        completion_logprobs(model, *args, adapter_names=["default", "__base__", "default"])


def test_a_compiled_model_notices_that_its_head_is_another_for_the_call() -> None:
    model = tiny.text_model("qwen2", num_hidden_layers=1)
    compiled = torch.compile(model, backend="eager")
    ids, attention_mask = text_batch()
    mask = last_columns(attention_mask)
    with torch.no_grad():
        before = compiled(input_ids=ids, attention_mask=attention_mask).logits
        warn_once.cache_clear()
        with pytest.warns(UserWarning, match="the whole model is compiled; compile its layers instead"):
            got = completion_logprobs(compiled, ids, attention_mask, mask).logps
        assert torch.equal(compiled(input_ids=ids, attention_mask=attention_mask).logits, before)
    assert torch.equal(got, completion_logprobs(model, ids, attention_mask, mask, layout="padded").logps)


def masking(forward: Any) -> Any:
    """A forward after which some ids can never be drawn, as Chameleon's image tokens."""

    def masked(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits[:, :, 5:9] = torch.finfo(output.logits.dtype).min
        return output

    return masked


def growing(forward: Any) -> Any:
    """A forward that scales the logits, and differently every time."""
    scale = itertools.count(2)

    def scaled(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = output.logits * next(scale)
        return output

    return scaled


def test_heads_that_cannot_be_expressed_are_refused() -> None:
    ids, attention_mask = text_batch()
    args = (ids, attention_mask, last_columns(attention_mask))
    model = tiny.text_model("llama")
    model.forward = masking(model.forward)
    with pytest.raises(
        ValueError, match="model: expected a scale, a soft-cap or a cut of the logits, LlamaForCausalLM"
    ):
        completion_logprobs(model, *args)
    model = tiny.text_model("llama")
    model.forward = growing(model.forward)
    with pytest.raises(ValueError, match=r"model: expected one scale, .* got another in each run"):
        completion_logprobs(model, *args)
    model = tiny.text_model("llama")
    plain = model.lm_head.forward
    model.lm_head.forward = lambda hidden: plain(hidden.tanh())
    with pytest.raises(ValueError, match="own log-probabilities differ"):
        completion_logprobs(model, *args)
    model = tiny.text_model("llama")
    model.lm_head = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, tiny.VOCAB)).double()
    with pytest.raises(TypeError, match=r"got torch\.nn\.modules\.container\.Sequential"):
        describe_head(model)
    model = tiny.text_model("llama")
    model.lm_head = nn.ModuleList([nn.Linear(16, tiny.VOCAB)] * 2)
    with pytest.raises(TypeError, match="ModuleList"):
        completion_logprobs(model, *args)
    with pytest.raises(TypeError, match="names no head"):
        describe_head(model.model)
    with pytest.raises(TypeError, match="expected a transformers model, wrapped or not, got Linear"):
        describe_head(nn.Linear(2, 2))
    model = tiny.text_model("llama")
    model.forward = lambda input_ids, **_: model.model(input_ids)
    with pytest.raises(RuntimeError, match="was not called"):
        completion_logprobs(model, *args)
    assert "forward" not in vars(model.lm_head), "a call that fails has to leave the head as it was"


def test_results_are_not_rounded_on_their_way_out() -> None:
    class Rounds(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, **inputs: Any) -> Any:
            found = self.module(**inputs)
            return {**found, "results": tuple(x.bfloat16() for x in found["results"])}

    ids, attention_mask = text_batch()
    with pytest.raises(ValueError, match=r"expected results of torch\.float64, .* has made them torch\.bfloat16"):
        completion_logprobs(Rounds(tiny.text_model("llama")), ids, attention_mask, last_columns(attention_mask))


def test_wrong_arguments_are_named() -> None:
    model = tiny.text_model("gemma3_text")
    ids, attention_mask = text_batch()
    mask, advantages = last_columns(attention_mask), torch.ones(3)
    for wrong, message in (
        (mask[:2], r"completion_mask: expected shape \(B, T\) with B = 3 and 0 < T <= 12, got \(2, 5\)"),
        (torch.ones(3, 13), "completion_mask"),
    ):
        with pytest.raises(ValueError, match=message):
            completion_logprobs(model, ids, attention_mask, wrong)
    with pytest.raises(ValueError, match=r"input_ids: expected shape \(B, L\)"):
        completion_logprobs(model, ids[0], attention_mask, mask)
    with pytest.raises(ValueError, match="labels: expected none"):
        completion_logprobs(model, ids, attention_mask, mask, labels=ids)
    with pytest.raises(RuntimeError, match="is logits_to_keep too small"):
        completion_logprobs(model, ids, attention_mask, mask, logits_to_keep=5)
    assert completion_logprobs(model, ids, attention_mask, mask, logits_to_keep=6).logps.shape == (3, 5)
    with pytest.raises(TypeError, match="loss_fn: expected a GRPOLoss, got LossConfig"):
        causal_lm_loss(model, LossConfig(), ids, attention_mask, mask, advantages)  # type: ignore[arg-type]
    for name in ("head", "run", "cu_seqlens", "sequence_group"):
        with pytest.raises(ValueError, match=f"{name}: expected none here"):
            causal_lm_loss(model, GRPOLoss(), ids, attention_mask, mask, advantages, **{name: 1})
    for name in ("bias", "engine", "process_group", "final_logit_softcapping"):  # of `Head` and `Run`
        with pytest.raises(TypeError, match=f"^{name}: expected an input of Gemma3ForCausalLM or the loss, got"):
            causal_lm_loss(model, GRPOLoss(), ids, attention_mask, mask, advantages, **{name: 1})


def test_names_that_nothing_reads_are_refused_before_the_model_runs() -> None:
    """transformers' forwards have **kwargs, in which a misspelt name vanishes: the loss was the on-policy one."""
    model = tiny.text_model("llama")
    calls: list[None] = []
    model.register_forward_pre_hook(lambda *_: calls.append(None))
    ids, attention_mask = text_batch()
    batch = (ids, attention_mask, last_columns(attention_mask))
    loss = (model, GRPOLoss(), *batch, torch.ones(3))
    for name, got in (
        ("old_logps", r"a name that nothing there reads; did you mean old_per_token_logps\?"),
        ("num_items", r"a name that nothing there reads; did you mean num_items_in_batch\?"),
        ("mask", r"a name that nothing there reads; did you mean attention_mask or completion_mask\?"),
        ("output_hidden_state", r"a name that nothing there reads; did you mean output_hidden_states\?"),
        ("wandb", "a name that nothing there reads$"),
        ("temperature", r"a field of LossConfig: set it on the loss, GRPOLoss\(temperature=\.\.\.\)"),
        ("beta", r"a field of LossConfig: set it on the loss, GRPOLoss\(beta=\.\.\.\)"),
    ):
        with pytest.raises(TypeError, match=f"^{name}: expected an input of LlamaForCausalLM or the loss, got {got}"):
            causal_lm_loss(*loss, **{name: None})
    for name, got in (
        ("temprature", r"did you mean temperature\?"),
        ("num_items_in_batch", "a name that nothing there reads"),
        ("old_per_token_logps", "a name that nothing there reads"),
        ("epsilon", "a field of LossConfig"),
    ):
        with pytest.raises(TypeError, match=f"^{name}: expected an input of LlamaForCausalLM, got .*{got}"):
            completion_logprobs(model, *batch, **{name: None})
    assert not calls


def test_names_of_wrappers_bodies_and_of_all_models_are_known() -> None:
    class Weighs(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any, weigh: float = 1.0, **inputs: Any) -> Any:
            return self.module(*args, **inputs)

    ids, attention_mask = text_batch()
    batch = (ids, attention_mask, last_columns(attention_mask))
    model = tiny.text_model("granitemoe")
    want = completion_logprobs(model, *batch).logps
    names = {"weigh": 2.0, "output_attentions": False, "position_ids": None, "use_cache": False, "return_dict": True}
    torch.testing.assert_close(completion_logprobs(Weighs(model), *batch, **names).logps, want)
    with pytest.raises(TypeError, match="weigh: expected an input of GraniteMoeForCausalLM, got"):
        completion_logprobs(model, *batch, weigh=2.0)
    adapted = peft_model(tiny.text_model("llama"), target_modules=["q_proj"])
    mixed = completion_logprobs(adapted, *batch, adapter_names=["default", "__base__", "default"]).logps
    torch.testing.assert_close(mixed[::2], completion_logprobs(adapted, *batch).logps[::2])
    with adapted.disable_adapter():
        torch.testing.assert_close(mixed[1], completion_logprobs(adapted, *batch).logps[1])
    with pytest.raises(TypeError, match=r"adapter_name: .* did you mean adapter_names\?"):
        completion_logprobs(adapted, *batch, adapter_name="default")
