"""Presets that correct for a sampler, M2PO's mask, and what is special in losses by name."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from grpo_kernels import LossConfig, objectives, policy_loss_from_logps, presets
from tests.support.objective_sources import mean_of, ppo, topr, with_gradient
from tests.support.off_policy import FLOAT, B, Given, T, agree, arguments, off_policy, ours


def test_the_batch_is_on_both_sides_of_every_bound() -> None:
    given = off_policy(0)
    given["advantages"][4] = 0.5
    mask = given["mask"]
    r = torch.exp(given["logps"] - given["sampling"])[mask]
    assert all((r < bound).any() and (r > bound).any() for bound in (0.2, 5.0, 0.8, 1.2, 1e4))
    good, moved = given["advantages"][mask] > 0, (given["logps"] - given["old"])[mask]
    assert all(((moved > 0) & side).any() and ((moved < 0) & side).any() for side in (good, ~good))
    assert (~good & (moved > math.log(4.0))).any()
    assert moved.abs().max() > 25


def test_scores_of_topr_are_by_position() -> None:
    """One a sequence, of another sign than the advantages, also where packed sequences and a mask move the tokens."""
    given = off_policy(1)
    given["scores"] = torch.tensor([1.0, -1.0, 0.0, 2.0, -3.0, 1.0])[:, None].expand(B, T)
    wanted = with_gradient(lambda x: mean_of(topr, x), given)
    agree(ours(given, objective=objectives.topr(given["scores"])), wanted)
    rows = {name: x.flatten() for name, x in arguments(given).items()}
    zeros, bounds = torch.zeros(B * T, dtype=FLOAT), torch.arange(0, B * T + 1, T)
    out = policy_loss_from_logps(
        given["logps"].flatten(),
        zeros,
        **rows,
        objective=objectives.topr(given["scores"].flatten()),
        cu_seqlens=bounds,
    )
    torch.testing.assert_close(out.loss, wanted[0])


# presets: a weight w = old / sampler on PPO's loss, or a mask


def weight(x: Given) -> Tensor:
    return torch.exp(x["old"] - x["sampling"])


def masked(w: Tensor, low: float, high: float) -> Tensor:
    return torch.where((w >= low) & (w <= high), w, 0.0)


def sequence_weight(x: Given) -> Tensor:
    return torch.where(x["mask"], weight(x).log(), 0.0).sum(dim=1, keepdim=True).exp()


def opsm_keep(x: Given, delta: float = 1e-4) -> Tensor:
    moved = torch.where(x["mask"], x["sampling"] - x["logps"], 0.0).sum(dim=1) / x["mask"].sum(
        dim=1
    ).clamp(min=1)
    return ~((x["advantages"] < 0) & (moved[:, None] > delta))


PRESETS: dict[str, tuple[Callable[[Given], Tensor], str]] = {
    "TIS": (lambda x: ppo(x) * weight(x).clamp(0.0, 2.0), "token-mean"),
    "ICEPOP": (lambda x: ppo(x) * masked(weight(x), 0.5, 5.0), "token-mean"),
    "MIS": (lambda x: ppo(x) * masked(sequence_weight(x), 0.0, 3.0), "token-mean"),
    "OPSM": (lambda x: ppo(x) * opsm_keep(x), "seq-mean-token-mean"),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_the_sources(name: str) -> None:
    formula, mode = PRESETS[name]
    kept, dropped = 0, 0
    for seed in range(5):
        given = off_policy(seed)
        given["sampling"] = torch.where(given["sampling"].isnan(), given["old"], given["sampling"])
        found = ours(given, config=getattr(presets, name))
        agree(found, with_gradient(lambda x: mean_of(formula, x, mode), given))
        plain = with_gradient(lambda x: mean_of(ppo, x, mode), given)[1] != 0
        kept, dropped = (
            kept + int((found[1] != 0).sum()),
            dropped + int((plain & (found[1] == 0)).sum()),
        )
    assert kept > 0
    assert (dropped > 0) == (name != "TIS")


def largest_dropped(squares: list[float], threshold: float) -> int:
    """The number of the largest that are dropped, one after the other."""
    rest = sorted(squares)
    while len(rest) > 1 and sum(rest) / len(rest) >= threshold:
        rest.pop()
    return len(squares) - len(rest)


@pytest.mark.parametrize("threshold", [0.04, 0.2, 1e9, 1e-12])
def test_m2po_drops_the_largest_until_the_mean_is_below(threshold: float) -> None:
    for seed in range(5):
        given = off_policy(seed)
        mask, old, sampling = given["mask"], given["old"], given["sampling"]
        found = objectives.m2po_mask(
            *(x.masked_fill(~mask, torch.nan) for x in (old, sampling)), mask, threshold
        )
        squares = (old - sampling).nan_to_num(nan=0.0)[mask].square()
        dropped = largest_dropped(squares.tolist(), threshold)
        assert not (found & ~mask).any()
        assert int((mask & ~found).sum()) == dropped
        kept = found[mask]
        if dropped:
            assert squares[kept].max() <= squares[~kept].min()
        if threshold == 0.04:
            assert 0 < dropped < len(squares) - 1
    assert not objectives.m2po_mask(old, sampling, torch.zeros(B, T)).any()
    packed = objectives.m2po_mask(
        old.flatten(), sampling.flatten(), mask.flatten().long(), threshold
    )
    assert torch.equal(packed.view(B, T), found)


def test_m2po_as_a_mask_and_as_a_ratio() -> None:
    """The tokens that are dropped leave the mean, or stay in it."""
    given = off_policy(2)
    keep = objectives.m2po_mask(given["old"], given.pop("sampling"), given["mask"])
    for changes in ({"mask": keep}, {"ratio": keep.to(FLOAT)}):
        wanted = with_gradient(lambda x: mean_of(ppo, x), given | changes)
        agree(ours(given | changes, config=LossConfig(loss_type="bnpo")), wanted)


def test_m2po_checks_its_arguments() -> None:
    zeros = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"threshold: .* > 0, got 0"):
        objectives.m2po_mask(zeros, zeros, zeros, threshold=0)
    with pytest.raises(
        ValueError, match=r"old_per_token_logps: expected shape .* = \(2, 3\), got \(2, 2\)"
    ):
        objectives.m2po_mask(zeros[:, :2], zeros, zeros)


def test_ratios_that_overflow_on_a_branch_not_taken() -> None:
    """e^99 in float32, beyond the bound or capped; a sampler's probability of 0."""
    logps = torch.full((1, 3), -1.0)
    given = {
        "logps": logps,
        "advantages": torch.ones(1, 3),
        "mask": torch.ones(1, 3, dtype=torch.bool),
    }
    given["sampling"] = torch.tensor([[-100.0, -math.inf, -1.0]])
    for objective in (
        objectives.ipo(),
        objectives.icepop(),
        objectives.rollout_is(),
        objectives.kpop(kl_tau=0.0),
    ):
        _, gradient = ours(given, objective=objective)
        torch.testing.assert_close(gradient, torch.tensor([0.0, 0.0, -1 / 3]))
