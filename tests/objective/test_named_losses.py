"""Losses by name, objectives and presets, against their sources' formulas in float64 through autograd."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import GRPOLoss, LossConfig, Run, grpo_loss, objectives, policy_loss_from_logps, presets
from grpo_kernels.objective import named_losses
from tests.support.off_policy import FLOAT, off_policy

B, T = 6, 12
Given = dict[str, Tensor]


def batch(seed: int) -> Given:
    return off_policy(seed, B, T)


def garbage(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x, torch.nan)


def ours(given: Given, **how: Any) -> tuple[Tensor, Tensor]:
    """Value and gradient of the loss, NaN wherever the mask is 0."""
    mask, sampling = given["mask"], given.get("sampling")
    logps = garbage(given["logps"], mask).requires_grad_()
    out = policy_loss_from_logps(
        logps,
        torch.zeros_like(logps),
        mask,
        garbage(given["advantages"], mask),
        old_per_token_logps=garbage(given["old"], mask),
        sampling_per_token_logps=None if sampling is None else garbage(sampling, mask),
        importance_sampling_ratio=given.get("ratio"),
        **how,
    )
    return out.loss.detach(), torch.autograd.grad(out.loss, logps)[0]


def written_out(formula: Callable[[Given], Tensor], given: Given, mean: str = "tokens") -> tuple[Tensor, Tensor]:
    """The same of a formula of per-token losses, summed over the counted tokens and divided by their number, or meaned
    over each sequence and then over sequences."""
    given = given | {"logps": given["logps"].clone().requires_grad_()}
    mask = given["mask"]
    if "sampling" in given:
        given["sampling"] = torch.where(given["sampling"].isnan(), given["logps"].detach(), given["sampling"])
    per_token = torch.where(mask, formula(given), 0.0)
    if mean == "tokens":
        loss = per_token.sum() / mask.sum()
    else:
        loss = (per_token.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).mean()
    return loss.detach(), torch.autograd.grad(loss, given["logps"])[0]


def agree(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-14)


# each source's formula, of log-probabilities that are all finite


def ratio_to(name: str, x: Given) -> Tensor:
    return torch.exp(x["logps"] - x[name])


def ipo(x: Given, eps: float = 0.3, kl_tau: float = 0.0, cap: float = 1e4) -> Tensor:
    r, moved = ratio_to("sampling", x), (x["logps"].exp() - x["sampling"].exp()).abs()
    surrogate = r.detach().clamp(max=cap) * torch.exp(x["logps"] - x["logps"].detach())
    return -torch.where(moved > eps, 0.0, x["advantages"] * surrogate) + kl_tau * r.log() ** 2


def icepop(x: Given, low: float = 0.2, high: float = 5.0) -> Tensor:
    r = ratio_to("sampling", x)
    return -torch.where((r >= low) & (r <= high), r, 0.0) * x["advantages"]


def kpop(x: Given, threshold: float = 0.1, kl_tau: float = 1e-3) -> Tensor:
    p, q = (x[name].exp().clamp(1e-6, 1 - 1e-6) for name in ("logps", "sampling"))
    forward = p * torch.log(p / q) + (1 - p) * torch.log((1 - p) / (1 - q))
    backward = q * torch.log(q / p) + (1 - q) * torch.log((1 - q) / (1 - p))
    r, masked = ratio_to("sampling", x), (forward > threshold) | (backward > threshold)
    return -torch.where(masked, 0.0, x["advantages"] * r) + kl_tau * r.log() ** 2


def rollout_is(x: Given, low: float = 0.2, high: float = 0.2) -> Tensor:
    r = ratio_to("sampling", x)
    kept = torch.where((r > 1 - low) & (r < 1 + high), r, 0.0)
    return -kept.detach() * x["advantages"] * x["logps"]


def topr(x: Given, positive: float = 1.0, negative: float = 1.0) -> Tensor:
    good = x.get("scores", x["advantages"]) > 0
    tapered = ratio_to("old", x).clamp(0.0, 1.0).detach()
    return torch.where(good, positive, negative * tapered) * -x["advantages"] * x["logps"]


def ppo(x: Given, low: float = 0.2, high: float = 0.2) -> Tensor:
    r = ratio_to("old", x)
    return -torch.min(r * x["advantages"], r.clamp(1 - low, 1 + high) * x["advantages"])


def fipo(
    x: Given, decay_rate: float = 32.0, low: float = 0.0, high: float = 0.2, safety: float = 4.0, ranged: float = 0.2
) -> Tensor:
    log_ratio = torch.where(x["mask"], x["logps"] - x["old"], 0.0).detach()
    place = torch.arange(T, dtype=FLOAT)
    distance = place[:, None] - place[None, :]  # of the k-th row's token from the t-th column's
    future = log_ratio @ torch.where(distance >= 0, 2 ** (-distance / decay_rate), 0.0)
    f = future.exp().clamp(1 - low, 1 + high)
    unsafe = (x["advantages"] < 0) & (log_ratio.exp() > safety)
    return ppo(x, ranged, ranged) * torch.where(unsafe, f.clamp(0.8, 1.0), f)


# objective, formula; the defaults first
OBJECTIVES: list[tuple[Any, Callable[[Given], Tensor]]] = [
    (objectives.ipo(), ipo),
    (objectives.ipo(eps=0.1, kl_tau=1e-3), lambda x: ipo(x, 0.1, 1e-3)),
    (objectives.ipo(ratio_max=1.1), lambda x: ipo(x, cap=1.1)),
    (objectives.icepop(), icepop),
    (objectives.icepop(ratio_low=0.8, ratio_high=1.5), lambda x: icepop(x, 0.8, 1.5)),
    (objectives.kpop(), kpop),
    (objectives.kpop(threshold=0.01, kl_tau=0.0), lambda x: kpop(x, 0.01, 0.0)),
    (objectives.rollout_is(), rollout_is),
    (objectives.rollout_is(eps_clip_low=0.5, eps_clip_high=1.0), lambda x: rollout_is(x, 0.5, 1.0)),
    (objectives.topr(), topr),
    (objectives.topr(positive_weight=0.5, negative_weight=2.0), lambda x: topr(x, 0.5, 2.0)),
    (objectives.fipo(), fipo),
    (
        objectives.fipo(0.1, 0.1, decay_rate=3.0, influence_low=0.3, influence_high=0.4, safety_threshold=1.2),
        lambda x: fipo(x, 3.0, 0.3, 0.4, 1.2, 0.1),
    ),
]
CASES = [pytest.param(*pair, id=f"{pair[0]!r:.60}") for pair in OBJECTIVES]
TOKEN_LEVEL = {"icepop", "ipo", "kpop", "rollout_is", "topr"}


@pytest.mark.parametrize(("objective", "formula"), CASES)
def test_values_and_gradients_are_the_sources(objective: Any, formula: Callable[[Given], Tensor]) -> None:
    for seed in range(5):
        given = batch(seed)
        agree(ours(given, objective=objective), written_out(formula, given))


@pytest.mark.parametrize(("objective", "formula"), CASES)
def test_a_ratio_multiplies_the_whole_loss(objective: Any, formula: Callable[[Given], Tensor]) -> None:
    given = batch(7)
    given["ratio"] = torch.rand(B, T, dtype=FLOAT)
    given["ratio"][1:3, :3] = 0.0
    agree(ours(given, objective=objective), written_out(lambda x: formula(x) * x["ratio"], given))


def test_both_sides_of_every_bound_are_tested() -> None:
    given = batch(0)
    given["advantages"][4] = 0.5
    mask = given["mask"]
    r = torch.exp(given["logps"] - given["sampling"])[mask]
    for bound in (0.2, 5.0, 0.8, 1.2, 1e4):
        assert (r < bound).any()
        assert (r > bound).any()
    for name in ("ipo", "icepop", "kpop", "rollout_is"):
        options = {"kl_tau": 0.0} if name == "kpop" else {}
        _, gradient = ours(given, objective=getattr(objectives, name)(**options))
        dropped = int((gradient[mask] == 0).sum())
        assert 0 < dropped < int(mask.sum()), name
    good = given["advantages"][mask] > 0
    moved = (given["logps"] - given["old"])[mask]
    assert all(((moved > 0) & side).any() and ((moved < 0) & side).any() for side in (good, ~good))
    assert (~good & (moved > math.log(4.0))).any()


def test_scores_of_topr_are_by_position() -> None:
    """One a sequence, of another sign than the advantages, also where packed sequences and a mask move the tokens."""
    given = batch(1)
    scores = torch.tensor([1.0, -1.0, 0.0, 2.0, -3.0, 1.0])
    given["scores"] = scores[:, None].expand(B, T)
    wanted = written_out(topr, given)
    agree(ours(given, objective=objectives.topr(given["scores"])), wanted)
    flat = {name: given[name].flatten() for name in ("logps", "old", "advantages", "mask", "scores")}
    out = policy_loss_from_logps(
        flat["logps"],
        torch.zeros(B * T, dtype=FLOAT),
        flat["mask"],
        flat["advantages"],
        old_per_token_logps=flat["old"],
        objective=objectives.topr(flat["scores"]),
        cu_seqlens=torch.arange(0, B * T + 1, T),
    )
    torch.testing.assert_close(out.loss, wanted[0])


# presets: a weight w = old / sampler on PPO's loss, or a mask


def weight(x: Given) -> Tensor:
    sampling = torch.where(x["sampling"].isnan(), x["old"], x["sampling"])
    return torch.exp(x["old"] - sampling)


def masked(w: Tensor, low: float, high: float) -> Tensor:
    return torch.where((w >= low) & (w <= high), w, 0.0)


def sequence_weight(x: Given) -> Tensor:
    return torch.where(x["mask"], weight(x).log(), 0.0).sum(dim=1, keepdim=True).exp()


def opsm_keep(x: Given, delta: float = 1e-4) -> Tensor:
    moved = torch.where(x["mask"], x["sampling"] - x["logps"], 0.0).sum(dim=1) / x["mask"].sum(dim=1).clamp(min=1)
    return ~((x["advantages"] < 0) & (moved[:, None] > delta))


PRESETS: dict[str, tuple[Callable[[Given], Tensor], str]] = {
    "TIS": (lambda x: ppo(x) * weight(x).clamp(0.0, 2.0), "tokens"),
    "ICEPOP": (lambda x: ppo(x) * masked(weight(x), 0.5, 5.0), "tokens"),
    "MIS": (lambda x: ppo(x) * masked(sequence_weight(x), 0.0, 3.0), "tokens"),
    "OPSM": (lambda x: ppo(x) * opsm_keep(x), "sequences"),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_the_sources(name: str) -> None:
    formula, mean = PRESETS[name]
    kept, dropped = 0, 0
    for seed in range(5):
        given = batch(seed)
        given["sampling"] = torch.where(given["sampling"].isnan(), given["old"], given["sampling"])
        found = ours(given, config=getattr(presets, name))
        agree(found, written_out(formula, given, mean))
        plain = written_out(ppo, given, mean)[1] != 0
        kept, dropped = kept + int((found[1] != 0).sum()), dropped + int((plain & (found[1] == 0)).sum())
    assert kept > 0
    assert (dropped > 0) == (name != "TIS")


# M2PO


def m2po(squares: list[float], threshold: float) -> int:
    """The number of the largest that are dropped, one after the other."""
    rest = sorted(squares)
    while len(rest) > 1 and sum(rest) / len(rest) >= threshold:
        rest.pop()
    return len(squares) - len(rest)


@pytest.mark.parametrize("threshold", [0.04, 0.2, 1e9, 1e-12])
def test_m2po_drops_the_largest_until_the_mean_is_below(threshold: float) -> None:
    for seed in range(5):
        given = batch(seed)
        mask, old, sampling = given["mask"], given["old"], given["sampling"]
        found = objectives.m2po_mask(garbage(old, mask), garbage(sampling, mask), mask, threshold)
        squares = (old - sampling).nan_to_num(nan=0.0)[mask].square()
        dropped = m2po(squares.tolist(), threshold)
        assert not (found & ~mask).any()
        assert int((mask & ~found).sum()) == dropped
        kept = found[mask]
        if dropped:
            assert squares[kept].max() <= squares[~kept].min()
        if threshold == 0.04:
            assert 0 < dropped < len(squares) - 1
    assert not objectives.m2po_mask(old, sampling, torch.zeros(B, T)).any()
    packed = objectives.m2po_mask(old.flatten(), sampling.flatten(), mask.flatten().long(), threshold)
    assert torch.equal(packed.view(B, T), found)


def test_m2po_as_a_mask_and_as_a_ratio() -> None:
    """The tokens that are dropped leave the mean, or stay in it."""
    given = batch(2)
    keep = objectives.m2po_mask(given["old"], given.pop("sampling"), given["mask"])
    config = LossConfig(loss_type="bnpo")
    agree(ours(given | {"mask": keep}, config=config), written_out(ppo, given | {"mask": keep}))
    agree(ours(given | {"ratio": keep.to(FLOAT)}, config=config), written_out(lambda x: ppo(x) * keep, given))


# from hidden states


@pytest.mark.parametrize("trains", [True, False])
def test_engines_and_gradients_from_hidden_states(trains: bool) -> None:
    """One pass for all that look at one token at a time, two for FIPO."""
    given = batch(3)
    mask = given["mask"]
    hidden = torch.randn(B, T, 5, dtype=FLOAT).requires_grad_()
    weight = torch.randn(13, 5, dtype=FLOAT).requires_grad_(trains)
    ids = torch.randint(13, (B, T))
    given["logps"] = torch.log_softmax(hidden @ weight.T, dim=-1).gather(-1, ids[..., None])[..., 0]
    for name in ("old", "sampling"):
        given[name] = given["logps"].detach() + 0.5 * torch.randn(B, T, dtype=FLOAT)
    leaves = (hidden, weight) if trains else (hidden,)
    for objective, formula in OBJECTIVES:
        out = grpo_loss(
            hidden,
            weight,
            ids.masked_fill(~mask, -100),
            mask,
            garbage(given["advantages"], mask),
            old_per_token_logps=garbage(given["old"], mask),
            sampling_per_token_logps=garbage(given["sampling"], mask),
            objective=objective,
            run=Run(workspace_bytes=1 << 10),
        )
        name = type(objective).__name__
        assert out.engine == ("frozen" if not trains else "one_pass" if name in TOKEN_LEVEL else "two_pass")
        wanted = torch.where(mask, formula(given), 0.0).sum() / mask.sum()
        torch.testing.assert_close(out.loss, wanted, rtol=1e-10, atol=1e-13)
        found = torch.autograd.grad(out.loss, leaves)
        for x, y in zip(found, torch.autograd.grad(wanted, leaves, retain_graph=True), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["TIS", "ICEPOP"])
def test_weights_of_a_token_take_one_pass(name: str) -> None:
    given = batch(4)
    hidden, weight = torch.randn(B, T, 5, requires_grad=True), torch.randn(13, 5, requires_grad=True)
    logps = {"old_per_token_logps": given["old"], "sampling_per_token_logps": given["sampling"]}
    ids = torch.zeros(B, T, dtype=torch.long)
    out = grpo_loss(hidden, weight, ids, given["mask"], given["advantages"], config=getattr(presets, name), **logps)
    assert out.engine == "one_pass"


# as objects


def test_ratios_that_overflow_on_a_branch_not_taken() -> None:
    """e^99 in float32, beyond the bound or capped; a sampler's probability of 0."""
    logps = torch.tensor([[-1.0, -1.0, -1.0]], requires_grad=True)
    far = torch.tensor([[-100.0, -math.inf, -1.0]])
    for objective in (objectives.ipo(), objectives.icepop(), objectives.rollout_is(), objectives.kpop(kl_tau=0.0)):
        out = policy_loss_from_logps(
            logps,
            torch.zeros_like(logps),
            None,
            torch.ones(1, 3),
            sampling_per_token_logps=far,
            objective=objective,
        )
        (gradient,) = torch.autograd.grad(out.loss, logps)
        torch.testing.assert_close(gradient, torch.tensor([[0.0, 0.0, -1 / 3]]))


