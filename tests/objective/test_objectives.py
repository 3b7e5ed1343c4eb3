"""verl's policy losses as objectives, against verl's own functions: from logps, and from hidden states."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import GRPOLoss, LossConfig, Run, TokenInputs, grpo_loss, objectives
from grpo_kernels.batch.inputs import LossInputs
from grpo_kernels.batch.tokens import Tokens, read_tokens
from grpo_kernels.objective import named_losses, verl_losses
from grpo_kernels.objective.custom import CustomObjective
from grpo_kernels.objective.evaluation import Evaluation
from grpo_kernels.objective.normaliser import token_weights
from grpo_kernels.objective.policy import PolicyObjective
from tests.support.off_policy import FLOAT, off_policy
from tests.support.verl_peer import core_algos, verl_module

B, T = 6, 9
SEED = 7  # of clip_cov's draw
# name: parameters under which tokens fall on both sides of every bound below
OURS: dict[str, dict[str, Any]] = {
    "gpg": {},
    "dro": {"dro_beta": 0.3},
    "cispo": {"clip_ratio_low": 0.3, "clip_ratio_high": 0.5},
    "dppo_tv": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15, "clip_ratio_c": 1.5},
    "dppo_kl": {"clip_ratio_low": 0.03, "clip_ratio_high": 0.05, "clip_ratio_c": 1.5},
    "clip_cov": {
        "clip_ratio_low": 0.4, "clip_ratio_high": 0.6, "clip_cov_ratio": 0.1, "clip_cov_lb": -0.5, "clip_cov_ub": 1.5
    },
    "kl_cov": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7},
    "gspo": {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15},
    "geo_mean": {"clip_ratio_low": 0.4, "clip_ratio_high": 0.2},
}  # fmt: skip
TOKEN_LEVEL = {"gpg", "dro", "cispo", "dppo_tv", "dppo_kl"}
FACTOR = 13  # loss_scale_factor
# verl's loss_agg_mode: (our normaliser, num_items_in_batch as a share of the counted tokens; 0 stands for 1 item)
MODES: dict[str, tuple[LossConfig, float | None]] = {
    "token-mean": (LossConfig(loss_type="bnpo"), None),
    "token-sum": (LossConfig(loss_type="dapo"), 0.0),
    "seq-mean-token-sum": (LossConfig(loss_type="luspo"), None),
    "seq-mean-token-mean": (LossConfig(loss_type="grpo"), None),
    "seq-mean-token-sum-norm": (LossConfig(loss_type="dr_grpo", max_completion_length=FACTOR), None),
}


def ours(name: str) -> Any:
    draw = {"generator": torch.Generator().manual_seed(SEED)} if name == "clip_cov" else {}
    return getattr(objectives, name)(**OURS[name], **draw)


def batch(seed: int, *, per_token: bool = True, weighted: bool = False) -> dict[str, Tensor]:
    given = off_policy(seed, B, T, per_token=per_token)
    if weighted:
        given["ratio"] = torch.rand(B, T, dtype=FLOAT) * 2
        given["ratio"][0, :4] = 0.0
    return given


def garbage(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, x, torch.nan)


def tokens_of(given: dict[str, Tensor]) -> Tokens:
    """The tokens as `grpo_loss` reads them, with NaN where the mask is 0."""
    mask, ratio = given["mask"], given.get("ratio")
    inputs = LossInputs(
        torch.zeros(B, T, dtype=torch.long),
        mask,
        garbage(given["advantages"], mask),
        old_per_token_logps=garbage(given["old"], mask),
        importance_sampling_ratio=None if ratio is None else garbage(ratio, mask),
    )
    return read_tokens(inputs, FLOAT)


def evaluate(objective: Any, given: dict[str, Tensor], config: LossConfig, items: float | None) -> Evaluation:
    tokens = tokens_of(given)
    number = None if items is None else max(items * len(tokens), 1.0)
    weights = token_weights(config, tokens.layout, number, FLOAT)
    made = (
        PolicyObjective(config, tokens, weights) if objective is None else CustomObjective(objective, tokens, weights)
    )
    logps = given["logps"][given["mask"]]
    return made.evaluate(logps, torch.zeros_like(logps))


def verl_config(options: dict[str, Any], info: dict[str, Any]) -> Any:
    """verl's ActorConfig with our parameters where verl has them."""
    actor = verl_module("workers.config")
    own = {field.name for field in dataclasses.fields(actor.PolicyLossConfig)}
    return actor.ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=actor.PolicyLossConfig(**{key: value for key, value in options.items() if key in own}),
        global_batch_info=info,
        **{key: value for key, value in options.items() if key not in own},
    )


