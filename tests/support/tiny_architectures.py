"""Tiny random models of many architectures of transformers, text and vision-language; nothing is
downloaded.

Sizes are those of `all_architectures`. Scales and caps are far from what would not be noticed:
logits spread over several units, and a cap cuts into them. Also batches and adapters for them, and
the models' own numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from grpo_kernels.transformers import causal_lm_logps
from tests.support import all_architectures as every

VOCAB = 97
HIDDEN = 16

_TIED = {"tie_word_embeddings": True}
_FULL = {"use_sliding_window": False, "layer_types": ["full_attention"] * 2}
# model type -> fields, most of them of its logits
_FIELDS: dict[str, dict[str, Any]] = {
    "qwen2": {**_TIED, **_FULL},
    "qwen3": _FULL,
    "qwen3_moe": _FULL,
    "phi3": {"sliding_window": None},
    "gpt2": _TIED,
    "gemma2": {"final_logit_softcapping": 1.5},
    "gemma3_text": {"final_logit_softcapping": 0.7},
    "recurrent_gemma": {"logits_soft_cap": 2.0},
    "granite": {"logits_scaling": 0.3},
    "granitemoe": {"logits_scaling": 4.0},
    "hyperclovax": {"logits_scaling": 3.0},
    "minicpm3": {"dim_model_base": 4},
    "cohere": {**_TIED, "logit_scale": 3.0},
    "cohere2": {"logit_scale": 0.25},
    "falcon_h1": {"lm_head_multiplier": 0.2},
    "opt": {**_TIED, "word_embed_proj_dim": 8},
    "bert": {},  # a dense layer, an activation and a norm before the head, which has a bias
}
_OTHERS = ("llama", "mistral", "gpt_oss", "mamba", "phi", "gptj", "gpt_neox", "bloom", "olmo2")
TEXT = (*_FIELDS, *_OTHERS)


def drawn(model_class: str, config: Any, dtype: torch.dtype) -> Any:
    """A model in evaluation mode, its head so wide that distributions are far from uniform."""
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config).to(dtype).eval()
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
    config = every.config_of(kind, **{**_FIELDS.get(kind, {}), **fields})
    return drawn(every.CLASSES[kind], config, dtype)


def plain_logprobs(
    model: nn.Module, ids: Tensor, temperature: float = 1.0, **inputs: Any
) -> tuple[Tensor, Tensor]:
    """(logps, entropies), (B, L) each, from the model's own logits; column 0 is 0."""
    logits = model(input_ids=ids, **inputs).logits[:, :-1].double()
    logps = (logits / temperature).log_softmax(-1)
    chosen = logps.gather(-1, ids[:, 1:, None]).squeeze(-1)
    entropies = -(logps.exp() * logps).sum(-1)
    return nn.functional.pad(chosen, (1, 0)), nn.functional.pad(entropies, (1, 0))


# Of the text model below images
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def qwen2_vl() -> tuple[Any, Tensor, dict[str, Any]]:
    """(model, ids (2, 14), the model's other inputs), one image of four tokens a sequence."""
    rope = {"rope_type": "default", "mrope_section": [1, 1], "rope_theta": 1e4}
    sizes = {"hidden_size": 16, "out_hidden_size": HIDDEN, "embed_dim": 16}
    sizes |= {"intermediate_size": 32, "num_heads": 2}
    vision = {"depth": 2, "patch_size": 4, "fullatt_block_indexes": [1], "window_size": 16, **sizes}
    image, first, last = 90, 91, 92
    fields = {
        "text_config": {**_TEXT, "rope_parameters": rope}, "vision_config": vision,
        "image_token_id": image, "video_token_id": 93, "vision_start_token_id": first,
        "vision_end_token_id": last, "tie_word_embeddings": False,
    }  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(**fields)
    model = drawn("Qwen2_5_VLForConditionalGeneration", config, torch.float64)
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
    text = {**_TEXT, "head_dim": 4, "final_logit_softcapping": 1.5, "sliding_window": 8}
    vision = {
        "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads":
        2, "image_size": 16, "patch_size": 4,
    }  # fmt: skip
    fields = {"text_config": text, "vision_config": vision}
    fields |= {"mm_tokens_per_image": 4, "image_token_index": 90}
    model = drawn(
        "Gemma3ForConditionalGeneration", transformers.Gemma3Config(**fields), torch.float64
    )
    ids = torch.randint(3, 90, (2, 14))
    ids[:, 2:6] = 90
    inputs = {
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(2, 3, 16, 16, dtype=torch.float64),
        "token_type_ids": (ids == 90).long(),
    }
    return model, ids, inputs


