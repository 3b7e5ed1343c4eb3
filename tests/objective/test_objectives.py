"""Every objective against its source: from logps and from hidden states, as a value, and with wrong arguments."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_kernels import GRPOLoss, Run, grpo_loss, objectives
from grpo_kernels.objective import named_losses, verl_losses
from tests.support.objective_sources import (
    MODES,
    OF_VERL,
    SOURCES,
    TOKEN_LEVEL,
    Source,
    with_gradient,
)
from tests.support.off_policy import FLOAT, B, Given, T, agree, arguments, off_policy, ours

each = pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("name", "mode"), [(name, mode) for name, x in SOURCES.items() for mode in x.modes]
)
def test_values_and_gradients_are_the_sources(name: str, mode: str, weighted: bool) -> None:
    source = SOURCES[name]
    rtol = (
        max(source.rtol, 1e-7) if mode == "seq-mean-token-mean" else source.rtol
    )  # verl's lengths plus 1e-8
    for seed in range(4):
        given = off_policy(seed, per_token=source.per_token, weighted=weighted)
        found = ours(
            given,
            objective=source.make(),
            config=MODES[mode],
            num_items_in_batch=1 if mode == "token-sum" else None,
        )
        agree(found, with_gradient(source.loss, given, mode), rtol)


def hidden_batch(given: Given, *, trains: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a head and ids; the log-probabilities of `given` become theirs, and such that are near."""
    hidden = torch.randn(B, T, 5, dtype=FLOAT).requires_grad_()
    weight = (1.5 * torch.randn(13, 5, dtype=FLOAT)).requires_grad_(trains)
    ids = torch.randint(13, (B, T))
    given["logps"] = torch.log_softmax(hidden @ weight.T, dim=-1).gather(-1, ids[..., None])[..., 0]
    for name in ("old", "sampling"):
        given[name] = given["logps"].detach() + 0.5 * torch.randn(B, T, dtype=FLOAT)
    return hidden, weight, ids


@pytest.mark.parametrize("trains", [True, False])
@each
def test_from_hidden_states(source: Source, trains: bool) -> None:
    """With a frozen head too, where the engine asks whether the entropies are used: nothing is drawn for that."""
    given = off_policy(3, per_token=source.per_token, weighted=True)
    hidden, weight, ids = hidden_batch(given, trains=trains)
    leaves = (hidden, weight) if trains else (hidden,)
    wanted = source.loss(given, source.modes[0])
    gradients = torch.autograd.grad(wanted, leaves)
    out = grpo_loss(
        hidden,
        weight,
        ids.masked_fill(~given["mask"], -100),
        **arguments(given),
        objective=source.make(),
        config=MODES[source.modes[0]],
        run=Run(workspace_bytes=1 << 10),
    )
    assert out.engine == (
        "frozen" if not trains else "one_pass" if source.name in TOKEN_LEVEL else "two_pass"
    )
    rtol = max(source.rtol / 10, 1e-10)
    torch.testing.assert_close(out.loss, wanted.detach(), rtol=rtol, atol=1e-13)
    for x, y in zip(torch.autograd.grad(out.loss, leaves), gradients, strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=1e-12)


@each
def test_on_policy_and_packed(source: Source) -> None:
    """Without old logps they are the current ones; packed sequences give what padded ones do."""
    given = off_policy(4, per_token=source.per_token)
    hidden, weight, ids = hidden_batch(given)
    options = {"objective": source.make(), "config": MODES[source.modes[-1]]}
    wanted = source.loss(given | {"old": given["logps"].detach()}, source.modes[-1])
    given.pop("old")
    out = grpo_loss(hidden, weight, ids, **arguments(given), **options)
    torch.testing.assert_close(out.loss, wanted.detach(), rtol=1e-7, atol=1e-12)
    found, gradient = (torch.autograd.grad(x, hidden)[0] for x in (out.loss, wanted))
    torch.testing.assert_close(found, gradient, rtol=1e-6, atol=1e-12)
    rows = {name: x.flatten() for name, x in arguments(given).items()}
    options["objective"] = source.make()
    bounds = torch.arange(0, B * T + 1, T)
    packed = grpo_loss(
        hidden.flatten(0, 1), weight, ids.flatten(), **rows, cu_seqlens=bounds, **options
    )
    torch.testing.assert_close(packed.loss, out.loss)


