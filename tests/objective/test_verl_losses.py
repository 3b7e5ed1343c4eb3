"""verl's losses: what docs/verl-losses.md says beside the objectives, defaults, draws, edges of its arithmetic."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import LossConfig, TokenInputs, objectives
from tests.support.objective_sources import (
    FACTOR,
    MODES,
    OF_VERL,
    SEED,
    of_verl,
    verl_config,
    verl_loss,
    with_gradient,
)
from tests.support.off_policy import Given, agree, off_policy, ours
from tests.support.verl_peer import verl_module

TOKEN_MEAN = MODES["token-mean"]


def by_verl(name: str, *rest: Any, **how: Any) -> tuple[Tensor, Tensor]:
    return with_gradient(partial(verl_loss, name), *rest, **how)


CLIP = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}
CLIPPED = {"epsilon": 0.1, "epsilon_high": 0.3}
PPO = LossConfig(loss_type="bnpo", delta=3.0)
SEQUENCES = {"mode": "seq-mean-token-mean"}
# What docs/verl-losses.md says beside the objectives: verl's name and arguments, ours.
DOCUMENTED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "vanilla": ("vanilla", {"options": CLIP}, {"config": LossConfig(loss_type="bnpo", delta=3.0, **CLIPPED)}),
    "gspo": ("gspo", {"options": CLIP, **SEQUENCES},
             {"config": LossConfig(loss_type="grpo", importance_sampling_level="sequence", **CLIPPED)}),
    "sapo": ("sapo", {"options": {}, **SEQUENCES}, {"config": LossConfig(loss_type="sapo")}),
    "geo_mean": ("geo_mean", SEQUENCES, {"config": LossConfig(loss_type="gmpo", epsilon=0.4, epsilon_high=0.2)}),
    "tokens of all ranks": ("gpg", {"info": {"dp_size": 4, "batch_num_tokens": 120}},
                            {"objective": objectives.gpg(), "config": MODES["token-sum"], "num_items_in_batch": 30}),
    "TRL's cispo": ("cispo", {"options": {"clip_ratio_low": 1.0, "clip_ratio_high": 0.5}},
                    {"config": LossConfig(loss_type="cispo", epsilon_high=1.5)}),
    "bypass_mode of ppo_clip": ("bypass_mode", {}, {"config": PPO}),
    "bypass_mode of reinforce": ("bypass_mode", {}, {"objective": objectives.gpg(), "config": TOKEN_MEAN}),
}  # fmt: skip


@pytest.mark.parametrize("row", DOCUMENTED)
def test_what_else_the_page_says(row: str) -> None:
    name, theirs, here = DOCUMENTED[row]
    if name == "bypass_mode":
        options = {
            "loss_type": row.split()[-1],
            "rollout_is": "token",
            "rollout_is_threshold": 2.0,
            "rollout_rs": None,
        }
        correction = verl_module("trainer.config").RolloutCorrectionConfig(**options)
        theirs = {"options": {"rollout_correction": correction}}
    for seed in range(3):
        given = off_policy(seed, per_token="mode" not in theirs)
        given["old"][1:3, 0] = given["logps"][1:3, 0] + 1.0  # verl clamps log-ratios at 20 or 10
        wanted = by_verl(name, given, **theirs)
        if row.endswith("reinforce"):
            given["ratio"] = torch.exp(given["logps"] - given["old"]).clamp(max=2.0)
        exact = not ("mode" in theirs or name == "bypass_mode")
        agree(
            ours(given, **here), wanted, 1e-11 if exact else 1e-6
        )  # sequences' lengths plus 1e-8; weights in float32


@pytest.mark.parametrize(
    "mode", ["seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)
def test_without_a_global_batch_size_verl_leaves_out_empty_sequences(mode: str) -> None:
    given = off_policy(6)
    wanted = by_verl("dro", given, mode, info={"loss_scale_factor": FACTOR})
    given = {name: x[:-1] for name, x in given.items()}
    agree(ours(given, objective=of_verl("dro"), config=MODES[mode]), wanted, 1e-7)


def test_defaults_are_verls() -> None:
    config = verl_config({}, {})
    for name in set(OF_VERL) - {"dro"}:
        for field, value in vars(getattr(objectives, name)()).items():
            source = config if hasattr(config, field) else config.policy_loss
            assert field == "generator" or value == getattr(source, field), field


def test_draws_are_of_the_generator_or_torchs_own() -> None:
    """Of the tokens between the bounds of the covariance, a share of all is drawn."""
    given = off_policy(2)
    given["advantages"][4] = 0.5

    def gradient(objective: Any) -> Tensor:
        return ours(given, objective=objective, config=TOKEN_MEAN)[1]

    first, again = (gradient(of_verl("clip_cov")) for _ in range(2))
    assert torch.equal(first, again)
    torch.manual_seed(SEED)
    default = objectives.clip_cov(**OF_VERL["clip_cov"])
    assert torch.equal(first, gradient(default))
    assert not all(torch.equal(first, gradient(default)) for _ in range(8))
    nothing_drawn = objectives.clip_cov(
        **OF_VERL["clip_cov"] | {"clip_cov_lb": 1e9, "clip_cov_ub": 1e10}
    )
    drawn = (first == 0) & (gradient(nothing_drawn) != 0)
    assert drawn.sum() == int(0.1 * len(first))


# where verl's arithmetic gives out, in float32


def single(logps: list[float], old: list[float], advantages: list[float]) -> Given:
    """One sequence."""
    rows = {"logps": logps, "old": old, "advantages": advantages}
    mask = torch.ones(1, len(logps), dtype=torch.bool)
    return {key: torch.tensor([row]) for key, row in rows.items()} | {"mask": mask}


def per_token(objective: Any, given: Given) -> tuple[Tensor, Tensor]:
    """The objective's losses and the gradient of their sum."""
    logps = given["logps"].clone().requires_grad_()
    tokens = TokenInputs(
        logps,
        torch.zeros_like(logps),
        given["mask"],
        given["advantages"],
        given["old"],
        None,
        None,
        None,
    )
    losses = objective(tokens)
    return losses.detach(), torch.autograd.grad(losses.sum(), logps)[0]