def test_objectives_are_values() -> None:
    names = {type(objective).__name__ for objective, _ in OBJECTIVES}
    assert names | {"m2po_mask"} == set(named_losses.__all__)
    for objective, _ in OBJECTIVES:
        assert pickle.loads(pickle.dumps(objective)) == objective
        assert copy.deepcopy(GRPOLoss(objective=objective)).objective == objective
    assert {name for name in names if getattr(objectives, name).token_level} == TOKEN_LEVEL


def test_a_sampler_is_asked_for() -> None:
    logps = torch.zeros(2, 3, requires_grad=True)
    for name in ("ipo", "icepop", "kpop", "rollout_is"):
        with pytest.raises(ValueError, match="objective: expected sampling_per_token_logps beside"):
            policy_loss_from_logps(logps, logps, None, torch.ones(2), objective=getattr(objectives, name)())


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "eps: expected a finite number >= 0, got -0.1", lambda: objectives.ipo(eps=-0.1)),
        (ValueError, "ratio_max: .* > 0, got 0", lambda: objectives.ipo(ratio_max=0.0)),
        (ValueError, "ratio_low: .* > 0, got 0", lambda: objectives.icepop(ratio_low=0)),
        (TypeError, "threshold: expected a number, got None", lambda: objectives.kpop(threshold=None)),
        (ValueError, "decay_rate: .* > 0, got 0", lambda: objectives.fipo(decay_rate=0.0)),
        (TypeError, r"scores: expected a tensor, got list", lambda: objectives.topr([1.0])),
        (ValueError, "threshold: .* > 0, got 0", lambda: objectives.m2po_mask(*[torch.zeros(2, 3)] * 3, threshold=0)),
        (
            ValueError,
            r"old_per_token_logps: expected shape .* = \(2, 3\), got \(2, 2\)",
            lambda: objectives.m2po_mask(torch.zeros(2, 2), torch.zeros(2, 3), torch.ones(2, 3)),
        ),
    ],
)
def test_wrong_arguments(error: type[Exception], message: str, call: Any) -> None:
    with pytest.raises(error, match=message):
        call()
