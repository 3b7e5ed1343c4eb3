"""Estimators against loops over lists and TRL's own lines; their properties, groups that span
ranks, and wrong arguments."""

from __future__ import annotations

import inspect
import math
import random
import warnings
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo_kernels import advantages as adv
from tests.support.pretend_gpu import OnGPU, here, pretended
from tests.support.ranks import run_ranks

NAN, INF, FLOAT = math.nan, math.inf, torch.float64
STDS = pytest.mark.parametrize("std", ["sample", "population"])
SCALES = pytest.mark.parametrize("scale", ["group", "batch", "mean", "none"])
AGGREGATIONS = pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])


def close(found, expected, tolerance=1e-12):
    expected = torch.as_tensor(expected, dtype=FLOAT)
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


def random_rewards(seed, rows, columns=None, nan_share=0.2, dtype=torch.float32):
    """Rewards of a few levels, as verifiers give them, some unscored."""
    gen = torch.Generator().manual_seed(seed)
    shape = (rows,) if columns is None else (rows, columns)
    rewards = torch.randint(-2, 4, shape, generator=gen).to(dtype) * 0.37
    return rewards.masked_fill(torch.rand(shape, generator=gen) < nan_share, NAN)


def random_tokens(seed, rows=5, length=11):
    """Values and a mask with holes; the first row counts nothing, the second everything."""
    gen = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, length, generator=gen) < 0.6
    mask[0], mask[1] = False, True
    return torch.randn(rows, length, generator=gen, dtype=FLOAT), mask


def mean_std(values, correction):
    """Over the non-NaN values; the std of one value is NaN with a correction of 1."""
    scored = [v for v in values if not math.isnan(v)]
    if not scored:
        return NAN, NAN
    mean = math.fsum(scored) / len(scored)
    if len(scored) == correction:
        return mean, NAN
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in scored) / (len(scored) - correction))


def weighted(row, weights):
    scored = [w * r for w, r in zip(weights, row, strict=True) if not math.isnan(r)]
    return math.fsum(scored) if scored else NAN


def z_scores(values, ids, correction, epsilon, over="group"):
    out = []
    for value, own in zip(values, ids, strict=True):
        group = [v for v, i in zip(values, ids, strict=True) if i == own]
        mean, spread = mean_std(group, correction)
        spread = {"batch": mean_std(values, correction)[1], "mean": mean}.get(over, spread)
        if over == "none":
            out.append(value - mean)
        elif over == "mean" and not mean > 0:
            out.append(0.0)
        else:
            out.append((value - mean) / (spread + epsilon))
    return out


def loop_group(table, ids, weights, *, scale_rewards, std, multi_objective_aggregation, eps):
    correction = 1 if std == "sample" else 0
    if multi_objective_aggregation == "sum_then_normalize":
        totals = [weighted(row, weights) for row in table]
        result = z_scores(totals, ids, correction, eps, scale_rewards)
    else:
        columns = [z_scores(x, ids, correction, eps) for x in zip(*table, strict=True)]
        totals = []
        for row, given in zip(zip(*columns, strict=True), table, strict=True):
            known = [w * z for w, z in zip(weights, row, strict=True) if z == z]
            totals.append(NAN if all(math.isnan(r) for r in given) else math.fsum(known))
        mean, spread = mean_std(totals, correction)
        result = [(t - mean) / (spread + eps) for t in totals]
    return [0.0 if math.isnan(a) else a for a in result]


def loop_process(rewards, ends, ids, mask, correction, epsilon):
    out = [[0.0] * len(row) for row in mask]
    for b, own in enumerate(ids):
        pool = [r for row, i in zip(rewards, ids, strict=True) if i == own for r in row]
        mean, spread = mean_std(pool, correction)
        for t in range(len(mask[b])):
            later = [r for r, e in zip(rewards[b], ends[b], strict=True) if e >= t and r == r]
            total = math.fsum((r - mean) / (spread + epsilon) for r in later)
            out[b][t] = total if mask[b][t] and total == total else 0.0
    return out


def loop_gae(rewards, values, mask, gamma, lam, last):
    advantages = [[0.0] * len(row) for row in mask]
    returns = [[0.0] * len(row) for row in mask]
    for b, row in enumerate(mask):
        following, running = last[b], 0.0
        for t in reversed([t for t, counts in enumerate(row) if counts]):
            running = rewards[b][t] + gamma * following - values[b][t] + gamma * lam * running
            following = values[b][t]
            advantages[b][t], returns[b][t] = running, running + following
    return advantages, returns


