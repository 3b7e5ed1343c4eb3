"""verl's distillation from a teacher's top-k log-probabilities: our loss within verl's engine."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.support import verl_engine
from tests.support.verl_engine import OURS
from tests.support.verl_peer import verl_module

K = 6


@pytest.fixture
def group() -> Iterator[None]:
    with verl_engine.on_one_rank():
        yield


def distilling(data: Any, **fields: Any) -> tuple[Any, Any]:
    """The mini-batch with a teacher's top K, and verl's loss for it."""
    offsets = data["input_ids"].offsets()
    tokens = len(data["input_ids"].values())
    logps = (3 * torch.randn(tokens, verl_engine.VOCAB)).log_softmax(-1).topk(K, -1)
    data = data.clone()
    data["teacher_logprobs"] = torch.nested.nested_tensor_from_jagged(logps.values, offsets)
    data["teacher_ids"] = torch.nested.nested_tensor_from_jagged(logps.indices, offsets)
    off = ("use_chunked_topk", "use_task_rewards", "use_policy_gradient")
    defaults = {"loss_mode": "forward_kl_topk", "log_prob_min_clamp": -5.3, "loss_max_clamp": None}
    defaults |= {**dict.fromkeys(off, False), "distillation_loss_coef": 0.5, "topk": K}
    config = SimpleNamespace(distillation_loss=SimpleNamespace(**{**defaults, **fields}))
    loss = verl_module("trainer.distillation.losses").distillation_ppo_loss
    return data, functools.partial(loss, config=verl_engine.config(), distillation_config=config)


@pytest.mark.parametrize(
    ("rewards", "least", "most"), [(False, 6, 6), (True, 12, 14)], ids=["alone", "with rewards"]
)
def test_within_verls_engine(group: None, rewards: bool, least: int, most: int) -> None:
    data, loss = distilling(verl_engine.batch(dead=0, tools=True), use_task_rewards=rewards)
    flags = {"distillation_use_topk": True, "distillation_only": not rewards}
    unfused, ours = (verl_engine.run(options, data, loss, **flags) for options in (None, OURS))
    assert ours.loss == pytest.approx(unfused.loss, rel=1e-6)
    assert verl_engine.gap(ours, unfused) < 5e-6
    for mass in ("distillation/student_mass", "distillation/teacher_mass"):
        assert ours.metrics[mass] == pytest.approx(unfused.metrics[mass])
    counted = int(data["response_mask"].sum())
    done = ours.products.head / (verl_engine.VOCAB * verl_engine.HIDDEN * counted)
    assert least <= done <= most


@pytest.mark.parametrize(
    ("mode", "more", "message"),
    [
        ("another", {}, "loss_mode: expected 'forward_kl_topk', got 'another'"),
        ("forward_kl_topk", {"use_remove_padding": False}, "use_remove_padding: expected True"),
    ],
)
def test_what_verls_fused_heads_do_not_serve_is_refused(
    group: None, mode: str, more: dict[str, Any], message: str
) -> None:
    data, loss = distilling(verl_engine.batch(), loss_mode=mode)
    with pytest.raises(ValueError, match=message):
        verl_engine.run(OURS, data, loss, distillation_use_topk=True, **more)
