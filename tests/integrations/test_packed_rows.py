"""Packed rows: several sequences in a row without padding, told apart by positions that begin anew.

Losses and gradients are those of the padded batch of the same sequences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from grpo_kernels.base.checks import WARNED
from grpo_kernels.transformers import completion_logprobs
from tests.support import tiny_architectures as tiny
from tests.support.flash_attention import flash_attention, set_attention
from tests.support.training_step import PADDED, assert_same, batch, loss_of, said_by

pytestmark = pytest.mark.unit

ATTENTION = ("sdpa", "eager", "flash_attention_2")


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    WARNED.clear()
    with flash_attention(monkeypatch):
        yield


def packed(given: dict[str, Tensor], padding: Tensor | None = None, rows: int = 1) -> Any:
    """The sequences of a padded batch in packed `rows`, the same number of them in each."""
    attended = given["attention_mask"].bool()
    whole = torch.nn.functional.pad(given["completion_mask"], (8, 0))
    of_token = {
        "input_ids": given["input_ids"],
        "position_ids": given["attention_mask"].cumsum(1) - 1,
        "completion_mask": whole,
        "advantages": given["advantages"][:, None] * whole,
    }
    order = torch.arange(len(attended)).tensor_split(rows)
    found: dict[str, Any] = {"attention_mask": None}
    for name, x in of_token.items():
        lines = [x[i][attended[i]] for i in order]
        if padding is not None:
            end = padding if name == "position_ids" else torch.zeros_like(padding)
            lines = [torch.cat([line, end.to(line.dtype)]) for line in lines]
        found[name] = torch.nn.utils.rnn.pad_sequence(lines, batch_first=True)
    return found


def ends_of(given: dict[str, Tensor]) -> dict[str, Any]:
    """As flash attention's varlen functions want them."""
    starts = (given["position_ids"][0] == 0).nonzero()[:, 0]
    ends = torch.cat([starts, torch.tensor([given["input_ids"].shape[1]])]).to(torch.int32)
    longest = int(ends.diff().max())
    sizes = {"max_length_q": longest, "max_length_k": longest}
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends.clone(), **sizes}


def model_of(kind: str, name: str) -> Any:
    window = {"sliding_window": 6} if kind == "mistral" else {}
    model = tiny.text_model(kind, torch.float32, **window)
    set_attention(model, name)
    return model


def assert_as_padded(model: Any, given: dict[str, Tensor], rows: dict[str, Any]) -> Any:
    """Loss and gradients of packed `rows` are those of the padded batch; the output."""
    want, gradients = loss_of(model, given, **PADDED)
    out, got = loss_of(model, rows)
    torch.testing.assert_close(out.loss, want.loss, rtol=2e-6, atol=2e-6)
    assert_same(got, gradients)
    return out


PADDINGS = {
    "none": None,
    "anew": torch.arange(6),  # as verl pads
    "zeros": torch.zeros(6),
    "ones": torch.ones(6),
}


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", ATTENTION)
def test_they_are_a_tree(name: str, padding: str) -> None:
    given = batch()
    model, row = model_of("llama", name), packed(given, PADDINGS[padding])
    for more in ({}, ends_of(row) if padding != "ones" else {}):
        assert not said_by(lambda more=more: loss_of(model, {**row, **more}))
        out = assert_as_padded(model, given, {**row, **more})
        # two prompts, of 4 and 8 tokens, and the completions without their last ones
        computed = (4 + 8 + 35 - 6) / row["input_ids"].numel()
        assert out.metrics["tokens/computed"] == pytest.approx(computed)


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gpt_oss", "qwen3_moe", "gpt2"])
def test_families(kind: str) -> None:
    """Windows, soft-caps, sinks, experts, learned positions."""
    given = batch()
    for name in ("sdpa", "eager"):
        model = model_of(kind, name).eval()
        if name == "eager" or model._supports_sdpa:
            out = assert_as_padded(model, given, packed(given))
            assert out.metrics["tokens/computed"] < 0.6


def test_several_rows() -> None:
    """A row lives if one of its tokens has an advantage."""
    given = batch()
    given["advantages"] = torch.tensor([1.0, 0.0, -0.5, 0.0, 0.0, 0.0])
    rows = packed(given, rows=2)
    for name in ("sdpa", "eager"):
        out = assert_as_padded(model_of("llama", name), given, rows)
        assert out.metrics["tokens/gradient"] < out.metrics["tokens/computed"] < 0.6
        assert out.metrics["sequences/gradient"] == 0.5


def test_scores() -> None:
    given = batch()
    model, row, mask = model_of("llama", "sdpa"), packed(given), given["completion_mask"] != 0
    names = ("input_ids", "attention_mask", "completion_mask")
    want = completion_logprobs(model, **{name: given[name] for name in names})
    del row["advantages"]
    got = completion_logprobs(model, **row)
    torch.testing.assert_close(got.logps[row["completion_mask"] != 0], want.logps[mask])


def as_given(model: Any, row: dict[str, Any]) -> tuple[str, dict[str, Tensor]]:
    """What is said, once, and the gradients, of all tokens."""
    said = said_by(lambda: loss_of(model, row))
    out, got = loss_of(model, row)
    assert len(said) == 1 and out.metrics["tokens/computed"] == 1
    return said[0], got


def test_without_a_tree_they_run_as_given() -> None:
    given = batch()
    model = model_of("llama", "sdpa")
    hook = model.model.layers[0].register_forward_hook(lambda *_: None)
    _, want = loss_of(model, given, **PADDED)
    said, got = as_given(model, packed(given))
    assert "the hook" in said and "packed rows run as given" in said
    assert_same(got, want)
    hook.remove()
    out, got = loss_of(model, packed(given), layout="trim")
    assert_same(got, want)
    assert out.metrics["tokens/computed"] == 1


def test_ends_that_do_not_agree() -> None:
    row = packed(batch())
    ends = ends_of(row)
    ends["cu_seq_lens_k"][2] += 1
    assert "do not agree" in as_given(model_of("llama", "sdpa"), {**row, **ends})[0]


def test_sequences_that_begin_late_and_rows_that_flash_attention_joins() -> None:
    row = packed(batch())
    row["position_ids"] += 3
    assert "do not begin at position 0" in as_given(model_of("llama", "sdpa"), row)[0]
    rows = packed(batch(), rows=2)
    assert "one packed row" in as_given(model_of("llama", "flash_attention_2"), rows)[0]