def loop_reinforce(totals, mask, kl, beta, gamma):
    """Returns before whitening; None where a position is left out."""
    out = [[None] * len(row) for row in mask]
    for b, row in enumerate(mask):
        running, reward = 0.0, totals[b]
        if math.isnan(reward):
            continue
        for t in reversed([t for t, counts in enumerate(row) if counts]):
            running = reward - beta * kl[b][t] + gamma * running
            out[b][t], reward = running, 0.0
    return out


@AGGREGATIONS
@SCALES
@STDS
def test_group_advantages_against_loops(scale, std, aggregation):
    rng = random.Random(0)
    for seed in range(12):
        rows, columns = rng.randint(2, 14), rng.choice([None, 1, 3])
        dtype = rng.choice([torch.float32, FLOAT])
        rewards = random_rewards(seed, rows, columns, dtype=dtype)
        ids = [rng.choice([-7, 0, 3, 10**12]) for _ in range(rows)]
        weights = [rng.uniform(-1, 2) for _ in range(columns)] if columns else None
        epsilon = rng.choice([1e-4, 0.1])
        options = {"scale_rewards": scale, "std": std, "eps": epsilon}
        options["multi_objective_aggregation"] = aggregation
        result = adv.group_advantages(rewards, group_ids=ids, reward_weights=weights, **options)
        table = rewards.double().reshape(rows, -1).tolist()
        expected = loop_group(table, ids, weights or [1.0], **options)
        close(result, expected, 1e-7)  # rounded once, from float64
        assert result.dtype == rewards.dtype


def test_defaults_are_trls():
    """Sum of the columns, sample std of the group plus 1e-4."""
    rewards = random_rewards(0, 12, 2, 0.4)
    options = {"scale_rewards": "group", "std": "sample", "eps": 1e-4}
    options["multi_objective_aggregation"] = "sum_then_normalize"
    expected = adv.group_advantages(rewards, 4, reward_weights=[1.0, 1.0], **options)
    assert torch.equal(adv.group_advantages(rewards, 4), expected)


@pytest.mark.parametrize("normalize", [False, True])
def test_rloo_against_loops(normalize):
    """A reward less the mean of the others that are scored in its group; 0 if there are none."""
    rng = random.Random(1)
    for seed in range(25):
        rows = rng.randint(3, 14)
        rewards = random_rewards(seed, rows, 2, nan_share=0.4)
        ids, weights = [rng.randint(0, 3) for _ in range(rows)], [0.5, 2.0]
        totals = [weighted(row, weights) for row in rewards.double().tolist()]
        want = []
        for i, total in enumerate(totals):
            others = [totals[j] for j in range(rows) if ids[j] == ids[i] and j != i]
            want.append(total - mean_std(others, 0)[0])
        if normalize:
            mean, spread = mean_std(want, 1)
            want = [(a - mean) / (spread + 1e-4) for a in want]
        options = {"normalize_advantages": normalize, "reward_weights": weights}
        result = adv.rloo_advantages(rewards, group_ids=torch.tensor(ids), **options)
        close(result, [0.0 if math.isnan(a) else a for a in want], 1e-6)


@STDS
def test_process_advantages_against_loops(std):
    rng = random.Random(2)
    for seed in range(25):
        rows, steps = rng.randint(1, 7), rng.randint(1, 5)
        length = rng.randint(steps, 12)
        rewards = random_rewards(seed, rows, steps, nan_share=0.3, dtype=FLOAT)
        ends = [sorted(rng.sample(range(length), steps)) for _ in range(rows)]
        mask = torch.rand(rows, length) < 0.8
        ids = [rng.randint(0, 2) for _ in range(rows)]
        options = {"group_ids": ids, "completion_mask": mask.int(), "std": std}
        result = adv.process_advantages(rewards, torch.tensor(ends), **options)
        correction = int(std == "sample")
        expected = loop_process(rewards.tolist(), ends, ids, mask.tolist(), correction, 1e-4)
        close(result, expected, 1e-9)
        junk = torch.where(rewards.isnan(), rng.choice([-1, -100, 10**9]), torch.tensor(ends))
        assert torch.equal(adv.process_advantages(rewards, junk, **options), result)


