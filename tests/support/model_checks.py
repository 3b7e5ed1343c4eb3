"""What the tests of the helper for transformers' models share: batches, adapters, and the model's
own numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels.transformers import completion_logprobs
from tests.support import tiny_architectures as tiny

BOUNDS = {torch.float32: 2e-5, torch.float64: 1e-6}  # some models round their logits to float32


def text_batch() -> tuple[Tensor, Tensor]:
    """ids (3, 12) and their attention mask: one sequence padded on the left, one on the right."""
    torch.manual_seed(1)
    ids = torch.randint(3, tiny.VOCAB, (3, 12))
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
    return tiny.text_model(kind, dtype, **fields), ids, attention_mask, last_columns(attention_mask)


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
        plain = tiny.plain_logprobs(model, ids, **placed)
    got = completion_logprobs(model, ids, completion_mask=completion_mask, **inputs)
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
