"""A tiny random model of every architecture that transformers maps to a causal language model.

Sizes are set wherever a config has the field. Windows, blocks, compress ratios and the number of
selected tokens are far below the length of the sequences that the sweep computes. There is one
layer of each kind that the default config has."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

# Size of a field by the ending of its name; of several endings the longest decides.
_ENDINGS = {
    97: "vocab_size vocab_size_per_layer_input hash_byte_group_vocab",
    16: "hidden_size hidden_size_per_layer_input d_model n_embd emb_dim embed_dim embedding_size "
    "moe_intermediate_size expert_intermediate_size experts_intermediate_size "
    "expert_ffn_hidden_size index_n_heads",
    32: "intermediate_size intermediate_size_mlp feed_forward_size ffn_dim ffn_hidden_size dim_ff "
    "dff d_inner d_ssm attention_hidden_size",
    4: "heads n_head head_dim dim_head head_size kv_channels rotary_dim experts",
    2: "key_value_heads kv_heads experts_per_tok experts_per_token moe_topk moe_k dt_rank "
    "step_rank num_codebooks topk_blocks laurel_rank type_vocab_size",
    1: "group n_groups shared_experts first_k_dense_replace n_layers_per_attn_res_block",
    8: "lora_rank index_head_dim qk_head_dim mamba_head_dim d_state state_size chunk_size "
    "block_size attention_head_dim",
    12: "window window_size window_len attention_chunk_size local_attention index_topk rel_extent "
    "floor_scale n_floor",
    256: "positions position_embeddings seq_len n_ctx context_length max_length",
}
_SIZES = {ending: size for size, endings in _ENDINGS.items() for ending in endings.split()}
_MAY_BE_NONE = ("head_dim", "num_key_value_heads", "sliding_window", "n_shared_experts",
"n_routed_experts",
                "num_experts_per_tok")  # fmt: skip
_DEPTHS = (
    "num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers",
    "num_decoder_layers", "num_encoder_layers", "num_blocks", "depth",
)  # fmt: skip
_FIXED = {
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "is_decoder": True,
    "is_encoder_decoder": False, "tie_word_embeddings": False, "use_sliding_window": True,
    "max_window_layers": 1,
}  # fmt: skip

_DOTS3 = {
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 8,
    "swa_kv_lora_rank": 8, "swa_head_dim": 8, "swa_qk_nope_head_dim": 4, "swa_v_head_dim": 4,
}  # fmt: skip
_FOUR = ["sliding_attention", "full_attention"] * 2
_QWEN4: dict[str, Any] = {
    "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 12,
    "indexer_compress_ratio": 4, "ple_layer_ids": [1], "ple_embed_dim": 16, "heads_per_ngram": 2,
    "ngram_size": 3, "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 1, "hc_lowrank": 8,
}  # fmt: skip

# Fields of one type: what its own checks ask for, and layers that its default has none of.
_FIELDS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "big_bird": {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1},
    "bigbird_pegasus": {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1},
    "blt": {
        f"{part}_config": {
            "hidden_size": 16, "hidden_size_global": 16, "intermediate_size": 32,
            "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97, "sliding_window":
            12,
        }
        for part in ("patcher", "encoder", "decoder", "global")
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4,
    "heavily_compressed_attention": 8}},
    "doge": {"sliding_window": None},  # which would leave nothing for its top keys to cut
    "dots3_note": _DOTS3,
    "dots3_note_text": _DOTS3,
    "flint": {"mlp_only_layers": [0]},
    "gemma3n_text": {
        "layer_types": _FOUR, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
        "intermediate_size": [32] * 4, "activation_sparsity_pattern": [0.95, 0.0, 0.95, 0.0],
    },
    "gemma4_text": {"layer_types": _FOUR, "num_hidden_layers": 4, "num_kv_shared_layers": 2},
    "glm_moe_dsa": {"indexer_types": ["full", "shared"]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1], "num_hidden_layers":
    2}, "lfm2_moe": {"layer_types": ["conv", "full_attention"]}, "mamba2": {"head_dim": 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"], "index_n_heads":
    2}, "qwen4_exp": _QWEN4, "qwen4_exp_text": _QWEN4, "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_embds": False, "local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8,
    "hash_seed": 0}, "xlm": {"causal": True}, "xmod": {"default_language": "en_XX"}, "zaya":
    {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"]},
}  # fmt: skip


# What the warning says, or the error of a refusal: a pattern for each row of the table in
# docs/status.md that has one, under a model type of that row.
_SAID = {
    "jamba": "a state that is not known",
    "zaya": "a state that is not known",
    "inkling_text": "'position_bias'",
    "minimax": "are off by",
    "gptj": "not looked up|it raised",
    "deepseek_v32": "a mask of its own",
    "bloom": "takes no position_ids",
    "mamba2": "takes no position_ids",
    "phimoe": "are off by",
    "bart": "takes no position_ids",
    "roberta": "are off by",
    "xlnet": "takes no position_ids|a state|it raised",
    "llama4": "a mask of its own|it raised|chunks of columns",
    "doge": "a mask of its own",
    "musicgen": "lm_head: expected an nn.Linear",
    "prophetnet": "expected hidden states of 6|view size",
}
PAGE = (Path(__file__).parents[2] / "docs/status.md").read_text()


class Outcome(NamedTuple):
    layout: str  # that serves, or "refused" or "not built"
    said: str  # pattern, or "" where nothing is said


LISTED = [
    (kind, Outcome(layout, next((_SAID[x] for x in kinds.split(", ") if x in _SAID), "")))
    for layout, kinds in re.findall(
        r"^\| (tree|trim|padded|refused|not built) \| .* \| (.*) \|$", PAGE, re.MULTILINE
    )
    for kind in kinds.split(", ")
]
OUTCOME = dict(LISTED)


def config_of(kind: str, **fields: Any) -> Any:
    """A small config: the decoder's where the class for text takes it alone."""
    cls = getattr(transformers, CLASSES[kind]).config_class
    return cls(**{**_small(cls), **_FIELDS.get(kind, {}), **fields})