def test_gspo_has_no_gradient_above_a_ratio_of_e_to_the_10() -> None:
    given = single([-1.0, -2.0], [-15.0, -12.0], [-1.0, -1.0])
    loss, gradient = by_verl("gspo", given)
    losses, of_ours = per_token(objectives.gspo(), given)
    assert not of_ours.any()
    assert not gradient.any()
    torch.testing.assert_close(losses, torch.full((1, 2), torch.e**10))
    torch.testing.assert_close(losses.mean(), loss)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_bound_that_is_met_exactly_passes_the_gradient(advantage: float) -> None:
    """In any release of torch, whose clamp has a derivative there that is 1 up to 2.13 and then 0."""
    old = -1.0 - advantage * 0.25
    at_bound = single([-1.0], [old], [advantage])
    _, gradient = per_token(
        objectives.geo_mean(clip_ratio_low=0.25, clip_ratio_high=0.25), at_bound
    )
    torch.testing.assert_close(gradient, -advantage * torch.exp(at_bound["logps"] - old))
    largest = single([-1.0], [-11.0], [advantage])
    _, gradient = per_token(
        objectives.gspo(clip_ratio_low=0.0, clip_ratio_high=float(torch.e**11)), largest
    )
    torch.testing.assert_close(gradient, torch.full((1, 1), -advantage * torch.e**10))


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_ratios_that_overflow_on_a_branch_not_taken(name: str) -> None:
    """e^99 in float32: beyond the bound where A > 0, of no effect where A = 0. verl's gradient is NaN there."""
    given = single(
        [-1.0, -1.0, -2.0], [-100.0, -1.0, -2.0], [0.0 if name == "kl_cov" else 1.0, -0.5, 0.5]
    )
    assert by_verl(name, given)[1].isnan().any()
    options = {
        "kl_cov": {"ppo_kl_coef": 0.0},
        "clip_cov": {"clip_cov_lb": 50.0, "clip_cov_ub": 51.0},
    }[name]
    losses, gradient = per_token(getattr(objectives, name)(**options), given)
    torch.testing.assert_close(
        losses, torch.tensor([[0.0 if name == "kl_cov" else -1.2, 0.5, -0.5]])
    )
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 0.5, -0.5]]))


def test_ratios_that_overflow_where_they_count_are_seen() -> None:
    given = single([-1.0, torch.nan], [-100.0, -1.0], [-1.0, 1.0])
    for objective in (objectives.clip_cov(), objectives.kl_cov()):
        losses, _ = per_token(objective, given)
        assert losses[0, 0] == torch.inf
        assert losses[0, 1].isnan()


def test_probabilities_that_round_above_one() -> None:
    """A logp of 1e-7 is a probability of 1, rounded: no NaN in the KL, and it is judged like its neighbour."""
    losses, gradient = per_token(
        objectives.dppo_kl(), single([1e-7, 0.0, -1e-7], [-1e-3] * 3, [1.0, 1.0, 1.0])
    )
    assert (gradient != 0).all()
    assert losses.isfinite().all()
