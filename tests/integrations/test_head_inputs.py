"""`head_inputs`, and the output that `completion_logprobs` returns besides, against the models' own
outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from grpo_kernels import linear_logprob
from grpo_kernels.transformers import completion_logprobs, describe_head, head_inputs
from tests.support import tiny_architectures as tiny
from tests.support.model_checks import peft_model, positions_of_generate, scene, text_batch


@pytest.mark.parametrize(
    "kind", ["gemma3_text", "hyperclovax", "cohere", "gptj", "gpt2", "adapter"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_what_is_handed_over_gives_the_models_log_probabilities(
    kind: str, dtype: torch.dtype
) -> None:
    """In the first call, in which the model's logits are checked, and in the second."""
    model = tiny.text_model("llama" if kind == "adapter" else kind, dtype)
    if kind == "adapter":
        model = peft_model(model, target_modules=["q_proj", "lm_head"]).to(dtype)
    ids, attention_mask = text_batch()
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
        logps = linear_logprob(states, found.head(states), ids[:, 1:], entropy=False).logps
        torch.testing.assert_close(logps.double(), plain.double(), rtol=bound, atol=bound)
        if dtype == torch.float64:
            got, want = (
                torch.autograd.grad(x.sum(), parameters, retain_graph=True) for x in (logps, plain)
            )
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_no_logits_are_made_once_the_head_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, attention_mask, _ = scene("qwen3")
    plain = model(input_ids=ids, attention_mask=attention_mask)
    with head_inputs(model):
        model(input_ids=ids, attention_mask=attention_mask)
    monkeypatch.setattr(model.lm_head, "forward", lambda *_: pytest.fail("the head has projected"))
    layers = {"output_hidden_states": True}
    with head_inputs(model) as found:
        output = model(input_ids=ids, attention_mask=attention_mask, **layers)
    torch.testing.assert_close(output.hidden_states[-1], found.hidden)
    monkeypatch.undo()
    assert torch.equal(model(input_ids=ids, attention_mask=attention_mask).logits, plain.logits)


def test_one_forward_is_expected() -> None:
    """A call within another is refused; the outer one goes on, and the model is as before."""
    model, ids, *_ = scene()
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
    model, *args = scene("qwen3_moe")
    ids, attention_mask, _ = args
    wanted: dict[str, Any] = {"output_router_logits": True, "output_hidden_states": True}
    placed = positions_of_generate(model, ids, attention_mask)
    plain = model(input_ids=ids, attention_mask=attention_mask, **placed, **wanted)
    for _ in range(2):
        scores, output = completion_logprobs(model, *args, return_output=True, **wanted)
        assert type(output) is type(plain)
        assert (output.logits, "logits" in output) == (None, False)
        torch.testing.assert_close(output.aux_loss, plain.aux_loss)
        torch.testing.assert_close(output.hidden_states[-1], plain.hidden_states[-1])
        torch.testing.assert_close(scores.given, completion_logprobs(model, *args, **wanted).given)
    router = model.model.layers[0].mlp.gate.weight
    torch.testing.assert_close(
        *(torch.autograd.grad(x.aux_loss, router)[0] for x in (output, plain))
    )
