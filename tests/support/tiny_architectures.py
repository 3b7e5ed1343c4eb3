"""Tiny random models of many architectures of transformers, text and vision-language; nothing is
downloaded.

Scales and caps are far from what would not be noticed: logits spread over several units, and a cap
cuts into them."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

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
    "lru_width": 16,
    "attention_window_size": 8,
    "logits_soft_cap": 2.0,
    "head_dim": 4,
}

# model type -> (config class, model class, fields)
TEXT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _GROUPED),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**_GROUPED, "sliding_window": 8}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**_GROUPED, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _HEADS),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**_HEADS, **_EXPERTS}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**_HEADS, "final_logit_softcapping": 1.5}),
    "gemma3_text": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {**_HEADS, "final_logit_softcapping": 0.7},
    ),
    "recurrent_gemma": (
        "RecurrentGemmaConfig",
        "RecurrentGemmaForCausalLM",
        {"num_hidden_layers": 3, **_RECURRENT},
    ),
    "granite": ("GraniteConfig", "GraniteForCausalLM", {**_GROUPED, "logits_scaling": 0.3}),
    "granitemoe": (
        "GraniteMoeConfig",
        "GraniteMoeForCausalLM",
        {**_GROUPED, **_EXPERTS, "logits_scaling": 4.0},
    ),
    "hyperclovax": (
        "HyperCLOVAXConfig",
        "HyperCLOVAXForCausalLM",
        {**_HEADS, "logits_scaling": 3.0},
    ),
    "minicpm3": (
        "MiniCPM3Config",
        "MiniCPM3ForCausalLM",
        {**_LATENT, "num_key_value_heads": 4, "dim_model_base": 4},
    ),
    "cohere": (
        "CohereConfig",
        "CohereForCausalLM",
        {**_GROUPED, "logit_scale": 3.0, "tie_word_embeddings": True},
    ),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM", {**_GROUPED, "logit_scale": 0.25}),
    "falcon_h1": (
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {**_HEADS, **_MAMBA, "mamba_chunk_size": 8, "lm_head_multiplier": 0.2},
    ),
    "mamba": (
        "MambaConfig",
        "MambaForCausalLM",
        {"state_size": 4, "expand": 2, "time_step_rank": 2},
    ),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {**_HEADS, **_EXPERTS, "sliding_window": 8}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", _GROUPED),
    "phi": ("PhiConfig", "PhiForCausalLM", {"num_key_value_heads": 4}),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", {"rotary_dim": 4}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"tie_word_embeddings": True}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {"ffn_dim": 32, "word_embed_proj_dim": 8, "tie_word_embeddings": True},
    ),
    "bloom": ("BloomConfig", "BloomForCausalLM", {}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", _GROUPED),
    # A dense layer, an activation and a norm before the head, which has a bias.
    "bert": ("BertConfig", "BertLMHeadModel", {"is_decoder": True}),
}
SCALED = (
    "gemma2", "gemma3_text", "recurrent_gemma", "granite", "granitemoe", "hyperclovax",
    "cohere", "cohere2", "falcon_h1",
)  # fmt: skip
BIASED = ("phi", "gptj", "bert")


def build(
    config_class: str, model_class: str, fields: dict[str, Any], dtype: torch.dtype = torch.float64
) -> Any:
    """A model in evaluation mode, its head drawn so wide that the distributions are far from
    uniform."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    model = (
        getattr(transformers, model_class)(getattr(transformers, config_class)(**fields))
        .to(dtype)
        .eval()
    )
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the default has no float64
    head = model.get_output_embeddings()
    with torch.no_grad():
        for (
            parameter
        ) in model.parameters():  # biases and norms too, so that none of them is without effect
            parameter.add_(0.1 * torch.randn_like(parameter))
        head.weight.normal_(0.0, 0.5)
        if head.bias is not None:
            head.bias.normal_(0.0, 1.0)
    return model


def text_model(kind: str, dtype: torch.dtype = torch.float64, **fields: Any) -> Any:
    """The model of one row of `TEXT`."""
    config_class, model_class, own = TEXT[kind]
    return build(config_class, model_class, {**_TEXT, **own, **fields}, dtype)


def roberta() -> Any:
    """A decoder whose positions begin after the id of its padding token, and are counted from the
    ids."""
    return build(
        "RobertaConfig", "RobertaForCausalLM", {**_TEXT, "is_decoder": True, "pad_token_id": 1}
    )


def plain_logprobs(
    model: nn.Module, ids: Tensor, temperature: float = 1.0, **inputs: Any
) -> tuple[Tensor, Tensor]:
    """(logps, entropies), (B, L) each, of every token from the model's own logits; the first column
    is 0."""
    logits = model(input_ids=ids, **inputs).logits[:, :-1].double()
    logps = (logits / temperature).log_softmax(-1)
    chosen = logps.gather(-1, ids[:, 1:, None]).squeeze(-1)
    entropies = -(logps.exp() * logps).sum(-1)
    return nn.functional.pad(chosen, (1, 0)), nn.functional.pad(entropies, (1, 0))


def qwen2_vl(version: str = "Qwen2_5_VL") -> tuple[Any, Tensor, dict[str, Any]]:
    """(model, ids (2, 14), the model's other inputs), one image of four tokens a sequence."""
    rope = {"rope_type": "default", "mrope_section": [1, 1], "rope_theta": 1e4}
    sizes = {
        "hidden_size": 16,
        "out_hidden_size": HIDDEN,
        "embed_dim": 16,
        "intermediate_size": 32,
        "num_heads": 2,
    }
    vision = {"depth": 2, "patch_size": 4, "fullatt_block_indexes": [1], "window_size": 16, **sizes}
    if version == "Qwen2VL":
        vision |= {"hidden_size": HIDDEN}
    image, first, last = 90, 91, 92
    fields = {
        "text_config": {**_TEXT, **_GROUPED, "rope_parameters": rope}, "vision_config": vision,
        "image_token_id": image, "video_token_id": 93, "vision_start_token_id": first,
        "vision_end_token_id": last, "tie_word_embeddings": False,
    }  # fmt: skip
    model = build(f"{version}Config", f"{version}ForConditionalGeneration", fields)
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
    """Likewise."""
    text = {**_TEXT, **_HEADS, "final_logit_softcapping": 1.5, "sliding_window": 8}
    vision = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads":
        2, "image_size": 16, "patch_size": 4,
    }  # fmt: skip
    fields = {
        "text_config": text,
        "vision_config": vision,
        "mm_tokens_per_image": 4,
        "image_token_index": 90,
    }
    model = build("Gemma3Config", "Gemma3ForConditionalGeneration", fields)
    ids = torch.randint(3, 90, (2, 14))
    ids[:, 2:6] = 90
    inputs = {
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(2, 3, 16, 16, dtype=torch.float64),
        "token_type_ids": (ids == 90).long(),
    }
    return model, ids, inputs


VISION: dict[str, Any] = {
    "qwen2_vl": lambda: qwen2_vl("Qwen2VL"),
    "qwen2_5_vl": lambda: qwen2_vl("Qwen2_5_VL"),
    "gemma3": gemma3_vl,
}
