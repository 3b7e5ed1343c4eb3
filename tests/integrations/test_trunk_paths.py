"""Attention and layers with a state along the paths of a tree, also of packed rows: loss and
gradients are the padded forward's, each token's result that of its path alone."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.models.qwen3_5 import modeling_qwen3_5

from grpo_kernels.base.checks import WARNED
from grpo_kernels.body import layout, paths
from grpo_kernels.body.paths import Paths, Segments
from grpo_kernels.body.trunk import ordinary_id
from tests.support import all_architectures as every
from tests.support import tiny_architectures as tiny
from tests.support.flash_attention import HUB, flash_attention, ragged_varlen, set_attention
from tests.support.training_step import (
    FAMILIES,
    PADDED,
    assert_any_rows,
    assert_right,
    assert_same,
    batch,
    lengthened,
    loss_of,
    said_by,
)

pytestmark = pytest.mark.unit

WINDOWED = ("mistral", "gemma2", "gpt_oss")
NO_DROPOUT: dict[str, dict[str, float]] = {
    "opt": {"dropout": 0.0},
    "bert": dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
}
ATTENTION = {"eager": "", "sdpa": "_supports_sdpa", "flash_attention_2": "_supports_flash_attn"}


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    WARNED.clear()
    with flash_attention(monkeypatch):
        yield


def model_of(kind: str, name: str, **fields: Any) -> Any:
    """Windows, where it has any, are shorter than the batch."""
    fields |= {"sliding_window": 6} if kind in WINDOWED else {}
    model = tiny.text_model(kind, torch.float32, **fields)
    for key, x in model.named_parameters():
        if key.endswith("sinks"):
            torch.nn.init.normal_(x)
    set_attention(model, name)
    return model


@pytest.mark.parametrize("name", [*ATTENTION, HUB])
@pytest.mark.parametrize("kind", [kind for kind, layout in FAMILIES.items() if layout == "tree"])
def test_families(kind: str, name: str) -> None:
    """With and without activation checkpointing, which recomputes layers after the call."""
    model, given = model_of(kind, name, **NO_DROPOUT.get(kind, {})).train(), batch()
    if not getattr(model, ATTENTION.get(name) or "training"):
        pytest.skip(f"{kind} has no {name}")
    for reentrant in (None, name in ("sdpa", HUB)):
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        out = assert_right(model, given, modes=[{}, {}], quiet=True)
        assert out.metrics["tokens/computed"] < 0.6


@pytest.mark.parametrize("cells", [0.0, 30.0, 1e9])
@pytest.mark.parametrize("name", ["sdpa", "eager", "flash_attention_2"])
def test_whatever_rows_share(name: str, cells: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a call for each segment, some, or one for all; with a window, and without."""
    monkeypatch.setattr("grpo_kernels.body.paths.call_cells", lambda *_: cells)
    kind = "qwen3" if cells == 30.0 else "mistral"
    assert not said_by(lambda: assert_any_rows(model_of(kind, name)))


def test_torchs_attention_for_ragged_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA in 16 bits: one call a layer; where a window cuts, a call for several segments."""
    calls: list[int] = []

    def varlen_attn(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return ragged_varlen(*args, **kwargs)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr(paths, "has_varlen", lambda *_: True)
    given = batch()
    for kind, expected in (("qwen3", 4), ("mistral", 0)):
        model = model_of(kind, "sdpa")
        loss_of(model, given)  # its trial, whose rows fit into some windows
        calls.clear()
        assert_right(model, given)
        assert len(calls) == expected, "two layers, with a graph and without"


def test_torchs_attention_that_is_not_exact_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trial on the device decides."""

    def wrong(*args: Any, **kwargs: Any) -> Any:
        return 1.01 * ragged_varlen(*args, **kwargs)

    monkeypatch.setattr(paths, "has_varlen", lambda *_: True)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", wrong)
    out = assert_right(model_of("qwen3", "sdpa"), batch(), modes=[{}, {}])
    assert out.metrics["tokens/computed"] < 0.6


