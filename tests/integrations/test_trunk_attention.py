"""Attention along the paths of a tree on each implementation: loss and gradients are the padded
forward's."""

from __future__ import annotations

import inspect
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from grpo_kernels.base.checks import WARNED
from grpo_kernels.base.tensors import cut
from grpo_kernels.body import attention, trial
from grpo_kernels.body.trunk import ordinary_id
from tests.support import tiny_architectures as tiny
from tests.support.flash_attention import HUB, flash_attention, ragged_varlen, set_attention
from tests.support.training_step import (
    FAMILIES,
    assert_any_rows,
    assert_right,
    batch,
    loss_of,
    said_by,
    swept,
)

pytestmark = pytest.mark.unit

IN_TREES = [kind for kind, layout in FAMILIES.items() if layout == "tree"]
WINDOWED = ("mistral", "gemma2", "gemma3_text", "gpt_oss", "cohere2")
NO_DROPOUT: dict[str, dict[str, float]] = {
    "opt": {"dropout": 0.0},
    "gpt2": dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "bert": dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    "phi": dict.fromkeys(("resid_pdrop", "embd_pdrop", "attention_dropout"), 0.0),
}


def cases() -> Iterator[tuple[str, str]]:
    for kind in IN_TREES:
        model = tiny.text_model(kind, torch.float32)
        yield kind, "eager"
        if model._supports_sdpa:
            yield kind, "sdpa"
        # transformers' flash attention looks for an nn.Linear, which gpt2 has not
        if model._supports_flash_attn and kind != "gpt2":
            yield kind, "flash_attention_2"
            if kind in ("llama", "gpt_oss"):
                yield kind, HUB


CASES = [*cases()]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    WARNED.clear()
    with flash_attention(monkeypatch):
        yield


def model_of(kind: str, name: str, **fields: Any) -> Any:
    """A model of the attention implementation `name`, whose windows, where it has any, are shorter
    than the batch."""
    model = tiny.text_model(
        kind, torch.float32, **({"sliding_window": 6} if kind in WINDOWED else {}), **fields
    )
    for key, x in model.named_parameters():
        if key.endswith("sinks"):
            torch.nn.init.normal_(x)
    set_attention(model, name)
    return model


@pytest.mark.parametrize(
    ("kind", "name", "reentrant"), [swept(*case, bool(i % 2)) for i, case in enumerate(CASES)]
)
def test_families(kind: str, name: str, reentrant: bool) -> None:
    """With and without activation checkpointing, which recomputes layers after the call of the
    model has ended."""
    model, given = model_of(kind, name, **NO_DROPOUT.get(kind, {})).train(), batch()
    for checkpointing in (None, {"use_reentrant": reentrant}):
        if checkpointing is not None:
            model.gradient_checkpointing_enable(checkpointing)
            model.enable_input_require_grads()
        out = assert_right(model, given, modes=[{}, {}], quiet=True)
        assert out.metrics["tokens/computed"] < 0.6