def verl_loss(
    name: str,
    given: dict[str, Tensor],
    mode: str = "token-mean",
    *,
    options: dict[str, Any] | None = None,
    info: dict[str, Any] | None = None,
) -> Tensor:
    """What verl's registered function makes of it; masked positions hold 0, as it would read them."""
    info = {"global_batch_size": B, "loss_scale_factor": FACTOR} if info is None else info
    config = verl_config(OURS[name] if options is None else options, info)
    mask = given["mask"]
    old, logps, advantages = (torch.where(mask, given[key], 0.0) for key in ("old", "logps", "advantages"))
    torch.manual_seed(SEED)
    function = core_algos().get_policy_loss_fn(name)
    loss, _ = function(old, logps, advantages, mask.to(logps.dtype), mode, config, given.get("ratio"))
    return loss


def with_gradient(name: str, given: dict[str, Tensor], mode: str = "token-mean", **how: Any) -> tuple[Tensor, Tensor]:
    logps = given["logps"].clone().requires_grad_()
    loss = verl_loss(name, given | {"logps": logps}, mode, **how)
    (gradient,) = torch.autograd.grad(loss, logps)
    return loss.detach(), gradient[given["mask"]]


def agree(found: Evaluation, loss: Tensor, gradient: Tensor, rtol: float = 1e-12) -> None:
    torch.testing.assert_close(found.loss, loss, rtol=rtol, atol=1e-14)
    torch.testing.assert_close(found.d_logp, gradient, rtol=rtol, atol=1e-14)
    assert found.coefficients.d_entropy is None


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OURS)
def test_losses_and_gradients_are_verls(name: str, mode: str, weighted: bool) -> None:
    config, items = MODES[mode]
    if name == "geo_mean":  # means over sequences, whatever it is asked for
        config, items = MODES["seq-mean-token-mean"]
    # verl's geo_mean divides by the sequence's length plus 1e-8
    rtol = 1e-6 if name == "geo_mean" else 1e-12
    for seed in range(4):
        given = batch(seed, per_token=name != "geo_mean", weighted=weighted)
        loss, gradient = with_gradient(name, given, mode)
        if mode == "seq-mean-token-mean":
            rtol = max(rtol, 1e-7)  # the same 1e-8 there
        agree(evaluate(ours(name), given, config, items), loss, gradient, rtol)


def test_both_sides_of_every_bound_are_tested() -> None:
    given = batch(3)
    given["advantages"][4] = 0.5  # where it is 0 everything is
    count, log_ratio = int(given["mask"].sum()), (given["logps"] - given["old"])[given["mask"]]
    dropped = {name: evaluate(ours(name), given, *MODES["token-mean"]).d_logp == 0 for name in OURS}
    for name in ("dppo_tv", "dppo_kl", "clip_cov"):
        assert 5 < dropped[name].sum() < count - 5
    nothing_drawn = objectives.clip_cov(**OURS["clip_cov"] | {"clip_cov_lb": 1e9, "clip_cov_ub": 1e10})
    clipped = evaluate(nothing_drawn, given, *MODES["token-mean"]).d_logp == 0
    assert (dropped["clip_cov"] & ~clipped).sum() == int(0.1 * count)
    assert log_ratio.abs().max() > 25