def test_the_installed_torch_has_the_signature_that_is_known() -> None:
    from torch.nn.attention.varlen import varlen_attn

    known = {*inspect.signature(ragged_varlen).parameters}
    assert known <= {*inspect.signature(varlen_attn).parameters}
    cuda, cpu, bf16 = torch.device("cuda"), torch.device("cpu"), torch.bfloat16
    assert paths.has_varlen("sdpa", cuda, bf16)
    for given in (("eager", cuda, bf16), ("sdpa", cpu, bf16), ("sdpa", cuda, torch.float32)):
        assert not paths.has_varlen(*given)


def test_attention_that_is_replaced_later_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another library's drops what it does not know: the next layout serves."""
    model, given = model_of("qwen3", "sdpa"), batch()
    loss_of(model, given)
    ours = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def dropping(*args: Any, segments: Any = None, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    dropping._takes_segments = True  # type: ignore[attr-defined]  # so that it is not wrapped again
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", dropping)
    assert_right(model, given, "0 calls of its layers", "layout='trim' is used")


def packed(given: dict[str, Tensor], padding: Tensor | None = None, rows: int = 1) -> Any:
    """The sequences of a padded batch in packed `rows`, the same number of them in each."""
    attended = given["attention_mask"].bool()
    prompt = attended.shape[1] - given["completion_mask"].shape[1]
    whole = torch.nn.functional.pad(given["completion_mask"], (prompt, 0))
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


# Packed rows are told apart by positions that begin anew; here as verl pads, and in other ways.
PADDINGS = {"none": None, "anew": torch.arange(6), "zeros": torch.zeros(6), "ones": torch.ones(6)}


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", ["sdpa", "eager", "flash_attention_2"])
def test_packed_rows_are_a_tree(name: str, padding: str) -> None:
    given = batch()
    model, row = model_of("llama", name), packed(given, PADDINGS[padding])
    for more in ({}, ends_of(row) if padding != "ones" else {}):
        out = assert_right(model, {**row, **more}, padded=given, quiet=True)
        # two prompts, of 4 and 8 tokens, and the completions without their last ones
        computed = (4 + 8 + 35 - 6) / row["input_ids"].numel()
        assert out.metrics["tokens/computed"] == pytest.approx(computed)


@pytest.mark.parametrize("kind", ["mistral", "gemma2", "gpt_oss", "qwen3_moe", "gpt2"])
def test_packed_rows_of_families(kind: str) -> None:
    """Windows, soft-caps, sinks, experts, learned positions."""
    out = assert_right(model_of(kind, "eager"), packed(batch()), padded=batch())
    assert out.metrics["tokens/computed"] < 0.6


def test_several_packed_rows() -> None:
    """A row lives if one of its tokens has an advantage."""
    given = batch()
    given["advantages"] = torch.tensor([1.0, 0.0, -0.5, 0.0, 0.0, 0.0])
    rows = packed(given, rows=2)
    for name in ("sdpa", "eager"):
        out = assert_right(model_of("llama", name), rows, padded=given)
        assert out.metrics["tokens/gradient"] < out.metrics["tokens/computed"] < 0.6
        assert out.metrics["sequences/gradient"] == 0.5


@pytest.mark.parametrize(
    ("kind", "layout", "joins"),
    [("gpt_oss", "trim", True), ("gpt_oss", "tree", False), ("llama", "trim", False)],
)
def test_a_model_that_does_not_keep_packed_rows_apart_is_named(kind, layout, joins) -> None:
    model, given, row = model_of(kind, "eager"), batch(), packed(batch())
    said = said_by(lambda: loss_of(model, row, layout=layout))
    assert [x for x in said if "layout='tree', or one row per sequence" in x] == said[:joins]
    got, want = loss_of(model, row, layout=layout)[1], loss_of(model, given, **PADDED)[1]
    apart = max(float((x - want[name]).abs().max()) for name, x in got.items())
    assert (apart > 1e-2) == joins


def test_packed_rows_without_a_tree_run_as_given() -> None:
    """A hook, other ends, sequences that begin late, and rows that flash attention would join."""
    given, row = batch(), packed(batch())
    others, late = ends_of(row), {**row, "position_ids": row["position_ids"] + 3}
    others["cu_seq_lens_k"][2] += 1
    hooked = model_of("llama", "sdpa")
    hook = hooked.model.layers[0].register_forward_hook(lambda *_: None)
    _, want = loss_of(hooked, given, **PADDED)
    joined = ["one packed row at a time", "use one packed row per call, or one row per sequence"]
    for model, case, words in (
        (hooked, row, ["packed rows run as given"]),
        (model_of("llama", "sdpa"), {**row, **others}, ["do not agree"]),
        (model_of("llama", "sdpa"), late, ["do not begin at position 0"]),
        (model_of("llama", "flash_attention_2"), packed(given, rows=2), joined),
    ):
        said = said_by(lambda model=model, case=case: loss_of(model, case))
        assert len(said) == len(words)
        assert all(x in text for x, text in zip(words, said, strict=True))
        assert loss_of(model, case)[0].metrics["tokens/computed"] == 1
    assert_same(loss_of(hooked, row)[1], want)
    hook.remove()
    out, got = loss_of(hooked, row, layout="trim")
    assert_same(got, want)
    assert out.metrics["tokens/computed"] == 1


def test_an_ordinary_id_is_none_of_several_end_tokens() -> None:
    """As in the configs of Gemma 3 and Llama 3."""
    model = tiny.text_model("llama", torch.float32)
    model.config.eos_token_id, model.config.pad_token_id, model.config.bos_token_id = [0, 1], 3, 2
    assert ordinary_id(model) == 4


# Layers with a state, one model of each kind

KINDS = ("qwen3_5_text", "kimi_linear", "bamba", "lfm2")


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_whatever_rows_share(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of two ids part anywhere, as if a chunk were one token and branches cost nothing."""
    monkeypatch.setattr(paths, "_CHUNK", 1)
    monkeypatch.setattr(paths, "cost", lambda *_: 0.0)
    model = every.build(kind).train()
    assert not said_by(lambda: assert_any_rows(model, counts=kind != "bamba"))


def test_an_argument_that_may_be_of_each_token_is_not_dropped() -> None:
    row = Paths(torch.arange(3)[None], torch.tensor([3]), torch.tensor([3]))
    x, name = torch.randn(1, 3, 2, 4), "torch_chunk_gated_delta_rule"
    inner, named = getattr(modeling_qwen3_5, name), {"g": x[..., 0], "beta": x[..., 0], "gate": x}
    with pytest.raises(paths.NotAlongPaths, match="'gate' that may be of each token"):
        paths._recur(Segments(row, varlen=False), inner, name, x, x, x, **named)


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
    assert_right(every.build(kind).train(), packed(large()), padded=large())


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


def test_the_trial_sees_a_wrong_state(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "torch_chunk_gated_delta_rule"
    plain = getattr(modeling_qwen3_5, name)

    def forgetful(*args: Any, initial_state: Tensor | None = None, **kwargs: Any) -> Any:
        zeros = None if initial_state is None else 0 * initial_state
        return plain(*args, initial_state=zeros, **kwargs)

    monkeypatch.setattr(modeling_qwen3_5, name, forgetful)
    assert_right(every.build("qwen3_5_text"), large(), "states are off by", "'trim' is used")


def test_a_recurrence_that_drops_its_last_state_later_gives_way(monkeypatch):
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


def test_many_rows_that_each_continue_the_previous_one_and_many_segments() -> None:
    cells = torch.arange(1100 * 1100).view(1100, -1)
    attended, features = cells[0] <= cells[0, :, None], cells[:1].expand_as(cells)[..., None]
    found = layout.tree(cells, attended, features, least=2)
    assert found.sources.shape == (1, 1650)  # every second row branches off
    ones = torch.ones(8000, dtype=torch.int64)
    calls, _ = paths.group(Paths(torch.arange(8000)[:, None], ones, ones), call_cells=1e12)
    assert len(calls) == 1


def test_rows_that_share_nothing_run_as_rows() -> None:
    """A recurrence computes as much of them as rows side by side, and tokens are gathered."""
    ids = torch.randint(3, 90, (4, 64), generator=torch.Generator().manual_seed(0))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    given |= {"advantages": torch.tensor([1.0, -1, 2, 3]), "completion_mask": torch.ones(4, 32)}
    model = every.build("qwen3_5_text")
    for share, expected in ((0, 4 * 63), (48, 48 + 4 * 15)):
        ids[:, :share] = ids[0, :share]
        out = assert_right(model, given)
        assert round(float(out.metrics["tokens/computed"]) * 4 * 64) == expected
    assert not said_by(lambda: loss_of(model, given))
