"""Estimators against loops over lists, against TRL's own lines, and by worked examples."""

from __future__ import annotations

import inspect
import math
import random
import textwrap
from types import SimpleNamespace

import pytest
import torch

from grpo_kernels import advantages as adv
from tests.support.advantage_loops import (
    loop_gae,
    loop_group,
    loop_process,
    loop_reinforce,
    loop_rloo,
    mean_std,
    random_rewards,
    random_tokens,
    weighted,
    z_scores,
)

NAN = math.nan
STDS = pytest.mark.parametrize("std", ["sample", "population"])


def close(actual, expected, atol=1e-6):
    torch.testing.assert_close(
        actual.double(), torch.as_tensor(expected, dtype=torch.float64), atol=atol, rtol=atol
    )


def test_worked_example_of_outcome_supervision():
    result = adv.group_advantages(torch.tensor([8.5, 6.2, 4.1]), 3, std="population", epsilon=1e-8)
    assert [round(a, 2) for a in result.tolist()] == [1.24, -0.04, -1.21]


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("scale", ["group", "batch", "mean", "none"])
@STDS
def test_group_advantages_against_loops(scale, std, aggregation):
    rng = random.Random(0)
    for seed in range(12):
        rows, columns = rng.randint(2, 14), rng.choice([None, 1, 3])
        rewards = random_rewards(
            seed, rows, columns, dtype=rng.choice([torch.float32, torch.float64])
        )
        ids = [rng.choice([-7, 0, 3, 10**12]) for _ in range(rows)]
        weights = [rng.uniform(-1, 2) for _ in range(columns)] if columns else None
        options = {
            "scale": scale,
            "std": std,
            "aggregation": aggregation,
            "epsilon": rng.choice([1e-4, 0.1]),
        }
        result = adv.group_advantages(rewards, group_ids=ids, reward_weights=weights, **options)
        table = rewards.double().reshape(rows, -1).tolist()
        close(
            result, loop_group(table, ids, weights or [1.0], **options), atol=1e-7
        )  # rounded once, from float64
        assert result.dtype == rewards.dtype


def trl_advantages(rewards, num_generations, weights, scale, aggregation):
    """TRL's own lines, cut out of its trainer and run as they are."""
    from trl.trainer import grpo_trainer

    source = inspect.getsource(grpo_trainer.GRPOTrainer._generate_and_score_completions)
    first = source.index("        unscorable_mask = torch.isnan(")
    last = "        advantages = torch.nan_to_num(advantages, nan=0.0)\n"
    lines = textwrap.dedent(source[first : source.index(last, first) + len(last)])
    self = SimpleNamespace(
        multi_objective_aggregation=aggregation,
        scale_rewards=scale,
        reward_weights=weights,
        reward_funcs=weights,
    )
    scope = {
        "self": self,
        "rewards_per_func": rewards,
        "num_generations": num_generations,
        "device": "cpu",
    }
    exec(lines, vars(grpo_trainer).copy(), scope)
    return scope["advantages"]


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_defaults_equal_trl(scale, aggregation):
    for seed, (rows, num_generations, nan_share) in enumerate(
        [(12, 4, 0), (12, 4, 0.4), (12, 2, 0.6), (4, 2, 0.3)]
    ):
        rewards, weights = random_rewards(seed, rows, 2, nan_share), torch.tensor([1.0, 0.3])
        expected = trl_advantages(rewards.clone(), num_generations, weights, scale, aggregation)
        options = {"scale": scale, "aggregation": aggregation, "reward_weights": weights}
        result = adv.group_advantages(rewards, num_generations, **options)
        torch.testing.assert_close(result, expected, atol=3e-6, rtol=1e-5)
        if scale == "group" and aggregation == "sum_then_normalize":
            assert torch.equal(
                adv.group_advantages(rewards, num_generations, reward_weights=weights), result
            )


