"""Losses by name against their sources, verl's own functions or formulas of log-probabilities; the
presets that correct for a sampler; M2PO's mask."""

from __future__ import annotations

import dataclasses
import math
import pickle
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import (
    LossConfig,
    Run,
    TokenInputs,
    grpo_loss,
    objectives,
    policy_loss_from_logps,
    presets,
)
from tests.support.verl_peer import core_algos, verl_module

FLOAT, B, T = torch.float64, 6, 12
Given = dict[str, Tensor]
SEED = 7  # of clip_cov's draw
FACTOR = 13  # verl's loss_scale_factor
# verl's loss_agg_mode: our normalizer
MODES = {
    "token-mean": LossConfig(loss_type="bnpo"),
    "token-sum": LossConfig(loss_type="dapo"),  # with 1 item
    "seq-mean-token-sum": LossConfig(loss_type="luspo"),
    "seq-mean-token-mean": LossConfig(loss_type="grpo"),
    "seq-mean-token-sum-norm": LossConfig(loss_type="dr_grpo", max_completion_length=FACTOR),
}


def off_policy(seed: int, *, per_token: bool = True, weighted: bool = False) -> Given:
    """(B, T) each: ratios from e^-30 to e^39, advantages of 0, holes and an empty sequence; with
    weights, some 0."""
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, dtype=FLOAT)

    logps = -normal(B, T).abs() * 1.5
    old = (logps + 0.6 * normal(B, T)).clamp(max=-1e-9)
    sampling = (logps + 0.5 * normal(B, T)).clamp(max=-1e-9)
    logps[1:4, 0] = torch.tensor([-31.0, -1.0, math.log(0.2)], dtype=FLOAT)
    old[1:4, 0] = torch.tensor([-1.0, -31.0, -3.0], dtype=FLOAT)
    sampling[1:4, 0] = torch.tensor([-1.0, -31.0, math.log(1e-6)], dtype=FLOAT)  # above IPO's cap
    sampling[0, :3] = torch.tensor([-40.0, math.nan, math.nan], dtype=FLOAT)
    logps[0, 3], old[0, 3] = -1e-12, -2.0
    advantages = normal(B, T) if per_token else normal(B, 1).expand(B, T).clone()
    advantages[4] = 0.0
    mask = torch.rand(B, T, generator=gen) < 0.7
    mask[0, :4], mask[1:5, 0], mask[5] = True, True, False
    given = {"logps": logps, "old": old, "sampling": sampling}
    given |= {"advantages": advantages, "mask": mask}
    if weighted:
        given["ratio"] = 2 * torch.rand(B, T, generator=gen, dtype=FLOAT)
        given["ratio"][0, :4] = 0.0
    return given


def arguments(given: Given) -> dict[str, Any]:
    """What a loss takes besides log-probabilities or a head, NaN wherever the mask is 0."""
    names = {
        "advantages": "advantages",
        "old": "old_per_token_logps",
        "sampling": "sampling_per_token_logps",
        "ratio": "importance_sampling_ratio",
        "ref": "ref_per_token_logps",
    }
    mask = given["mask"]
    masked = {names[x]: torch.where(mask, given[x], torch.nan) for x in names.keys() & given.keys()}
    return masked | {"completion_mask": mask}


def ours(given: Given, **how: Any) -> tuple[Tensor, Tensor]:
    """Value of the loss and its gradient at the counted tokens; the entropies get none."""
    logps = torch.where(given["mask"], given["logps"], torch.nan).requires_grad_()
    leaves = logps, torch.zeros_like(logps).requires_grad_()
    out = policy_loss_from_logps(leaves[0], entropies=leaves[1], **arguments(given), **how)
    gradient, of_entropies = torch.autograd.grad(out.loss, leaves, materialize_grads=True)
    assert not of_entropies.any()
    assert not gradient[~given["mask"]].any()
    return out.loss.detach(), gradient[given["mask"]]


def agree(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], rtol: float = 1e-11) -> None:
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=1e-14)


def with_gradient(source: Callable[..., Tensor], given: Given, *rest: Any) -> tuple[Tensor, Tensor]:
    """Value of `source(given, ...)` and its gradient at the counted tokens."""
    logps = given["logps"].clone().requires_grad_()
    loss = source(given | {"logps": logps}, *rest)
    (gradient,) = torch.autograd.grad(loss, logps)
    return loss.detach(), gradient[given["mask"]]