def test_data_parallel_means() -> None:
    """verl's gradients are averaged over dp_size ranks: a mean over all their tokens is "dapo" with that many items."""
    given = batch(5)
    info = {"dp_size": 4, "batch_num_tokens": 120}
    loss, gradient = with_gradient("gpg", given, info=info)
    share = 120 / 4 / float(given["mask"].sum())
    agree(evaluate(ours("gpg"), given, LossConfig(loss_type="dapo"), share), loss, gradient)


@pytest.mark.parametrize("mode", ["seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_without_a_global_batch_size_verl_counts_the_sequences_that_have_tokens(mode: str) -> None:
    given = batch(6)
    loss, gradient = with_gradient("dro", given, mode, info={"loss_scale_factor": FACTOR})
    agree(evaluate(ours("dro"), given, *MODES[mode]), loss * (B - 1) / B, gradient * (B - 1) / B, 1e-7)


# verl's other losses are fields of the config: verl's name, our fields, verl's parameters, loss_agg_mode
CONFIGS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("vanilla", {"loss_type": "bnpo", "epsilon": 0.1, "epsilon_high": 0.3, "delta": 3.0},
     {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}, "token-mean"),
    ("gspo", {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.3},
     {"clip_ratio_low": 0.1, "clip_ratio_high": 0.3}, "seq-mean-token-mean"),
    ("sapo", {"loss_type": "sapo"}, {}, "seq-mean-token-mean"),
    ("geo_mean", {"loss_type": "gmpo", "epsilon": 0.4, "epsilon_high": 0.2}, OURS["geo_mean"], "seq-mean-token-mean"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fields", "options", "mode"), CONFIGS, ids=[row[0] for row in CONFIGS])
def test_losses_that_the_config_has(name: str, fields: dict[str, Any], options: dict[str, Any], mode: str) -> None:
    for seed in range(3):
        given = batch(seed, per_token=name == "vanilla")
        given["old"][1:3, 0] = given["logps"][1:3, 0] + 1.0  # verl clamps log-ratios at 20 or 10
        loss, gradient = with_gradient(name, given, mode, options=options)
        # their sequence means divide by the length plus 1e-8
        agree(evaluate(None, given, LossConfig(**fields), None), loss, gradient, 1e-12 if name == "vanilla" else 1e-6)


def test_gspo_is_the_ratio_of_a_sequence_where_nothing_is_one_a_token() -> None:
    """Elsewhere GSPO and GSPO-token have different gradients, and verl's is the second."""
    sequence = LossConfig(loss_type="grpo", importance_sampling_level="sequence", epsilon=0.1, epsilon_high=0.15)
    clipped = []
    for seed in range(4):
        for weighted, per_token in ((True, True), (False, True), (True, False), (False, False)):
            given = batch(seed, per_token=per_token, weighted=weighted)
            found = evaluate(ours("gspo"), given, *MODES["seq-mean-token-mean"]).d_logp
            other = evaluate(None, given, sequence, None).d_logp
            if weighted or per_token:
                assert (found - other).abs().max() > 0.3 * found.abs().max()
            else:
                torch.testing.assert_close(found, other)
                clipped.append(int((found[given["advantages"][given["mask"]] != 0] == 0).sum()))
    assert max(clipped) > 5
    assert min(clipped) < 20


def test_gspo_has_no_gradient_above_a_ratio_of_e_to_the_10() -> None:
    given = single("gspo", [-1.0, -2.0], [-15.0, -12.0], [-1.0, -1.0])
    loss, gradient = with_gradient("gspo", given)
    losses, own = per_token(objectives.gspo(), given)
    assert not own.any()
    assert not gradient.any()
    torch.testing.assert_close(losses, torch.full((1, 2), torch.e**10))
    torch.testing.assert_close(losses.mean(), loss)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_bound_that_is_met_exactly_passes_the_gradient(advantage: float) -> None:
    """In any release of torch, whose clamp has a derivative there that is 1 up to 2.13 and then 0."""
    old = -1.0 - advantage * 0.25
    at_bound = single("geo_mean", [-1.0], [old], [advantage])
    _, gradient = per_token(objectives.geo_mean(clip_ratio_low=0.25, clip_ratio_high=0.25), at_bound)
    torch.testing.assert_close(gradient, -advantage * torch.exp(at_bound["logps"] - old))
    largest = single("gspo", [-1.0], [-11.0], [advantage])
    _, gradient = per_token(objectives.gspo(clip_ratio_low=0.0, clip_ratio_high=float(torch.e**11)), largest)
    torch.testing.assert_close(gradient, torch.full((1, 1), -advantage * torch.e**10))


@pytest.mark.parametrize("kind", ["ppo_clip", "reinforce"])
def test_bypass_mode_is_what_it_dispatches_to(kind: str) -> None:
    """PPO with the sampler's logps as the old ones, or `gpg` weighted by the ratio to them, at most 2."""
    given = batch(2)
    given["old"][1:3, 0] = given["logps"][1:3, 0] + 1.0  # verl clamps log-ratios at 20
    correction = verl_module("trainer.config").RolloutCorrectionConfig(
        loss_type=kind, rollout_is="token", rollout_is_threshold=2.0, rollout_rs=None
    )
    loss, gradient = with_gradient("bypass_mode", given, options={"rollout_correction": correction})
    if kind == "ppo_clip":
        found = evaluate(None, given, LossConfig(loss_type="bnpo", delta=3.0), None)
    else:
        given["ratio"] = torch.exp(given["logps"] - given["old"]).clamp(max=2.0)
        found = evaluate(ours("gpg"), given, *MODES["token-mean"])
    agree(found, loss, gradient, 1e-6)


def test_trls_cispo_is_one_of_verls() -> None:
    given = batch(1)
    config = LossConfig(loss_type="cispo", epsilon_high=1.5)
    wanted = evaluate(objectives.cispo(clip_ratio_low=1.0, clip_ratio_high=0.5), given, config, None)
    found = evaluate(None, given, config, None)
    torch.testing.assert_close(found.loss, wanted.loss)
    torch.testing.assert_close(found.d_logp, wanted.d_logp, rtol=1e-12, atol=1e-8)  # verl's ratio is at least e^-20


# from hidden states


def hidden_batch(given: dict[str, Tensor], trains: bool) -> tuple[Tensor, Tensor, Tensor]:
    gen = torch.Generator().manual_seed(11)
    hidden = torch.randn(B, T, 5, generator=gen, dtype=FLOAT).requires_grad_()
    weight = (1.5 * torch.randn(13, 5, generator=gen, dtype=FLOAT)).requires_grad_(trains)
    ids = torch.randint(13, (B, T), generator=gen)
    given["logps"] = torch.log_softmax(hidden @ weight.T, dim=-1).gather(-1, ids[..., None])[..., 0]
    given["old"] = given["logps"].detach() + 0.5 * torch.randn(B, T, generator=gen, dtype=FLOAT)
    return hidden, weight, ids


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("name", OURS)
def test_from_hidden_states(name: str, trains: bool) -> None:
    """With a frozen head too, where the engine asks whether the entropies are used: nothing is drawn for that."""
    given = batch(3, per_token=name != "geo_mean", weighted=True)
    hidden, weight, ids = hidden_batch(given, trains)
    leaves = (hidden, weight) if trains else (hidden,)
    wanted = verl_loss(name, given)
    gradients = torch.autograd.grad(wanted, leaves)
    mask = given["mask"]
    out = grpo_loss(
        hidden,
        weight,
        ids.masked_fill(~mask, -100),
        mask,
        given["advantages"],
        old_per_token_logps=garbage(given["old"], mask),
        importance_sampling_ratio=garbage(given["ratio"], mask),
        objective=ours(name),
        config=LossConfig(loss_type="grpo" if name == "geo_mean" else "bnpo"),
        run=Run(workspace_bytes=1 << 10),
    )
    if trains:
        assert (out.engine == "one_pass") == (name in TOKEN_LEVEL)
    found = torch.autograd.grad(out.loss, leaves)
    rtol = 1e-7 if name == "geo_mean" else 1e-10
    torch.testing.assert_close(out.loss, wanted.detach(), rtol=rtol, atol=1e-12)
    for own, other in zip(found, gradients, strict=True):
        torch.testing.assert_close(own, other, rtol=rtol, atol=1e-11)


@pytest.mark.parametrize("name", OURS)
def test_on_policy_and_packed(name: str) -> None:
    """Without old logps they are the current ones; packed sequences give what padded ones do."""
    given = batch(4, per_token=name != "geo_mean")
    hidden, weight, ids = hidden_batch(given, True)
    mask = given["mask"]
    own = given | {"old": given["logps"].detach()}
    options = {"config": LossConfig(loss_type="grpo")}
    out = grpo_loss(hidden, weight, ids, mask, given["advantages"], objective=ours(name), **options)
    loss = verl_loss(name, own, "seq-mean-token-mean")
    torch.testing.assert_close(out.loss, loss.detach(), rtol=1e-7, atol=1e-12)
    (wanted,) = torch.autograd.grad(loss, hidden)
    torch.testing.assert_close(torch.autograd.grad(out.loss, hidden)[0], wanted, rtol=1e-6, atol=1e-12)
    flat = (hidden.flatten(0, 1), weight, ids.flatten(), mask.flatten(), given["advantages"].flatten())
    packed = grpo_loss(*flat, cu_seqlens=torch.arange(0, B * T + 1, T), objective=ours(name), **options)
    torch.testing.assert_close(packed.loss, out.loss)


# where verl's arithmetic gives out


def single(name: str, logps: list[float], old: list[float], advantages: list[float], **extra: Any) -> dict[str, Tensor]:
    """float32, one sequence; the batch of `TokenInputs` and of verl's function."""
    rows = {"logps": logps, "old": old, "advantages": advantages}
    return {key: torch.tensor([row]) for key, row in rows.items()} | {
        "mask": torch.ones(1, len(logps), dtype=torch.bool)
    }


def per_token(objective: Any, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The objective's losses and the gradient of their sum."""
    logps = given["logps"].clone().requires_grad_()
    inputs = TokenInputs(
        logps, torch.zeros_like(logps), given["mask"], given["advantages"], given["old"], None, None, given.get("ratio")
    )
    losses = objective(inputs)
    return losses.detach(), torch.autograd.grad(losses.sum(), logps)[0]


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_ratios_that_overflow_on_a_branch_not_taken(name: str) -> None:
    """e^99 in float32: beyond the bound where A > 0, of no effect where A = 0. verl's gradient is NaN there."""
    given = single(name, [-1.0, -1.0, -2.0], [-100.0, -1.0, -2.0], [0.0 if name == "kl_cov" else 1.0, -0.5, 0.5])
    _, theirs = with_gradient(name, given)
    assert theirs.isnan().any()
    options = {"kl_cov": {"ppo_kl_coef": 0.0}, "clip_cov": {"clip_cov_lb": 50.0, "clip_cov_ub": 51.0}}[name]
    losses, gradient = per_token(getattr(objectives, name)(**options), given)
    torch.testing.assert_close(losses, torch.tensor([[0.0 if name == "kl_cov" else -1.2, 0.5, -0.5]]))
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 0.5, -0.5]]))


