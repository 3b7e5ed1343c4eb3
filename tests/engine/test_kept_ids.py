"""Sets as samplers hand them over, positions without one, divided and adapted heads, and the loss over kept sets."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close

from grpo_kernels import (
    GRPOLoss,
    Head,
    KeptIds,
    LoRA,
    LossConfig,
    Scores,
    grpo_loss,
    linear_logprob,
    policy_loss_from_logps,
)
from grpo_kernels.base import agreement
from tests.support.flat import flat
from tests.support.kept_scenes import BIG, Scene, assert_near, by_full_logits, compute, scene
from tests.support.measure import count_flops
from tests.support.ranks import run_ranks

F64 = torch.float64


def as_csr(kept: Tensor) -> KeptIds:
    """The ids of a padded tensor without its padding."""
    counts = (kept >= 0).sum(-1)
    return KeptIds.from_counts(kept[kept >= 0], counts)


def without_some(s: Scene) -> tuple[Scene, Tensor]:
    """The scene with two sets that are empty and two that lack the sampled id; and where that is."""
    kept, where = s.kept.clone(), torch.zeros(2, 9, dtype=torch.bool)
    for i, (b, t) in enumerate(s.mask.nonzero()[1:5].tolist()):
        kept[b, t] = -1 if i % 2 else kept[b, t].masked_fill(kept[b, t] == s.ids[b, t], -1)
        where[b, t] = True
    return s.but(kept=kept), where


def whole_sets(s: Scene, where: Tensor) -> Scene:
    """The scene with the whole vocabulary as the set of the positions `where`."""
    vocab = s.weight.shape[0]
    every = torch.arange(vocab).expand(2, 9, vocab)
    padded = torch.nn.functional.pad(s.kept, (0, vocab - s.kept.shape[-1]), value=-1)
    return s.but(kept=torch.where(where[..., None], every, padded))


@pytest.mark.parametrize("dtype", [F64, torch.bfloat16])
def test_kept_ids_are_the_padded_ids(dtype: torch.dtype) -> None:
    s = scene("all", dtype)
    want = compute(s)
    for kept in (as_csr(s.kept), KeptIds.from_padded(s.kept), replace(as_csr(s.kept.int()))):
        got = compute(s.but(kept=kept))
        assert all(torch.equal(x, want[name]) for name, x in got.items())


def test_masked_positions_may_hold_garbage() -> None:
    s = scene()
    kept, want = as_csr(s.kept.masked_fill((s.mask == 0)[..., None], BIG)), compute(s)
    assert all(torch.equal(x, want[name]) for name, x in compute(s.but(kept=kept)).items())


SAMPLED = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0]])  # multi-turn: the third token of the first is a tool's
ROWS = [[[2, 5, 7], [4], [0, 3]], [[1, 6]]]  # vLLM: ascending; SGLang: by falling weight
WANT = [[[2, 5, 7], [4], [], [0, 3]], [[1, 6], [], [], []]]


def lists(kept: KeptIds) -> list[list[int]]:
    offsets = kept.offsets.tolist()
    return [kept.ids[start:stop].tolist() for start, stop in itertools.pairwise(offsets)]


def test_rows_of_vllm_and_sglang() -> None:
    assert lists(KeptIds.from_rows(ROWS, SAMPLED)) == [ids for rows in WANT for ids in rows]
    falling = [[[7, 2, 5], None, [3, 0]], [[6, 1]]]  # None: no set
    assert lists(KeptIds.from_rows(falling, SAMPLED.bool()))[:2] == [[7, 2, 5], []]
    assert lists(KeptIds.from_rows([], torch.zeros(0, 3))) == []
    with pytest.raises(ValueError, match=r"rows: expected 3 lists of ids for sequence 0, .*, got 2"):
        KeptIds.from_rows([ROWS[0][:2], ROWS[1]], SAMPLED)
    with pytest.raises(ValueError, match=r"mask: expected shape \(B, T\) with B = 1, as rows, got \(2, 4\)"):
        KeptIds.from_rows(ROWS[:1], SAMPLED)


def test_rows_of_tensors_and_arrays_and_of_large_ids() -> None:
    for kind in (torch.tensor, np.array, tuple):
        rows = [[kind(ids) for ids in row] for row in ROWS]
        assert lists(KeptIds.from_rows(rows, SAMPLED)) == [ids for rows in WANT for ids in rows]
    assert lists(KeptIds.from_rows([[[2**40, 3]]], torch.ones(1, 1))) == [[2**40, 3]]
    for wrong in ([0.5], torch.tensor([1.0]), [True], ["a"]):
        with pytest.raises(TypeError, match="rows: expected lists of integer ids, got one with"):
            KeptIds.from_rows([[wrong]], torch.ones(1, 1))


class Logprob(NamedTuple):
    """As vLLM's."""

    logprob: float


