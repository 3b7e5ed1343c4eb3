"""The models: their published configurations, and what of them decides how much a training step computes.

Nothing is downloaded: a configuration makes the model on the meta device, where its parameters are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

_QWEN3: dict[str, Any] = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
# name -> (model type of transformers, the fields that shape the model)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-0.6B": ("qwen3", {
        **_QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    }),
    "Qwen3-1.7B": ("qwen3", {
        **_QWEN3, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
        "tie_word_embeddings": True,
    }),
    "Qwen3-8B": ("qwen3", {
        **_QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "tie_word_embeddings": False,
    }),
    "Llama-3-8B": ("llama", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "tie_word_embeddings": False,
    }),
    "Gemma-2-2B": ("gemma2", {
        "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 256000, "sliding_window": 4096,
        "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    }),
    "gpt-oss-20B": ("gpt_oss", {
        "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "sliding_window": 128,
        "num_local_experts": 32, "num_experts_per_tok": 4, "tie_word_embeddings": False,
    }),
}  # fmt: skip
_TOY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1021,
}
_TOY_IF_THERE = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "num_local_experts": 4}
_SPECIAL_TOKENS = {
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}  # of the tokenizer in benchmarks/tiny_models.py


@dataclass(frozen=True)
class Sizes:
    """What decides the cost of a step.

    Attributes:
        vocab, hidden: V and H of the head.
        parameters: all of the model, embedding and head included.
        matrices: entries of the body's matrices that one token is multiplied with: no embedding, no head, no bias, and
            of the experts only as many as a token gets.
        not_recomputed: those among them that gradient checkpointing does not use again: torch stops recomputing a layer
            at the last tensor that was saved, which leaves out a final projection that only a residual sum follows.
        attention: query heads times head size.
        windows: for each layer the keys a query sees in generation, None for all.
        fused_attention: attention whose backward computes the scores anew ("sdpa"), not "eager".
    """

    name: str
    vocab: int
    hidden: int
    parameters: int
    matrices: int
    not_recomputed: int
    attention: int
    windows: tuple[int | None, ...]
    fused_attention: bool


def config(name: str, *, toy: bool = False) -> PretrainedConfig:
    """The configuration of one of `MODELS`; at toy size the same architecture with a tiny shape."""
    kind, fields = MODELS[name]
    if toy:
        fields = {**fields, **_TOY, **{key: value for key, value in _TOY_IF_THERE.items() if key in fields}}
    return transformers.AutoConfig.for_model(kind, **fields, **_SPECIAL_TOKENS)


def build(name: str, *, toy: bool = False, device: str = "cpu", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model with random weights."""
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config(name, toy=toy), dtype=dtype)


@cache
def sizes(name: str, *, toy: bool = False) -> Sizes:
    """The sizes of one of `MODELS`, counted on the meta device."""
    model = build(name, toy=toy, device="meta")
    made = model.config
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    active = getattr(made, "num_experts_per_tok", 1), getattr(made, "num_local_experts", 1)
    matrices = not_recomputed = 0
    for key, weight in model.base_model.named_parameters():
        if weight is embedding or weight.ndim < 2 or key.endswith("bias"):
            continue
        of_token = weight.numel() * active[0] // active[1] if weight.ndim == 3 else weight.numel()
        matrices += of_token
        if key.endswith("mlp.down_proj.weight") and made.model_type != "gemma2":  # there a norm comes after it
            not_recomputed += of_token
    kinds = getattr(made, "layer_types", None) or ["full_attention"] * made.num_hidden_layers
    return Sizes(
        name=name,
        vocab=head.size(0),
        hidden=head.size(1),
        parameters=sum(weight.numel() for weight in model.parameters()),
        matrices=matrices,
        not_recomputed=not_recomputed,
        attention=made.num_attention_heads * made.head_dim,
        windows=tuple(made.sliding_window if kind == "sliding_attention" else None for kind in kinds),
        fused_attention=made._attn_implementation == "sdpa",
    )