def test_process_lists_are_padded_tensors():
    mask = torch.ones(3, 4, dtype=torch.bool)
    steps = [[0.5, None, 1.0], [0.25], []], [[0, 1, 3], [2], []]
    lists = adv.process_advantages(*steps, 3, completion_mask=mask)
    rewards = torch.tensor([[0.5, NAN, 1.0], [0.25, NAN, NAN], [NAN] * 3])
    ends = torch.tensor([[0, 1, 3], [2, -1, -1], [-1] * 3])
    assert torch.equal(lists, adv.process_advantages(rewards, ends, 3, completion_mask=mask))
    assert lists[1, 2] < 0
    for kind in (torch.tensor, np.array):  # as a reward model returns them
        rows = [kind([0.5, NAN, 1.0]), kind([0.25]), kind([])]
        step_ends = [kind([0, 1, 3]), kind([2]), []]
        assert torch.equal(lists, adv.process_advantages(rows, step_ends, 3, completion_mask=mask))
    whole = np.array([[0.1, 0.9], [0.5, 0.2]]), np.array([[1, 3], [0, 2]])
    want = adv.process_advantages(*(x.tolist() for x in whole), 2, completion_mask=mask[:2])
    assert torch.equal(adv.process_advantages(*whole, 2, completion_mask=mask[:2]), want)
    none = [[], [], []]
    assert adv.process_advantages(none, none, 3, completion_mask=mask[:, :0]).shape == (3, 0)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64])
def test_process_steps_that_cancel_give_exactly_0(dtype):
    """Also where the rewards have no exact binary form: a lone step at the mean, and two steps."""
    rewards, ends = [[0.1, 0.9], [0.5, None]], [[3, 7], [5, 0]]
    if dtype is not None:
        rewards, ends = torch.tensor([[0.1, 0.9], [0.5, NAN]], dtype=dtype), torch.tensor(ends)
    found = adv.process_advantages(rewards, ends, 2, completion_mask=torch.ones(2, 8))
    assert found.dtype == (dtype or torch.float32)
    assert found[0, :4].tolist() == [0.0] * 4 and found[1].tolist() == [0.0] * 8
    assert found[0, 4:].tolist() == pytest.approx([0.99975] * 4)
    steps = [[0.3, 0.7, 0.2], [0.4]], [[0, 1, 4], [5]]
    at_mean = adv.process_advantages(*steps, 2, completion_mask=torch.ones(2, 6))
    assert at_mean[1].tolist() == [0.0] * 6


def test_integers_of_numpy_are_taken():
    total = torch.tensor([1.0, 2.0, 4.0, 8.0])
    assert torch.equal(adv.group_advantages(total, np.int64(2)), adv.group_advantages(total, 2))


def test_process_lists_follow_the_mask_to_its_device(monkeypatch):
    lists, mask = ([[0.1, 0.9], [0.5]], [[3, 7], [5]], 2), torch.ones(2, 8)
    expected = adv.process_advantages(*lists, completion_mask=mask)
    with pretended(monkeypatch):
        found = adv.process_advantages(*lists, completion_mask=OnGPU(mask))
    assert isinstance(found, OnGPU) and torch.equal(here(found), expected)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 1.0), (0.99, 0.0), (0.0, 0.5)])
def test_gae_against_loops(gamma, lam):
    for seed, length in enumerate((1, 6, 26, 1000)):
        values, mask = random_tokens(seed, length=length)
        rewards, last = random_tokens(seed + 100, length=length)[0], values[:, 0] + 1
        lists = rewards.tolist(), values.tolist(), mask.tolist()
        for given in (None, last):
            ends = torch.zeros(5) if given is None else given
            expected = loop_gae(*lists, gamma, lam, ends.tolist())
            found = adv.gae(rewards, values, mask, gamma, lam, given)
            for x, y in zip(found, expected, strict=True):
                close(x, y)


def test_gae_of_terminal_rewards_and_whitened():
    values, mask = random_tokens(9)
    terminal = torch.arange(5.0)
    rewards = torch.zeros_like(values)
    for row in range(1, 5):
        rewards[row, mask[row].nonzero()[-1]] = terminal[row].item()
    expected = adv.gae(rewards, values, mask)
    outcome = terminal.masked_fill(~mask.any(1), NAN)
    assert torch.equal(adv.gae(outcome, values, mask)[0], expected[0])
    whitened, returns = adv.gae(rewards, values, mask, whiten_advantages=True)
    assert torch.equal(whitened, adv.whiten(expected[0], mask))
    assert torch.equal(returns, expected[1])
    assert adv.gae(terminal.bfloat16(), values.bfloat16(), mask)[1].dtype == torch.bfloat16