def test_the_log_probabilities_of_vllm_hold_the_sets() -> None:
    rows = [[{i: Logprob(-1.0) for i in ids} | {9: Logprob(-math.inf)} for ids in row] for row in ROWS]
    assert lists(KeptIds.from_logprobs(rows, SAMPLED)) == [ids for rows in WANT for ids in rows]
    plain = [[{i: x.logprob for i, x in token.items()} for token in row] for row in rows]
    assert lists(KeptIds.from_logprobs(plain, SAMPLED)) == [ids for rows in WANT for ids in rows]
    assert lists(KeptIds.from_logprobs([[None]], torch.ones(1, 1))) == [[]]


def test_counts_of_prime_rl_and_offsets_of_slime() -> None:
    flat = [i for rows in WANT for ids in rows for i in ids]
    counts = [[len(ids) for ids in rows] for rows in WANT]
    prime = KeptIds.from_counts(torch.tensor(flat, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32))
    slime = KeptIds(torch.tensor(flat), torch.tensor([0, 3, 4, 4, 6, 8, 8, 8, 8], dtype=torch.int32))
    for kept in (prime, slime):
        assert lists(kept) == [ids for rows in WANT for ids in rows]
        ids = torch.tensor([[5, 4, 0, 3], [6, 0, 0, 0]])
        hidden, weight = torch.randn(2, 4, 3), torch.randn(8, 3)
        logps = linear_logprob(hidden, weight, ids, kept_ids=kept, mask=SAMPLED).logps
        assert logps[0, 1] == 0 and bool((logps[SAMPLED == 0] == 0).all()) and bool((logps[0, [0, 3]] < 0).all())