VISION: dict[str, Any] = {"qwen2_5_vl": qwen2_vl, "gemma3": gemma3_vl}
BOUNDS = {torch.float32: 2e-5, torch.float64: 1e-6}  # some models round their logits to float32


def text_batch() -> tuple[Tensor, Tensor]:
    """ids (3, 12) and their attention mask: one sequence padded on the left, one on the right."""
    torch.manual_seed(1)
    ids = torch.randint(3, VOCAB, (3, 12))
    attention_mask = torch.ones_like(ids)
    attention_mask[0, :3] = 0
    attention_mask[1, 10:] = 0
    return ids, attention_mask


def last_columns(attention_mask: Tensor) -> Tensor:
    """A completion mask (B, 5), of different lengths."""
    mask = attention_mask[:, -5:].clone()
    mask[0, 3:] = 0
    return mask


def scene(
    kind: str = "llama", dtype: torch.dtype = torch.float64, **fields: Any
) -> tuple[Any, Tensor, Tensor, Tensor]:
    """A model, and a batch for it: ids, their attention mask, a completion mask."""
    ids, attention_mask = text_batch()
    return text_model(kind, dtype, **fields), ids, attention_mask, last_columns(attention_mask)


def with_logits(model: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`model` with a forward that changes its logits in the end."""
    forward = model.forward

    def changed(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        output.logits = change(output.logits)
        return output

    model.forward = changed
    return model


def positions_of_generate(
    model: Any, ids: Tensor, attention_mask: Tensor, **inputs: Any
) -> dict[str, Tensor]:
    """The position ids that the model's `generate` hands to its forward, if that takes any."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if "position_ids" not in inspect.signature(type(base).forward).parameters:
        return {}
    given = {"attention_mask": attention_mask, **inputs}
    return {"position_ids": base._prepare_position_ids_for_generation(ids, given)}


def assert_as_model(model: Any, ids: Tensor, completion_mask: Tensor, **inputs: Any) -> None:
    """Scores are those that `generate` samples from where the mask counts, 0 elsewhere."""
    counted = completion_mask.bool()
    bound = BOUNDS[next(model.parameters()).dtype]
    placed = {**positions_of_generate(model, ids, **inputs), **inputs}
    with torch.no_grad():
        plain = plain_logprobs(model, ids, **placed)
    got = causal_lm_logps(model, ids, completion_mask=completion_mask, **inputs)
    want = [x[:, -completion_mask.shape[1] :] for x in plain]
    for ours, theirs in zip((got.logps, got.entropies), want, strict=True):
        assert ours.shape == completion_mask.shape
        assert ours.isfinite().all()
        assert (ours == 0)[~counted].all()
        torch.testing.assert_close(ours[counted].double(), theirs[counted], rtol=bound, atol=bound)
    assert want[0][counted].std() > 0.2, "the distributions are too flat to tell one from another"


def peft_model(model: Any, **fields: Any) -> Any:
    """`model` with LoRA, whose second factor is drawn too: a fresh adapter adds nothing."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(4)
    config = peft.LoraConfig(r=3, lora_alpha=6, **fields)
    wrapped = peft.get_peft_model(model, config).to(torch.float64)
    with torch.no_grad():
        for name, x in wrapped.named_parameters():
            if "lora_B" in name:
                x.normal_(0.0, 0.3)
            if "modules_to_save" in name:
                x.add_(0.3 * torch.randn_like(x))
    return wrapped.eval()