def test_float32_rewards_are_rounded_once_and_weights_in_a_list_not_at_all():
    rewards, weights = torch.randn(1000, 2), [0.1, 1 / 3]
    expected = adv.group_advantages(
        rewards.double(), 500, reward_weights=torch.tensor(weights, dtype=torch.float64)
    )
    torch.set_default_dtype(torch.float16)
    try:
        found = adv.group_advantages(rewards, 500, reward_weights=weights)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected.float())


@pytest.mark.parametrize("normalize", [False, True])
def test_rloo_against_loops(normalize):
    rng = random.Random(1)
    for seed in range(25):
        rows = rng.randint(3, 14)
        rewards = random_rewards(seed, rows, 2, nan_share=0.4)
        ids, weights = [rng.randint(0, 3) for _ in range(rows)], [0.5, 2.0]
        options = {"normalize": normalize, "epsilon": 1e-4}
        result = adv.rloo_advantages(
            rewards, group_ids=torch.tensor(ids), reward_weights=weights, **options
        )
        totals = [weighted(row, weights) for row in rewards.double().tolist()]
        close(result, loop_rloo(totals, ids, **options))


def test_worked_example_of_process_supervision():
    """Normalised: -0.447, 0.447, -1.342, 1.342; each token sums the steps that end at or after it."""
    result = adv.process_advantages(
        [[0.8, 0.9, 0.7, 1.0]] * 3, [[1, 3, 4, 6]] * 3, 3, length=8, epsilon=0.0
    )
    close(result, [[0, 0, 0.447, 0.447, 0, 1.342, 1.342, 0]] * 3, atol=5e-4)
    last_only = adv.process_advantages(
        [[0.8], [0.9], [0.7], [1.0]], [[0]] * 4, 4, length=1, epsilon=0.0
    )
    close(last_only[:, 0], [-0.447, 0.447, -1.342, 1.342], atol=5e-4)


@STDS
def test_process_advantages_against_loops(std):
    rng = random.Random(2)
    for seed in range(25):
        rows, steps, length = rng.randint(1, 7), rng.randint(1, 5), rng.randint(1, 12)
        rewards = random_rewards(seed, rows, steps, nan_share=0.3, dtype=torch.float64)
        ends = torch.tensor(
            [sorted(rng.randrange(length) for _ in range(steps)) for _ in range(rows)]
        )
        mask = torch.rand(rows, length) < 0.8
        ids = [rng.randint(0, 2) for _ in range(rows)]
        options = {"group_ids": ids, "completion_mask": mask.int(), "std": std}
        result = adv.process_advantages(rewards, ends, **options)
        expected = loop_process(
            rewards.tolist(), ends.tolist(), ids, mask.tolist(), int(std == "sample"), 1e-4
        )
        close(result, expected, atol=1e-9)
        garbage = torch.where(rewards.isnan(), rng.choice([-1, -100, 10**9]), ends)
        assert torch.equal(adv.process_advantages(rewards, garbage, **options), result)


def test_process_lists_are_padded_tensors():
    lists = adv.process_advantages(
        [[0.5, None, 1.0], [0.25], []], [[0, 1, 3], [2], []], 3, length=4
    )
    rewards = torch.tensor([[0.5, NAN, 1.0], [0.25, NAN, NAN], [NAN] * 3])
    ends = torch.tensor([[0, 1, 3], [2, -1, -1], [-1] * 3])
    mask = torch.ones(3, 4, dtype=torch.bool)
    assert torch.equal(lists, adv.process_advantages(rewards, ends, 3, completion_mask=mask))
    assert lists[1, 2] < 0


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 1.0), (0.99, 0.0), (0.0, 0.5)])
def test_gae_against_loops(gamma, lam):
    for seed, length in enumerate((1, 6, 26, 1000)):
        values, mask = random_tokens(seed, length=length)
        rewards, last = random_tokens(seed + 100, length=length)[0], values[:, 0] + 1
        for last_value in (torch.zeros(5), last):
            expected = loop_gae(
                rewards.tolist(), values.tolist(), mask.tolist(), gamma, lam, last_value.tolist()
            )
            result = adv.gae(
                rewards, values, mask, gamma, lam, last_value if last_value is last else None
            )
            for x, y in zip(result, expected, strict=True):
                close(x, y, atol=1e-12)


