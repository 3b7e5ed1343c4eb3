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

NAN = float("nan")


def close(actual, expected, atol=1e-6):
    torch.testing.assert_close(actual.double(), torch.as_tensor(expected, dtype=torch.float64), atol=atol, rtol=atol)


# group_advantages


def test_worked_example_of_outcome_supervision():
    result = adv.group_advantages(torch.tensor([8.5, 6.2, 4.1]), 3, std="population", epsilon=1e-8)
    assert [round(a, 2) for a in result.tolist()] == [1.24, -0.04, -1.21]


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("scale", ["group", "batch", "mean", "none"])
@pytest.mark.parametrize("std", ["sample", "population"])
def test_group_advantages_against_loops(scale, std, aggregation):
    rng = random.Random(0)
    for seed in range(12):
        rows, columns = rng.randint(2, 14), rng.choice([None, 1, 3])
        rewards = random_rewards(seed, rows, columns, dtype=rng.choice([torch.float32, torch.float64]))
        ids = [rng.choice([-7, 0, 3, 10**12]) for _ in range(rows)]
        weights = [rng.uniform(-1, 2) for _ in range(columns)] if columns else None
        options = {"scale": scale, "std": std, "aggregation": aggregation, "epsilon": rng.choice([1e-4, 0.1])}
        result = adv.group_advantages(rewards, group_ids=ids, reward_weights=weights, **options)
        table = rewards.double().reshape(rows, -1).tolist()
        close(result, loop_group(table, ids, weights or [1.0], **options), atol=1e-7)  # rounded once, from float64
        assert result.dtype == rewards.dtype


def test_maxrl_is_prime_rls():
    """(r - mean) / mean, and 0 where the mean is not above 0; the rarer the right answers, the larger."""
    right = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [-1.0, 0.5, 0.0, 0.0]])
    for rewards in (right, torch.rand(4, 4, dtype=torch.float64)):
        mean = rewards.mean(dim=1, keepdim=True)
        expected = torch.where(mean > 0, (rewards - mean) / mean, 0.0).flatten()
        close(adv.group_advantages(rewards.flatten(), 4, scale="mean", epsilon=0.0), expected)
    assert adv.group_advantages(right.flatten(), 4, scale="mean", epsilon=0.0)[0] == 3.0


def trl_advantages(rewards, num_generations, weights, scale, aggregation):
    """TRL's own lines, cut out of its trainer and run as they are."""
    from trl.trainer import grpo_trainer

    source = inspect.getsource(grpo_trainer.GRPOTrainer._generate_and_score_completions)
    first = source.index("        unscorable_mask = torch.isnan(")
    last = "        advantages = torch.nan_to_num(advantages, nan=0.0)\n"
    lines = textwrap.dedent(source[first : source.index(last, first) + len(last)])
    self = SimpleNamespace(
        multi_objective_aggregation=aggregation, scale_rewards=scale, reward_weights=weights, reward_funcs=weights
    )
    scope = {"self": self, "rewards_per_func": rewards, "num_generations": num_generations, "device": "cpu"}
    exec(lines, vars(grpo_trainer).copy(), scope)
    return scope["advantages"]


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_defaults_equal_trl(scale, aggregation):
    for seed, (rows, num_generations, nan_share) in enumerate([(12, 4, 0), (12, 4, 0.4), (12, 2, 0.6), (4, 2, 0.3)]):
        rewards, weights = random_rewards(seed, rows, 2, nan_share), torch.tensor([1.0, 0.3])
        expected = trl_advantages(rewards.clone(), num_generations, weights, scale, aggregation)
        options = {"scale": scale, "aggregation": aggregation, "reward_weights": weights}
        result = adv.group_advantages(rewards, num_generations, **options)
        torch.testing.assert_close(result, expected, atol=3e-6, rtol=1e-5)
        if scale == "group" and aggregation == "sum_then_normalize":
            assert torch.equal(adv.group_advantages(rewards, num_generations, reward_weights=weights), result)


def test_float32_rewards_are_rounded_once():
    rewards = torch.randn(1000)
    assert torch.equal(adv.group_advantages(rewards, 500), adv.group_advantages(rewards.double(), 500).float())


def test_one_unscored_function_of_several_does_not_unscore_the_row():
    rewards = torch.tensor([[1.0, NAN], [2.0, 1.0], [NAN, NAN]])
    expected = adv.group_advantages(torch.tensor([1.0, 3.0, NAN]), 3)
    assert torch.equal(adv.group_advantages(rewards, 3), expected)
    assert expected[2] == 0
    assert expected[0] < 0


