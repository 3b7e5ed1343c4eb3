"""Layers with a state along the paths of a tree: each token's result is that of its path alone."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
from transformers.models.bamba import modeling_bamba
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.qwen3_5 import modeling_qwen3_5

from grpo_kernels.body import states
from grpo_kernels.body.attention import Paths, Segments
from grpo_kernels.body.layout import _worth_sharing, tree
from grpo_kernels.transformers import completion_logprobs
from tests.support import all_architectures as every
from tests.support.prefix_trees import rows_of, seen
from tests.support.training_step import (
    PADDED,
    SCORED,
    assert_same,
    batch,
    distance,
    lengthened,
    loss_of,
    said_by,
)

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("forget_warnings")]

# one of each kind of layer
KINDS = ("qwen3_5_text", "kimi_linear", "bamba", "lfm2")
CPU = torch.device("cpu")


def trees(count: int) -> list[tuple[Paths, dict[int, list[int]]]]:
    """Random ones, and of each token the tokens that it sees, itself the last."""
    draw, found = random.Random(5), []
    for _ in range(count):
        sequences = [
            [draw.randrange(2) for _ in range(draw.randrange(1, 12))]
            for _ in range(draw.randrange(1, 9))
        ]
        layout = tree(rows_of(sequences), graph=True, multiple=draw.choice([1, 4]))
        assert layout.paths is not None
        found.append((layout.paths, seen(layout)))
    return found


@pytest.mark.parametrize("side_by_side", [False, True])
def test_runs_go_on_from_their_parents(side_by_side: bool) -> None:
    for paths, path_of in trees(30):
        runs = states.Runs.of(paths)
        done: dict[int, int] = {}  # the last token of each run so far -> its number
        for call in itertools.chain(*runs.calls(3, 2.0, side_by_side=side_by_side)):
            assert len(runs.depths[call].unique()) == 1
            widest, is_parent = int(runs.lengths[call].amax()), runs.is_parent
            for i in call.tolist():
                begin, length = int(runs.begins[i]), int(runs.lengths[i])
                path = path_of[begin + length - 1]
                assert path[-length:] == [*range(begin, begin + length)], "one after the other"
                before = path[: len(path) - length]
                assert int(runs.parents[i]) == (done[before[-1]] if before else -1)
                assert side_by_side or not is_parent[i] or length == widest, "no padding"
            done |= {int(runs.begins[i] + runs.lengths[i] - 1): i for i in call.tolist()}
        assert sorted(done.values()) == [*range(len(runs.begins))]
        assert int(runs.lengths.sum()) == len(path_of)


@pytest.mark.parametrize("side_by_side", [False, True])
def test_a_depth_reads_the_states_of_the_one_before_alone(side_by_side: bool) -> None:
    """Else time and memory would grow with the square of the depth."""
    paths = tree(rows_of([[1] * n for n in range(1, 20)]), graph=True).paths
    assert paths is not None
    depths, _ = states._calls(paths, 4, 1.0, side_by_side=side_by_side)
    assert [[parents.tolist() for _, _, parents, _ in calls] for calls in depths[1:]] == [
        [[0]]
    ] * 18


@pytest.mark.parametrize("taps", [2, 4])
def test_a_convolution_sees_the_path(taps: int) -> None:
    for paths, path_of in trees(20):
        states_ = torch.randn(1, 3, len(path_of), dtype=torch.float64).requires_grad_()
        weight = torch.randn(3, taps, dtype=torch.float64)
        inner = modeling_qwen3_5.causal_conv1d_fn
        own = torch.stack([inner(states_[:, :, p], weight)[0, :, -1] for p in path_of.values()], 1)
        got = states._convolve(inner, Segments(paths, varlen=False), states_, weight)
        assert_equal(got[0], own, states_)


def assert_equal(got: Tensor, want: Tensor, *leaves: Tensor) -> None:
    """Also the gradients, for a random cotangent."""
    torch.testing.assert_close(got, want)
    cotangent = torch.randn_like(want)
    found = (torch.autograd.grad(x, leaves, cotangent, retain_graph=True) for x in (got, want))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def varlen(inner: Callable[..., Any]) -> Callable[..., Any]:
    """``fla.ops``'s contract for `inner`: sequences in one row, a state (N, H, K, V) each."""

    def function(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *,
        cu_seqlens: Tensor | None = None, initial_state: Tensor | None = None,
        output_final_state: bool = False, **others: Any,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        named = {"output_final_state": output_final_state, **others}
        if cu_seqlens is None:
            return inner(q, k, v, g=g, beta=beta, initial_state=initial_state, **named)
        assert (
            q.shape[0] == 1
            and cu_seqlens.dtype == torch.int64
            and not others.keys() - {"use_qk_l2norm_in_kernel"}
        )
        assert initial_state is None or initial_state.shape[0] == len(cu_seqlens) - 1
        outputs, lasts = [], []
        for i, (begin, end) in enumerate(itertools.pairwise(cu_seqlens)):
            of_tokens = (x[:, begin:end] for x in (q, k, v, g, beta))
            first = None if initial_state is None else initial_state[i : i + 1]
            *placed, decay, rate = of_tokens
            output, last = inner(*placed, g=decay, beta=rate, initial_state=first, **named)
            outputs.append(output)
            lasts.append(last)
        return torch.cat(outputs, 1), torch.cat(lasts) if output_final_state else None

    return function


def recurrences() -> dict[str, tuple[Callable[..., Any], states.Recurrence, bool]]:
    """Function, how it is called, whether its decay is of each channel."""
    delta = modeling_qwen3_5.torch_chunk_gated_delta_rule
    kimi = modeling_kimi_linear.chunk_kimi_delta_attention
    known = states.RECURRENCES
    return {
        "delta": (delta, known["torch_chunk_gated_delta_rule"], False),
        "delta, side by side": (varlen(delta), known["torch_chunk_gated_delta_rule"], False),
        "kimi": (kimi, known["chunk_kimi_delta_attention"], True),
        "mamba2": (modeling_bamba.mamba2_chunk_scan, known["mamba2_chunk_scan"], False),
    }


@pytest.mark.parametrize("name", recurrences())
def test_a_recurrence_sees_the_path(name: str) -> None:
    inner, recurrence, by_channel = recurrences()[name]
    for paths, path_of in trees(5):
        n = len(path_of)
        x = [torch.randn(1, n, 2, 4).requires_grad_() for _ in range(3)]
        rates = (-torch.rand(1, n, 2, *((4,) if by_channel else ()))).requires_grad_()
        last = torch.rand(1, n, 2).requires_grad_()
        if name == "mamba2":
            args, kwargs = (x[0], rates, -torch.rand(2), x[1], x[2]), {"chunk_size": 4}
            kwargs |= {"dt_softplus": True, "return_final_states": False, "initial_states": None}
            leaves = [*x, rates]
        else:
            args, kwargs = tuple(x), {"g": rates, "beta": last, "use_qk_l2norm_in_kernel": True}
            kwargs |= {"output_final_state": False, "initial_state": None}
            leaves = [*x, rates, last]

        def of_path(path: list[int], args: Any = args, kwargs: Any = kwargs) -> Tensor:
            places = {**dict(enumerate(args)), **kwargs}
            places |= {key: places[key][:, path] for key in recurrence.of_tokens}
            found = inner(
                *(places.pop(i) for i in range(len(args))), **{str(k): v for k, v in places.items()}
            )
            return (found[0] if isinstance(found, tuple) else found)[0, -1]

        want = torch.stack([of_path(path) for path in path_of.values()])
        segments = Segments(paths, varlen=False)
        got = states._recur(inner, recurrence, segments, args, kwargs)
        got = got[0] if isinstance(got, tuple) else got
        assert segments.chunk == kwargs.get("chunk_size", 64)
        assert states._side_by_side.get(inner, False) == (name == "delta, side by side") or n == 1
        assert_equal(got[0], want, *leaves)


def test_an_argument_that_may_be_of_each_token_is_not_dropped() -> None:
    inner, recurrence, _ = recurrences()["delta"]
    paths = tree(rows_of([[1, 2, 3]]), graph=True).paths
    assert paths is not None
    x = torch.randn(1, 3, 2, 4)
    named = {"g": x[..., 0], "beta": x[..., 0], "gate": x}
    with pytest.raises(states.NotAlongPaths, match="'gate' that may be of each token"):
        states._recur(inner, recurrence, Segments(paths, varlen=False), (x, x, x), named)


@pytest.mark.parametrize(
    ("shared", "least", "expected"),
    [
        ([0, 100, 100, 100], 32, [0, 100, 100, 100]),  # a group
        ([0, 103, 100, 101, 100], 32, [0, 100, 100, 100, 100]),  # completions that begin alike
        ([0, 140, 100], 32, [0, 140, 100]),
        ([0, 20, 20, 20], 32, [0, 20, 20, 20]),  # sixty tokens
        ([0, 20, 0, 20], 32, [0, 0, 0, 0]),
        ([0, 20, 30, 20], 32, [0, 20, 20, 20]),
        ([0, 60, 40, 20], 32, [0, 40, 40, 0]),
    ],
)
def test_branches_that_save_little_are_none(
    shared: list[int], least: int, expected: list[int]
) -> None:
    assert _worth_sharing(shared, least) == expected


def test_a_tree_without_small_branches_still_has_each_row() -> None:
    draw = random.Random(7)
    for _ in range(30):
        sequences = [
            [draw.randrange(2) for _ in range(draw.randrange(1, 12))]
            for _ in range(draw.randrange(1, 9))
        ]
        layout = tree(rows_of(sequences), graph=True, least=draw.randrange(1, 9))
        assert layout.paths is not None
        found = seen(layout)
        token = dict(zip(layout.cells.tolist(), layout.tokens.tolist(), strict=True))
        assert layout.depths[0].tolist() == [len(found[i]) - 1 for i in range(len(found))]
        ids = {}
        for i, sequence in enumerate(sequences):
            path = [token[i * 12 + column] for column in range(len(sequence))]
            assert found[path[-1]] == path
            ids |= {i * 12 + column: x for column, x in enumerate(sequence)}
        for tokens in found.values():
            values = [ids[layout.sources[0, i].item()] for i in tokens]
            assert values in [x[: len(values)] for x in sequences]


def large() -> dict[str, Tensor]:
    """Prompts of 4 and 8 tokens, completions of 8 to 80."""
    return lengthened(batch(), 8)


@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_gets_the_padded_numbers(kind: str, reentrant: bool | None) -> None:
    """With and without activation checkpointing, which recomputes layers after the call."""
    model, given = every.build(kind).train(), large()
    want, gradients = loss_of(model, given, **PADDED)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    for _ in range(2):
        assert not said_by(lambda: loss_of(model, given))
        out, got = loss_of(model, given)
        torch.testing.assert_close(out.loss, want.loss, rtol=2e-6, atol=2e-6)
        assert_same(got, gradients)
        assert out.metrics["tokens/computed"] < 0.6


@pytest.mark.parametrize("kind", KINDS)
def test_padding_within_a_sequence_counts(kind: str) -> None:
    """A convolution has it among its taps, and in a recurrence it decays the state."""
    model, given = every.build(kind), large()
    holes = given["attention_mask"] = given["attention_mask"].clone()
    holes[0, 5] = holes[3, 40] = 0
    given["completion_mask"] = given["completion_mask"] * holes[:, 8:] * holes[:, 7:-1]
    want, gradients = loss_of(model, given, **PADDED)
    said = said_by(lambda: loss_of(model, given))
    assert len(said) == 1 and "padding within" in said[0] and "'trim' serves" in said[0]
    out, got = loss_of(model, given)
    torch.testing.assert_close(out.loss, want.loss, rtol=2e-6, atol=2e-6)
    assert_same(got, gradients)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_keep_states_apart(kind: str) -> None:
    """transformers' own functions would carry a state into the next sequence."""
    model, given = every.build(kind).train(), large()
    mask, counted = given["attention_mask"] != 0, torch.zeros_like(given["attention_mask"])
    counted[:, 8:] = given["completion_mask"]
    lengths = mask.sum(1).tolist()
    packed = {name: x[mask][None] for name, x in (("ids", given["input_ids"]), ("mask", counted))}
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    ids, attended, completion = (given[name] for name in SCORED)
    want = completion_logprobs(model, ids, attended, completion, layout="padded").logps
    got = completion_logprobs(
        model, packed["ids"], None, packed["mask"], position_ids=positions
    ).logps
    want, got = want[completion != 0], got[packed["mask"] != 0]
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    parameters, cotangent = [*model.parameters()], torch.randn_like(want)
    one, other = (
        torch.autograd.grad(x, parameters, cotangent, materialize_grads=True, allow_unused=True)
        for x in (got, want)
    )
    assert_same(dict(enumerate(one)), dict(enumerate(other)))  # type: ignore[arg-type]


def test_padding_that_a_bias_makes_other_than_zero() -> None:
    """A convolution reads it in the first tokens of a row, and a long batch has few of those."""
    model, draw = every.build("lfm2", conv_bias=True), torch.Generator().manual_seed(0)
    ids, mask = torch.randint(3, 90, (3, 200), generator=draw), torch.ones(3, 200).long()
    ids[1, :100], mask[2, :119], mask[2, 124:] = ids[0, :100], 0, 0
    given = {"input_ids": ids, "attention_mask": mask, "completion_mask": mask[:, 120:]}
    given["advantages"] = torch.tensor([0.01, -0.01, 1.0])
    _, gradients = loss_of(model, given, **PADDED)
    said = said_by(lambda: assert_same(loss_of(model, given)[1], gradients))
    assert len(said) == 1 and "states are off by" in said[0] and "'padded' serves" in said[0]


def conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, seq_idx: Any = None,
    initial_states: Any = None, return_final_states: bool = False, final_states_out: Any = None,
    activation: str | None = None,
) -> Tensor:  # fmt: skip
    """``causal_conv1d.causal_conv1d_fn``."""
    assert seq_idx is None and initial_states is None and not return_final_states
    assert x.stride(2) == 1 or (x.stride(1) == 1 and x.stride(2) % 8 == x.stride(0) % 8 == 0)
    assert activation in (None, "silu", "swish")
    out = torch.nn.functional.conv1d(
        x, weight[:, None], bias, padding=weight.shape[1] - 1, groups=x.shape[1]
    )[..., : x.shape[2]]
    return out if activation is None else torch.nn.functional.silu(out)