def verl_config(options: dict[str, Any], info: dict[str, Any]) -> Any:
    """verl's ActorConfig with our parameters where verl has them."""
    actor = verl_module("workers.config")
    fields = {field.name for field in dataclasses.fields(actor.PolicyLossConfig)}
    loss = actor.PolicyLossConfig(**{key: x for key, x in options.items() if key in fields})
    others = {key: x for key, x in options.items() if key not in fields}
    needed = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
    return actor.ActorConfig(**needed, policy_loss=loss, global_batch_info=info, **others)


def verl_loss(given: Given, mode: str, name: str, options: dict[str, Any]) -> Tensor:
    """verl's registered function; masked positions hold 0, as it would read them."""
    config = verl_config(options, {"global_batch_size": B, "loss_scale_factor": FACTOR})
    mask, numbers = given["mask"], [given[x] for x in ("old", "logps", "advantages")]
    read = [*(torch.where(mask, x, 0.0) for x in numbers), mask.to(numbers[0].dtype)]
    torch.manual_seed(SEED)
    return core_algos().get_policy_loss_fn(name)(*read, mode, config, given.get("ratio"))[0]


def mean_of(formula: Callable[[Given], Tensor], given: Given, mode: str = "token-mean") -> Tensor:
    """The mean of a formula's losses, times the ratio, over tokens, or over each sequence and then
    over sequences."""
    mask = given["mask"]
    if "sampling" in given:
        unscored = given["sampling"].isnan()
        sampling = torch.where(unscored, given["logps"].detach(), given["sampling"])
        given = given | {"sampling": sampling}
    per_token = torch.where(mask, formula(given) * given.get("ratio", 1.0), 0.0)
    if mode == "token-mean":
        return per_token.sum() / mask.sum()
    return (per_token.sum(dim=1) / mask.sum(dim=1).clamp(min=1)).mean()


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


def fipo(x, decay_rate=32.0, low=0.0, high=0.2, safety=4.0, ranged=0.2):
    log_ratio = torch.where(x["mask"], x["logps"] - x["old"], 0.0).detach()
    place = torch.arange(T, dtype=FLOAT)
    distance = place[:, None] - place[None, :]  # of the k-th row's token from the t-th column's
    future = log_ratio @ torch.where(distance >= 0, 2 ** (-distance / decay_rate), 0.0)
    f = future.exp().clamp(1 - low, 1 + high)
    unsafe = (x["advantages"] < 0) & (log_ratio.exp() > safety)
    return ppo(x, ranged, ranged) * torch.where(unsafe, f.clamp(0.8, 1.0), f)


# verl's losses: our name, and parameters under which tokens fall on both sides of every bound
OF_VERL: dict[str, tuple[str, dict[str, Any]]] = {
    "cispo": ("cispo_two_sided", {"clip_ratio_low": 0.3, "clip_ratio_high": 0.5}),
    "dppo_tv": ("dppo_tv", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15, "clip_ratio_c": 1.5}),
    "dppo_kl": ("dppo_kl", {"clip_ratio_low": 0.03, "clip_ratio_high": 0.05, "clip_ratio_c": 1.5}),
    "clip_cov": ("clip_cov", {
        "clip_ratio_low": 0.4, "clip_ratio_high": 0.6, "clip_cov_ratio": 0.1, "clip_cov_lb": -0.5,
        "clip_cov_ub": 1.5,
    }),
    "kl_cov": ("kl_cov", {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7}),
    "gspo": ("gspo_token", {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15}),
}  # fmt: skip
FORMULAS: dict[str, tuple[Callable[..., Tensor], dict[str, float], tuple[float, ...]]] = {
    "ipo near": (ipo, {"eps": 0.1, "kl_tau": 1e-3}, (0.1, 1e-3)),
    "ipo capped": (ipo, {"ratio_max": 1.1}, (0.3, 0.0, 1.1)),
    "icepop_prime_rl": (icepop, {}, ()),
    "icepop_prime_rl near": (icepop, {"ratio_low": 0.8, "ratio_high": 1.5}, (0.8, 1.5)),
    "kpop": (kpop, {}, ()),
    "kpop near": (kpop, {"threshold": 0.01, "kl_tau": 0.0}, (0.01, 0.0)),
    "rollout_is": (rollout_is, {}, ()),
    "rollout_is far": (rollout_is, {"eps_clip_low": 0.5, "eps_clip_high": 1.0}, (0.5, 1.0)),
    "topr": (topr, {}, ()),
    "topr weighted": (topr, {"positive_weight": 0.5, "negative_weight": 2.0}, (0.5, 2.0)),
    "fipo": (fipo, {}, ()),
    "fipo fast": (fipo, {
        "clip_ratio_low": 0.1, "clip_ratio_high": 0.1, "decay_rate": 3.0, "influence_low": 0.3,
        "influence_high": 0.4, "safety_threshold": 1.2,
    }, (3.0, 0.3, 0.4, 1.2, 0.1)),
}  # fmt: skip
COUPLED = {"clip_cov", "kl_cov", "gspo", "fipo", "fipo fast"}