def test_no_rows():
    assert adv.group_advantages(torch.zeros(0), 4).shape == (0,)
    assert adv.rloo_advantages(torch.zeros(0, 3), group_ids=[]).shape == (0,)


# rloo_advantages


@pytest.mark.parametrize("normalize", [False, True])
def test_rloo_against_loops(normalize):
    rng = random.Random(1)
    for seed in range(25):
        rows = rng.randint(3, 14)
        rewards = random_rewards(seed, rows, 2, nan_share=0.4)
        ids, weights = [rng.randint(0, 3) for _ in range(rows)], [0.5, 2.0]
        options = {"normalize": normalize, "epsilon": 1e-4}
        result = adv.rloo_advantages(rewards, group_ids=torch.tensor(ids), reward_weights=weights, **options)
        totals = [weighted(row, weights) for row in rewards.double().tolist()]
        close(result, loop_rloo(totals, ids, **options))


def test_rloo_by_hand():
    assert adv.rloo_advantages(torch.tensor([1.0, 2.0, 6.0, 5.0, NAN, NAN]), 3).tolist() == [-3, -1.5, 4.5, 0, 0, 0]
    assert adv.rloo_advantages(torch.tensor([0.1] * 7), 7, normalize=True, epsilon=0.0).tolist() == [0.0] * 7


# process_advantages

WORKED_STEPS = [[0.8, 0.9, 0.7, 1.0]] * 3


def test_worked_example_of_process_supervision():
    ends = [[1, 3, 4, 6]] * 3
    result = adv.process_advantages(WORKED_STEPS, ends, 3, length=8, epsilon=0.0)
    # Normalised: -0.447, 0.447, -1.342, 1.342; each token sums the steps that end at or after it.
    expected = [0, 0, 0.447, 0.447, 0, 1.342, 1.342, 0]
    for row in result.tolist():
        assert row == pytest.approx(expected, abs=5e-4)
    last_only = adv.process_advantages([[0.8], [0.9], [0.7], [1.0]], [[0]] * 4, 4, length=1, epsilon=0.0)
    assert last_only[:, 0].tolist() == pytest.approx([-0.447, 0.447, -1.342, 1.342], abs=5e-4)


@pytest.mark.parametrize("std", ["sample", "population"])
def test_process_advantages_against_loops(std):
    rng = random.Random(2)
    for seed in range(25):
        rows, steps, length = rng.randint(1, 7), rng.randint(1, 5), rng.randint(1, 12)
        rewards = random_rewards(seed, rows, steps, nan_share=0.3, dtype=torch.float64)
        ends = torch.tensor([sorted(rng.randrange(length) for _ in range(steps)) for _ in range(rows)])
        mask = torch.rand(rows, length) < 0.8
        ids = [rng.randint(0, 2) for _ in range(rows)]
        options = {"group_ids": ids, "completion_mask": mask.int(), "std": std}
        result = adv.process_advantages(rewards, ends, **options)
        expected = loop_process(rewards.tolist(), ends.tolist(), ids, mask.tolist(), int(std == "sample"), 1e-4)
        close(result, expected, atol=1e-9)
        garbage = torch.where(rewards.isnan(), rng.choice([-1, -100, 10**9]), ends)
        assert torch.equal(adv.process_advantages(rewards, garbage, **options), result)


def test_process_lists_are_padded_tensors():
    lists = adv.process_advantages([[0.5, None, 1.0], [0.25], []], [[0, 1, 3], [2], []], 3, length=4)
    rewards = torch.tensor([[0.5, NAN, 1.0], [0.25, NAN, NAN], [NAN] * 3])
    ends = torch.tensor([[0, 1, 3], [2, -1, -1], [-1] * 3])
    mask = torch.ones(3, 4, dtype=torch.bool)
    assert torch.equal(lists, adv.process_advantages(rewards, ends, 3, completion_mask=mask))
    assert lists[2].tolist() == [0.0] * 4
    assert lists[1, 3] == 0
    assert lists[1, 2] < 0