def test_verls_estimators_give_the_same():
    verls = pytest.importorskip("verl.trainer.ppo.core_algos")
    mask = torch.tensor([[1.0, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0]])
    rewards, values = torch.randn(4, 3) * mask, torch.randn(4, 3)
    groups, total = [0, 0, 1, 1], rewards.sum(-1)
    gae, _ = adv.gae(rewards, values, mask, 0.9, 0.95, whiten_advantages=True)
    grpo = adv.group_advantages(total, group_ids=groups, eps=1e-6)[:, None]
    rloo = adv.rloo_advantages(total, group_ids=groups)[:, None]
    index = {"index": np.array(["a", "a", "b", "b"])}
    for name, found, more in (
        ("gae_advantage_return", gae, {"values": values, "gamma": 0.9, "lam": 0.95}),
        ("grpo_outcome_advantage", grpo, index),
        ("rloo_outcome_advantage", rloo, index),
    ):
        theirs = getattr(verls, f"compute_{name}")
        want, _ = theirs(token_level_rewards=rewards, response_mask=mask, **more)
        torch.testing.assert_close(found * mask, want * mask)


@STDS
def test_whiten_against_loops(std):
    x, mask = random_tokens(11)
    x[~mask] = NAN
    mean, spread = mean_std(x.flatten().tolist(), int(std == "sample"))
    close(adv.whiten(x, mask, std=std), torch.where(mask, (x - mean) / (spread + 1e-8), 0.0))
    options = {"std": std, "shift_mean": False, "eps": 0.5}
    close(adv.whiten(x, mask, **options), torch.where(mask, x / (spread + 0.5), 0.0))
    assert adv.whiten(torch.tensor([[3.0]]), torch.ones(1, 1), **options).item() == 6.0
    assert not adv.whiten(torch.full((2, 5), 0.1), torch.ones(2, 5), eps=0.0).any()
    assert not adv.whiten(x, torch.zeros_like(mask)).any()


@pytest.mark.parametrize("baseline", [False, True])
@pytest.mark.parametrize(("gamma", "beta"), [(1.0, 0), (0.9, 0.2)])
def test_reinforce_plus_plus_against_loops(baseline, gamma, beta):
    for seed in range(8):
        kl, mask = random_tokens(seed, rows=6)
        rewards = random_rewards(seed, 6, 2, nan_share=0.3, dtype=FLOAT)
        ids, weights = [0, 1, 0, 1, 0, 1], [1.0, 0.5]
        totals = [weighted(row, weights) for row in rewards.tolist()]
        if baseline:
            totals = z_scores(totals, ids, 0, 0.0, "none")
        raw = loop_reinforce(totals, mask.tolist(), kl.tolist(), beta, gamma)
        mean, spread = mean_std([a for row in raw for a in row if a is not None], 1)
        scaled = [[0.0 if a is None else (a - mean) / (spread + 1e-8) for a in x] for x in raw]
        options = {"gamma": gamma, "beta": 0.2, "reward_weights": weights}
        options |= {"per_token_kl": kl.masked_fill(~mask, NAN)} if beta else {}
        options |= {"group_ids": ids} if baseline else {}
        close(adv.reinforce_plus_plus(rewards, mask, **options), scaled, 1e-9)


def batch(seed: int, *, holes: bool = False, rows: int = 13, length: int = 7) -> SimpleNamespace:
    """Groups of unequal size in any order, one of one row, one of equal rewards."""
    gen = torch.Generator().manual_seed(seed)
    ids = torch.cat([torch.randint(3, (rows - 4,), generator=gen), torch.tensor([3, 4, 4, 4])])
    rewards = torch.randn(rows, 2, generator=gen, dtype=FLOAT)
    rewards[ids == 4] = torch.tensor([0.7, 0.3], dtype=FLOAT)
    mask = torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=gen)
    if holes:
        mask = torch.rand(rows, length, generator=gen) < 0.6
        mask[0], mask[1] = False, True
    order = torch.randperm(rows, generator=gen)
    per_token = torch.randn(2, rows, length, generator=gen, dtype=FLOAT)
    return SimpleNamespace(
        rewards=rewards[order], ids=ids[order] * 1000 - 5, mask=mask, token_rewards=per_token[0],
        values=per_token[1], kl=0.5 + torch.rand(rows, length, generator=gen, dtype=FLOAT),
        last=torch.randn(rows, generator=gen, dtype=FLOAT),
        ends=torch.arange(2 * rows).view(-1, 2) % 4,
    )  # fmt: skip


