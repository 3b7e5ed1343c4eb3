"""Kept sets beyond the cases of `test_differential`: what samplers hand over, bits, what is read,
what it costs and takes, what is refused."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from grpo_kernels import KeptIds, LoRA, LossConfig, Run, grpo_loss, linear_logps, token_level
from tests.support.case_builder import Case, make_case
from tests.support.cases import HEADS, scored
from tests.support.flat import flat
from tests.support.measure import AllocationWatcher, count_flops
from tests.support.pretend_gpu import OnGPU, here, pretended
from tests.support.reference import kept_lanes
from tests.support.run_case import (
    arguments,
    check_scores,
    config_of,
    packed,
    run,
    run_scores,
    upstream_of,
)
from tests.support.tolerance import assert_scores

BIG = 10**6  # an id that does not exist


def case_of(name: str = "plain", **options: Any) -> Case:
    return scored(f"kept {name}", b=2, t=9, h=12, v=60, kept=14, **HEADS[name], **options)


def scores_of(case: Case, **options: Any) -> Any:
    """`linear_logps` with a plain head."""
    given = {"completion_ids": case.completion_ids, "kept_ids": case.kept_ids}
    given |= {"completion_mask": case.completion_mask}
    return linear_logps(case.hidden, case.weight, **given | options)


def as_csr(kept: Tensor) -> KeptIds:
    """The ids of a padded tensor without its padding."""
    return KeptIds.from_counts(kept[kept >= 0], (kept >= 0).sum(-1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_kept_ids_are_the_padded_ids(dtype: torch.dtype) -> None:
    """And with garbage in masked positions; without the entropy, log-probabilities are the same."""
    case = scored("handed over", t=9, kept=14, dtype=dtype, **HEADS["all"])
    want, padded = run_scores(case), case.kept_ids
    garbage = padded.masked_fill((case.completion_mask == 0)[..., None], BIG)
    for kept in (as_csr(padded), KeptIds.from_padded(padded), as_csr(garbage.int())):
        assert_close(run_scores(case.but(kept_ids=kept)), want, rtol=0, atol=0)
        got = scores_of(case, kept_ids=kept, entropy=False)
        assert torch.equal(got.logps, scores_of(case).logps) and got.entropies is None


# multi-turn: the third token of the first is a tool's
SAMPLED = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0]])
ROWS = [[[2, 5, 7], [4], [0, 3]], [[1, 6]]]  # vLLM: ascending; SGLang: by falling weight
WANT = [[2, 5, 7], [4], [], [0, 3], [1, 6], [], [], []]


def lists(kept: KeptIds) -> list[list[int]]:
    offsets = kept.offsets.tolist()
    return [kept.ids[start:stop].tolist() for start, stop in itertools.pairwise(offsets)]


def test_rows_of_vllm_and_sglang() -> None:
    for kind in (torch.tensor, np.array, tuple, list):
        rows = [[kind(ids) for ids in row] for row in ROWS]
        assert lists(KeptIds.from_rows(rows, SAMPLED)) == WANT
    falling = [[[7, 2, 5], None, [3, 0]], [[6, 1]]]  # None: no set
    assert lists(KeptIds.from_rows(falling, SAMPLED.bool()))[:2] == [[7, 2, 5], []]
    assert lists(KeptIds.from_rows([], torch.zeros(0, 3))) == []
    assert lists(KeptIds.from_rows([[[2**40, 3]]], torch.ones(1, 1))) == [[2**40, 3]]
    for rows, mask, message in (
        ([ROWS[0][:2], ROWS[1]], SAMPLED, "rows: expected 3 lists of ids for sequence 0, .* got 2"),
        (ROWS[:1], SAMPLED, r"completion_mask: expected shape \(B, T\) with B = 1, as rows, got"),
        *(([[wrong]], torch.ones(1, 1), "rows: expected lists of integer ids, got one with")
          for wrong in ([0.5], torch.tensor([1.0]), [True], ["a"])),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=f"^{message}"):
            KeptIds.from_rows(rows, mask)


def test_the_log_probabilities_of_vllm_hold_the_sets() -> None:
    plain = [[dict.fromkeys(ids, -1.0) | {9: -math.inf} for ids in row] for row in ROWS]
    vllms = [
        [{i: SimpleNamespace(logprob=x) for i, x in token.items()} for token in row]
        for row in plain
    ]
    for each in (vllms, plain):
        assert lists(KeptIds.from_logprobs(each, SAMPLED)) == WANT
    assert lists(KeptIds.from_logprobs([[None]], torch.ones(1, 1))) == [[]]


def test_counts_of_prime_rl_and_offsets_of_slime() -> None:
    flat_ids = [i for ids in WANT for i in ids]
    counts = torch.tensor([len(ids) for ids in WANT], dtype=torch.int32).view(2, 4)
    offsets = torch.tensor([0, 3, 4, 4, 6, 8, 8, 8, 8], dtype=torch.int32)
    ids = torch.tensor([[5, 4, 0, 3], [6, 0, 0, 0]])
    for kept in (
        KeptIds.from_counts(torch.tensor(flat_ids, dtype=torch.int32), counts),
        KeptIds(torch.tensor(flat_ids), offsets),
    ):
        assert lists(kept) == WANT
        hidden, weight = torch.randn(2, 4, 3), torch.randn(8, 3)
        logps = linear_logps(hidden, weight, ids, kept_ids=kept, completion_mask=SAMPLED).logps
        assert (logps == 0).tolist() == [[False, True, True, False], [False, True, True, True]]


def test_order_and_repetition_of_kept_ids_do_not_matter() -> None:
    case = case_of("all")
    kept, ids, want = case.kept_ids, case.completion_ids[..., None], run_scores(case)
    for other in (kept.flip(-1), kept.sort(-1).values):
        assert_close(run_scores(case.but(kept_ids=other)), want, rtol=0, atol=0)
    check_scores(case.but(kept_ids=torch.cat([kept.flip(-1), ids, kept.roll(3, -1)], dim=-1)))


def test_what_is_not_finite_stays_with_its_own_ids() -> None:
    """Padding has no row of its own in the head that garbage could reach."""
    case = case_of(mask="full")
    for where in ((case.kept_ids >= 0).sum(-1) > 1).nonzero().tolist():
        at = tuple(where)
        hidden = case.hidden.clone()
        hidden[at] = math.nan
        results, grads = run_scores(case.but(hidden=hidden))
        assert results["logps"].isnan().nonzero().tolist() == [where]
        reached = set(grads["weight"].isnan().any(1).nonzero()[:, 0].tolist())
        assert reached == set(case.kept_ids[at].tolist()) - {-1}


def test_an_id_alone_in_its_set_is_certain_and_costs_nothing() -> None:
    case, got = case_of(), []
    alone = torch.where(case.kept_ids == case.completion_ids[..., None], case.kept_ids, -1)
    assert count_flops(lambda: got.extend(run_scores(case.but(kept_ids=alone)))) == 0
    assert not any(x.any() for found in got for x in found.values() if x is not None)


def test_dtypes_of_autocast_and_of_tensors() -> None:
    """Autocast rounds the operands and nothing else; mixed ones are used as stored."""
    case = case_of("all")
    rounded = case.but(hidden=case.hidden.bfloat16().float(), weight=case.weight.bfloat16().float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run_scores(case)
    assert_scores(rounded, upstream_of(case), *got)
    for hidden, weight in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        check_scores(case_of().but(hidden=case.hidden.to(hidden), weight=case.weight.to(weight)))


@pytest.mark.parametrize(
    ("shape", "k"), [((0,), 3), ((2, 0), 3), ((0, 4), 0), ((2, 3), 0), ((2, 3), 4)]
)
def test_nothing_to_score_is_an_attached_zero(shape: tuple[int, ...], k: int) -> None:
    leaves = hidden, weight = torch.randn(*shape, 5), torch.randn(7, 5)
    for x in leaves:
        x.requires_grad_()
    ids, kept = torch.full(shape, BIG), torch.full((*shape, k), BIG)
    scores = linear_logps(hidden, weight, ids, kept_ids=kept, completion_mask=torch.zeros(shape))
    assert scores.logps.shape == scores.entropies.shape == shape
    (scores.logps.sum() + scores.entropies.sum()).backward()
    assert not hidden.grad.any() and not weight.grad.any()


def test_on_a_gpu_wrong_ids_make_their_position_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """To raise would wait for the device. The sizes of the sets are waited for, once, and which
    rows to go back for."""
    case = case_of()
    ids, kept = case.completion_ids.clone(), case.kept_ids.clone()
    ids[0, 3], kept[1, 4, 0] = BIG, 60
    kept[1, 1] = torch.where(kept[1, 1] == ids[1, 1], -1, kept[1, 1])
    kept[1, 1, 0] = ids[1, 1] ^ 1  # another
    with pretended(monkeypatch) as waits:
        leaves = (OnGPU(x.clone()).requires_grad_() for x in (case.hidden, case.weight))
        scores = linear_logps(*leaves, OnGPU(ids), kept_ids=OnGPU(kept))
        assert waits == ["tolist"]
    wrong = torch.zeros(2, 9, dtype=torch.bool)
    wrong[0, 3] = wrong[1, 1] = wrong[1, 4] = True
    for x in (scores.logps, scores.entropies):
        assert torch.equal(here(x).isnan(), wrong)
    want = scores_of(case, completion_mask=~wrong).logps
    assert_close(here(scores.logps).detach()[~wrong], want[~wrong])


SETS = torch.tensor([[[1, 5], [2, -1]], [[3, 3], [4, 6]]])


def with_set(*ids: int) -> Tensor:
    """`SETS`, with another one at (0, 1)."""
    sets = SETS.clone()
    sets[0, 1] = torch.tensor(ids)
    return sets


IDS, BOUNDS = torch.zeros(4, dtype=torch.long), torch.tensor([0, 1, 2, 3, 4])
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"completion_ids": torch.tensor([[1, 2], [9, 4]])}, ValueError,
        r"completion_ids: expected an id of .* kept set, got 9 at position \(1, 0\)"),
    ({"completion_ids": torch.tensor([[1, -1], [3, 4]])}, ValueError, "completion_ids: .*got -1"),
    ({"kept_ids": with_set(-1, -1)}, ValueError,
        r"kept_ids: expected a set .* got none at position \(0, 1\); on_missing_set='full'"),
    ({"kept_ids": with_set(2, 10)}, ValueError, r"kept_ids: .*, got 10 at position \(0, 1\)"),
    ({"kept_ids": with_set(2, -2)}, ValueError, "kept_ids: .* or -1, got -2 at"),
    ({"kept_ids": torch.zeros(2, 3, 4).long()}, ValueError, r"kept_ids: .*shape .*K\)"),
    ({"kept_ids": torch.tensor(1)}, ValueError, r"kept_ids: expected shape .*K\)"),
    ({"kept_ids": torch.zeros(2, 2, 4)}, TypeError, "kept_ids: expected signed integer"),
    ({"kept_ids": [[1]]}, TypeError, "kept_ids: expected a tensor, got list"),
    ({"kept_ids": KeptIds(torch.zeros(4), BOUNDS)}, TypeError, r"kept_ids\.ids: .* integer"),
    ({"kept_ids": KeptIds(IDS, BOUNDS * 1.0)}, TypeError, r"kept_ids\.offsets: expected int32"),
    ({"kept_ids": KeptIds(IDS, BOUNDS[:4])}, ValueError, r"kept_ids\.offsets: expected shape"),
    ({"kept_ids": KeptIds(IDS, BOUNDS.clamp(max=3))}, ValueError, ".*from 0 to M = 4, .*0 to 3"),
    ({"kept_ids": KeptIds(IDS, BOUNDS.clamp(min=1))}, ValueError, ".*from 0 to M = 4, .*1 to 4"),
    ({"kept_ids": KeptIds(IDS, BOUNDS[[0, 3, 2, 3, 4]])}, ValueError, ".*non-decreasing"),
    ({"kept_ids": KeptIds(IDS.view(2, 2), BOUNDS)}, ValueError, r"kept_ids\.ids: expected shape"),
    ({"on_missing_set": "all"}, ValueError, "on_missing_set: expected one of error, full"),
    ({"entropy": "set"}, ValueError, "entropy: expected True, False or 'full'"),
    ({"extras": ("is_top1",)}, ValueError, "extras: expected none with kept_ids"),
    ({"kept_ids": None, "on_missing_set": "full"}, ValueError,
        "on_missing_set: expected kept_ids with 'full', got none"),
    ({"kept_ids": None, "entropy": "full"}, TypeError, "entropy: expected a bool without kept_ids"),
]  # fmt: skip


def test_wrong_arguments() -> None:
    hidden, weight, ids = torch.randn(2, 2, 3), torch.randn(10, 3), torch.tensor([[1, 2], [3, 4]])
    good: dict[str, Any] = {"completion_ids": ids, "kept_ids": SETS}
    linear_logps(hidden, weight, **good)
    for changes, kind, message in WRONG:
        with pytest.raises(kind, match=f"^{message}"):
            linear_logps(hidden, weight, **{**good, **changes})
    with pytest.raises(TypeError, match=r"^counts: expected integers, got torch\.float32"):
        KeptIds.from_counts(IDS, torch.ones(4))
    with pytest.raises(ValueError, match=r"^kept: expected shape \(\.\.\., K\), got \(\)"):
        KeptIds.from_padded(torch.tensor(3))


def test_torch_does_the_rows_of_sets_whatever_the_backend() -> None:
    """Triton refuses float64; no row is scored over the whole vocabulary."""
    hidden, weight = torch.randn(2, 4, dtype=torch.float64), torch.randn(9, 4, dtype=torch.float64)
    ids, kept, run = torch.tensor([1, 2]), torch.tensor([[1, 5], [2, 0]]), Run(backend="triton")
    with pytest.raises(ValueError, match="float64"):
        linear_logps(hidden, weight, ids, run=run)
    found = linear_logps(hidden, weight, ids, kept_ids=kept, run=run)
    assert torch.equal(found.logps, linear_logps(hidden, weight, ids, kept_ids=kept).logps)


def test_what_the_loss_says_of_the_sets_padded_and_packed() -> None:
    options = {"bias": True, "dtype": torch.float64, "others": {"on_missing_set": "full"}}
    case = make_case("said", t=9, kept=14, **options)
    out, grads = run(case)
    assert (out.engine, out.backend) == ("kept_sets", "torch")
    lanes = kept_lanes(case.kept_ids.flatten(0, 1), case.weight.shape[0])
    has = lanes.gather(1, case.completion_ids.reshape(-1, 1)).view(case.completion_ids.shape)
    counted, sizes = case.completion_mask != 0, (case.kept_ids >= 0).sum(-1)
    without = counted & ~has
    assert without.any()
    assert out.metrics["kept/without_set"] == without.sum().double() / counted.sum()
    assert out.metrics["kept/size"] == sizes[counted & has].double().mean()

    given = arguments(case)
    call, stays = packed(case, given)
    call["kept_ids"] = as_csr(case.kept_ids[stays])
    same = flat(grpo_loss)(**call, config=config_of(case))
    same.loss.backward()
    assert_close(same.loss, out.loss, rtol=1e-12, atol=1e-12)
    for name in ("hidden", "weight", "bias"):
        assert_close(given[name].grad, grads[name], rtol=1e-11, atol=1e-12)


def test_refusals_of_the_loss() -> None:
    case = make_case("refused", t=9, kept=14, old=False)
    args = case.hidden, case.weight, case.completion_ids, case.completion_mask, case.advantages
    grpo_loss(*args, kept_ids=case.kept_ids)
    of_whole = torch.full(case.completion_ids.shape, -1.0)
    same = "expected log-probabilities over the same kept sets"
    for options, message in (
        ({"kl_estimator": "full", "reference": args[:2]}, "kl_estimator: .*kept_ids"),
        ({"old_per_token_logps": of_whole}, f"old_per_token_logps: {same}"),
        ({"ref_per_token_logps": of_whole}, f"ref_per_token_logps: {same}, .* got -1: compute"),
    ):
        beta = 0.0 if "old_per_token_logps" in options else 0.1
        with pytest.raises(ValueError, match=f"^{message}"):
            grpo_loss(*args, kept_ids=case.kept_ids, beta=beta, **options)


def sets_of(n: int, v: int, k: int) -> Tensor:
    return torch.rand(n, v).argsort(-1)[:, :k].contiguous()


def test_flops() -> None:
    """2NKH forward, and 2NKH for each of d hidden and d weight, of the positions that have any
    gradient."""
    n, h, v, k = 24, 16, 500, 8
    hidden, weight = torch.randn(n, h).requires_grad_(), torch.randn(v, h).requires_grad_()
    kept, up = sets_of(n, v, k), torch.ones(n)
    half = torch.where(torch.arange(n) < n // 2, 1.0, 0.0)
    for head, upstream, want in (
        (weight, None, 1), (weight, up, 3), (weight.detach(), up, 2), (weight, half, 2),
        (weight, 0 * up, 1),
    ):  # fmt: skip

        def step(head: Tensor = head, upstream: Tensor | None = upstream) -> None:
            run = Run(workspace_bytes=20_000)
            logps = linear_logps(hidden, head, kept[:, 0], kept_ids=kept, run=run).logps
            if upstream is not None:
                logps.backward(upstream)

        assert count_flops(step) == want * 2 * n * k * h


def test_flops_of_ragged_sets_go_with_their_sizes() -> None:
    """One large set does not make the others pay: at most twice what the ids kept would cost."""
    kept, sizes = sets_of(64, 500, 256), torch.randint(2, 6, (64,))
    sizes[7] = 256
    ragged = torch.where(torch.arange(256) < sizes[:, None], kept, -1)
    hidden, weight = torch.randn(64, 16), torch.randn(500, 16)
    flops = count_flops(lambda: linear_logps(hidden, weight, kept[:, 0], kept_ids=ragged))
    assert 1 <= flops / (2 * 16 * int(sizes.sum())) <= 2


def test_flops_of_an_adapter_and_of_positions_without_a_set() -> None:
    """One pass over sets and, where the loss allows it, over the whole vocabulary for positions
    without one."""
    n, k, h, r, v = 32, 8, 16, 2, 500
    hidden, weight = torch.randn(n, h).requires_grad_(), torch.randn(v, h).requires_grad_()
    lora = LoRA(torch.randn(r, h).requires_grad_(), torch.randn(v, r).requires_grad_())
    kept, ones = sets_of(n, v, k), torch.ones(n)
    missing = torch.where((torch.arange(n) < 16)[:, None], -1, kept)

    def step(kept: Tensor, **options: Any) -> None:
        flat(linear_logps)(
            hidden, weight, kept[:, 0].clamp(0), kept_ids=kept, **options
        ).logps.sum().backward()

    adapted = 3 * (2 * n * k * (h + r) + 2 * n * r * h)
    assert count_flops(lambda: step(kept, lora=lora)) == adapted
    of_sets, whole = 6 * 16 * k * h, 2 * 16 * v * h
    for options, passes in (({}, 4), ({"expected": ones}, 3)):
        found = count_flops(lambda given=options: step(missing, on_missing_set="full", **given))
        assert found == of_sets + passes * whole

    def backward(**config: Any) -> int:
        given = {"kept_ids": missing[None], "on_missing_set": "full"}
        given["old_per_token_logps"] = torch.full((1, n), -2.0)
        config = LossConfig(**config, epsilon=100.0, epsilon_high=100.0)
        ids = missing[None, :, 0].clamp(0)
        out = grpo_loss(hidden[None], weight, ids, None, torch.ones(1), config=config, **given)
        return count_flops(out.loss.backward)

    of_sets = 4 * 16 * k * h
    assert backward() == of_sets  # the whole vocabulary's was computed in the forward
    assert backward(importance_sampling_level="sequence") == of_sets + 3 * whole


def test_an_objective_declared_token_level_scores_positions_without_a_set() -> None:
    """Only those are asked for chunk by chunk, so their coefficients are not all coefficients."""
    kept, weight = sets_of(8, 60, 5), torch.randn(60, 16)
    kept[3] = -1
    given = {"kept_ids": kept[None], "on_missing_set": "full"}
    found = []
    for declare in (token_level, lambda x: x):
        hidden = torch.randn(1, 8, 16, generator=torch.manual_seed(1)).requires_grad_()
        objective = declare(lambda t: t.loss + 0.01 * t.logps.square())
        ids, advantages = kept[None, :, 0].clamp(0), torch.ones(1)
        out = grpo_loss(hidden, weight, ids, None, advantages, objective=objective, **given)
        out.loss.backward()
        found.append(hidden.grad)
    assert_close(*found)
    assert found[0][0, 3].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory(dtype: torch.dtype) -> None:
    """Within the workspace, beside 8 bytes an entry; of the vocabulary's size is nothing but d
    weight."""
    n, h, v, k, budget = 256, 32, 20_000, 40, 200_000
    kept = torch.randint(0, v, (n, k), dtype=torch.int32)
    hidden, weight = torch.randn(n, h).to(dtype).requires_grad_(), torch.randn(v, h).to(dtype)
    entries, rows, states = 8 * n * k, 60 * n, n * h * dtype.itemsize
    run = Run(workspace_bytes=budget)
    assert n * k * h * 4 > 6 * budget  # all of the gathered rows would not fit
    for trains in (False, True):
        weight = weight.detach().requires_grad_(trains)
        with AllocationWatcher() as watch:
            scores = linear_logps(hidden, weight, kept[:, 0], kept_ids=kept, run=run)
            assert watch.peak <= budget + entries + rows
            assert watch.largest < v * h / 8
            (scores.logps.sum() + scores.entropies.sum()).backward()
        head = v * h * (4 + (dtype.itemsize if dtype.itemsize == 2 else 0)) if trains else 0
        assert watch.peak <= budget + entries + rows + 2 * states + head
        assert watch.largest == v * h if trains else watch.largest < v * h / 8
    with torch.no_grad(), AllocationWatcher() as watch:
        linear_logps(hidden, weight, kept[:, 0], kept_ids=kept, run=run)
    assert watch.peak <= budget + rows  # nothing is kept for a backward that cannot come
