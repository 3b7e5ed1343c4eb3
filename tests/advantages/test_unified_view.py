"""docs/unified-view.md: its code runs as it stands, its coefficients are the gradients', its costs are counted."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from grpo_kernels import LossConfig, grpo_loss, linear_logprob, presets
from tests.support.measure import count_flops

PAGE = (Path(__file__).parents[2] / "docs" / "unified-view.md").read_text()
PAIRS = torch.tensor([1.0] * 4 + [-1.0] * 4, dtype=torch.float64)
BETA = 0.1


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the page's code leaves behind, in float64; before the losses, the reference is moved off the policy."""
    found: dict[str, Any] = {}
    setup, *others = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        exec(setup, found)
        found["mask"][2, 4:] = found["mask"][5, 3:] = 0
        found["ref"] = (found["ref"] - 0.3 * torch.rand(8, 6)) * found["mask"]
        found["rewards"][6] = 0.5
        for block in others:
            exec(block, found)
            name = next((name for name in ("ppo", "outcome", "process") if f"{name} = grpo_loss" in block), None)
            found[f"{name}_advantages"] = found.get("advantages")
    finally:
        torch.set_default_dtype(torch.float32)
    return found


def coefficients(name: str, names: dict[str, Any], logps: Tensor) -> tuple[Tensor, Tensor]:
    """(k_t, w_t) as the page's table has them, (B, T) each."""
    mask, ref = names["mask"], names["ref"]
    over_tokens = mask / mask.sum()
    over_sequences = mask / mask.sum(1, keepdim=True) / len(mask)
    ratio = torch.exp(ref - logps)
    if name == "sft":
        return torch.ones_like(mask), over_tokens
    if name == "rft":
        accepted = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 1])[:, None].expand_as(mask)
        return accepted, mask / (mask * accepted).sum()
    if name == "ppo":
        given, ratio = names["ppo_advantages"], 1 / ratio
        clipped = torch.where(given > 0, ratio > 1.2, ratio < 0.8)
        return torch.where(clipped, 0.0, ratio * given), over_tokens
    if name == "dpo":
        margins = (PAIRS[:, None] * BETA * (logps - ref) * mask).sum(1)
        per_pair = torch.sigmoid(-(margins[:4] + margins[4:])).repeat(2)
        return (BETA * PAIRS * per_pair)[:, None] * mask, mask / 4
    given = names[f"{name}_advantages"]
    given = given[:, None] if given.dim() == 1 else given
    return given + presets.GRPO.beta * (ratio - 1), over_sequences


@pytest.mark.parametrize("name", ["sft", "rft", "ppo", "outcome", "process", "dpo"])
def test_the_gradient_of_each_call_is_that_of_the_tables_coefficient(name: str, names: dict[str, Any]) -> None:
    leaves = names["hidden"], names["weight"]
    logps = torch.log_softmax(leaves[0] @ leaves[1].T, -1).gather(-1, names["ids"][..., None])[..., 0]
    k, w = coefficients(name, names, logps.detach())
    want = torch.autograd.grad(-(w * k * logps * names["mask"]).sum(), leaves, retain_graph=True)
    out = names[name]
    found = torch.autograd.grad(out if name == "dpo" else out.loss, leaves, retain_graph=True)
    torch.testing.assert_close(found, want, atol=1e-12, rtol=1e-10)
    assert all(x.abs().sum() > 1e-3 for x in found)


def test_the_values_that_the_page_gives_are_those_of_the_losses(names: dict[str, Any]) -> None:
    logps = torch.log_softmax(names["hidden"] @ names["weight"].T, -1).gather(-1, names["ids"][..., None])[..., 0]
    mask = names["mask"]
    torch.testing.assert_close(names["sft"].loss, -(logps * mask).sum() / mask.sum())
    given = (names["hidden"], names["weight"], names["ids"], mask, names["outcome_advantages"])
    on_policy = grpo_loss(*given, config=LossConfig(loss_type="grpo"))
    torch.testing.assert_close(on_policy.loss, -names["outcome_advantages"].mean())
    assert names["best_of_four"].tolist() == [1, 0, 0, 1, 0, 0, 0, 1]
    assert names["accepted"].tolist() == [1, 0, 0, 1, 0, 0, 0, 1]