SCALED = product(("group", "batch", "mean", "none"), ("sum_then_normalize", "normalize_then_sum"))
ESTIMATORS: dict[str, Any] = {
    f"group {scale} {kind}": lambda d, scale=scale, kind=kind, **group: adv.group_advantages(
        d.rewards, group_ids=d.ids, scale_rewards=scale, multi_objective_aggregation=kind, eps=0.0,
        **group,
    ) for scale, kind in SCALED
}  # fmt: skip
ESTIMATORS |= {
    "rloo": lambda d, **group: adv.rloo_advantages(d.rewards, group_ids=d.ids, **group),
    "rloo normalized": lambda d, **group: adv.rloo_advantages(
        d.rewards, group_ids=d.ids, normalize_advantages=True, eps=0.0, **group),
    "process": lambda d, **group: adv.process_advantages(
        d.rewards, d.ends, group_ids=d.ids, completion_mask=d.mask, **group),
    "gae": lambda d, **group: adv.gae(
        d.token_rewards, d.values, d.mask, 0.9, 0.9, torch.where(d.mask.any(1), d.last, NAN))[0],
    "gae whitened": lambda d, **group: adv.gae(
        d.token_rewards, d.values, d.mask, whiten_advantages=True, **group)[0],
    "reinforce++": lambda d, **group: adv.reinforce_plus_plus(d.rewards, d.mask, **group),
    "reinforce++ baseline": lambda d, **group: adv.reinforce_plus_plus(
        d.rewards, d.mask, per_token_kl=d.kl, beta=0.2, group_ids=d.ids, **group),
    "whiten": lambda d, **group: adv.whiten(d.token_rewards, d.mask, eps=0.0, **group),
}  # fmt: skip
CENTERED = [name for name in ESTIMATORS if name.split()[0] in ("group", "rloo", "process")]


def part(d: SimpleNamespace, rows: slice | Tensor, columns: int | None = None) -> SimpleNamespace:
    """These rows of a batch, padded to so many columns only."""
    per_token = ("mask", "token_rewards", "values", "kl")
    cut = {k: x[rows, :columns] if k in per_token else x[rows] for k, x in vars(d).items()}
    return SimpleNamespace(**cut)


@pytest.mark.parametrize("name", CENTERED)
def test_equal_rewards_give_exactly_zero(name: str) -> None:
    """Whatever their size; the other group differs, so that a std over the batch is not 0."""
    sizes = product((0.1, 1e8, -3.3e7, 1e-30, 0.0), (1, 3, 7, 11), (torch.float32, FLOAT))
    for value, size, dtype in sizes:
        data = batch(5, rows=size + 4)
        rewards = torch.tensor([value] * size + [NAN, 1.0, 2.0, 4.0], dtype=dtype)
        data.rewards = rewards[:, None].repeat(1, 2)
        data.ids = torch.tensor([0] * (size + 1) + [1] * 3)
        found = ESTIMATORS[name](data)
        assert not found[: size + 1].any()
        assert found.isfinite().all() and found[size + 1 :].any()
        data.rewards = torch.full_like(data.rewards, value)  # in the whole batch
        assert not ESTIMATORS[name](data).any()


