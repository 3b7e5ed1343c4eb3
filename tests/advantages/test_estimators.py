"""verl's advantage estimators: against verl's own functions, and where those give out against the formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo_kernels import advantages as adv
from tests.support.estimators import FLOAT, batch
from tests.support.verl_peer import core_algos

NAN = float("nan")


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found.double(), expected.double(), atol=tolerance, rtol=tolerance)


def at_last(rewards: Tensor, mask: Tensor) -> Tensor:
    """(B,) -> (B, T): the reward at each row's last counted token, as verl holds them."""
    last = mask.long().cumsum(1).argmax(1)
    return torch.zeros(mask.shape, dtype=FLOAT).scatter(1, last[:, None], rewards[:, None]) * mask


def of_verl(name: str, data: SimpleNamespace, rewards: Tensor, **options: Any) -> Tensor:
    """verl's advantages (B, T) of rewards (B, T)."""
    function = core_algos().get_adv_estimator_fn(name)
    grouped = (
        {}
        if name in ("remax", "reinforce_plus_plus")
        else {"index": np.array([str(i) for i in data.ids.tolist()])}
    )
    return function(
        token_level_rewards=rewards.clone(), response_mask=data.mask.to(FLOAT), **grouped, **options
    )[0]


def spread(result: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, result[:, None], 0.0)


def alone(ids: Tensor) -> Tensor:
    return (ids[:, None] == ids).sum(1) == 1


