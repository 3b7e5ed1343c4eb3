"""A newcomer's mistakes with a transformers model: each is refused, or warned of once, in words that say what to do."""

from __future__ import annotations

import warnings

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from grpo_kernels import GRPOLoss
from grpo_kernels.base import checks
from grpo_kernels.integrations.transformers import causal_lm_loss, completion_logprobs, describe_head
from tests.support import tiny_architectures as tiny
from tests.support.model_checks import last_columns, text_batch


@pytest.fixture(autouse=True)
def _warned_of_nothing() -> None:
    checks.warn_once.cache_clear()


def encoder_decoders() -> dict[str, torch.nn.Module]:
    bart = transformers.BartConfig(
        vocab_size=60, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32,
    )  # fmt: skip
    t5 = transformers.T5Config(
        vocab_size=60, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    models = transformers.BartForConditionalGeneration(bart), transformers.T5ForConditionalGeneration(t5)
    return {type(x).__name__: x for x in models}


def test_encoder_decoder_models_are_refused_by_name() -> None:
    ids = torch.randint(3, 60, (2, 8))
    for name, model in encoder_decoders().items():
        message = f"^model: expected a model of one sequence, .* got {name}, an encoder-decoder model"
        for inputs in ({}, {"decoder_input_ids": ids}):
            with pytest.raises(TypeError, match=message):
                completion_logprobs(model, ids, None, torch.ones(2, 4), **inputs)
        with pytest.raises(TypeError, match=message):
            describe_head(model)


def padded() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, attention mask and completion mask: the second sequence ends two columns before the last."""
    ids, attention_mask = text_batch()
    return ids, attention_mask, last_columns(attention_mask)


@pytest.mark.parametrize("shape", [(3, 11), (2, 12), (12,), (3, 1, 12)])
def test_an_attention_mask_of_another_shape(shape: tuple[int, ...]) -> None:
    ids, _, mask = padded()
    with pytest.raises(ValueError, match=r"^attention_mask: expected shape \(B, L\) = \(3, 12\), got \("):
        completion_logprobs(tiny.text_model("llama"), ids, torch.ones(shape), mask)
    with pytest.raises(TypeError, match=r"^attention_mask: expected a tensor, got list"):
        completion_logprobs(tiny.text_model("llama"), ids, [[1] * 12] * 3, mask)  # type: ignore[arg-type]


def test_tokens_that_count_in_padding() -> None:
    ids, attention_mask, mask = padded()
    mask[1, 3:] = 1  # both columns are padding
    model = tiny.text_model("llama")
    message = r"^completion_mask: expected 0 where attention_mask is 0, got .* in column 11 of sequence 1, with"
    with pytest.raises(ValueError, match=message):
        completion_logprobs(model, ids, attention_mask, mask)
    with pytest.raises(ValueError, match=message):
        causal_lm_loss(model, GRPOLoss(), ids, attention_mask, mask, torch.ones(3))


def test_an_end_token_that_is_the_padding_token_too_may_count() -> None:
    ids, attention_mask, mask = padded()
    mask[1, 3] = 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        completion_logprobs(tiny.text_model("llama"), ids, attention_mask, mask)


@pytest.mark.parametrize("what", ["first token", "hole"])
def test_a_mask_that_is_likely_not_meant_warns_once(what: str) -> None:
    ids, attention_mask, mask = padded()
    if what == "hole":
        attention_mask[2, 5], message = 0, "attention_mask: it has zeros between ones"
    else:
        mask, message = attention_mask, "completion_mask: it counts a token whose column before has attention_mask 0"
    model = tiny.text_model("llama")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            completion_logprobs(model, ids, attention_mask, mask)
    assert [x.filename for x in caught] == [__file__]
    assert message in str(caught[0].message)


def test_a_hole_with_positions_of_its_own_is_meant() -> None:
    ids, attention_mask, mask = padded()
    attention_mask[2, 5] = 0
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        completion_logprobs(tiny.text_model("llama"), ids, attention_mask, mask, position_ids=positions)


def test_weights_in_the_place_of_a_completion_mask() -> None:
    ids, attention_mask, mask = padded()
    with pytest.warns(UserWarning, match="mask: it holds values other than 0 and 1"):
        completion_logprobs(tiny.text_model("llama"), ids, attention_mask, 0.5 * mask)
    with pytest.warns(UserWarning, match="completion_mask: it holds values other than 0 and 1"):
        causal_lm_loss(tiny.text_model("llama"), GRPOLoss(), ids, attention_mask, 0.5 * mask, torch.ones(3))


def test_log_probabilities_have_the_temperature_of_the_loss() -> None:
    ids, attention_mask, mask = padded()
    model = tiny.text_model("llama")
    loss_fn = GRPOLoss(temperature=0.7)
    for logits_dtype in ("float32", "input"):
        options = {"logits_dtype": logits_dtype}
        old = completion_logprobs(model, ids, attention_mask, mask, loss_fn=loss_fn, **options).logps
        plain = completion_logprobs(model, ids, attention_mask, mask, temperature=0.7).logps
        torch.testing.assert_close(old, plain, rtol=1e-2, atol=1e-2)
        given = {"old_per_token_logps": old.detach(), **options}
        out = causal_lm_loss(model, loss_fn, ids, attention_mask, mask, torch.ones(3), **given)
        torch.testing.assert_close(out.metrics["ratio"], torch.ones_like(out.metrics["ratio"]), rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match=r"^temperature: expected None beside loss_fn, .* got 1\.0"):
        completion_logprobs(model, ids, attention_mask, mask, loss_fn=loss_fn, temperature=1.0)
    with pytest.raises(TypeError, match=r"^loss_fn: expected a GRPOLoss, got dict"):
        completion_logprobs(model, ids, attention_mask, mask, loss_fn={})  # type: ignore[call-overload]
