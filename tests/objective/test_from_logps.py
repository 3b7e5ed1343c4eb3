"""The loss on given log-probabilities is `grpo_loss`, without its projection, and that of a
docstring's plain version."""

from __future__ import annotations

import itertools
import re
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import grpo_kernels
from grpo_kernels import LossConfig, linear_logps, policy_loss_from_logps
from tests.support.case_builder import Case
from tests.support.cases import LOSSES, random_case
from tests.support.flat import flat
from tests.support.reference import reference_loss, settings
from tests.support.run_case import CONSTANTS, arguments, config_of, packed
from tests.support.tolerance import assert_matches

OF_HEAD = ("hidden", "weight", "bias", "completion_ids", *CONSTANTS)


def by_two_steps(case: Case, *, is_packed: bool) -> tuple[Any, dict[str, Tensor | None]]:
    """Scored by `linear_logps`, then the loss on that, padded again; with the gradients of the
    head's tensors."""
    given, config = arguments(case), config_of(case)
    call, stays = packed(case, given) if is_packed else (dict(given), slice(None))
    head = {name: call.pop(name) for name in OF_HEAD if name in call}
    del call["reference"]
    head |= {"completion_mask": call["completion_mask"], "temperature": config.temperature}
    scores = flat(linear_logps)(**head)
    out = policy_loss_from_logps(scores.logps, entropies=scores.entropies, **call, config=config)
    assert out.engine == "given"
    if out.loss.requires_grad:
        out.loss.backward()
    found = SimpleNamespace(loss=out.loss, metrics=out.metrics)
    for name in ("logps", "entropies"):
        x = getattr(out, name)
        grid = torch.zeros(case.completion_ids.shape, dtype=x.dtype)
        grid[stays] = x
        setattr(found, name, grid)
    leaves = {name: given[name] for name in OF_HEAD[:3]}
    return found, {name: None if x is None else x.grad for name, x in leaves.items()}


def test_it_is_grpo_loss_padded_and_packed() -> None:
    tried = set()
    for seed in range(130):
        case = random_case(seed, plain=True)
        o, ratio = settings(case), case.importance_sampling_ratio
        if not (o.beta and o.kl_estimator == "full"):
            fits = ratio is None or ratio.shape == case.completion_ids.shape
            can_pack = fits and case.completion_ids.numel() > 0
            found, grads = by_two_steps(case, is_packed=can_pack and seed % 3 == 0)
            assert_matches(found, grads, reference_loss(case), case)
            tried.add((o.loss_type, o.importance_sampling_level))
    assert tried == {*LOSSES}


def test_dtypes_masked_positions_and_a_second_derivative() -> None:
    """16-bit log-probabilities give the loss in fp32 and get their gradient in 16 bits; what is
    masked is not read."""
    rows = ([[-1.5, torch.nan]], [[2.0, torch.nan]])
    given = [torch.tensor(x, dtype=torch.bfloat16).requires_grad_() for x in rows]
    mask, advantages = torch.tensor([[1, 0]]), torch.tensor([2.0])
    out = policy_loss_from_logps(given[0], mask, advantages, entropies=given[1], entropy_coef=0.5)
    assert out.loss.dtype == torch.float32
    d_logps, d_entropies = torch.autograd.grad(3 * out.loss, given, create_graph=True)
    assert d_logps.dtype == torch.bfloat16
    assert d_logps.tolist() == [[-6.0, 0.0]] and d_entropies.tolist() == [[-1.5, 0.0]]
    for x in given:
        with pytest.raises(RuntimeError, match=r"differentiating twice .* with torch"):
            torch.autograd.grad(d_logps.sum(), x, allow_unused=True, retain_graph=True)
    assert out.logps.tolist() == [[-1.5, 0.0]]
    with pytest.raises(RuntimeError, match=r"out.logps: .* only out.loss has one"):
        (out.loss + out.logps.sum()).backward()