# gae, whiten and reinforce_plus_plus


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 1.0), (0.99, 0.0), (0.0, 0.5)])
def test_gae_against_loops(gamma, lam):
    for seed in range(6):
        values, mask = random_tokens(seed, length=1 + 5 * seed)
        rewards, last = random_tokens(seed + 100, length=1 + 5 * seed)[0], values[:, 0] + 1
        for last_value in (None, last):
            result = adv.gae(rewards, values, mask, gamma, lam, last_value)
            last_list = [0.0] * len(values) if last_value is None else last.tolist()
            expected = loop_gae(rewards.tolist(), values.tolist(), mask.tolist(), gamma, lam, last_list)
            close(result[0], expected[0], atol=1e-12)
            close(result[1], expected[1], atol=1e-12)


def test_gae_terminal_rewards_dtypes_and_whitening():
    values, mask = random_tokens(9)
    terminal = torch.arange(5.0)
    rewards = torch.zeros_like(values)
    for row in range(1, 5):
        rewards[row, mask[row].nonzero()[-1]] = terminal[row].item()
    expected = adv.gae(rewards, values, mask)
    result = adv.gae(terminal.masked_fill(~mask.any(1), NAN), values, mask)
    assert torch.equal(result[0], expected[0])
    assert result[0].dtype == torch.float64
    assert adv.gae(terminal.bfloat16(), values.bfloat16(), mask)[1].dtype == torch.bfloat16
    whitened, returns = adv.gae(rewards, values, mask, whiten_advantages=True)
    assert torch.equal(whitened, adv.whiten(expected[0], mask))
    assert torch.equal(returns, expected[1])
    assert not adv.gae(terminal, values.requires_grad_(), mask)[1].requires_grad


def test_gae_of_a_thousand_tokens_keeps_its_precision():
    rewards, values = (torch.randn(1, 1000, dtype=torch.float64) for _ in range(2))
    mask = torch.ones(1, 1000)
    expected = loop_gae(rewards.tolist(), values.tolist(), mask.tolist(), 1.0, 0.95, [0.0])
    close(adv.gae(rewards, values, mask)[0], expected[0], atol=1e-12)


@pytest.mark.parametrize("std", ["sample", "population"])
def test_whiten_against_loops(std):
    x, mask = random_tokens(11)
    x[~mask] = NAN
    mean, spread = mean_std(x.flatten().tolist(), int(std == "sample"))
    close(adv.whiten(x, mask, std=std), torch.where(mask, (x - mean) / (spread + 1e-8), 0.0), atol=1e-12)
    close(
        adv.whiten(x, mask, std=std, shift_mean=False, epsilon=0.5), torch.where(mask, x / (spread + 0.5), 0.0), 1e-12
    )
    assert adv.whiten(torch.full((2, 5), 0.1), torch.ones(2, 5), epsilon=0.0).tolist() == [[0.0] * 5] * 2
    assert adv.whiten(torch.tensor([[3.0]]), M[:1, :1], std=std, shift_mean=False, epsilon=0.5).item() == 6.0
    assert adv.whiten(x, torch.zeros_like(mask)).tolist() == torch.zeros_like(x).tolist()


@pytest.mark.parametrize("baseline", [False, True])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_against_loops(baseline, gamma):
    for seed in range(8):
        kl, mask = random_tokens(seed, rows=6)
        rewards = random_rewards(seed, 6, 2, nan_share=0.3, dtype=torch.float64)
        ids, weights = [0, 1, 0, 1, 0, 1], [1.0, 0.5]
        totals = [weighted(row, weights) for row in rewards.tolist()]
        if baseline:
            totals = z_scores(totals, ids, 0, 0.0, "none")
        raw = loop_reinforce(totals, mask.tolist(), kl.tolist(), 0.2, gamma)
        mean, spread = mean_std([a for row in raw for a in row if a is not None], 0)
        expected = [[0.0 if a is None else (a - mean) / (spread + 1e-8) for a in row] for row in raw]
        options = {"beta": 0.2, "gamma": gamma, "reward_weights": weights, "group_ids": ids if baseline else None}
        result = adv.reinforce_plus_plus(rewards, mask, per_token_kl=kl.masked_fill(~mask, NAN), **options)
        close(result, expected, atol=1e-9)


def test_reinforce_plus_plus_without_kl_spreads_the_reward():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    result = adv.reinforce_plus_plus(torch.tensor([1.0, -2.0]), mask, beta=5.0)
    close(result, [[0.7071, 0.7071, 0.0], [-1.4142, 0.0, 0.0]], atol=1e-4)