@pytest.mark.parametrize("name", ["rloo", "process", "group group sum_then_normalize"])
def test_a_constant_added_to_all_rewards_changes_nothing(name: str) -> None:
    """Small differences of large rewards are not lost."""
    data = batch(6)
    data.rewards = (torch.arange(26.0).view(13, 2) * 5 % 7).mul(8)
    small = ESTIMATORS[name](data)
    data.rewards = data.rewards + 1e8
    assert torch.equal(ESTIMATORS[name](data), small)
    assert small.any()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_masked_positions_orders_dtypes_and_empty_batches(name: str) -> None:
    """What is masked is never read; rows may come in any order; no gradient, and inputs stay as
    they are."""
    data = batch(3, holes=True)
    whole, order = ESTIMATORS[name](data), torch.randperm(len(data.ids))
    close(ESTIMATORS[name](part(data, order)), whole[order])
    for junk in (NAN, INF, -1e300):
        for field in ("token_rewards", "values", "kl"):
            setattr(data, field, getattr(data, field).masked_fill(~data.mask, junk))
        assert torch.equal(ESTIMATORS[name](data), whole)
    if whole.dim() == 2:
        assert not whole[~data.mask].any()
    for dtype in (torch.bfloat16, FLOAT):
        data = batch(0)
        for field, x in vars(data).items():
            if x.is_floating_point():
                setattr(data, field, x.to(dtype).requires_grad_())
        before = {field: x.detach().clone() for field, x in vars(data).items()}
        found = ESTIMATORS[name](data)
        assert found.dtype == dtype and not found.requires_grad
        assert all(torch.equal(x.detach(), before[field]) for field, x in vars(data).items())
    data.rewards = torch.full_like(data.rewards, NAN)
    if not name.startswith(("gae", "whiten")):
        assert not ESTIMATORS[name](data).any()
    data.rewards, data.token_rewards = (data.rewards > 0).int(), data.token_rewards.float()
    data.values = data.values.float()
    assert ESTIMATORS[name](data).dtype == torch.float32
    assert ESTIMATORS[name](part(batch(0), slice(0, 0))).shape == (0, *whole.shape[1:])
    if not name.startswith("process"):  # whose steps end at tokens
        empty = ESTIMATORS[name](part(batch(0), slice(None), 0))
        assert empty.shape == (13, *[0] * (whole.dim() - 1))


SPLITS = {"unequal": 5, "nothing for the second": 13, "padded less": 6}
CALLS = {**ESTIMATORS, "rows": lambda d, **group: adv.group_advantages(d.rewards, 13, **group)}


def of_ranks(split: str) -> SimpleNamespace:
    """Holes and an unscored row; or rows that from the sixth on count nothing from column 4 on."""
    data = batch(8 if split == "padded less" else 7, holes=split != "padded less")
    if split == "padded less":
        data.mask[6:, 4:] = False
    else:
        data.rewards[3] = NAN
    return data


def rank_task(rank: int, world_size: int) -> dict[str, Any]:
    group, results = torch.distributed.group.WORLD, {}
    for split, first in SPLITS.items():
        rows, columns = slice(0, first), None
        if rank:
            rows, columns = slice(first, 13), 4 if "less" in split else None
        own = part(of_ranks(split), rows, columns)
        results[split] = [call(own, process_group=group) for call in CALLS.values()]
    # no communication, though initialized
    results["alone"] = [call(of_ranks("unequal")) for call in CALLS.values()]
    try:
        adv.group_advantages(torch.zeros(3 + rank), 4, process_group=group)
    except ValueError as error:
        results["message"] = str(error)
    return results


@pytest.mark.slow
def test_groups_that_span_ranks() -> None:
    first, second = run_ranks(rank_task, 2)
    for split in SPLITS:
        for call, own, other in zip(CALLS.values(), first[split], second[split], strict=True):
            x = call(of_ranks(split))
            padding = x.shape[-1] - other.shape[-1] if x.dim() == 2 else 0
            close(torch.cat([own, torch.nn.functional.pad(other, (0, padding))]), x, 1e-10)
    for own, call in zip(first["alone"], CALLS.values(), strict=True):
        assert torch.equal(own, call(of_ranks("unequal")))
    for result in (first, second):
        expected = "expected a divisor of 7, the number of rewards"
        assert result["message"] == f"num_generations: {expected}, got 4"