def test_every_estimator_of_verl_has_its_counterpart() -> None:
    """The table in docs/verl-losses.md is complete for this release."""
    names = {name.value for name in core_algos().AdvantageEstimator}
    grouped = {"grpo", "grpo_vectorized", "rloo", "rloo_vectorized", "grpo_passk", "opo", "gpg"}
    token = {"gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "gdpo"}
    assert names == grouped | token | {"optimal_token_baseline", "tir_optimal_token_baseline"}


def gpg(rewards: Tensor, d: SimpleNamespace) -> Tensor:
    """alpha is B / (rows of groups that differ), where verl has B / (rewards that are not 0)."""
    useful = [
        bool((rewards[d.ids == i] != r).any()) for i, r in zip(d.ids, rewards, strict=True)
    ].count(True)
    return adv.gpg_advantages(rewards, group_ids=d.ids) * useful / int((rewards != 0).sum())


# one advantage a completion: ours, verl's options, tolerance
PER_COMPLETION: dict[str, tuple[Callable[[Tensor, SimpleNamespace], Tensor], dict[str, Any], float]] = {
    "grpo": (lambda r, d: adv.group_advantages(r, epsilon=1e-6, group_ids=d.ids), {}, 1e-6),
    "grpo, no std": (lambda r, d: adv.group_advantages(r, scale="none", group_ids=d.ids),
                     {"norm_adv_by_std_in_grpo": False}, 1e-12),
    "rloo": (lambda r, d: adv.rloo_advantages(r, group_ids=d.ids), {}, 1e-12),
    "rloo_vectorized": (lambda r, d: adv.rloo_advantages(r, group_ids=d.ids), {}, 1e-12),
    "opo": (lambda r, d: adv.opo_advantages(r, d.mask, group_ids=d.ids), {}, 1e-12),
    "grpo_passk": (lambda r, d: adv.passk_advantages(r, group_ids=d.ids),
                   {"config": {"norm_adv_by_std_in_grpo": True}}, 1e-12),
    "grpo_passk, no std": (lambda r, d: adv.passk_advantages(r, group_ids=d.ids, scale="none"),
                           {"config": {"norm_adv_by_std_in_grpo": False}}, 1e-12),
    "gpg": (gpg, {}, 1e-7),  # verl's alpha is float32
}  # fmt: skip


@pytest.mark.parametrize("name", PER_COMPLETION)
def test_completions_get_verls(name: str) -> None:
    """A group of one gets 0; verl has other rules for it, or refuses it. Of several best it picks one, to give it 0."""
    estimate, options, tolerance = PER_COMPLETION[name]
    for seed in range(6):
        levels = name == "gpg" or seed % 3 == 1
        data = batch(seed, holes=name == "opo" and seed % 2 == 1, levels=levels)
        data.mask[:, 0] = True
        if "passk" in name:
            data.ids = torch.where(alone(data.ids), -5, data.ids)
        rewards, single = data.rewards[:, 0], alone(data.ids)
        found = estimate(rewards, data)
        expected = of_verl(name.split(",")[0], data, at_last(rewards, data.mask), **options)
        close(spread(found, data.mask)[~single], expected[~single], tolerance)
        assert not found[single].any()
        assert found.any() or levels


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_whitened_tokens_get_verls(name: str) -> None:
    """verl whitens with the std of samples, ours is that of all: a factor of sqrt((n - 1) / n)."""
    data = batch(2)
    data.ids = torch.where(alone(data.ids), -5, data.ids)
    count, rewards = int(data.mask.sum()), data.rewards[:, 0]
    last = at_last(rewards, data.mask)
    if name == "gae":
        found, returns = adv.gae(
            data.token_rewards, data.logps, data.mask, 0.9, 0.8, whiten_advantages=True
        )
        function = core_algos().get_adv_estimator_fn("gae")
        mask = data.mask.to(FLOAT)
        expected, theirs = function(
            data.token_rewards, data.logps, mask, torch.tensor(0.9), torch.tensor(0.8)
        )
        close(returns, theirs * data.mask, 1e-6)  # its 0.9 is float32
    elif name == "reinforce_plus_plus":
        found = adv.reinforce_plus_plus(
            rewards, data.mask, per_token_kl=data.ratio, beta=0.1, gamma=0.9
        )
        expected = of_verl(name, data, last - 0.1 * data.ratio, config=SimpleNamespace(gamma=0.9))
    else:
        found = adv.reinforce_plus_plus(rewards, data.mask, group_ids=data.ids)
        expected = of_verl(name, data, last)
    close(found * math.sqrt((count - 1) / count), expected * data.mask, 1e-6)


# one advantage a token


@pytest.mark.parametrize("columns", [1, 2])
def test_gdpo_is_verls(columns: int) -> None:
    """verl takes several rewards in float32."""
    for seed in range(4):
        data = batch(seed)
        data.ids = torch.where(alone(data.ids), -5, data.ids)
        rewards, weights = data.rewards[:, :columns], [1.0, 0.4][:columns]
        options: dict[str, Any] = {}
        if columns == 2:
            full = torch.cat([torch.ones(len(rewards), 3), data.mask], dim=1).long()
            options = {
                "config": {"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": weights},
                "non_tensor_batch": dict(zip("ab", rewards.T.numpy(), strict=True)),
                "batch": {"prompts": torch.zeros(len(rewards), 3), "attention_mask": full},
            }
        expected = of_verl("gdpo", data, at_last(rewards[:, 0], data.mask), **options)
        found = adv.gdpo_advantages(rewards, data.mask, group_ids=data.ids, reward_weights=weights)
        close(found, expected, 1e-7 if columns == 1 else 1e-5)


@pytest.mark.parametrize("holes", [False, True])
def test_remax_is_verls(holes: bool) -> None:
    """It leaves what it has at masked positions before the last counted one; ours are 0."""
    data = batch(0, holes=holes)
    expected = of_verl("remax", data, data.token_rewards, reward_baselines=data.baselines)
    junk = torch.where(data.mask, data.token_rewards, NAN)
    close(adv.remax_advantages(junk, data.baselines, data.mask), expected * data.mask)
    outcome = data.rewards[:, 0]
    found = adv.remax_advantages(outcome, data.baselines, data.mask)
    close(
        found,
        of_verl("remax", data, at_last(outcome, data.mask), reward_baselines=data.baselines)
        * data.mask,
    )
    close(found, spread(outcome - data.baselines, data.mask))


@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_optimal_token_baseline_is_verls(name: str, weighted: bool, tail: bool) -> None:
    """One function for both: they differ where masks have holes, which the first does not align."""
    for seed in range(4):
        data = batch(seed, holes=name.startswith("tir") and seed % 2 == 1)
        numbers = {"old_log_probs": data.logps, "sum_pi_squared": data.squares}
        ratio = data.ratio if weighted else None
        expected = of_verl(
            name,
            data,
            data.token_rewards,
            **numbers,
            rollout_is_weights=ratio,
            handle_zero_tail=tail,
        )
        junk = [
            torch.where(data.mask, x, NAN)
            for x in (data.token_rewards, data.logps, data.squares, data.ratio)
        ]
        options = {
            "importance_sampling_ratio": junk[3] if weighted else None,
            "handle_zero_tail": tail,
        }
        found = adv.optimal_token_baseline(
            junk[0], data.mask, *junk[1:3], group_ids=data.ids, **options
        )
        single = alone(data.ids)
        if (
            not tail
        ):  # a group of one: what it gets is its own baseline, while verl leaves it without
            assert not found[single].any()
            found, expected = found[~single], expected[~single]
        close(found, expected, 1e-6)  # 1e-8 in verl's denominators
        assert (found != 0).any()


def test_a_baseline_lies_between_the_returns() -> None:
    """Where pi rounds to 1, verl's 1 - 2 pi + sum pi^2 is rounding noise of either sign, and so are its weights."""
    data = batch(3, rows=6)
    data.ids, data.mask = torch.zeros(6, dtype=torch.long), torch.ones(6, 7, dtype=torch.bool)
    noise = 1e-7 * torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.01], dtype=FLOAT)[:, None].expand(
        6, 7
    )
    logps, squares = torch.full((6, 7), -1e-9, dtype=FLOAT), 1 + noise
    rewards = data.rewards[:, 0]
    theirs = of_verl(
        "optimal_token_baseline",
        data,
        at_last(rewards, data.mask),
        old_log_probs=logps,
        sum_pi_squared=squares,
    )
    found = adv.optimal_token_baseline(rewards, data.mask, logps, squares, 6)
    for result, within in ((found, True), (theirs, False)):
        baseline = rewards[:, None] - result
        assert bool(((baseline >= rewards.min()) & (baseline <= rewards.max())).all()) == within


def test_remax_of_a_prompt_without_a_baseline() -> None:
    mask = torch.ones(4, 2)
    assert not adv.remax_advantages(torch.ones(4), torch.full((4,), NAN), mask).any()
    assert (
        adv.remax_advantages(torch.ones(4).bfloat16(), torch.zeros(4), mask).dtype == torch.float32
    )


def test_certain_tokens_have_no_baseline() -> None:
    certain = (torch.zeros(2, 3), torch.ones(2, 3))
    found = adv.optimal_token_baseline(torch.tensor([1.0, 3.0]), torch.ones(2, 3), *certain, 2)
    assert found.tolist() == [[1.0] * 3, [3.0] * 3]
