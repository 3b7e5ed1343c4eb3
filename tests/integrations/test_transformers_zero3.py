"""The helper for transformers' models under DeepSpeed ZeRO-3: two gloo processes give the gradients of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from grpo_kernels import GRPOLoss
from grpo_kernels.integrations.transformers import causal_lm_loss, completion_logprobs
from tests.support import tiny_architectures as tiny
from tests.support import zero3
from tests.support.model_checks import peft_model, shared_batch
from tests.support.ranks import run_ranks

pytestmark = zero3.needs_deepspeed

KINDS = ("tied", "adapter on the head")


def build(kind: str) -> Any:
    if kind == "tied":
        return tiny.text_model("cohere")
    return peft_model(tiny.text_model("cohere2"), target_modules=["q_proj", "lm_head"])


def step(model: Any, rank: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, log-probabilities)."""
    batch = shared_batch(rank)
    scored = {name: batch[name] for name in ("input_ids", "attention_mask", "completion_mask")}
    with torch.no_grad():
        logps, _ = completion_logprobs(model, **scored)
    loss_fn = GRPOLoss(loss_type="grpo", beta=0.1)
    return causal_lm_loss(model, loss_fn, **batch, ref_per_token_logps=logps - 0.2).loss, logps


def zero3_task(rank: int, world_size: int) -> list[Any]:
    """(loss, log-probabilities, gradients) of each kind."""
    package, found = zero3.deepspeed(), []
    for kind in KINDS:
        model = build(kind)
        trained = {name: x for name, x in model.named_parameters() if x.requires_grad}
        config = {**zero3.CONFIG, "train_micro_batch_size_per_gpu": 1}
        optimizer = torch.optim.SGD(trained.values(), lr=0.0)
        engine, *_ = package.initialize(model=model, config=config, optimizer=optimizer)
        loss, logps = step(engine, rank)
        engine.backward(loss)
        gradients = {name: package.utils.safe_get_full_grad(x).clone() for name, x in trained.items()}
        engine.destroy()
        found.append((loss.detach(), logps, gradients))
    return found


def test_zero3_gives_the_gradients_of_one_process() -> None:
    ranks = run_ranks(zero3_task, 2)
    for i, kind in enumerate(KINDS):
        model = build(kind)
        loss, logps = step(model, None)
        loss.backward()
        torch.testing.assert_close(sum(found[i][0] for found in ranks) / 2, loss.detach())
        torch.testing.assert_close(torch.cat([found[i][1] for found in ranks]), logps)
        for found in ranks:
            for name, x in model.named_parameters():
                if x.requires_grad:  # DeepSpeed keeps gradients in float32
                    error = (found[i][2][name] - x.grad).abs().max() / x.grad.abs().max()
                    assert error < 2e-7, f"{kind}, {name}: {error:.1e}"
