"""Tiny language models and their tokenizer, built locally: nothing is downloaded.

Shared by the benchmarks and the tests. It knows transformers, and nothing of `grpo_kernels`.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

WORDS = 200
SPECIAL = ("<pad>", "<eos>", "<unk>")
VOCAB = WORDS + len(SPECIAL)
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] + ' ' }}{% endfor %}"

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
_GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# kind -> (config class, model class, fields): one kind for every property of a head that the
# integration must carry.
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    kind: (f"{family}Config", f"{family}ForCausalLM", fields)
    for kind, family, fields in (
        ("qwen3", "Qwen3", {**_GROUPED, "tie_word_embeddings": False}),
        ("tied", "Qwen3", {**_GROUPED, "tie_word_embeddings": True}),
        ("softcap", "Gemma2", {**_GROUPED, "final_logit_softcapping": 2.0}),
        ("logit_scale", "Cohere", {"num_key_value_heads": 2, "logit_scale": 0.25}),
        ("logits_scaling", "Granite", {"num_key_value_heads": 2, "logits_scaling": 2.0}),
        ("bias", "Phi", {"num_key_value_heads": 4}),
        ("experts", "Qwen3Moe", {**_GROUPED, **_EXPERTS, "tie_word_embeddings": False}),
    )
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Words `w0 .. w199`, split at white space; ids 0, 1, 2: padding, end, unknown."""
    vocab = {word: i for i, word in enumerate([*SPECIAL, *(f"w{i}" for i in range(WORDS))])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>",
        padding_side="left",
    )  # fmt: skip
    made.chat_template = CHAT_TEMPLATE
    return made


def model(
    kind: str = "qwen3", seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """A causal language model of one of `KINDS` with random weights, the same ones for the same
    seed; `changes` replace fields of its config.

    The head is drawn wide (0.3 instead of 0.02), so that the distributions are far from uniform,
    and every embedding leans towards the end-of-sequence row of the head, so that completions end
    after 2 to 12 tokens.
    """
    config_name, model_name, fields = KINDS[kind]
    torch.manual_seed(seed)
    config = getattr(transformers, config_name)(**{**_SHAPE, **fields, **changes})
    made = getattr(transformers, model_name)(config)
    with torch.no_grad():
        head = made.get_output_embeddings()
        lean = torch.tensor([1.0, -1.0]).repeat(config.hidden_size // 2)
        head.weight.normal_(0.0, 0.3)
        if head.bias is not None:
            head.bias.normal_(0.0, 0.3)
        made.get_input_embeddings().weight.add_(0.3 * lean)
        head.weight[_SHAPE["eos_token_id"]] = 0.12 * lean
    return made.to(dtype)
