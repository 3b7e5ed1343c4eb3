"""Layers with a state along the paths of a tree: each token's result is that of its path alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
from transformers.models.qwen3_5 import modeling_qwen3_5

from grpo_kernels.body import paths as along
from grpo_kernels.body.paths import Paths, Segments
from tests.support import all_architectures as every
from tests.support.training_step import (
    PADDED,
    assert_any_rows,
    assert_right,
    assert_same,
    batch,
    lengthened,
    loss_of,
    said_by,
)

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("forget_warnings")]

# one of each kind of layer
KINDS = ("qwen3_5_text", "kimi_linear", "bamba", "lfm2")


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_rows_share(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of two ids part anywhere, as if a chunk were one token and branches cost nothing."""
    monkeypatch.setattr(along, "_CHUNK", 1)
    monkeypatch.setattr(along, "cost", lambda *_: 0.0)
    model = every.build(kind).train()
    assert not said_by(lambda: assert_any_rows(model, counts=kind != "bamba"))


def test_an_argument_that_may_be_of_each_token_is_not_dropped() -> None:
    paths = Paths(torch.arange(3)[None], torch.tensor([3]), torch.tensor([3]))
    x, name = torch.randn(1, 3, 2, 4), "torch_chunk_gated_delta_rule"
    inner, recurrence = getattr(modeling_qwen3_5, name), along.RECURRENCES[name]
    named = {"g": x[..., 0], "beta": x[..., 0], "gate": x}
    with pytest.raises(along.NotAlongPaths, match="'gate' that may be of each token"):
        along._recur(Segments(paths, varlen=False), inner, recurrence, (x, x, x), named)


KERNELS = {
    "causal_conv1d_fn": {"weight", "bias", "activation"},
    "torch_chunk_gated_delta_rule": {
        *("g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel")
    },
}


def large() -> dict[str, Tensor]:
    """Prompts of 44 and 48 tokens, long enough to be branches, and completions of 16 to 80."""
    given = lengthened(batch(), 8)
    more = torch.randint(3, 90, (2, 40), generator=torch.Generator().manual_seed(0))
    for name, x in (("input_ids", more), ("attention_mask", torch.ones_like(more))):
        parts = given[name][:, :8], x.repeat_interleave(3, dim=0), given[name][:, 8:]
        given[name] = torch.cat(parts, dim=1)
    return given


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_gets_the_padded_numbers(kind: str, reentrant: bool | None) -> None:
    """With and without activation checkpointing, which recomputes layers after the call."""
    model = every.build(kind).train()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    out = assert_right(model, large(), modes=[{}, {}], quiet=True)
    assert out.metrics["tokens/computed"] < 0.6


@pytest.mark.parametrize("kind", KINDS)
def test_padding_within_a_sequence_counts(kind: str) -> None:
    """A convolution has it among its taps, and in a recurrence it decays the state."""
    model, given = every.build(kind), large()
    holes = given["attention_mask"] = given["attention_mask"].clone()
    holes[0, 5] = holes[3, 80] = 0
    given["completion_mask"] = given["completion_mask"] * holes[:, 48:] * holes[:, 47:-1]
    assert_right(model, given, "padding inside", "'trim' is used")


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_keep_states_apart(kind: str) -> None:
    """transformers' own functions would carry a state into the next sequence."""
    model, given = every.build(kind).train(), large()
    mask, counted = given["attention_mask"] != 0, torch.zeros_like(given["attention_mask"])
    counted[:, 48:] = given["completion_mask"]
    positions = torch.cat([torch.arange(n) for n in mask.sum(1).tolist()])[None]
    row = {"input_ids": given["input_ids"][mask][None], "completion_mask": counted[mask][None]}
    row |= {"attention_mask": None, "position_ids": positions}
    row["advantages"] = (given["advantages"][:, None] * counted)[mask][None]
    want, gradients = loss_of(model, given, **PADDED)
    out, got = loss_of(model, row)
    torch.testing.assert_close(out.loss, want.loss, rtol=2e-6, atol=2e-6)
    assert_same(got, gradients)


def test_kernels_of_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers calls fla's and causal_conv1d's: with the arguments that they take."""
    plain = {x: getattr(modeling_qwen3_5, x) for x in KERNELS}
    begun = list[bool]()

    def kernel(name: str, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        begun.append(kwargs.get("initial_state") is not None)
        if name == "causal_conv1d_fn":
            aligned = x.stride(1) == 1 and x.stride(2) % 8 == x.stride(0) % 8 == 0
            assert x.stride(2) == 1 or aligned
        taken = {key: y for key, y in kwargs.items() if key in KERNELS[name]}
        return plain[name](x, *args, **taken)

    for name in KERNELS:
        monkeypatch.setattr(modeling_qwen3_5, name, functools.partial(kernel, name))
    out = assert_right(every.build("qwen3_5_text").train(), large())
    assert out.metrics["tokens/computed"] < 0.6 and any(begun)


def from_zeros(segments: Any, inner: Callable[..., Any], recurrence: Any, *given: Any) -> Any:
    def forgetful(*args: Any, **kwargs: Any) -> Any:
        first = kwargs.get("initial_state")
        return inner(*args, **{**kwargs, "initial_state": None if first is None else 0 * first})

    return RECUR(segments, forgetful, recurrence, *given)


RECUR = along._recur


def test_the_trial_sees_a_wrong_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(along, "_recur", from_zeros)
    assert_right(every.build("qwen3_5_text"), large(), "states are off by", "'trim' is used")


def test_a_recurrence_that_drops_its_last_state_later_gives_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, given, name = every.build("qwen3_5_text"), large(), "torch_chunk_gated_delta_rule"
    loss_of(model, given)
    plain = getattr(modeling_qwen3_5, name).__wrapped__

    def dropping(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)[0], None

    monkeypatch.setattr(modeling_qwen3_5, name, dropping)
    said = "layout='tree': a recurrence gives back no last state", "'trim' is used"
    assert_right(model, given, *said, modes=[{}, {}])


def test_layers_that_are_not_known_are_refused_by_name() -> None:
    said = "JambaMambaMixer has a state that is not known", "mamba_selective_scan", "'trim' is used"
    assert_right(every.build("jamba"), large(), *said)


def four_rows() -> dict[str, Tensor]:
    ids = torch.randint(3, 90, (4, 64), generator=torch.Generator().manual_seed(0))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    given["advantages"] = torch.tensor([1.0, -1, 2, 3])
    return given | {"completion_mask": torch.ones(4, 32)}


def test_rows_that_share_nothing_run_as_rows() -> None:
    """A recurrence computes as much of them as rows side by side, and tokens are gathered."""
    model, given = every.build("qwen3_5_text"), four_rows()
    ids = given["input_ids"]
    for share, expected in ((0, 4 * 63), (48, 48 + 4 * 15)):
        ids[:, :share] = ids[0, :share]
        out = assert_right(model, given)
        assert round(float(out.metrics["tokens/computed"]) * 4 * 64) == expected
    assert not said_by(lambda: loss_of(model, given))