def test_no_tokens_at_all():
    empty = torch.zeros(3, 0)
    assert adv.gae(empty, empty, empty, last_value=torch.zeros(3))[0].shape == (3, 0)
    assert adv.reinforce_plus_plus(torch.ones(3), empty).shape == (3, 0)
    assert adv.process_advantages([[], [], []], [[], [], []], 3, length=0).shape == (3, 0)


# wrong arguments

R8, M = torch.zeros(8), torch.ones(2, 3)
INF = torch.tensor([0.0, math.inf])


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (TypeError, "rewards: expected a tensor, got list", lambda: adv.group_advantages([1.0, 2.0], 2)),
        (TypeError, "rewards: expected real", lambda: adv.group_advantages(torch.zeros(2, dtype=torch.cfloat), 2)),
        (ValueError, r"rewards: expected shape .* got \(2, 2, 2\)", lambda: adv.group_advantages(R8.view(2, 2, 2), 2)),
        (ValueError, r"rewards: expected shape .* got \(8, 0\)", lambda: adv.group_advantages(torch.zeros(8, 0), 2)),
        (ValueError, r"rewards: expected finite .* got inf at \(1, 0\)", lambda: adv.group_advantages(INF, 2)),
        (ValueError, "rewards: expected finite .* got -inf", lambda: adv.rloo_advantages(-INF, 2)),
        (ValueError, "exactly one of the two, got neither", lambda: adv.group_advantages(R8)),
        (ValueError, "exactly one of the two, got both", lambda: adv.group_advantages(R8, 2, group_ids=[0] * 8)),
        (ValueError, "num_generations: expected a divisor of the 8 .* got 3", lambda: adv.group_advantages(R8, 3)),
        (ValueError, "num_generations: expected at least 2, got 0", lambda: adv.group_advantages(R8, 0)),
        (ValueError, "num_generations: expected at least 2 .* got 1", lambda: adv.group_advantages(R8, 1)),
        (TypeError, "num_generations: expected an int, got float", lambda: adv.rloo_advantages(R8, 2.0)),
        (TypeError, "group_ids: expected integers", lambda: adv.group_advantages(R8, group_ids=R8)),
        (ValueError, r"group_ids: .* \(8,\), got \(7,\)", lambda: adv.group_advantages(R8, group_ids=[0] * 7)),
        (ValueError, r"reward_weights: .* got \(2,\)", lambda: adv.rloo_advantages(R8, 2, reward_weights=[1, 2])),
        (ValueError, "reward_weights: .* got nan", lambda: adv.group_advantages(R8, 2, reward_weights=[NAN])),
        (ValueError, "scale: expected one of .* got 'groups'", lambda: adv.group_advantages(R8, 2, scale="groups")),
        (ValueError, "std: expected one of .* got 'biased'", lambda: adv.group_advantages(R8, 2, std="biased")),
        (ValueError, "aggregation: expected one of", lambda: adv.group_advantages(R8, 2, aggregation="sum")),
        (ValueError, "epsilon: .* got -1", lambda: adv.group_advantages(R8, 2, epsilon=-1.0)),
        (ValueError, "epsilon: .* got nan", lambda: adv.rloo_advantages(R8, 2, epsilon=NAN)),
        (TypeError, "epsilon: expected a number, got str", lambda: adv.group_advantages(R8, 2, epsilon="1")),
        (ValueError, r"step_rewards: .* \(B, S\), got", lambda: adv.process_advantages(R8, R8.long(), 2, length=3)),
        (ValueError, r"step_ends: .* got \(3, 2\)", lambda: adv.process_advantages(M, M.T.long(), 2, length=3)),
        (TypeError, "step_ends: expected integers", lambda: adv.process_advantages(M, M, 2, length=3)),
        (ValueError, r"step_ends: .*\[1, 2\] by row, got \[1, 1\]",
         lambda: adv.process_advantages([[1.0], [1.0, 2.0]], [[0], [0]], 2, length=3)),
        (ValueError, r"step_ends: .* \[0, 3\), got 3 at \(1, 0\)",
         lambda: adv.process_advantages([[1.0], [1.0]], [[0], [3]], 2, length=3)),
        (ValueError, "step_ends: .* got -1", lambda: adv.process_advantages([[1.0]], [[-1]], 1, length=3)),
        (ValueError, "step_rewards: .* got inf", lambda: adv.process_advantages([[math.inf]], [[0]], 1, length=3)),
        (ValueError, "completion_mask, length: .* got neither", lambda: adv.process_advantages([[1.0]], [[0]], 1)),
        (ValueError, "completion_mask, length: .* got both",
         lambda: adv.process_advantages([[1.0]], [[0]], 1, length=3, completion_mask=M[:1])),
        (ValueError, r"completion_mask: .* \(1, 3\), got \(2, 3\)",
         lambda: adv.process_advantages([[1.0]], [[0]], 1, completion_mask=M)),
        (ValueError, "length: expected at least 0, got -1", lambda: adv.process_advantages([[]], [[]], 1, length=-1)),
        (TypeError, "length: expected an int, got float", lambda: adv.process_advantages([[]], [[]], 1, length=3.0)),
        (ValueError, r"values: .* \(2, 3\), got \(2, 2\)", lambda: adv.gae(M, M[:, :2], M)),
        (ValueError, r"rewards: .* \(2, 3\), got \(2, 2\)", lambda: adv.gae(M[:, :2], M, M)),
        (ValueError, r"rewards: .* \(2,\), got \(3,\)", lambda: adv.gae(M[0], M, M)),
        (ValueError, r"completion_mask: expected shape \(B, T\), got \(8,\)", lambda: adv.gae(M, M, R8)),
        (TypeError, "completion_mask: expected a tensor, got NoneType", lambda: adv.gae(M, M, None)),
        (ValueError, r"values: expected finite .* got nan at \(0, 0\)", lambda: adv.gae(M, M * NAN, M)),
        (ValueError, "rewards: expected finite .* got nan", lambda: adv.gae(M[:, 0] * NAN, M, M)),
        (ValueError, r"last_value: .* \(2,\), got \(3,\)", lambda: adv.gae(M, M, M, last_value=M[0])),
        (ValueError, "last_value: expected finite", lambda: adv.gae(M, M, M, last_value=INF)),
        (ValueError, r"gamma: .* \[0, 1\], got 1.5", lambda: adv.gae(M, M, M, gamma=1.5)),
        (ValueError, r"lam: .* \[0, 1\], got -0.1", lambda: adv.gae(M, M, M, lam=-0.1)),
        (ValueError, r"x: .* \(2, 3\), got \(8,\)", lambda: adv.whiten(R8, M)),
        (ValueError, "x: expected finite .* got inf", lambda: adv.whiten(M / 0, M)),
        (ValueError, r"rewards: .* \(2,\), got \(8,\)", lambda: adv.reinforce_plus_plus(R8, M)),
        (TypeError, "reward_weights: expected a tensor or a list of numbers, got 'ab'",
         lambda: adv.group_advantages(R8[:, None], 2, reward_weights="ab")),
        (TypeError, r"reward_weights: .* got \[None, 1\]",
         lambda: adv.rloo_advantages(R8[:, None], 2, reward_weights=[None, 1])),
        (ValueError, "completion_mask: expected 0 or a number that is not, got nan", lambda: adv.whiten(M, M * NAN)),
        (ValueError, "beta: expected a finite number, got nan", lambda: adv.reinforce_plus_plus(M[:, 0], M, beta=NAN)),
        (ValueError, "per_token_kl: .* got nan",
         lambda: adv.reinforce_plus_plus(M[:, 0], M, per_token_kl=M * NAN)),
        (ValueError, r"per_token_kl: .* \(2, 3\), got \(8,\)",
         lambda: adv.reinforce_plus_plus(M[:, 0], M, per_token_kl=R8)),
    ],
)  # fmt: skip
def test_wrong_arguments(error, message, call):
    with pytest.raises(error, match=message):
        call()


def test_weights_in_a_list_are_not_rounded():
    rewards = random_rewards(2, 8, 2, nan_share=0.0)
    expected = adv.group_advantages(rewards, 4, reward_weights=torch.tensor([0.1, 1 / 3], dtype=torch.float64))
    torch.set_default_dtype(torch.float16)
    try:
        found = adv.group_advantages(rewards, 4, reward_weights=[0.1, 1 / 3])
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


WITH_GROUP = [name for name in adv.__all__ if "process_group" in inspect.signature(getattr(adv, name)).parameters]


@pytest.mark.parametrize("name", WITH_GROUP)
def test_what_is_no_process_group_is_refused(name):
    """First of all: the other arguments are none either."""
    estimate = getattr(adv, name)
    others = [x for x in inspect.signature(estimate).parameters.values() if x.default is x.empty]
    with pytest.raises(TypeError, match=r"^process_group: expected a torch.distributed.ProcessGroup .* got str"):
        estimate(*[None] * len(others), process_group="x")