def objective_of(name: str) -> Callable[[TokenInputs], Tensor]:
    own, options = OF_VERL.get(name) or (name.split()[0], FORMULAS[name][1])
    draw = {"generator": torch.Generator().manual_seed(SEED)} if name == "clip_cov" else {}
    return partial(getattr(objectives, own), **options, **draw)


def source_of(name: str) -> Callable[[Given, str], Tensor]:
    if name in OF_VERL:
        return partial(verl_loss, name=name, options=OF_VERL[name][1])
    formula, _, parameters = FORMULAS[name]
    return partial(mean_of, lambda x: formula(x, *parameters))


each = pytest.mark.parametrize("name", [*OF_VERL, *FORMULAS])


def test_every_objective_is_here_and_picklable() -> None:
    names = {own for own, _ in OF_VERL.values()} | {name.split()[0] for name in FORMULAS}
    assert names | {"m2po_mask"} == {*objectives.__all__}
    assert not names & ({x.lower() for x in presets.__all__} | {"dapo", "bnpo", "cispo"})
    for name in names:
        objective = getattr(objectives, name)
        assert pickle.loads(pickle.dumps(objective)) is objective
        assert "\n\nSymbols: A is the token's advantage" in objective.__doc__


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("name", "mode"), [*product(OF_VERL, MODES), *product(FORMULAS, ["token-mean"])]
)
def test_values_and_gradients_are_the_sources(name: str, mode: str, weighted: bool) -> None:
    rtol = 1e-7 if mode == "seq-mean-token-mean" else 1e-11  # verl's lengths plus 1e-8
    for seed in range(4):
        given, how = off_policy(seed, weighted=weighted), {"config": MODES[mode]}
        how |= {"num_items_in_batch": 1 if mode == "token-sum" else None}
        found = ours(given, objective=objective_of(name), **how)
        agree(found, with_gradient(source_of(name), given, mode), rtol)