def dispatched(function: Callable[..., Any], *names: str) -> Callable[..., Any]:
    """As transformers calls a kernel: with the arguments that it takes."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{key: x for key, x in kwargs.items() if key in names})

    return wrapped


def test_kernels_of_other_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls of FLA's for a group, whatever its completions' lengths."""
    calls: list[int] = []
    rule = varlen(modeling_qwen3_5.torch_chunk_gated_delta_rule)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[0].shape[1])
        return rule(*args, **kwargs)

    taken = ("g", "beta", "cu_seqlens", "initial_state", "output_final_state")
    rules = dispatched(counted, *taken, "use_qk_l2norm_in_kernel")
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", rules)
    monkeypatch.setattr(
        modeling_qwen3_5, "causal_conv1d_fn", dispatched(conv1d, "bias", "activation")
    )
    model = every.build("qwen3_5_text").train()
    given = {name: x[3:] for name, x in large().items()}  # a group with a prompt of eight tokens
    given["input_ids"] = torch.cat(
        [given["input_ids"][:1, :1].expand(3, 40), given["input_ids"]], 1
    )
    given["attention_mask"] = torch.nn.functional.pad(given["attention_mask"], (40, 0), value=1)
    given["advantages"] = torch.tensor([1.0, -1.0, 0.5])
    _, gradients = loss_of(model, given, **PADDED)
    loss_of(model, given)
    calls.clear()
    out, got = loss_of(model, given)
    assert_same(got, gradients)
    assert out.metrics["tokens/computed"] < 0.6
    layers = model.config.layer_types.count("linear_attention")
    assert calls == [48, sum(calls) // layers - 48] * layers


@pytest.mark.parametrize("kind", KINDS)
def test_sixteen_bits_and_autocast(kind: str) -> None:
    """As near to fp32 as the padded forward is."""
    given = large()
    _, exact = loss_of(every.build(kind), given, **PADDED)
    for dtype, autocast in ((torch.bfloat16, False), (torch.float32, True)):
        model, errors = every.build(kind).to(dtype), {}
        for name, options in {"padded": PADDED, "tree": {}}.items():
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out, got = loss_of(model, given, **options)
            idle = {key: torch.zeros_like(x) for key, x in exact.items()}
            errors[name] = distance({**idle, **got}, exact)
        # rounding of 8 bits, in products of decays, may be more than a trial allows
        assert out.metrics["tokens/computed"] < 0.6 or (kind == "kimi_linear" and autocast)
        assert errors["tree"] <= 1.5 * errors["padded"], errors


def test_adapters_on_these_layers() -> None:
    peft = pytest.importorskip("peft")
    model = every.build("qwen3_5_text")
    places = ["in_proj_qkv", "in_proj_a", "out_proj"]
    model = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=places, init_lora_weights=False)
    )
    _, gradients = loss_of(model, large(), **PADDED)
    out, got = loss_of(model, large())
    assert_same(got, gradients)
    assert gradients and out.metrics["tokens/computed"] < 0.6


