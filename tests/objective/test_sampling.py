"""The importance sampling ratio made inside the loss: TRL's ratio, the float64 reference, engines,
metrics, errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from grpo_kernels import LossConfig, grpo_loss, policy_expectation, token_level
from tests.support.case_builder import Case, make_case
from tests.support.cases import LOSSES, loss
from tests.support.flat import flat
from tests.support.reference import head, on_grid, reference_loss
from tests.support.run_case import arguments, config_of, packed, run
from tests.support.sampler import MODES, PREFIX, given_ratio, trls_ratio

BOUNDS = {f"{PREFIX}clip_max": 1.25, f"{PREFIX}clip_min": 0.7}


def correction(mode: str) -> dict[str, Any]:
    return {f"{PREFIX}correction": True, f"{PREFIX}mode": mode, **BOUNDS}


def unscored(case: Case) -> Case:
    """Some of the tokens could not be scored by the sampler."""
    sampling = case.sampling_per_token_logps
    nan = torch.arange(sampling.numel()).reshape(sampling.shape) % 7 == 3
    return case.but(sampling_per_token_logps=sampling.masked_fill(nan, math.nan))


@pytest.mark.parametrize("old", [False, True], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("mode", MODES)
def test_it_is_the_loss_with_trls_ratio(mode: str, old: bool) -> None:
    """Every loss type, in float64, on two backends: value, gradients by autograd through full
    logits, metrics."""
    small = {"b": 4, "t": 6, "h": 6, "v": 20, "dtype": torch.float64, "sampling": True, "old": old}
    extras = ({"beta": 0.05}, {"entropy_coef": 0.1}, {}, {"temperature": 0.8})
    moved, close = 0, {"rtol": 1e-9, "atol": 1e-12}
    for i, (loss_type, level) in enumerate(LOSSES):
        kind = loss(loss_type, level) | ({} if loss_type == "gmpo" else extras[i % 4])
        kind |= {"epsilon_high": 1.1} if loss_type == "cispo" else {}
        case = unscored(make_case(f"sampling/{mode}/{i}", **small, **kind, **correction(mode)))
        scored = head(case)
        logps = on_grid(scored.logps.detach(), scored.counted)
        base = logps if case.old_per_token_logps is None else case.old_per_token_logps
        same = given_ratio(case, base)
        want = reference_loss(same)
        for backend in ("torch", "cpp"):
            out, grads = run(case, backend=backend)
            torch.testing.assert_close(out.loss.detach(), want.loss, **close)
            torch.testing.assert_close(grads["hidden"], want.d_hidden, **close)
            torch.testing.assert_close(grads["weight"], want.d_weight, **close)
            for name in want.metrics.keys() & out.metrics.keys():
                if loss_type != "gmpo" or name != "importance_sampling_ratio":
                    torch.testing.assert_close(out.metrics[name], want.metrics[name], **close)
        rows = flat(grpo_loss)(**packed(case, arguments(case))[0], config=config_of(case))
        torch.testing.assert_close(rows.loss.detach(), want.loss, **close)
        assert ("importance_sampling_ratio" in out.metrics) == (loss_type != "gmpo")
        without = reference_loss(same.but(importance_sampling_ratio=None)).loss
        moved += not torch.allclose(without, want.loss)
    assert moved == len(LOSSES) - 1  # GMPO has no ratio


def test_engines() -> None:
    """A ratio a token costs nothing; one a sequence couples its tokens where they are not yet
    known: of old log-probabilities it is."""
    for mode, loss_type, level, old, frozen, engine in (
        ("token_mask", "dapo", "token", False, (), "one_pass"),
        ("token_truncate", "cispo", "token", True, (), "one_pass"),
        ("sequence_mask", "dapo", "token", True, (), "one_pass"),
        ("sequence_mask", "dapo", "token", False, (), "two_pass"),
        ("sequence_mask", "dapo", "token", False, ("weight",), "frozen"),
        ("sequence_mean_mask", "dapo", "token", True, (), "one_pass"),
        ("sequence_mean_mask", "dapo", "token", False, (), "two_pass"),
        ("token_mask", "grpo", "sequence", False, (), "two_pass"),
        ("token_mask", "vespo", "token", False, (), "two_pass"),
        ("sequence_mask", "gmpo", "token", False, (), "one_pass"),  # which ignores it
    ):
        kind = loss(loss_type, level) | correction(mode)
        out, _ = run(make_case("engines", old=old, sampling=True, frozen=frozen, **kind))
        assert out.engine == engine, (mode, loss_type, level, old, frozen)


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask", "sequence_mean_mask"])
def test_metrics(mode: str) -> None:
    """TRL's figures, of the tokens the sampler could score; a token it could not score has the
    ratio 1."""
    case = unscored(make_case("metrics", b=5, old=False, sampling=True, **correction(mode)))
    out, _ = run(case)
    counted = case.completion_mask != 0
    gap = (out.logps - case.sampling_per_token_logps)[counted].abs()
    ratio = trls_ratio(case, out.logps)
    ratio = ratio if mode == "sequence_mask" else ratio[counted]
    scored = gap[~gap.isnan()]
    for name, want in {
        "sampling_unscored": gap.isnan().float().mean(),
        "importance_sampling_ratio": ratio.mean(),
        "sampling/sampling_logp_difference/mean": scored.mean(),
        "sampling/sampling_logp_difference/max": scored.max(),
        "sampling/importance_sampling_ratio/min": ratio.min(),
        "sampling/importance_sampling_ratio/max": ratio.max(),
    }.items():
        torch.testing.assert_close(out.metrics[name], want, rtol=1e-6, atol=1e-7)
    assert 0 < out.metrics["sampling_unscored"] < 0.4
    none = torch.full_like(case.sampling_per_token_logps, math.nan)
    alone = run(case.but(sampling_per_token_logps=none))[0]
    assert alone.metrics["importance_sampling_ratio"] == 1


def test_wrong_arguments() -> None:
    case = make_case("wrong", sampling=True, ratio="token", **correction("token_mask"))
    config, given, call = config_of(case), arguments(case), flat(grpo_loss)
    message = r"^importance_sampling_ratio: expected None since vllm_.*_correction = True"
    with pytest.raises(ValueError, match=message):
        call(**given, config=config)
    given["importance_sampling_ratio"] = None
    message = r"^sampling_per_token_logps: expected a tensor since vllm_.* got None"
    with pytest.raises(ValueError, match=message):
        call(**given | {"sampling_per_token_logps": None}, config=config)
    with pytest.raises(ValueError, match=message):
        policy_expectation(config, **{k: given[k] for k in ("completion_mask", "advantages")})
    with pytest.raises(ValueError, match=rf"^{PREFIX}correction: expected False with an obj"):
        call(**given, config=config, objective=token_level(lambda tokens: -tokens.logps))
    for options, name in (
        ({"mode": "batch_mask"}, "mode"),
        ({"clip_max": 0.0}, "clip_max"),
        ({"clip_min": -0.1}, "clip_min"),
        ({"clip_min": 3.0}, "clip_min"),
        ({"correction": 1}, "correction"),
        ({"correction": True, "mode": "token_truncate", "clip_max": None}, "clip_max"),
    ):
        with pytest.raises((TypeError, ValueError), match=rf"^{PREFIX}{name}: expected .+, got "):
            LossConfig(**{PREFIX + key: value for key, value in options.items()})
    LossConfig(**correction("sequence_mask") | dict.fromkeys(BOUNDS))  # a mask needs no bounds