R, M = torch.zeros(4), torch.ones(4, 3)
GOOD: dict[str, Any] = {
    "rewards": R, "completion_mask": M, "num_generations": 2, "values": M, "x": M,
    "step_rewards": M, "step_ends": torch.arange(3).expand(4, 3),
}  # fmt: skip
TAKES = {name: {*inspect.signature(getattr(adv, name)).parameters} for name in adv.__all__}
WRONG: list[tuple[type[Exception], str, Any, str]] = [
    *((ValueError, name, M[:, :2], r"expected shape \(B, T\) = \(4, 3\), got \(4, 2\)")
      for name in ("values", "x", "per_token_kl")),
    *((ValueError, name, M * NAN, "expected finite .* got nan")
      for name in ("values", "x", "per_token_kl")),
    (ValueError, "last_value", R[:3], r"expected shape \(B,\) = \(4,\), got \(3,\)"),
    *((TypeError, name, [1.0, 2.0], r"expected a tensor, got list; pass torch\.tensor\(\.\.\.\)$")
      for name in ("rewards", "values", "x", "completion_mask", "last_value")),
    (ValueError, "rewards", R.view(2, 2, 1), r"expected shape .* got \(2, 2, 1\)"),
    (ValueError, "rewards", R + torch.tensor([0, 0, INF, 0]), r"expected finite .* inf at \(2, "),
    (ValueError, "reward_weights", [1, 2], r"expected shape \(F,\) = \(1,\), got \(2,\)"),
    (TypeError, "reward_weights", [None], r"expected a tensor or a list of numbers, got \[None\]"),
    (ValueError, "num_generations", 3, "expected a divisor of 4, .* got 3"),
    (ValueError, "num_generations", 0, "expected at least [12].*, got 0"),
    (TypeError, "group_ids", R, "expected integers, got torch.float32"),
    (TypeError, "group_ids", object(), "expected integers, got <object"),
    (ValueError, "group_ids", [0] * 7, r"expected shape \(B,\) = \(4,\), got \(7,\)"),
    (ValueError, "scale_rewards", "groups", "expected one of .* got 'groups'"),
    (ValueError, "scale_rewards", True, "expected one of .* got True; True is 'group', False"),
    (ValueError, "std", "biased", "expected one of .* got 'biased'"),
    (ValueError, "eps", -1.0, "expected a finite number >= 0, got -1"),
    (ValueError, "completion_mask", R, r"expected shape \(B, T\), got \(4,\)"),
    (ValueError, "completion_mask", M * NAN, "expected a mask without NaN, got NaN"),
    (ValueError, "step_rewards", R, r"expected shape \(B, S\), got \(4,\)"),
    (ValueError, "step_ends", M[:, :2].long(), r"expected shape .* \(4, 3\), got \(4, 2\)"),
    (TypeError, "step_ends", M, "expected integers, got torch.float32"),
    (ValueError, "step_ends", M.long() * 3, r"expected indices in .* \[0, 3\), got 3 at \(0, 0\)"),
    (ValueError, "step_ends", -M.long(), r"expected indices .* -1 at .*by NaN in step_rewards$"),
    (ValueError, "step_ends", M.long(), r"expected each above .* not a mask\), got 1 at \(0, 1\)"),
    (TypeError, "step_ends", None, r".* a tensor \(B, S\), or a list for each .*, got NoneType"),
    (TypeError, "step_ends", 2, ".* got int; pass the group's size as num_generations=$"),
    (TypeError, "step_ends", [[0, 0.5]] * 4,
     "expected integers, .*, got 0.5; are step_rewards and step_ends swapped"),
    (ValueError, "gamma", 1.5, r"expected a number in \[0, 1\], got 1.5"),
    (ValueError, "lam", -0.1, r"expected a finite number >= 0, got -0.1"),
    (ValueError, "beta", NAN, "expected a finite number, got nan"),
]  # fmt: skip
STEPS = "process_advantages"
OF_ONE: list[tuple[type[Exception], str, dict[str, Any], str]] = [
    (ValueError, "group_advantages", {"rewards": M[:, :0]}, r"rewards: .* got \(4, 0\)"),
    *((ValueError, "group_advantages", {"num_generations": n},
       f"num_generations: expected at least 2 completions per prompt, .*, got {n}$")
      for n in (0, -3)),
    (ValueError, "group_advantages", {"std": False}, "std: .* False; scale_rewards='none' turns"),
    # by prompt, and of tokens: not taken for columns of functions
    *((ValueError, name, {"rewards": torch.ones(8, 4), "num_generations": 4},
       r"rewards: .* pass rewards\.flatten\(\)")
      for name in ("group_advantages", "rloo_advantages")),
    (ValueError, "reinforce_plus_plus", {"rewards": M}, "rewards: .* If these are rewards of tok"),
    *((TypeError, "group_advantages", {"group_ids": ids, "num_generations": None},
       "group_ids: expected integers.*return_inverse=True")
      for ids in (["a", "a", "b"], np.array(["a", "a", "b"], dtype=object))),
    (ValueError, STEPS, {"step_rewards": [[1.0], [1.0, 2.0]], "step_ends": [[0], [0]]},
     r"step_ends: .*\[1, 2\] by row, got \[1, 1\]"),
    (TypeError, STEPS, {"completion_mask": None}, "completion_mask: expected a tensor, got None"),
    (ValueError, "gae", {"rewards": M[:, :2]}, r"rewards: .* \(4, 3\), got \(4, 2\)"),
    *((ValueError, name, {"rewards": R[:3]}, r"rewards: .*= \(4,.*\), got \(3,\)")
      for name in ("gae", "reinforce_plus_plus")),
    *((ValueError, name, {"group_ids": [0] * 4, "num_generations": 2}, ".* of the two, got both")
      for name, takes in TAKES.items() if "group_ids" in takes),
    *((ValueError, name, {"num_generations": None},
       ".* exactly one of the two, got neither; pass num_generations=, the completions")
      for name in ("group_advantages", "rloo_advantages", STEPS)),
    *((TypeError, name, {"process_group": "x"} | ({"whiten_advantages": True} if name == "gae"
       else {}), "process_group: expected a torch.distributed.ProcessGroup .* got str")
      for name, takes in TAKES.items() if "process_group" in takes),
]  # fmt: skip