def hidden_batch(given: Given, *, trains: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a head and ids; the log-probabilities of `given` become theirs, and such that
    are near."""
    hidden = torch.randn(B, T, 5, dtype=FLOAT).requires_grad_()
    weight = (1.5 * torch.randn(13, 5, dtype=FLOAT)).requires_grad_(trains)
    ids = torch.randint(13, (B, T))
    given["logps"] = torch.log_softmax(hidden @ weight.T, dim=-1).gather(-1, ids[..., None])[..., 0]
    for name in ("old", "sampling"):
        given[name] = given["logps"].detach() + 0.5 * torch.randn(B, T, dtype=FLOAT)
    return hidden, weight, ids


@pytest.mark.parametrize("trains", [True, False])
@each
def test_from_packed_hidden_states(name: str, trains: bool) -> None:
    """With a frozen head too, where the engine asks whether the entropies are used: nothing is
    drawn for that."""
    given = off_policy(3, weighted=True)
    hidden, weight, ids = hidden_batch(given, trains=trains)
    leaves = (hidden, weight) if trains else (hidden,)
    wanted = source_of(name)(given, "token-mean")
    gradients = torch.autograd.grad(wanted, leaves)
    rows = {key: x.flatten() for key, x in arguments(given).items()}
    rows |= {"config": MODES["token-mean"], "cu_seqlens": torch.arange(0, B * T + 1, T)}
    rows |= {"objective": objective_of(name), "run": Run(workspace_bytes=1 << 10)}
    tokens = hidden.flatten(0, 1), weight, ids.masked_fill(~given["mask"], -100).flatten()
    out = grpo_loss(*tokens, **rows)
    trained = "two_pass" if name in COUPLED else "one_pass"
    assert out.engine == (trained if trains else "frozen")
    torch.testing.assert_close(out.loss, wanted.detach(), rtol=1e-10, atol=1e-13)
    for x, y in zip(torch.autograd.grad(out.loss, leaves), gradients, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)
    none = grpo_loss(*tokens, **rows | {"completion_mask": torch.zeros(B * T)})
    assert none.loss == 0 and not torch.autograd.grad(none.loss, hidden)[0].any()


@each
def test_without_old_log_probabilities_they_are_the_current_ones(name: str) -> None:
    given = off_policy(4)
    wanted = ours(given | {"old": given["logps"]}, objective=objective_of(name))
    del given["old"]
    agree(ours(given, objective=objective_of(name)), wanted)


@pytest.mark.parametrize("name", ["ipo", "icepop_prime_rl", "kpop", "rollout_is"])
def test_a_sampler_is_asked_for(name: str) -> None:
    given = off_policy(0)
    given.pop("sampling")
    with pytest.raises(ValueError, match="sampling_per_token_logps: expected a tensor"):
        ours(given, objective=getattr(objectives, name))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ipo", {"eps": -0.1}, "eps: expected a finite number >= 0, got -0.1"),
        ("icepop_prime_rl", {"ratio_low": 0}, "ratio_low: .* > 0, got 0"),
        ("icepop_prime_rl", {"ratio_low": 6.0}, "ratio_low: expected at most ratio_high = 5.0"),
        ("clip_cov", {"clip_cov_lb": 6.0}, "clip_cov_lb: expected at most clip_cov_ub = 5.0"),
        ("kpop", {"threshold": None}, "threshold: expected a number, got None"),
        ("clip_cov", {"clip_cov_ub": math.nan}, "clip_cov_ub: expected a finite number, got nan"),
        ("kl_cov", {"kl_cov_ratio": 2}, r"kl_cov_ratio: expected a number in \(0, 1\], got 2"),
    ],
)
def test_numbers_out_of_range(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        ours(off_policy(0), objective=partial(getattr(objectives, name), **options))
    ours(off_policy(0), objective=partial(objectives.clip_cov, clip_cov_lb=-1.0))


def test_scores_of_topr_are_by_position() -> None:
    """One a sequence, of another sign than the advantages, also where packed sequences and a mask
    move the tokens."""
    given = off_policy(1)
    scores = torch.tensor([1.0, -1.0, 0.0, 2.0, -3.0, 1.0])[:, None].expand(B, T)
    wanted = with_gradient(partial(mean_of, topr), given | {"scores": scores})
    objective = partial(objectives.topr, scores=scores)
    agree(ours(given, objective=objective), wanted)
    rows = {name: x.flatten() for name, x in arguments(given).items()}
    bounds = torch.arange(0, B * T + 1, T)
    out = policy_loss_from_logps(
        given["logps"].flatten(), **rows, objective=objective, cu_seqlens=bounds
    )
    torch.testing.assert_close(out.loss, wanted[0])


def test_defaults_are_verls() -> None:
    config = verl_config({}, {})
    for own, _ in OF_VERL.values():
        for field, value in (getattr(objectives, own).__kwdefaults__ or {}).items():
            source = config if hasattr(config, field) else config.policy_loss
            assert field == "generator" or value == getattr(source, field), field


def test_draws_are_of_the_generator_or_torchs_own() -> None:
    """Of the tokens between the bounds of the covariance, a share of all is drawn."""
    given, options = off_policy(2), OF_VERL["clip_cov"][1]
    given["advantages"][4] = 0.5

    def gradient(objective: Any) -> Tensor:
        return ours(given, objective=objective, config=MODES["token-mean"])[1]

    first, again = (gradient(objective_of("clip_cov")) for _ in range(2))
    assert torch.equal(first, again)
    torch.manual_seed(SEED)
    default = partial(objectives.clip_cov, **options)
    assert torch.equal(first, gradient(default))
    nothing = partial(objectives.clip_cov, **options | {"clip_cov_lb": 1e9, "clip_cov_ub": 1e10})
    drawn = (first == 0) & (gradient(nothing) != 0)
    assert drawn.sum() == int(0.1 * len(first))


def per_token(objective, logps, old, advantages):
    """The objective's losses of one sequence, and the gradient of their sum."""
    x = torch.tensor([logps], requires_grad=True)
    given = torch.tensor([advantages]), torch.tensor([old])
    mask = torch.ones_like(x, dtype=torch.bool)
    losses = objective(TokenInputs(x, torch.zeros_like(x), mask, *given, None, None, None))
    return losses.detach(), torch.autograd.grad(losses.sum(), x)[0]


def test_ends_of_gspo_and_dppo() -> None:
    """Above a ratio of e^10 there is no gradient; a logp of 1e-7 is a probability of 1, rounded: no
    NaN in the KL, and it is judged like its neighbor."""
    losses, gradient = per_token(objectives.gspo_token, [-1.0, -2.0], [-15.0, -12.0], [-1.0, -1.0])
    assert not gradient.any()
    torch.testing.assert_close(losses, torch.full((1, 2), torch.e**10))
    losses, gradient = per_token(objectives.dppo_kl, [1e-7, 0.0, -1e-7], [-1e-3] * 3, [1.0] * 3)
    assert (gradient != 0).all() and losses.isfinite().all()


def test_ratios_that_overflow() -> None:
    """e^99 in float32: beyond the bound where A > 0, of no effect where A = 0. verl's gradient is
    NaN there. Where they count they are seen."""
    logps, old = [-1.0, -1.0, -2.0], [-100.0, -1.0, -2.0]
    cases = {
        "kl_cov": ({"ppo_kl_coef": 0.0}, 0.0, 0.0),
        "clip_cov": ({"clip_cov_lb": 50.0, "clip_cov_ub": 51.0}, 1.0, -1.2),
    }
    for name, (options, advantage, loss) in cases.items():
        objective = partial(getattr(objectives, name), **options)
        losses, gradient = per_token(objective, logps, old, [advantage, -0.5, 0.5])
        torch.testing.assert_close(losses, torch.tensor([[loss, 0.5, -0.5]]))
        torch.testing.assert_close(gradient, torch.tensor([[0.0, 0.5, -0.5]]))
        losses, _ = per_token(objective, [-1.0, torch.nan], [-100.0, -1.0], [-1.0, 1.0])
        assert losses[0, 0] == torch.inf and losses[0, 1].isnan()
    given = {"logps": torch.full((1, 3), -1.0), "advantages": torch.ones(1, 3)}
    given["mask"] = torch.ones(1, 3, dtype=torch.bool)
    given["sampling"] = torch.tensor([[-100.0, -math.inf, -1.0]])
    quiet = partial(objectives.kpop, kl_tau=0.0)
    for objective in (objectives.ipo, objectives.icepop_prime_rl, objectives.rollout_is, quiet):
        _, gradient = ours(given, objective=objective)
        torch.testing.assert_close(gradient, torch.tensor([0.0, 0.0, -1 / 3]))


def test_published_estimators_on_policy() -> None:
    """REINFORCE's gradient is A a token over the token count, RLOO's A a token over the batch."""
    advantages = torch.tensor([1.5, -0.7], dtype=FLOAT)
    logps = torch.linspace(-3, -1, 10, dtype=FLOAT).view(2, 5).requires_grad_()
    for config, divisor in ((presets.REINFORCE, 10), (presets.RLOO, 2)):
        given = torch.ones(2, 5), advantages
        (found,) = torch.autograd.grad(
            policy_loss_from_logps(logps, *given, config=config).loss, logps
        )
        torch.testing.assert_close(found, -advantages[:, None].expand(2, 5) / divisor)


def test_m2po_drops_the_largest_until_the_mean_is_below() -> None:
    for seed, threshold in enumerate((0.04, 0.2, 1e9, 1e-12)):
        given = off_policy(seed)
        mask, old, sampling = given["mask"], given["old"], given["sampling"]
        junk = [x.masked_fill(~mask, torch.nan) for x in (old, sampling)]
        found = objectives.m2po_mask(*junk, mask, threshold)
        squares = (old - sampling).nan_to_num(nan=0.0)[mask].square()
        rest = sorted(squares.tolist())
        while len(rest) > 1 and sum(rest) / len(rest) >= threshold:
            rest.pop()
        assert not (found & ~mask).any()
        assert sorted(squares[found[mask]].tolist()) == rest
        flat = old.flatten(), sampling.flatten(), mask.flatten().long()
        assert torch.equal(objectives.m2po_mask(*flat, threshold).view(B, T), found)
    assert not objectives.m2po_mask(old, sampling, torch.zeros(B, T)).any()
    with pytest.raises(ValueError, match=r"^completion_mask: .* without NaN"):
        objectives.m2po_mask(old, sampling, torch.full((B, T), torch.nan))
    with pytest.raises(ValueError, match=r"^completion_mask: .* additive attention mask"):
        objectives.m2po_mask(old, sampling, torch.where(mask, 0.0, torch.finfo(torch.bfloat16).min))
    with pytest.warns(UserWarning, match="completion_mask: it holds values other than 0 and 1"):
        objectives.m2po_mask(old, sampling, torch.full((B, T), 2))