@pytest.mark.parametrize("cells", [0.0, 30.0, 1e9])
@pytest.mark.parametrize("name", ["sdpa", "eager", "flash_attention_2"])
def test_whatever_rows_share(name: str, cells: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a call for each segment, some, or one for all."""
    monkeypatch.setattr("grpo_kernels.body.attention.call_cells", lambda *_: cells)
    for kind in ("qwen3", "mistral"):
        assert not said_by(lambda kind=kind: assert_any_rows(model_of(kind, name)))


def test_completions_of_one_token() -> None:
    """A single query sees all keys, with heads in groups; the last tokens of completions are not
    computed."""
    given = {
        name: x[:, :10] if name != "completion_mask" else x[:, :2]
        for name, x in batch().items()
        if x.dim() == 2
    }
    given["advantages"] = batch()["advantages"]
    for name in ("sdpa", "eager", "flash_attention_2"):
        assert_right(model_of("llama", name), given)


def test_torchs_attention_for_ragged_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA in 16 bits: one call a layer; where a window cuts, a call for several segments."""
    calls: list[int] = []

    def varlen_attn(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return ragged_varlen(*args, **kwargs)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr(trial, "has_varlen", lambda *_: True)
    given = batch()
    for kind, expected in (("qwen3", 4), ("mistral", 0)):
        model = model_of(kind, "sdpa")
        loss_of(model, given)  # its trial, whose rows fit into some windows
        calls.clear()
        assert_right(model, given)
        assert len(calls) == expected, "two layers, with a graph and without"


def test_torchs_attention_that_is_not_exact_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial on the device decides: wrong numbers, or an error of a kernel that does not serve
    this head size."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        return 1.01 * ragged_varlen(*args, **kwargs)

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("head dimension")

    monkeypatch.setattr(trial, "has_varlen", lambda *_: True)
    for function in (wrong, refused):
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", function)
        model, given = model_of("qwen3", "sdpa"), batch()
        assert assert_right(model, given, modes=[{}, {}]).metrics["tokens/computed"] < 0.6


def test_the_installed_torch_has_the_signature_that_is_known() -> None:
    from torch.nn.attention.varlen import varlen_attn

    known = {*inspect.signature(ragged_varlen).parameters}
    assert known <= {*inspect.signature(varlen_attn).parameters}
    assert attention.has_varlen("sdpa", torch.device("cuda"), torch.bfloat16)
    for name, device, dtype in (
        ("eager", "cuda", torch.bfloat16),
        ("sdpa", "cpu", torch.bfloat16),
        ("sdpa", "cuda", torch.float32),
    ):
        assert not attention.has_varlen(name, torch.device(device), dtype)


def test_attention_that_is_replaced_later_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another library puts its function over ours, and drops what it does not know: the next layout
    serves."""
    model, given = model_of("qwen3", "sdpa"), batch()
    loss_of(model, given)
    ours = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def dropping(*args: Any, segments: Any = None, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    dropping._takes_segments = True  # type: ignore[attr-defined]  # so that it is not wrapped again
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", dropping)
    assert_right(model, given, "0 calls of its layers", "layout='trim' is used")
    monkeypatch.setitem(
        AttentionInterface._global_mapping, "sdpa", lambda *args, **kwargs: ours(*args, **kwargs)
    )
    assert_right(model, given)


def test_without_segments_the_wrapper_does_nothing() -> None:
    model = model_of("qwen3", "sdpa")
    ids = torch.arange(3, 15)[None]
    before = model(input_ids=ids).logits
    loss_of(model, batch())
    assert torch.equal(model(input_ids=ids).logits, before)
    wrapped = ALL_ATTENTION_FUNCTIONS["sdpa"]
    assert wrapped.__module__ == "transformers.integrations.sdpa_attention", (
        "DeepSpeed's is told by its module"
    )


def test_an_ordinary_id_is_none_of_several_end_tokens() -> None:
    """As in the configs of Gemma 3 and Llama 3."""
    model = tiny.text_model("llama", torch.float32)
    model.config.eos_token_id, model.config.pad_token_id, model.config.bos_token_id = [0, 1], 3, 2
    assert ordinary_id(model) == 4


def test_parts_cost_the_least_of_all() -> None:
    draw = random.Random(3)

    def cost(ends: tuple[int, ...], costs: list[int], overhead: int) -> int:
        parts = itertools.pairwise((0, *ends, len(costs)))
        return sum((end - first) * costs[end - 1] + overhead for first, end in parts)

    for overhead in (0, 3, 20, 200) * 5:
        costs = sorted(draw.randrange(1, 40) for _ in range(6))
        parts = cut(costs, overhead)
        assert [x for first, end in parts for x in range(first, end)] == [*range(6)]
        every = [ends for n in range(6) for ends in itertools.combinations(range(1, 6), n)]
        found = cost(tuple(end for _, end in parts[:-1]), costs, overhead)
        assert found == min(cost(ends, costs, overhead) for ends in every)