@pytest.mark.slow  # half a minute of torch.compile
def test_compiled_layers() -> None:
    model = every.build("qwen3_5_text").train()
    _, gradients = loss_of(model, large(), **PADDED)
    torch._dynamo.reset()
    for layer in model.model.layers:
        layer.compile(backend="eager", dynamic=True)
    out, got = loss_of(model, large())
    assert_same(got, gradients)
    # widths are multiples of 64
    assert (
        out.metrics["tokens/computed"]
        < loss_of(model, large(), layout="trim")[0].metrics["tokens/computed"]
    )
    torch._dynamo.reset()


def from_zeros(inner: Callable[..., Any], recurrence: Any, segments: Any, *given: Any) -> Any:
    def forgetful(*args: Any, **kwargs: Any) -> Any:
        first = kwargs.get("initial_state")
        return inner(*args, **{**kwargs, "initial_state": None if first is None else 0 * first})

    return RECUR(forgetful, recurrence, segments, *given)


def without_context(inner: Any, segments: Any, states_: Tensor, weight: Tensor, *a: Any, **k: Any):
    segments.consumed += 1
    return inner(states_, weight, *a, **k)


RECUR = states._recur


@pytest.mark.parametrize(
    ("name", "wrong"), [("_recur", from_zeros), ("_convolve", without_context)]
)
def test_the_trial_sees_a_wrong_state(
    name: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, name, wrong)
    model, given = every.build("qwen3_5_text"), large()
    _, gradients = loss_of(model, given, **PADDED)
    said = said_by(lambda: assert_same(loss_of(model, given)[1], gradients))
    assert len(said) == 1 and "states are off by" in said[0] and "'trim' serves" in said[0]