@pytest.mark.usefixtures("forget_warnings")
@pytest.mark.parametrize(
    "bonus", [{"entropy_coef": 0.1}, {"objective": lambda x: -x.logps - x.entropies}]
)
def test_entropies_without_a_graph_are_warned_of(bonus: Any) -> None:
    logps = torch.full((1, 2), -1.0, requires_grad=True)
    given: Any = (torch.ones(1, 2), torch.ones(1))
    alone, attached = ({"entropies": torch.ones(1, 2, requires_grad=x)} for x in (False, True))
    with pytest.warns(UserWarning, match="entropies: the loss has a gradient in them"):
        policy_loss_from_logps(logps, *given, **alone, **bonus)
    with warnings.catch_warnings(action="error"):
        policy_loss_from_logps(logps, *given, **alone)
        policy_loss_from_logps(logps.detach(), *given, **alone, **bonus)
        with torch.no_grad():
            policy_loss_from_logps(logps, *given, **alone, **bonus)
        policy_loss_from_logps(logps, *given, **attached, **bonus)


WRONG: list[tuple[str, Any, str]] = [
    ("logps", torch.zeros(4), r"logps: expected shape \(B, T\), got \(4,\)"),
    ("logps", torch.zeros(2, 3, dtype=torch.long), "logps: expected a floating-point tensor"),
    ("entropies", torch.zeros(2, 2), "entropies: expected shape"),
    ("config", LossConfig(beta=0.1), "ref_per_token_logps: expected a tensor since beta = 0.1"),
    ("cu_seqlens", torch.tensor([0, 6]), r"logps: expected shape \(N,\) with cu_seqlens"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG, ids=[x[2][:20] for x in WRONG])
def test_wrong_arguments(name: str, value: Any, message: str) -> None:
    zeros = torch.zeros(2, 3)
    good = {"logps": zeros, "entropies": zeros, "completion_mask": zeros + 1}
    good["advantages"] = torch.zeros(2)
    policy_loss_from_logps(**good)
    with pytest.raises((TypeError, ValueError), match=message):
        policy_loss_from_logps(**{**good, name: value})


# The plain torch version that a docstring of the library has

OPTIONS: dict[str, dict[str, Any]] = {
    "bounds": {"epsilon": 0.1, "epsilon_high": 0.3, "delta": 1.5, "beta": 0.3},
    "kl uncorrected": {"beta": 0.3, "use_bias_correction_kl": False},
    "top entropy": {"top_entropy_quantile": 0.4, "entropy_coef": 0.05, "beta": 0.1},
}
LEVELS = {"grpo": "token", "bnpo": "sequence", "dapo": "token", "dr_grpo": "sequence"}


def plain_loss() -> Callable[..., Tensor]:
    source = (Path(grpo_kernels.__file__).parent / "objective" / "policy.py").read_text()
    (code,) = re.findall(r"::\n\n((?: +def plain_loss\()(?:.*\n)+?)\n {4}\S", source)
    names: dict[str, Any] = {"torch": torch}
    exec(textwrap.dedent(code), names)
    return names["plain_loss"]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("loss_type", LEVELS)
def test_loss_and_gradient_are_those_of_the_plain_version(loss_type: str, options: str) -> None:
    plain, draw = plain_loss(), lambda: torch.randn(4, 7, dtype=torch.float64) * 0.4 - 2
    mask = torch.arange(7) < torch.tensor([[7], [3], [1], [5]])
    kind = {"loss_type": loss_type, "importance_sampling_level": LEVELS[loss_type]}
    config = LossConfig(**kind, max_completion_length=9, **OPTIONS[options])
    per_sequence = torch.tensor([1.5, -0.7, 0.0, -2.0], dtype=torch.float64)
    per_token = per_sequence[:, None] + draw()
    for old, advantages in itertools.product((None, draw()), (per_sequence, per_token)):
        logps, entropies = draw().requires_grad_(), draw().abs().requires_grad_()
        ref, ratio = draw(), draw().exp()
        column = advantages if advantages.dim() == 2 else advantages[:, None]
        loss = plain(config, mask, logps, entropies, column, old, ref, ratio)
        expected = torch.autograd.grad(loss, (logps, entropies), materialize_grads=True)
        out = policy_loss_from_logps(
            logps, mask, advantages, entropies=entropies, old_per_token_logps=old,
            ref_per_token_logps=ref if config.beta else None, importance_sampling_ratio=ratio,
            config=config,
        )  # fmt: skip
        found = torch.autograd.grad(out.loss, (logps, entropies), materialize_grads=True)
        torch.testing.assert_close(out.loss, loss, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