B, T, H, V = 8, 32, 10, 64
RIGHT = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 0])
UNEVEN = torch.tensor([1.0, -1, 0, 0, 0, 0, 0.5, -0.5])
NO_KL = LossConfig(loss_type="grpo")


def dpo(hidden: Tensor, weight: Tensor, ids: Tensor, ref: Tensor, expects: bool) -> Tensor:
    pairs = len(ids) // 2
    expected = torch.tensor([-1.0, 1.0]).repeat_interleave(pairs)[:, None].expand(ids.shape) if expects else None
    logps, _ = linear_logprob(hidden, weight, ids, entropy=False, expected=expected)
    margins = 0.1 * (logps - ref).sum(1)
    return -functional.logsigmoid(margins[:pairs] - margins[pairs:]).mean()


@pytest.mark.parametrize(
    ("advantages", "options", "trains", "frozen"),
    [
        (torch.ones(B), {}, 6, 4),
        (RIGHT, {"mask": RIGHT}, 6 / 4, 4 / 4),
        (RIGHT, {}, 2 + 4 / 4, 2 + 2 / 4),
        (UNEVEN, {"config": presets.PPO, "old": True}, 2 + 4 / 2, 2 + 2 / 2),
        (UNEVEN, {"config": NO_KL}, 2 + 4 / 2, 2 + 2 / 2),
        (UNEVEN, {"config": presets.GRPO, "ref": True}, 6, 4),
    ],
    ids=["SFT", "RFT, masked", "RFT", "PPO", "GRPO without KL", "GRPO"],
)
def test_the_page_counts_products_right(
    advantages: Tensor, options: dict[str, Any], trains: float, frozen: float
) -> None:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(B, T, H, generator=g).requires_grad_()
    ids, logps = torch.randint(V, (B, T), generator=g), torch.full((B, T), -4.0)
    mask = torch.ones(B, T) * options.get("mask", torch.ones(B))[:, None]
    given: dict[str, Any] = {"config": options.get("config", presets.REINFORCE)}
    for name in ("old", "ref"):
        if name in options:
            given[f"{name}_per_token_logps"] = logps
    if "old" in options:  # so that nothing is clipped
        given["config"] = LossConfig(loss_type=given["config"].loss_type, epsilon=100.0)
    for head_trains, want in ((True, trains), (False, frozen)):
        weight = torch.randn(V, H, generator=g).requires_grad_(head_trains)
        assert cost(lambda: grpo_loss(hidden, weight, ids, mask, advantages, **given).loss) == want  # noqa: B023


def cost(make: Callable[[], Tensor]) -> float:
    """Of forward and backward, in products of one completion token with the head, B T in all."""
    return count_flops(lambda: make().backward()) / (B * T * V * H)


def test_the_page_says_right_when_to_expect_something_of_dpo() -> None:
    """One pair has one coefficient, up to its sign; several have several."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=g).requires_grad_() for shape in ((B, T, H), (V, H)))
    ids, ref = torch.randint(V, (B, T), generator=g), -4 + torch.randn(B, T, generator=g)
    assert cost(lambda: dpo(hidden, weight, ids, ref, False)) == 8
    assert cost(lambda: dpo(hidden, weight, ids, ref, True)) > 8
    pair = hidden[:2].detach().requires_grad_()
    assert cost(lambda: dpo(pair, weight, ids[:2], ref[:2], True)) * B / 2 == 6
    frozen = weight.detach()
    assert cost(lambda: dpo(hidden, frozen, ids, ref, False)) == 4
