"""Sets as samplers hand them over; positions without one; what the loss over kept sets says, costs
and refuses."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from grpo_kernels import KeptIds, LoRA, LossConfig, grpo_loss, linear_logprob
from tests.support.case_builder import Case, make_case
from tests.support.flat import flat
from tests.support.measure import count_flops
from tests.support.reference_head import kept_lanes
from tests.support.run_case import arguments, config_of, packed, run, run_scores
from tests.support.score_cases import HEADS, scored

SOME_WITHOUT = {"others": {"without_set": "full"}}


def as_csr(kept: Tensor) -> KeptIds:
    """The ids of a padded tensor without its padding."""
    counts = (kept >= 0).sum(-1)
    return KeptIds.from_counts(kept[kept >= 0], counts)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_kept_ids_are_the_padded_ids(dtype: torch.dtype) -> None:
    """And with garbage in masked positions."""
    case = scored("handed over", t=9, kept=14, dtype=dtype, **HEADS["all"])
    want, padded = run_scores(case), case.kept_ids
    garbage = padded.masked_fill((case.completion_mask == 0)[..., None], 10**6)
    for kept in (
        as_csr(padded),
        KeptIds.from_padded(padded),
        replace(as_csr(padded.int())),
        as_csr(garbage),
    ):
        assert_close(run_scores(case.but(kept_ids=kept)), want, rtol=0, atol=0)


def test_without_the_entropy_the_log_probabilities_are_the_same() -> None:
    case = scored("no entropy", t=9, kept=14, **HEADS["all"])
    given = {
        "hidden": case.hidden,
        "weight": case.weight,
        "ids": case.completion_ids,
        "mask": case.completion_mask,
    }
    want = flat(linear_logprob)(**given, kept_ids=case.kept_ids)
    for kept in (case.kept_ids, as_csr(case.kept_ids)):
        got = flat(linear_logprob)(**given, kept_ids=kept, entropy=False)
        assert torch.equal(got.logps, want.logps) and got.entropies is None


# multi-turn: the third token of the first is a tool's
SAMPLED = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0]])
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
    with pytest.raises(
        ValueError, match=r"rows: expected 3 lists of ids for sequence 0, .*, got 2"
    ):
        KeptIds.from_rows([ROWS[0][:2], ROWS[1]], SAMPLED)
    with pytest.raises(
        ValueError, match=r"mask: expected shape \(B, T\) with B = 1, as rows, got \(2, 4\)"
    ):
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
    rows = [
        [{i: Logprob(-1.0) for i in ids} | {9: Logprob(-math.inf)} for ids in row] for row in ROWS
    ]
    assert lists(KeptIds.from_logprobs(rows, SAMPLED)) == [ids for rows in WANT for ids in rows]
    plain = [[{i: x.logprob for i, x in token.items()} for token in row] for row in rows]
    assert lists(KeptIds.from_logprobs(plain, SAMPLED)) == [ids for rows in WANT for ids in rows]
    assert lists(KeptIds.from_logprobs([[None]], torch.ones(1, 1))) == [[]]


def test_counts_of_prime_rl_and_offsets_of_slime() -> None:
    flat = [i for rows in WANT for ids in rows for i in ids]
    counts = [[len(ids) for ids in rows] for rows in WANT]
    prime = KeptIds.from_counts(
        torch.tensor(flat, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32)
    )
    slime = KeptIds(
        torch.tensor(flat), torch.tensor([0, 3, 4, 4, 6, 8, 8, 8, 8], dtype=torch.int32)
    )
    for kept in (prime, slime):
        assert lists(kept) == [ids for rows in WANT for ids in rows]
        ids = torch.tensor([[5, 4, 0, 3], [6, 0, 0, 0]])
        hidden, weight = torch.randn(2, 4, 3), torch.randn(8, 3)
        logps = linear_logprob(hidden, weight, ids, kept_ids=kept, mask=SAMPLED).logps
        assert (
            logps[0, 1] == 0
            and bool((logps[SAMPLED == 0] == 0).all())
            and bool((logps[0, [0, 3]] < 0).all())
        )


IDS = torch.zeros(4, dtype=torch.long)
WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "floats": (KeptIds(torch.zeros(4), torch.arange(5)), TypeError,
        "kept_ids.ids: expected signed integer"),
    "float bounds": (KeptIds(IDS, torch.arange(5.0)), TypeError,
        "kept_ids.offsets: expected int32 or int64"),
    "too few": (KeptIds(IDS, torch.arange(4)), ValueError,
        r"kept_ids.offsets: expected shape .*= \(5,\), got \(4,\)"),
    "short": (KeptIds(IDS, torch.tensor([0, 1, 2, 3, 3])), ValueError,
        "from 0 to M = 4 that never fall, .*0 to 3"),
    "late": (KeptIds(IDS, torch.tensor([1, 1, 2, 3, 4])), ValueError,
        "from 0 to M = 4 that never fall, .*1 to 4"),
    "falling": (KeptIds(IDS, torch.tensor([0, 3, 2, 3, 4])), ValueError,
        "from 0 to M = 4 that never fall"),
    "two dimensions": (KeptIds(IDS.view(2, 2), torch.arange(5)), ValueError,
        r"kept_ids.ids: expected shape \(M,\)"),
    "a list": ([[1], [2], [3], [4]], TypeError, "kept_ids: expected a tensor, got list"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_sets(name: str) -> None:
    kept, kind, message = WRONG[name]
    hidden, weight = torch.randn(4, 3), torch.randn(5, 3)
    linear_logprob(hidden, weight, IDS, kept_ids=KeptIds(IDS, torch.arange(5)))
    with pytest.raises(kind, match=message):
        linear_logprob(hidden, weight, IDS, kept_ids=kept)


def test_wrong_counts_and_a_tensor_without_dimensions() -> None:
    with pytest.raises(TypeError, match=r"counts: expected integers, got torch\.float32"):
        KeptIds.from_counts(IDS, torch.ones(4))
    with pytest.raises(ValueError, match=r"kept: expected shape \(\.\.\., K\), got \(\)"):
        KeptIds.from_padded(torch.tensor(3))


def test_wrong_options() -> None:
    case = scored("wrong", t=9, kept=14)
    given, kept = (case.hidden, case.weight, case.completion_ids), case.kept_ids
    for options, message in (
        ({"kept_ids": kept, "without_set": "all"}, "without_set: expected one of error, full"),
        ({"kept_ids": kept, "entropy": "set"}, "entropy: expected True, False or 'full'"),
        ({"kept_ids": kept, "engine": "one"}, "engine: expected one of"),
        ({"kept_ids": kept, "backend": "c"}, "backend: expected one of"),
        (
            {"kept_ids": kept, "extras": ("is_top1",)},
            r"extras: expected none with kept_ids, got \('is_top1',\)",
        ),
        ({"without_set": "full"}, "without_set: expected 'error', the default, without kept_ids"),
        (
            {"kept_ids": torch.full_like(kept, -1)},
            r"kept_ids: expected a set .* without_set='full' scores such positions",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            flat(linear_logprob)(*given, **options)
    with pytest.raises(TypeError, match="entropy: expected a bool without kept_ids, got 'full'"):
        linear_logprob(*given, entropy="full")


def test_flops_of_an_adapter_and_of_positions_without_a_set() -> None:
    n, k, h, r, v = 32, 8, 16, 2, 500
    hidden, weight = torch.randn(n, h).requires_grad_(), torch.randn(v, h).requires_grad_()
    a, b = torch.randn(r, h).requires_grad_(), torch.randn(v, r).requires_grad_()
    kept = torch.rand(n, v).argsort(-1)[:, :k].contiguous()
    missing = torch.where((torch.arange(n) < 16)[:, None], -1, kept)

    def step(kept: Tensor, **options: Any) -> None:
        scores = flat(linear_logprob)(hidden, weight, kept[:, 0].clamp(0), kept_ids=kept, **options)
        scores.logps.sum().backward()

    assert count_flops(lambda: step(kept, lora=LoRA(a, b))) == 3 * (
        2 * n * k * (h + r) + 2 * n * r * h
    )
    of_sets, whole = 6 * 16 * k * h, 2 * 16 * v * h
    assert count_flops(lambda: step(missing, without_set="full")) == of_sets + 4 * whole
    expected = torch.ones(n)
    assert (
        count_flops(lambda: step(missing, without_set="full", expected=expected))
        == of_sets + 3 * whole
    )


def without_one(case: Case) -> Tensor:
    """(B, T) bool: counted, and the set lacks the sampled id."""
    lanes = kept_lanes(case.kept_ids.flatten(0, 1), case.weight.shape[0])
    has = lanes.gather(1, case.completion_ids.reshape(-1, 1)).view(case.completion_ids.shape)
    return (case.completion_mask != 0) & ~has


def test_what_the_loss_says_of_the_sets_padded_and_packed() -> None:
    case = make_case("said", t=9, kept=14, bias=True, dtype=torch.float64, **SOME_WITHOUT)
    out, grads = run(case)
    assert (out.engine, out.backend) == ("kept_sets", "torch")
    counted, without = case.completion_mask != 0, without_one(case)
    sizes = (case.kept_ids >= 0).sum(-1)
    assert (
        without.any() and out.metrics["kept/without_set"] == without.sum().double() / counted.sum()
    )
    assert out.metrics["kept/size"] == sizes[counted & ~without].double().mean()

    given = arguments(case)
    call, stays = packed(case, given)
    call["kept_ids"] = as_csr(case.kept_ids[stays])
    same = flat(grpo_loss)(**call, config=config_of(case))
    same.loss.backward()
    assert_close(same.loss, out.loss, rtol=1e-12, atol=1e-12)
    for name in ("hidden", "weight", "bias"):
        assert_close(given[name].grad, grads[name], rtol=1e-11, atol=1e-12)


def test_flops_of_the_loss() -> None:
    """One pass over sets and, where the loss allows it, over the whole vocabulary for positions
    without one."""
    n, k, h, v = 32, 8, 16, 500
    hidden, weight = torch.randn(1, n, h).requires_grad_(), torch.randn(v, h).requires_grad_()
    kept = torch.rand(1, n, v).argsort(-1)[..., :k].contiguous()
    kept = torch.where((torch.arange(n) < 16)[:, None], -1, kept)
    ids, old = kept[..., 0].clamp(0), torch.full((1, n), -2.0)

    def run(**config: Any) -> int:
        given = {"kept_ids": kept, "without_set": "full", "old_per_token_logps": old}
        out = grpo_loss(
            hidden, weight, ids, None, torch.ones(1), config=LossConfig(**config), **given
        )
        return count_flops(out.loss.backward)

    of_sets, whole = 4 * 16 * k * h, 2 * 16 * v * h
    # the whole vocabulary's was computed in the forward
    assert run(epsilon=100.0, epsilon_high=100.0) == of_sets
    assert (
        run(importance_sampling_level="sequence", epsilon=100.0, epsilon_high=100.0)
        == of_sets + 3 * whole
    )


def test_refusals_of_the_loss() -> None:
    case = make_case("refused", t=9, kept=14, old=False)
    args = case.hidden, case.weight, case.completion_ids, case.completion_mask, case.advantages
    given: dict[str, Any] = {"kept_ids": case.kept_ids}
    grpo_loss(*args, **given)
    reference, of_whole = (case.hidden, case.weight), torch.full(case.completion_ids.shape, -1.0)
    for options, message in (
        (
            {"config": LossConfig(beta=0.1, kl_estimator="full"), "reference": reference},
            "kl_estimator: .*kept_ids",
        ),
        (
            {"old_per_token_logps": of_whole},
            "old_per_token_logps: expected log-probabilities over the same kept sets",
        ),
        (
            {"ref_per_token_logps": of_whole, "config": LossConfig(beta=0.1)},
            "ref_per_token_logps: expected log-probabilities over the same kept sets, .* got -1: "
            "make",
        ),
        ({"without_set": None}, "without_set: expected one of"),
    ):
        with pytest.raises(ValueError, match=message):
            grpo_loss(*args, **given, **options)
    with pytest.raises(
        ValueError, match="without_set: expected 'error', the default, without kept_ids"
    ):
        grpo_loss(*args, without_set="full")
