"""A newcomer's mistakes with a transformers model: each is refused, or warned of once, in words that say what to do."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from grpo_kernels.integrations.transformers import completion_logprobs, describe_head


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