def call(name: str, **changes: Any) -> Any:
    return getattr(adv, name)(**{key: x for key, x in GOOD.items() if key in TAKES[name]} | changes)


@pytest.mark.parametrize(("error", "argument", "value", "message"), WRONG)
def test_a_wrong_argument_is_named_by_every_estimator_that_takes_it(
    error: type[Exception], argument: str, value: Any, message: str
) -> None:
    takers = [name for name in adv.__all__ if argument in TAKES[name]]
    assert takers
    for name in takers:
        call(name)
        changes = {argument: value} | ({"num_generations": None} if argument == "group_ids" else {})
        with pytest.raises(error, match=f"^{argument}: {message}"):
            call(name, **changes)


@pytest.mark.parametrize(("error", "name", "changes", "message"), OF_ONE)
def test_of_one_estimator(error, name, changes, message):
    with pytest.raises(error, match=f"^{message}"):
        call(name, **changes)


def test_columns_of_functions_are_not_taken_for_rewards_by_prompt_or_of_tokens() -> None:
    adv.group_advantages(torch.rand(8, 4), 4, reward_weights=[1.0, 1, 1, 1])
    adv.group_advantages(torch.rand(8, 3), 4)
    adv.group_advantages(torch.rand(8, 1), 2)
    adv.reinforce_plus_plus(torch.rand(4, 3), M, reward_weights=[1.0, 1.0, 1.0])
    adv.reinforce_plus_plus(torch.rand(4, 1), M[:, :1])


def test_totals_that_differ_by_rounding_are_equal() -> None:
    """0.1 + 0.2 and 0.3 differ in the last bit, which eps = 0 would divide by itself."""
    rewards, options = torch.eye(3)[[0, 2]], {"reward_weights": [0.1, 0.2, 0.3]}
    rewards[0, 1] = 1.0
    for scale in ("group", "batch", "none", "mean"):
        scaled = adv.group_advantages(rewards, 2, scale_rewards=scale, eps=0, **options)
        assert scaled.tolist() == [0.0, 0.0]
    assert adv.rloo_advantages(rewards, 2, **options).tolist() == [0.0, 0.0]
    mask = torch.ones(2, 4)
    assert not adv.reinforce_plus_plus(rewards, mask, num_generations=2, eps=0, **options).any()
    apart = adv.group_advantages(rewards, 2, reward_weights=[0.1, 0.2, 0.3 + 1e-12], eps=0)
    assert apart.abs().min() > 0.7


NOT_SCALED = {"scale_rewards": "none", "multi_objective_aggregation": "normalize_then_sum"}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("group_advantages", {"scale_rewards": "mean", "rewards": R - 9}, "rewards: .*at least 0"),
        ("group_advantages", NOT_SCALED, "scale_rewards: 'none' is not used"),
        ("reinforce_plus_plus", {"beta": 0.1, "per_token_kl": None}, "beta: not used without"),
    ],
)
def test_an_option_without_use_is_warned_of(name, options, message, forget_warnings):
    with pytest.warns(UserWarning, match=message):
        call(name, **options)


def test_a_step_that_ends_in_a_masked_column_is_warned_of(forget_warnings):
    """As ends counted from the prompt, or lengths in their place."""
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1]])
    given = {"num_generations": 2, "completion_mask": mask}
    with warnings.catch_warnings(action="error"):
        adv.process_advantages([[0.5, None], [0.1, 1.0]], [[2, 3], [1, 3]], **given)
    with pytest.warns(UserWarning, match="step_ends: a step ends in a masked column"):
        adv.process_advantages([[0.5], [1.0]], [[3], [3]], **given)