def test_gae_of_terminal_rewards_and_whitened():
    values, mask = random_tokens(9)
    terminal = torch.arange(5.0)
    rewards = torch.zeros_like(values)
    for row in range(1, 5):
        rewards[row, mask[row].nonzero()[-1]] = terminal[row].item()
    expected = adv.gae(rewards, values, mask)
    assert torch.equal(
        adv.gae(terminal.masked_fill(~mask.any(1), NAN), values, mask)[0], expected[0]
    )
    whitened, returns = adv.gae(rewards, values, mask, whiten_advantages=True)
    assert torch.equal(whitened, adv.whiten(expected[0], mask))
    assert torch.equal(returns, expected[1])
    assert adv.gae(terminal.bfloat16(), values.bfloat16(), mask)[1].dtype == torch.bfloat16


@STDS
def test_whiten_against_loops(std):
    x, mask = random_tokens(11)
    x[~mask] = NAN
    mean, spread = mean_std(x.flatten().tolist(), int(std == "sample"))
    close(
        adv.whiten(x, mask, std=std),
        torch.where(mask, (x - mean) / (spread + 1e-8), 0.0),
        atol=1e-12,
    )
    unshifted = adv.whiten(x, mask, std=std, shift_mean=False, epsilon=0.5)
    close(unshifted, torch.where(mask, x / (spread + 0.5), 0.0), 1e-12)
    assert not adv.whiten(torch.full((2, 5), 0.1), torch.ones(2, 5), epsilon=0.0).any()
    one = adv.whiten(
        torch.tensor([[3.0]]), torch.ones(1, 1), std=std, shift_mean=False, epsilon=0.5
    )
    assert one.item() == 6.0
    assert not adv.whiten(x, torch.zeros_like(mask)).any()


@pytest.mark.parametrize("with_kl", [False, True])
@pytest.mark.parametrize("baseline", [False, True])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_against_loops(baseline, gamma, with_kl):
    for seed in range(8):
        kl, mask = random_tokens(seed, rows=6)
        rewards = random_rewards(seed, 6, 2, nan_share=0.3, dtype=torch.float64)
        ids, weights = [0, 1, 0, 1, 0, 1], [1.0, 0.5]
        totals = [weighted(row, weights) for row in rewards.tolist()]
        if baseline:
            totals = z_scores(totals, ids, 0, 0.0, "none")
        raw = loop_reinforce(totals, mask.tolist(), kl.tolist(), 0.2 if with_kl else 0.0, gamma)
        mean, spread = mean_std([a for row in raw for a in row if a is not None], 0)
        expected = [
            [0.0 if a is None else (a - mean) / (spread + 1e-8) for a in row] for row in raw
        ]
        options = {
            "beta": 0.2,
            "gamma": gamma,
            "reward_weights": weights,
            "group_ids": ids if baseline else None,
        }
        given_kl = kl.masked_fill(~mask, NAN) if with_kl else None
        close(
            adv.reinforce_plus_plus(rewards, mask, per_token_kl=given_kl, **options),
            expected,
            atol=1e-9,
        )


def test_no_tokens_and_no_rows():
    empty = torch.zeros(3, 0)
    assert adv.gae(empty, empty, empty, last_value=torch.zeros(3))[0].shape == (3, 0)
    assert adv.process_advantages([[], [], []], [[], [], []], 3, length=0).shape == (3, 0)
    assert adv.rloo_advantages(torch.zeros(0, 3), group_ids=[]).shape == (0,)