def test_a_layer_that_drops_its_arguments_later_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = every.build("qwen3_5_text"), large()
    _, gradients = loss_of(model, given, **PADDED)
    loss_of(model, given)
    ours = modeling_qwen3_5.causal_conv1d_fn

    def dropping(*args: Any, segments: Any = None, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    dropping._takes_segments = True  # type: ignore[attr-defined]  # so that it is not wrapped again
    monkeypatch.setattr(modeling_qwen3_5, "causal_conv1d_fn", dropping)
    said = said_by(lambda: assert_same(loss_of(model, given)[1], gradients))
    assert len(said) == 1 and "in its first forward" in said[0] and "'trim' serves" in said[0]


def test_layers_that_are_not_known_are_refused_by_name() -> None:
    model, given = every.build("jamba"), large()
    _, gradients = loss_of(model, given, **PADDED)
    said = said_by(lambda: assert_same(loss_of(model, given)[1], gradients))
    assert len(said) == 1 and "JambaMambaMixer has a state that is not known" in said[0]
    assert "mamba_selective_scan" in said[0] and "'trim' serves" in said[0]


def test_rows_that_share_nothing_run_as_rows() -> None:
    """A recurrence computes as much of them as rows side by side, and tokens are gathered."""
    model = every.build("qwen3_5_text")
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 90, (4, 64), generator=draw)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    given |= {"completion_mask": torch.ones(4, 32), "advantages": torch.tensor([1.0, -1, 2, 3])}
    _, gradients = loss_of(model, given, **PADDED)
    for share, expected in ((0, 4 * 63), (48, 48 + 4 * 15)):
        ids[:, :share] = ids[0, :share]
        _, gradients = loss_of(model, given, **PADDED)
        out, got = loss_of(model, given)
        assert_same(got, gradients)
        assert round(float(out.metrics["tokens/computed"]) * 4 * 64) == expected
    assert not said_by(lambda: loss_of(model, given))
