"""verl's policy losses that are configs, its defaults and draws, and the edges of its arithmetic."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import LossConfig, TokenInputs, objectives
from tests.support.objective_sources import MODES, OF_VERL, SEED, of_verl, verl_config, verl_loss, with_gradient
from tests.support.off_policy import Given, agree, off_policy, ours

TOKEN_MEAN = MODES["token-mean"]


def by_verl(name: str, *rest: Any, **how: Any) -> tuple[Tensor, Tensor]:
    return with_gradient(partial(verl_loss, name), *rest, **how)


def moderate(seed: int, **options: Any) -> Given:
    """No ratio beyond e^10, at which verl clamps some."""
    given = off_policy(seed, **options)
    given["old"][1:3, 0] = given["logps"][1:3, 0] + 1.0
    return given


# verl's other losses are fields of the config: our fields, verl's parameters, loss_agg_mode
CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "vanilla": ({"loss_type": "bnpo", "epsilon": 0.1, "epsilon_high": 0.3, "delta": 3.0},
                {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}, "token-mean"),
    "gspo": ({"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.3},
             {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}, "seq-mean-token-mean"),
    "sapo": ({"loss_type": "sapo"}, {}, "seq-mean-token-mean"),
    "geo_mean": ({"loss_type": "gmpo", "epsilon": 0.4, "epsilon_high": 0.2}, OF_VERL["geo_mean"],
                 "seq-mean-token-mean"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_that_the_config_has(name: str) -> None:
    fields, options, mode = CONFIGS[name]
    for seed in range(3):
        given = moderate(seed, per_token=name == "vanilla")
        wanted = by_verl(name, given, mode, options=options)
        # their sequence means divide by the length plus 1e-8
        agree(ours(given, config=LossConfig(**fields)), wanted, 1e-11 if name == "vanilla" else 1e-6)


def test_trls_cispo_is_one_of_verls() -> None:
    config = LossConfig(loss_type="cispo", epsilon_high=1.5)
    given = moderate(1)  # verl's ratio is at least e^-20
    agree(
        ours(given, config=config),
        ours(given, config=LossConfig(loss_type="dapo"), objective=objectives.cispo(1.0, 0.5)),
    )


def test_defaults_are_verls() -> None:
    config = verl_config({}, {})
    for name in set(OF_VERL) - {"dro"}:
        for field, value in vars(getattr(objectives, name)()).items():
            source = config if hasattr(config, field) else config.policy_loss
            assert field == "generator" or value == getattr(source, field), field


def test_draws_are_of_the_generator_or_torchs_own() -> None:
    """Of the tokens between the bounds of the covariance, a share of all is drawn."""
    given = off_policy(2)

    def gradient(objective: Any) -> Tensor:
        return ours(given, objective=objective, config=TOKEN_MEAN)[1]

    first, again = (gradient(of_verl("clip_cov")) for _ in range(2))
    assert torch.equal(first, again)
    torch.manual_seed(SEED)
    default = objectives.clip_cov(**OF_VERL["clip_cov"])
    assert torch.equal(first, gradient(default))
    assert not all(torch.equal(first, gradient(default)) for _ in range(8))
    nothing_drawn = objectives.clip_cov(**OF_VERL["clip_cov"] | {"clip_cov_lb": 1e9, "clip_cov_ub": 1e10})
    drawn = (first == 0) & (gradient(nothing_drawn) != 0)
    assert 0 < drawn.sum() <= int(0.1 * len(first))


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
        logps, torch.zeros_like(logps), given["mask"], given["advantages"], given["old"], None, None, None
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
    _, gradient = per_token(objectives.geo_mean(clip_ratio_low=0.25, clip_ratio_high=0.25), at_bound)
    torch.testing.assert_close(gradient, -advantage * torch.exp(at_bound["logps"] - old))
    largest = single([-1.0], [-11.0], [advantage])
    _, gradient = per_token(objectives.gspo(clip_ratio_low=0.0, clip_ratio_high=float(torch.e**11)), largest)
    torch.testing.assert_close(gradient, torch.full((1, 1), -advantage * torch.e**10))


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_ratios_that_overflow_on_a_branch_not_taken(name: str) -> None:
    """e^99 in float32: beyond the bound where A > 0, of no effect where A = 0. verl's gradient is NaN there."""
    given = single([-1.0, -1.0, -2.0], [-100.0, -1.0, -2.0], [0.0 if name == "kl_cov" else 1.0, -0.5, 0.5])
    assert by_verl(name, given)[1].isnan().any()
    options = {"kl_cov": {"ppo_kl_coef": 0.0}, "clip_cov": {"clip_cov_lb": 50.0, "clip_cov_ub": 51.0}}[name]
    losses, gradient = per_token(getattr(objectives, name)(**options), given)
    torch.testing.assert_close(losses, torch.tensor([[0.0 if name == "kl_cov" else -1.2, 0.5, -0.5]]))
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 0.5, -0.5]]))


def test_ratios_that_overflow_where_they_count_are_seen() -> None:
    given = single([-1.0, torch.nan], [-100.0, -1.0], [-1.0, 1.0])
    for objective in (objectives.clip_cov(), objectives.kl_cov()):
        losses, _ = per_token(objective, given)
        assert losses[0, 0] == torch.inf
        assert losses[0, 1].isnan()


def test_probabilities_that_round_above_one() -> None:
    """A logp of 1e-7 is a probability of 1, rounded: no NaN in the KL, and it is judged like its neighbour."""
    losses, gradient = per_token(objectives.dppo_kl(), single([1e-7, 0.0, -1e-7], [-1e-3] * 3, [1.0, 1.0, 1.0]))
    assert (gradient != 0).all()
    assert losses.isfinite().all()