def test_ratios_that_overflow_where_they_count_are_seen() -> None:
    given = single("clip_cov", [-1.0, torch.nan], [-100.0, -1.0], [-1.0, 1.0])
    for objective in (objectives.clip_cov(), objectives.kl_cov()):
        losses, _ = per_token(objective, given)
        assert losses[0, 0] == torch.inf
        assert losses[0, 1].isnan()


def test_probabilities_that_round_above_one() -> None:
    """A logp of 1e-7 is a probability of 1, rounded: no NaN in the KL, and it is judged like its neighbour."""
    given = single("dppo_kl", [1e-7, 0.0, -1e-7], [-1e-3] * 3, [1.0, 1.0, 1.0])
    losses, gradient = per_token(objectives.dppo_kl(), given)
    assert (gradient != 0).all()
    assert losses.isfinite().all()


# as objects


def test_objectives_are_values() -> None:
    for name in OURS:
        objective = getattr(objectives, name)(**OURS[name])
        assert pickle.loads(pickle.dumps(objective)) == objective
        assert repr(objective).startswith(name)
        assert copy.deepcopy(GRPOLoss(objective=objective)).objective == objective
    assert {name for name in OURS if getattr(objectives, name).token_level} == TOKEN_LEVEL
    assert set(verl_losses.__all__) == set(OURS)
    assert sorted(objectives.__all__) == sorted([*verl_losses.__all__, *named_losses.__all__])