IDS = torch.zeros(4, dtype=torch.long)
WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "floats": (KeptIds(torch.zeros(4), torch.arange(5)), TypeError, "kept_ids.ids: expected signed integer"),
    "float bounds": (KeptIds(IDS, torch.arange(5.0)), TypeError, "kept_ids.offsets: expected int32 or int64"),
    "too few": (KeptIds(IDS, torch.arange(4)), ValueError, r"kept_ids.offsets: expected shape .*= \(5,\), got \(4,\)"),
    "short": (KeptIds(IDS, torch.tensor([0, 1, 2, 3, 3])), ValueError, "from 0 to M = 4 that never fall, .*0 to 3"),
    "late": (KeptIds(IDS, torch.tensor([1, 1, 2, 3, 4])), ValueError, "from 0 to M = 4 that never fall, .*1 to 4"),
    "falling": (KeptIds(IDS, torch.tensor([0, 3, 2, 3, 4])), ValueError, "from 0 to M = 4 that never fall"),
    "two dimensions": (KeptIds(IDS.view(2, 2), torch.arange(5)), ValueError, r"kept_ids.ids: expected shape \(M,\)"),
    "a list": ([[1], [2], [3], [4]], TypeError, "kept_ids: expected a tensor, got list"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_sets(name: str) -> None:
    kept, kind, message = WRONG[name]
    hidden, weight = torch.randn(4, 3), torch.randn(5, 3)
    linear_logprob(hidden, weight, IDS, kept_ids=KeptIds(IDS, torch.arange(5)))
    with pytest.raises(kind, match=message):
        linear_logprob(hidden, weight, IDS, kept_ids=kept)


def test_wrong_options() -> None:
    s = scene()
    given = s.hidden, s.weight, s.ids
    for options, message in (
        ({"kept_ids": s.kept, "without_set": "all"}, "without_set: expected one of error, full"),
        ({"kept_ids": s.kept, "entropy": "set"}, "entropy: expected True, False or 'full'"),
        ({"kept_ids": s.kept, "engine": "one"}, "engine: expected one of"),
        ({"kept_ids": s.kept, "backend": "c"}, "backend: expected one of"),
        ({"kept_ids": s.kept, "extras": ("is_top1",)}, r"extras: expected none with kept_ids, got \('is_top1',\)"),
        ({"without_set": "full"}, "without_set: expected 'error', the default, without kept_ids"),
    ):
        with pytest.raises(ValueError, match=message):
            flat(linear_logprob)(*given, **options)
    with pytest.raises(TypeError, match="entropy: expected a bool without kept_ids, got 'full'"):
        linear_logprob(*given, entropy="full")
    with pytest.raises(ValueError, match=r"kept_ids: expected a set .* without_set='full' scores such positions"):
        compute(without_some(s)[0].but(kept=torch.full_like(s.kept, -1)))


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_without_a_set_it_is_the_whole_vocabulary(dtype: torch.dtype) -> None:
    s, where = without_some(scene("all", dtype))
    got = compute(s, without_set="full")
    error = {F64: 1e-13, torch.float32: 3e-6, torch.bfloat16: 2.0**-8}[dtype]
    assert_near(got, by_full_logits(whole_sets(s, where)), dtype, error)


@pytest.mark.parametrize("without_set", ["error", "full"])
def test_the_entropy_of_the_whole_vocabulary(without_set: str) -> None:
    s, where = scene("all", F64), torch.zeros(2, 9, dtype=torch.bool)
    if without_set == "full":
        s, where = without_some(s)
    nothing = torch.zeros(2, 9)
    of_sets = by_full_logits(whole_sets(s, where).but(up=(s.up[0], nothing)))
    of_all = by_full_logits(whole_sets(s, torch.ones_like(where)).but(up=(nothing, s.up[1])))
    want = {name: x + of_all[name] for name, x in of_sets.items() if name.startswith("d_")}
    want |= {"logps": of_sets["logps"], "entropies": of_all["entropies"]}
    assert_near(compute(s, without_set=without_set, entropy="full"), want, F64, 1e-13)


def test_without_the_entropy_the_log_probabilities_are_the_same() -> None:
    s = scene("all")
    given = {"hidden": s.hidden, "weight": s.weight, "ids": s.ids, "bias": s.bias, "mask": s.mask, **s.options}
    want = flat(linear_logprob)(**given, kept_ids=s.kept)
    for kept in (s.kept, as_csr(s.kept)):
        got = flat(linear_logprob)(**given, kept_ids=kept, entropy=False)
        assert torch.equal(got.logps, want.logps) and got.entropies is None


@pytest.mark.parametrize("own_input", [False, True])
def test_an_adapter_is_the_merged_head(own_input: bool) -> None:
    s = scene("all", F64)
    a, b = (torch.randn(shape, dtype=F64).requires_grad_() for shape in ((3, 12), (60, 3)))
    hidden, weight = s.hidden.clone().requires_grad_(), s.weight.clone().requires_grad_()
    given = torch.randn(2, 9, 12, dtype=F64) if own_input else None
    inputs = hidden if given is None else given.requires_grad_()
    leaves = [hidden, weight, a, b] + ([] if given is None else [given])

    def with_gradients(scores: Scores) -> list[Tensor]:
        found = [*scores.given.values()]
        return [*found, *torch.autograd.grad(found, leaves, [x.double() for x in s.up])]

    options = {"ids": s.ids, "kept_ids": s.kept, "mask": s.mask, "bias": s.bias, **s.options}
    got = with_gradients(flat(linear_logprob)(hidden, weight, lora=LoRA(a, b, 0.7, given), **options))
    wide = torch.cat([hidden, inputs], -1), torch.cat([weight, 0.7 * b @ a], -1)
    want = with_gradients(flat(linear_logprob)(*wide, **options))
    for x, y in zip(got, want, strict=True):
        assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_flops_of_an_adapter_and_of_positions_without_a_set() -> None:
    n, k, h, r, v = 32, 8, 16, 2, 500
    hidden, weight = torch.randn(n, h).requires_grad_(), torch.randn(v, h).requires_grad_()
    a, b = torch.randn(r, h).requires_grad_(), torch.randn(v, r).requires_grad_()
    kept = torch.rand(n, v).argsort(-1)[:, :k].contiguous()
    missing = torch.where((torch.arange(n) < 16)[:, None], -1, kept)

    def step(kept: Tensor, **options: Any) -> None:
        scores = flat(linear_logprob)(hidden, weight, kept[:, 0].clamp(0), kept_ids=kept, **options)
        scores.logps.sum().backward()

    assert count_flops(lambda: step(kept, lora=LoRA(a, b))) == 3 * (2 * n * k * (h + r) + 2 * n * r * h)
    of_sets, whole = 6 * 16 * k * h, 2 * 16 * v * h
    assert count_flops(lambda: step(missing, without_set="full")) == of_sets + 4 * whole
    expected = torch.ones(n)
    assert count_flops(lambda: step(missing, without_set="full", expected=expected)) == of_sets + 3 * whole


def test_rounded_logits() -> None:
    s = scene("temperature", torch.bfloat16)
    leaves = {name: x.detach().float().requires_grad_() for name, x in s.leaves().items()}
    z = (leaves["hidden"] @ leaves["weight"].T).bfloat16().double() / s.options["temperature"]
    inside = torch.zeros(2, 9, 61, dtype=torch.bool).scatter(-1, torch.where(s.kept < 0, 60, s.kept), True)[..., :60]
    want = z.masked_fill(~inside, -math.inf).log_softmax(-1).gather(-1, s.ids[..., None])[..., 0] * (s.mask != 0)
    given = {**s.leaves(), "ids": s.ids, "kept_ids": s.kept, "mask": s.mask, **s.options}
    got = flat(linear_logprob)(**given, logits_dtype="input").logps
    exact = flat(linear_logprob)(**given).logps
    assert_close(got.double(), want, rtol=0, atol=1e-5)
    assert (exact.double() - want).abs().max() > 1e-3


def divided(rank: int, world_size: int) -> None:
    """The same on every rank, and as in one process; the last rank has an id of few sets, or of none."""
    s, where = without_some(scene("all", F64))
    bounds = torch.linspace(0, 60, world_size + 1).int().tolist()
    none_here = torch.where(s.kept >= bounds[-2], -1, s.kept)
    none_here = torch.where(s.ids[..., None] == s.kept, s.kept, none_here)
    g = torch.Generator().manual_seed(1)
    lora = LoRA(*(torch.randn(shape, generator=g, dtype=F64) for shape in ((3, 12), (60, 3))), 0.7)
    with pytest.raises(ValueError, match="sequence_group: expected None with kept_ids"):
        grpo_loss(s.hidden, s.weight, s.ids, s.mask, ADVANTAGES, kept_ids=s.kept, sequence_group=dist.group.WORLD)
    for kept, options in (
        (s.kept, {"without_set": "full"}),
        (as_csr(none_here), {"without_set": "full", "entropy": "full"}),
        (none_here, {"without_set": "full", "lora": lora}),
    ):
        own, want = slice(bounds[rank], bounds[rank + 1]), compute(s.but(kept=kept), **options)
        some = {**options, "process_group": dist.group.WORLD}
        if "lora" in options:
            some["lora"] = replace(lora, b=lora.b[own])
        got = compute(s.but(kept=kept, weight=s.weight[own], bias=s.bias[own]), **some)
        for name, x in want.items():
            x = x[own] if name in ("d_weight", "d_bias") else x
            assert_close(got[name], x, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
        head = Head(s.weight[own], s.bias[own], process_group=dist.group.WORLD)
        advantages = torch.tensor([1.0, -1.0], dtype=F64)
        with patch.object(agreement, "gather_stacked", wraps=agreement.gather_stacked) as asked:
            out = grpo_loss(s.hidden, head, s.ids, s.mask, advantages, kept_ids=kept, without_set="full")
        assert asked.call_count == 1  # the ranks compare the sets and the loss at once
        assert out.metrics["kept/without_set"] == where.sum().double() / s.mask.sum()
    if world_size == 1:
        return
    other = torch.where(s.kept == s.ids[..., None], s.kept, rank)
    head = Head(s.weight[own], process_group=dist.group.WORLD)
    with pytest.raises(ValueError, match=r"process_group: .*kept_ids"):
        linear_logprob(s.hidden, head, s.ids, kept_ids=other, without_set="full", mask=s.mask)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_head_divided_among_ranks(world_size: int) -> None:
    run_ranks(divided, world_size)


ADVANTAGES = torch.tensor([1.0, -0.7], dtype=F64)


def loss_inputs(s: Scene, where: Tensor) -> dict[str, Any]:
    truth = by_full_logits(whole_sets(s, where))["logps"]
    noise = 0.2 * torch.randn(2, 9, dtype=F64, generator=torch.Generator().manual_seed(2))
    return {"old_per_token_logps": torch.where(truth == 0, truth, truth + noise), "num_items_in_batch": 11}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"importance_sampling_level": "sequence", "epsilon": 3e-4, "loss_type": "grpo"},
        {"loss_type": "luspo", "entropy_coef": 0.02, "top_entropy_quantile": 0.6},
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_the_loss_over_kept_sets(config: dict[str, Any], packed: bool) -> None:
    s, where = without_some(scene("all", F64))
    given = loss_inputs(s, where)
    if "loss_type" in config:
        del given["num_items_in_batch"]
    config = {"entropy_coef": 0.01, **config}
    oracle = by_full_logits(whole_sets(s, where))
    scores = [oracle[name].clone().requires_grad_() for name in ("logps", "entropies")]
    want = policy_loss_from_logps(*scores, s.mask, ADVANTAGES, config=LossConfig(**config), **given)
    up = torch.autograd.grad(want.loss, scores)
    through = by_full_logits(whole_sets(s, where).but(up=up))

    leaves, constants = s.leaves(), dict(s.options)
    temperature = constants.pop("temperature")
    kept, ids, mask, hidden = as_csr(s.kept), s.ids, s.mask, leaves["hidden"]
    if packed:
        hidden, ids, mask = hidden.flatten(0, 1), ids.flatten(), mask.flatten()
        given = {name: x.flatten() if isinstance(x, Tensor) else x for name, x in given.items()}
        given["cu_seqlens"] = torch.tensor([0, 9, 18])
    head = Head(leaves["weight"], leaves["bias"], **constants)
    loss_fn = GRPOLoss(**config, temperature=temperature)
    out = loss_fn(hidden, head, ids, mask, ADVANTAGES, kept_ids=kept, without_set="full", **given)
    out.loss.backward()
    assert (out.engine, out.backend) == ("kept_sets", "torch")
    assert_close(out.loss.detach(), want.loss.detach(), rtol=1e-12, atol=1e-12)
    for name, x in leaves.items():
        assert_close(x.grad, through[f"d_{name}"], rtol=1e-11, atol=1e-12)
    n, sizes = int(s.mask.sum()), (s.kept >= 0).sum(-1)
    assert out.metrics["kept/without_set"] == 4 / n
    assert out.metrics["kept/size"] == sizes[(s.mask != 0) & ~where].double().mean()
    assert_close(out.metrics["entropy"], want.metrics["entropy"])


def test_flops_of_the_loss() -> None:
    """One pass over sets and, where the loss allows it, over the whole vocabulary for positions without one."""
    n, k, h, v = 32, 8, 16, 500
    hidden, weight = torch.randn(1, n, h).requires_grad_(), torch.randn(v, h).requires_grad_()
    kept = torch.rand(1, n, v).argsort(-1)[..., :k].contiguous()
    kept = torch.where((torch.arange(n) < 16)[:, None], -1, kept)
    ids, old = kept[..., 0].clamp(0), torch.full((1, n), -2.0)

    def run(**config: Any) -> int:
        given = {"kept_ids": kept, "without_set": "full", "old_per_token_logps": old}
        out = grpo_loss(hidden, weight, ids, None, torch.ones(1), config=LossConfig(**config), **given)
        return count_flops(out.loss.backward)

    of_sets, whole = 4 * 16 * k * h, 2 * 16 * v * h
    assert run(epsilon=100.0, epsilon_high=100.0) == of_sets  # the whole vocabulary's was computed in the forward
    assert run(importance_sampling_level="sequence", epsilon=100.0, epsilon_high=100.0) == of_sets + 3 * whole


def test_refusals_of_the_loss() -> None:
    s = scene()
    given: dict[str, Any] = {"kept_ids": s.kept}
    args = s.hidden, s.weight, s.ids, s.mask, ADVANTAGES.float()
    grpo_loss(*args, **given)
    reference = s.hidden, s.weight
    of_whole = torch.full((2, 9), -1.0)
    for options, message in (
        ({"config": LossConfig(beta=0.1, kl_estimator="full"), "reference": reference}, "kl_estimator: .*kept_ids"),
        ({"old_per_token_logps": of_whole}, "old_per_token_logps: expected log-probabilities over the same kept sets"),
        (
            {"ref_per_token_logps": of_whole, "config": LossConfig(beta=0.1)},
            "ref_per_token_logps: expected log-probabilities over the same kept sets, .* got -1: make them",
        ),
        ({"without_set": None}, "without_set: expected one of"),
    ):
        with pytest.raises(ValueError, match=message):
            grpo_loss(*args, **given, **options)
    with pytest.raises(ValueError, match="without_set: expected 'error', the default, without kept_ids"):
        grpo_loss(*args, without_set="full")
