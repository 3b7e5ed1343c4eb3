"""verl itself, to test against: its real package, with what its import needs, all from
requirements/peers.txt.

verl asks for other releases of transformers, TRL and tensordict than ours, so it is installed
without its dependencies. The modules named here import and run all the same; its trainers (Ray
clusters, vLLM) are not touched. ``import verl`` also loads every installed plug-in of verl, ours
among them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from grpo_kernels.verl import patch_verl, unpatch_verl
from tests.support.case_builder import seeded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

needs_verl = pytest.mark.skipif(
    importlib.util.find_spec("verl") is None, reason="verl is not installed"
)

TEMPERATURE = 0.7

_TEXT: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
_EYES: dict[str, Any] = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32}
_EYES |= {"patch_size": 2}
_ROPE: dict[str, Any] = {"rope_type": "default", "mrope_section": [1, 1, 2]}
_MROPE: dict[str, Any] = {"rope_parameters": _ROPE}
_LINEAR: dict[str, Any] = {
    "layer_types": ["full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
_QWEN2 = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2}
_QWEN2_5 = {**_EYES, "intermediate_size": 16, "fullatt_block_indexes": [0]}
_PLACES = {**_EYES, "num_position_embeddings": 16}
# kind -> (its class without the ending, fields of the text model, fields of the vision model)
_VISION_KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VL", _MROPE, _QWEN2),
    "qwen2_5_vl": ("Qwen2_5_VL", _MROPE, _QWEN2_5),
    "qwen3_vl": ("Qwen3VL", _MROPE, {**_PLACES, "deepstack_visual_indexes": [0]}),
    "qwen3_5": ("Qwen3_5", _LINEAR, _PLACES),
    "glm4v": ("Glm4v", {"rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0}}, _EYES),
}


def verl_module(name: str) -> ModuleType:
    """The module `name` of verl; the test is skipped where verl is not installed."""
    pytest.importorskip("verl")
    return importlib.import_module(f"verl.{name}")


def core_algos() -> ModuleType:
    return verl_module("trainer.ppo.core_algos")


def monkey_patch() -> ModuleType:
    """verl's module that gives models their forward, made to work with the TRL and transformers we
    have.

    verl looks for a class that TRL 1.16 has no more, and for output classes that transformers has
    replaced by one."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    module = verl_module("models.transformers.monkey_patch")
    module.is_trl_available = lambda: False
    for folder, (prefix, *_) in _VISION_KINDS.items():
        modeling = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
        name = f"{prefix}CausalLMOutputWithPast"
        if not hasattr(modeling, name):
            setattr(modeling, name, CausalLMOutputWithPast)
    return module


@contextmanager
def patched() -> Iterator[ModuleType]:
    """`monkey_patch` with our plug-in; everything is as before afterwards."""
    module, name = monkey_patch(), "_flash_attention_forward"
    attention = importlib.import_module("transformers.integrations.flash_attention")
    before = getattr(attention, name)  # verl replaces it for good
    unpatch_verl()
    patch_verl()
    try:
        yield module
    finally:
        unpatch_verl()
        setattr(attention, name, before)


def with_own_class(model: PreTrainedModel) -> PreTrainedModel:
    """The model, of a subclass of its own: verl replaces the forward of a class."""
    cls = type(model)
    model.__class__ = type(cls.__name__, (cls,), {"__module__": cls.__module__})
    return model


def text_model(kind: str = "Qwen3", **fields: Any) -> PreTrainedModel:
    """A tiny text model with random weights and a class of its own."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**{**_TEXT, **fields})
    return with_own_class(getattr(transformers, f"{kind}ForCausalLM")(config))


def vision_model(kind: str) -> PreTrainedModel:
    import transformers

    prefix, text, eyes = _VISION_KINDS[kind]
    tokens = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    fields = {"text_config": {**_TEXT, **text}, "vision_config": eyes, "tie_word_embeddings": False}
    fields |= {name: 90 + i for i, name in enumerate(tokens)}
    config = getattr(transformers, f"{prefix}Config")(**fields)
    return with_own_class(getattr(transformers, f"{prefix}ForConditionalGeneration")(config))


def draw(shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids below 30, and weights of log-probabilities and entropies; the same on every rank."""
    g = seeded("verl")
    ids = torch.randint(3, 30, shape, generator=g)
    a, b = torch.randn((2, *shape), generator=g, dtype=torch.float64)
    return ids, a, b


def relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm().clamp(min=1e-30))