@each
def test_a_batch_without_tokens(source: Source) -> None:
    hidden, zeros = torch.randn(2, 3, 4, requires_grad=True), torch.zeros(2, 3)
    out = grpo_loss(
        hidden, torch.randn(7, 4), zeros.long(), zeros, torch.ones(2), sampling_per_token_logps=zeros,
        objective=source.make(),
    )  # fmt: skip
    out.loss.backward()
    assert out.loss == 0
    assert not hidden.grad.any()


@pytest.mark.parametrize("name", SOURCES)
def test_both_sides_of_every_bound_are_tested(name: str) -> None:
    """Where there is one: some of the gradients are 0 and some are not, of tokens with an advantage."""
    given = off_policy(3, per_token=SOURCES[name].per_token)
    given["advantages"][4] = 0.5
    _, gradient = ours(given, objective=SOURCES[name].make(), config=MODES["token-mean"])
    dropped = int((gradient == 0).sum())
    smooth = {"gpg", "dro", "cispo", "kl_cov", "kpop", "ipo, near", "topr", "topr, weighted"}
    assert dropped == 0 if name in smooth else 0 < dropped < len(gradient)


def test_objectives_are_values() -> None:
    for source in SOURCES.values():
        objective = source.make()
        if source.name == "clip_cov":  # without the generator, which has a state
            objective = objectives.clip_cov(**OF_VERL["clip_cov"])
        assert pickle.loads(pickle.dumps(objective)) == objective
        assert copy.deepcopy(GRPOLoss(objective=objective)).objective == objective
        assert repr(objective).startswith(source.name)
        assert objective.token_level == (source.name in TOKEN_LEVEL)
    assert set(verl_losses.__all__) == set(OF_VERL)
    assert {source.name for source in SOURCES.values()} | {"m2po_mask"} == set(objectives.__all__)
    assert sorted(objectives.__all__) == sorted([*verl_losses.__all__, *named_losses.__all__])


@pytest.mark.parametrize(
    ("name", "fields", "error", "message"),
    [
        ("dro", {"dro_beta": 0.0}, ValueError, r"dro_beta: expected a finite number > 0, got 0"),
        ("dro", {"dro_beta": None}, TypeError, "dro_beta: expected a number, got None"),
        ("cispo", {"clip_ratio_low": -0.1}, ValueError, "clip_ratio_low: .* >= 0, got -0.1"),
        ("dppo_kl", {"clip_ratio_c": 0.0}, ValueError, "clip_ratio_c: .* > 0, got 0"),
        ("clip_cov", {"clip_cov_ratio": 0}, ValueError, "clip_cov_ratio: .* > 0, got 0"),
        ("clip_cov", {"clip_cov_ub": float("nan")}, ValueError, "clip_cov_ub: .* got nan"),
        (
            "clip_cov",
            {"generator": 3},
            TypeError,
            "generator: expected a torch.Generator on the CPU, got 3",
        ),
        (
            "kl_cov",
            {"kl_cov_ratio": 2},
            ValueError,
            r"kl_cov_ratio: expected a number in \(0, 1\], got 2",
        ),
        ("ipo", {"eps": -0.1}, ValueError, "eps: expected a finite number >= 0, got -0.1"),
        ("ipo", {"ratio_max": 0.0}, ValueError, "ratio_max: .* > 0, got 0"),
        ("icepop", {"ratio_low": 0}, ValueError, "ratio_low: .* > 0, got 0"),
        ("kpop", {"threshold": None}, TypeError, "threshold: expected a number, got None"),
        ("fipo", {"decay_rate": 0.0}, ValueError, "decay_rate: .* > 0, got 0"),
        ("topr", {"scores": [1.0]}, TypeError, r"scores: expected a tensor, got list"),
    ],
)
def test_wrong_arguments(
    name: str, fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        getattr(objectives, name)(**fields)
    assert objectives.clip_cov(clip_cov_lb=-1.0)


@pytest.mark.parametrize("name", ["ipo", "icepop", "kpop", "rollout_is"])
def test_a_sampler_is_asked_for(name: str) -> None:
    given = off_policy(0)
    given.pop("sampling")
    with pytest.raises(ValueError, match="objective: expected sampling_per_token_logps beside"):
        ours(given, objective=getattr(objectives, name)())