def _size_of(name: str) -> int | None:
    endings = [x for x in _SIZES if f"_{name}".endswith(f"_{x}")]
    return _SIZES[max(endings, key=len)] if endings else None


def _small(cls: type[PretrainedConfig]) -> dict[str, Any]:
    default = {name: x for name, x in vars(cls()).items() if not name.startswith("_")}
    found = {name: x for name, x in _FIXED.items() if name in default}
    for name, x in default.items():
        is_number = isinstance(x, int) and not isinstance(x, bool)
        size = _size_of(name)
        if size is not None and (is_number or (x is None and name in _MAY_BE_NONE)):
            found[name] = size
        elif isinstance(x, float) and ("drop" in name or "noise" in name):
            found[name] = 0.0
        elif name == "rope_parameters" and x and "original_max_position_embeddings" in x:
            found[name] = {**x, "original_max_position_embeddings": 16}
        elif isinstance(x, PretrainedConfig):
            found[name] = _small(type(x))
    if "kv_lora_rank" in default and "num_key_value_heads" in found:
        found["num_key_value_heads"] = found["num_attention_heads"]
    depths = [name for name in _DEPTHS if isinstance(default.get(name), int)]
    if depths:
        lists = {
            name: x
            for name, x in default.items()
            if isinstance(x, list | tuple) and len(x) == default[depths[0]]
        }
        kinds = {
            tuple(map(str, layer)): i
            for i, layer in reversed([*enumerate(zip(*lists.values(), strict=True))])
        }
        chosen = sorted(kinds.values()) if len(kinds) > 1 else [0, 1]
        found |= {name: [x[i] for i in chosen[:4]] for name, x in lists.items()}
        found |= dict.fromkeys(depths, len(chosen[:4]))
        if "sliding_window" in default and {*lists.get("layer_types", ())} == {"full_attention"}:
            found["layer_types"] = ["full_attention", "sliding_attention"][: len(chosen)]
    return found


def build(kind: str, **fields: Any) -> Any:
    """The tiny model of a type in evaluation mode; no weight is 0, and logits spread over several
    units.

    fp32, but for Gemma 4: with random weights its own fp32 gradient is off by 1e-5 from that of
    fp64."""
    torch.manual_seed(0)
    model = getattr(transformers, CLASSES[kind])(config_of(kind, **fields)).eval()
    model = model.double() if kind.startswith("gemma4") else model.float()
    with torch.no_grad():
        for x in model.parameters():
            x.add_(0.05 * torch.randn_like(x))
        head = model.get_output_embeddings()
        if hasattr(head, "weight"):
            head.weight.normal_(0.0, 0.5)
    return model
