"""Tiny random models of many architectures of transformers, text and vision-language; nothing is
downloaded.

Scales and caps are far from what would not be noticed: logits spread over several units, and a cap
cuts into them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 97
HIDDEN = 16

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_GROUPED: dict[str, Any] = {"num_key_value_heads": 2}
_HEADS: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 4}
_EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
_MAMBA: dict[str, Any] = {
    "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups":
    1,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim":
    4,
}  # fmt: skip
_RECURRENT: dict[str, Any] = {
    "num_hidden_layers": 3, "lru_width": 16, "attention_window_size": 8, "logits_soft_cap": 2.0,
    "head_dim": 4,
}  # fmt: skip
_TIED: dict[str, Any] = {"tie_word_embeddings": True}

# model type -> fields
TEXT: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "mistral": {**_GROUPED, "sliding_window": 8},
    "qwen2": {**_GROUPED, **_TIED},
    "qwen3": _HEADS,
    "qwen3_moe": {**_HEADS, **_EXPERTS},
    "gemma2": {**_HEADS, "final_logit_softcapping": 1.5},
    "gemma3_text": {**_HEADS, "final_logit_softcapping": 0.7},
    "recurrent_gemma": _RECURRENT,
    "granite": {**_GROUPED, "logits_scaling": 0.3},
    "granitemoe": {**_GROUPED, **_EXPERTS, "logits_scaling": 4.0},
    "hyperclovax": {**_HEADS, "logits_scaling": 3.0},
    "minicpm3": {**_LATENT, "num_key_value_heads": 4, "dim_model_base": 4},
    "cohere": {**_GROUPED, **_TIED, "logit_scale": 3.0},
    "cohere2": {**_GROUPED, "logit_scale": 0.25},
    "falcon_h1": {**_HEADS, **_MAMBA, "mamba_chunk_size": 8, "lm_head_multiplier": 0.2},
    "mamba": {"state_size": 4, "expand": 2, "time_step_rank": 2},
    "gpt_oss": {**_HEADS, **_EXPERTS, "sliding_window": 8},
    "phi3": _GROUPED,
    "phi": {"num_key_value_heads": 4},
    "gptj": {"rotary_dim": 4},
    "gpt2": _TIED,
    "gpt_neox": {},
    "opt": {**_TIED, "ffn_dim": 32, "word_embed_proj_dim": 8},
    "bloom": {},
    "olmo2": _GROUPED,
    # a dense layer, an activation and a norm before the head, which has a bias
    "bert": {"is_decoder": True},
}


def build(
    config_class: Any, model_class: str, fields: dict[str, Any], dtype: torch.dtype = torch.float64
) -> Any:
    """A model in evaluation mode, its head so wide that distributions are far from uniform."""
    torch.manual_seed(0)
    if isinstance(config_class, str):
        config_class = getattr(transformers, config_class)
    model = getattr(transformers, model_class)(config_class(**fields)).to(dtype).eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the default has no float64
    head = model.get_output_embeddings()
    with torch.no_grad():
        for x in model.parameters():  # biases and norms too, so that each has an effect
            x.add_(0.1 * torch.randn_like(x))
        head.weight.normal_(0.0, 0.5)
        if head.bias is not None:
            head.bias.normal_(0.0, 1.0)
    return model


def text_model(kind: str, dtype: torch.dtype = torch.float64, **fields: Any) -> Any:
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    config_class = getattr(transformers, model_class).config_class
    return build(config_class, model_class, {**_TEXT, **TEXT[kind], **fields}, dtype)


def plain_logprobs(
    model: nn.Module, ids: Tensor, temperature: float = 1.0, **inputs: Any
) -> tuple[Tensor, Tensor]:
    """(logps, entropies), (B, L) each, from the model's own logits; column 0 is 0."""
    logits = model(input_ids=ids, **inputs).logits[:, :-1].double()
    logps = (logits / temperature).log_softmax(-1)
    chosen = logps.gather(-1, ids[:, 1:, None]).squeeze(-1)
    entropies = -(logps.exp() * logps).sum(-1)
    return nn.functional.pad(chosen, (1, 0)), nn.functional.pad(entropies, (1, 0))


def qwen2_vl() -> tuple[Any, Tensor, dict[str, Any]]:
    """(model, ids (2, 14), the model's other inputs), one image of four tokens a sequence."""
    rope = {"rope_type": "default", "mrope_section": [1, 1], "rope_theta": 1e4}
    sizes = {"hidden_size": 16, "out_hidden_size": HIDDEN, "embed_dim": 16}
    sizes |= {"intermediate_size": 32, "num_heads": 2}
    vision = {"depth": 2, "patch_size": 4, "fullatt_block_indexes": [1], "window_size": 16, **sizes}
    image, first, last = 90, 91, 92
    fields = {
        "text_config": {**_TEXT, **_GROUPED, "rope_parameters": rope}, "vision_config": vision,
        "image_token_id": image, "video_token_id": 93, "vision_start_token_id": first,
        "vision_end_token_id": last, "tie_word_embeddings": False,
    }  # fmt: skip
    model = build("Qwen2_5_VLConfig", "Qwen2_5_VLForConditionalGeneration", fields)
    ids = torch.randint(3, 90, (2, 14))
    ids[:, 1:7] = torch.tensor([first, image, image, image, image, last])
    inputs = {
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(32, 3 * 2 * 4 * 4, dtype=torch.float64),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
        "mm_token_type_ids": (ids == image).long(),
    }
    return model, ids, inputs


def gemma3_vl() -> tuple[Any, Tensor, dict[str, Any]]:
    text = {**_TEXT, **_HEADS, "final_logit_softcapping": 1.5, "sliding_window": 8}
    vision = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads":
        2, "image_size": 16, "patch_size": 4,
    }  # fmt: skip
    fields = {"text_config": text, "vision_config": vision}
    fields |= {"mm_tokens_per_image": 4, "image_token_index": 90}
    model = build("Gemma3Config", "Gemma3ForConditionalGeneration", fields)
    ids = torch.randint(3, 90, (2, 14))
    ids[:, 2:6] = 90
    inputs = {
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(2, 3, 16, 16, dtype=torch.float64),
        "token_type_ids": (ids == 90).long(),
    }
    return model, ids, inputs


VISION: dict[str, Any] = {"qwen2_5_vl": qwen2_vl, "gemma3": gemma3_vl}