def test_defaults_are_verls() -> None:
    config = verl_config({}, {})
    for name in set(OURS) - {"dro"}:
        for field, value in vars(getattr(objectives, name)()).items():
            source = config if hasattr(config, field) else config.policy_loss
            assert field == "generator" or value == getattr(source, field), field


def test_draws_are_of_the_generator_or_torchs_own() -> None:
    given = batch(2)
    runs = [evaluate(ours("clip_cov"), given, *MODES["token-mean"]).d_logp for _ in range(2)]
    assert torch.equal(*runs)
    torch.manual_seed(SEED)
    default = objectives.clip_cov(**OURS["clip_cov"])
    first, *more = (evaluate(default, given, *MODES["token-mean"]).d_logp for _ in range(9))
    assert torch.equal(first, runs[0])
    assert not all(torch.equal(first, other) for other in more)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, r"dro_beta: expected a finite number > 0, got 0", lambda: objectives.dro(0.0)),
        (TypeError, "dro_beta: expected a number, got None", lambda: objectives.dro(None)),
        (ValueError, "clip_ratio_low: .* >= 0, got -0.1", lambda: objectives.cispo(clip_ratio_low=-0.1)),
        (ValueError, "clip_ratio_c: .* > 0, got 0", lambda: objectives.dppo_kl(clip_ratio_c=0.0)),
        (ValueError, "clip_cov_ratio: .* > 0, got 0", lambda: objectives.clip_cov(clip_cov_ratio=0)),
        (ValueError, "clip_cov_ub: .* got nan", lambda: objectives.clip_cov(clip_cov_ub=float("nan"))),
        (
            TypeError,
            "generator: expected a torch.Generator on the CPU, got 3",
            lambda: objectives.clip_cov(generator=3),
        ),
        (ValueError, r"kl_cov_ratio: expected a number in \(0, 1\], got 2", lambda: objectives.kl_cov(kl_cov_ratio=2)),
    ],
)
def test_wrong_arguments(error: type[Exception], message: str, call: Any) -> None:
    with pytest.raises(error, match=message):
        call()
    assert objectives.clip_cov(clip_cov_lb=-1.0)


def test_a_batch_without_tokens() -> None:
    for name in OURS:
        hidden = torch.randn(2, 3, 4, requires_grad=True)
        ids, mask = torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3)
        out = grpo_loss(hidden, torch.randn(7, 4), ids, mask, torch.ones(2), objective=ours(name))
        out.loss.backward()
        assert out.loss == 0
        assert not hidden.grad.any()
