"""Gradients by finite differences, in 16 bits and under autocast, and summed over micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from grpo_kernels import grpo_loss, linear_logprob, token_level
from tests.support.case_builder import Case, make_case
from tests.support.flat import flat
from tests.support.run_case import arguments, config_of

F64 = torch.float64
HEAD = ("hidden", "weight", "bias")
IDS, MASK = torch.tensor([[0, 4, 2], [1, 3, 2]]), torch.tensor([[1, 1, 1], [1, 0, 1]])


@token_level
def own(tokens: Any) -> Tensor:
    return torch.tanh(tokens.logps) * tokens.advantages - 0.3 * tokens.entropies**2


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_gradcheck_of_a_custom_objective(level: str) -> None:
    coupled = lambda tokens: tokens.logps.sum(1, keepdim=True) * tokens.entropies  # noqa: E731
    hidden, weight = (torch.randn(x, dtype=F64).requires_grad_() for x in ((2, 3, 3), (5, 3)))
    given = IDS, MASK, torch.tensor([1.0, -2.0], dtype=F64)
    options = {"objective": own if level == "token" else coupled}
    assert gradcheck(lambda h, w: grpo_loss(h, w, *given, **options).loss, (hidden, weight))


def run(case: Case, scale: float = 1.0, engine: str = "auto") -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and its gradients for upstream `scale`, divided by it, in float64."""
    given = arguments(case)
    out = flat(grpo_loss)(**given, config=config_of(case), engine=engine)
    (out.loss * scale).backward()
    found = {name: given[name].grad for name in HEAD if given[name] is not None}
    return out.loss.detach(), {name: x.double() / scale for name, x in found.items()}


def far(x: Tensor, y: Tensor) -> float:
    return float((x.double() - y.double()).norm() / y.double().norm())


@pytest.mark.parametrize("engine", ["one_pass", "two_pass"])
def test_fp16_gradients_survive_under_a_loss_scale(engine: str) -> None:
    """The scale enters before the rounding: what would be flushed without it is not with it."""
    options = {"dtype": torch.float16, "num_items": 2e5, "bias": True, "entropy_coef": 1e-4}
    case = make_case("fp16", b=8, t=16, **options)
    want = run(case.to(torch.float32))[1]
    scaled, unscaled = run(case, 65536.0, engine)[1], run(case, 1.0, engine)[1]
    for name in HEAD:
        assert far(scaled[name], want[name]) < 1e-3
    assert far(unscaled["hidden"], want["hidden"]) > 1e-2  # the case is a hard one
    assert int((scaled["hidden"] == 0).sum()) == int((want["hidden"] == 0).sum())


@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("engine", ["one_pass", "two_pass"])
def test_autocast(engine: str, lower: torch.dtype) -> None:
    """The bits of explicit casts; gradients come in each tensor's own dtype."""
    case = make_case("autocast", b=3, bias=True, beta=0.1, entropy_coef=0.01)
    config, both = config_of(case), (torch.float32, torch.bfloat16)
    for kinds in ((x, y) for x in both for y in both):
        head = {"hidden": case.hidden.to(kinds[0]), "weight": case.weight.to(kinds[1])}
        given = arguments(case.but(**head))
        cast = arguments(case.but(**{name: x.to(lower) for name, x in head.items()}))
        with torch.autocast("cpu", dtype=lower):
            out = flat(grpo_loss)(**given, config=config, engine=engine)
            logps = linear_logprob(given["hidden"], given["weight"], case.completion_ids).logps
        want = flat(grpo_loss)(**cast, config=config, engine=engine)
        want_logps = linear_logprob(cast["hidden"], cast["weight"], case.completion_ids).logps
        out.loss.backward()
        want.loss.backward()
        assert torch.equal(out.loss, want.loss)
        assert torch.equal(out.logps, want.logps)
        assert torch.equal(logps, want_logps)
        assert out.loss.dtype == logps.dtype == torch.float32
        for name in HEAD:
            assert given[name].grad.dtype == given[name].dtype
            coarsest = max(torch.finfo(x.dtype).eps for x in (given[name], cast[name]))
            assert far(given[name].grad, cast[name].grad) < max(coarsest, 1e-6)
