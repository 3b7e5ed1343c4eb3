"""A batch of two prompts, its loss and gradients in each layout, and the layouts in which each family is exact."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers.models.gptj import modeling_gptj

from grpo_kernels import GRPOLoss
from grpo_kernels.integrations.transformers import causal_lm_loss
from tests.support import tiny_architectures as tiny
from tests.support.case_builder import seeded

PADDED: dict[str, Any] = {"zero_advantage": "train", "layout": "padded"}
MODES: dict[str, dict[str, Any]] = {mode: {"layout": mode} for mode in ("tree", "trim", "padded")}
ALL = "tree trim padded"
# Layouts in which each family is exact.
FAMILIES = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "granite", "granitemoe",
         "hyperclovax", "minicpm3", "cohere", "cohere2", "phi3", "phi", "bert",
         "gpt_neox", "gpt_oss", "gpt2", "olmo2", "opt"),
        ALL,
    ),
    **dict.fromkeys(("bloom", "falcon_h1", "mamba"), "trim padded"),
    "gptj": ALL if hasattr(modeling_gptj, "ALL_ATTENTION_FUNCTIONS") else "trim padded",  # from transformers 5.24 on
    "recurrent_gemma": "padded",
}  # fmt: skip
WIDE = {"mistral": 64, "gpt_oss": 64}  # a sliding window longer than the sequences


def family(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    fields = {"sliding_window": WIDE[kind]} if kind in WIDE else {}
    return tiny.text_model(kind, dtype, **fields)


def batch(sequences: int = 6) -> dict[str, Tensor]:
    """Two prompts with three completions each, padded on both sides; half of the advantages are 0."""
    draw = seeded("two prompts")
    prompts = torch.randint(3, 90, (2, 8), generator=draw).repeat_interleave(3, dim=0)
    ids = torch.cat([prompts, torch.randint(3, 90, (6, 10), generator=draw)], dim=1)
    first, last = torch.tensor([4, 4, 4, 0, 0, 0])[:, None], torch.tensor([18, 11, 15, 13, 10, 16])[:, None]
    mask = ((torch.arange(18) >= first) & (torch.arange(18) < last)).long()
    advantages = torch.tensor([1.0, 0.0, -0.5, 0.0, 0.0, 0.7])
    found = {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "completion_mask": mask[:, 8:]}
    return {name: x[:sequences] for name, x in {**found, "advantages": advantages}.items()}


def loss_of(model: Any, given: dict[str, Any], **options: Any) -> tuple[Any, dict[str, Tensor]]:
    """(output, gradients)."""
    model.zero_grad()
    out = causal_lm_loss(model, GRPOLoss(loss_type="dapo"), **given, num_items_in_batch=30.0, **options)
    out.loss.backward()
    return out, {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


@contextmanager
def positions_left_to_the_model(model: Any) -> Iterator[None]:
    """Inside, the model counts positions itself, as in TRL's trainer, which hands it none."""
    with mock.patch.object(type(model), "_prepare_position_ids_for_generation"):
        yield


def distance(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Norm of the difference over the norm."""
    assert got.keys() == want.keys()
    gap = sum((got[name].double() - x.double()).square().sum() for name, x in want.items())
    return float(gap / sum(x.double().square().sum() for x in want.values())) ** 0.5


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], bound: float = 3e-6) -> None:
    assert distance(got, want) <= bound


def assert_modes_agree(model: Any, given: dict[str, Any], modes: Iterable[dict[str, Any]] = MODES.values()) -> Any:
    """Loss and gradients in each mode are those of the padded forward; returns the output of the last one."""
    want, gradients = loss_of(model, given, **PADDED)
    for options in modes:
        out, got = loss_of(model, given, **options)
        torch.testing.assert_close(out.loss, want.loss, rtol=2e-6, atol=2e-6)
        assert_same(got, gradients)
    return out


def said_by(call: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [str(x.message) for x in found if "grpo_kernels" in str(x.message)]
