"""Two processes with unequal liveness: gradients are those of one padded process, and nobody
hangs."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
from benchmarks import tiny_models
from grpo_kernels import GRPOLoss
from grpo_kernels.transformers import causal_lm_loss, completion_logprobs
from tests.support import zero3
from tests.support.ranks import run_ranks

ADVANTAGES = {
    "uneven": ([1.0, 0.0, -1.0, 0.0], [0.0, 0.0, 0.7, 0.0]),
    "one rank without": ([1.0, -1.0, 0.5, 0.0], [0.0] * 4),
    "both without": ([0.0] * 4, [0.0] * 4),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "trim": {"layout": "trim"},
    "skip": {"zero_advantage": "skip"},
}
PADDED = {"zero_advantage": "train", "layout": "padded"}
Job = tuple[str, str, str, str]  # wrapping, model, advantages, options
JOBS: list[Job] = [
    *itertools.product(("DDP", "FSDP2"), ("qwen3",), ADVANTAGES, ("defaults", "skip")),
    *itertools.product(("DDP", "FSDP2"), ("qwen3",), ("uneven",), ("trim",)),
    ("DDP", "tied", "uneven", "defaults"),
    ("FSDP2", "tied", "uneven", "defaults"),
    ("FSDP2, trunk a unit", "qwen3", "one rank without", "defaults"),
    ("FSDP2, head a unit", "qwen3", "uneven", "defaults"),
    ("DDP, checkpointing", "qwen3", "uneven", "defaults"),
    ("DDP, reentrant checkpointing", "qwen3", "uneven", "defaults"),
    ("DDP, static graph", "qwen3", "one rank without", "defaults"),
    ("FSDP2, checkpointing", "qwen3", "one rank without", "defaults"),
]
ZERO3_JOBS: list[Job] = [
    *itertools.product(("ZeRO-3",), ("qwen3",), ADVANTAGES, ("defaults",)),
    ("ZeRO-3", "tied", "uneven", "skip"),
    ("ZeRO-3, checkpointing", "qwen3", "uneven", "defaults"),
]


def batch(rank: int, advantages: str) -> dict[str, Tensor]:
    """Four sequences of two prompts, padded on both sides, of lengths that differ between the
    ranks."""
    draw = torch.Generator().manual_seed(20 + rank)
    prompts, lengths = torch.tensor([2, 2, 5, 5]), torch.randint(2, 9, (4,), generator=draw)
    ids = torch.randint(3, tiny_models.VOCAB, (4, 13), generator=draw)
    ids[1, :5], ids[3, :5] = ids[0, :5], ids[2, :5]
    mask = torch.cat(
        [torch.arange(5) >= 5 - prompts[:, None], torch.arange(8) < lengths[:, None]], dim=1
    ).long()
    return {
        "input_ids": ids.masked_fill(mask == 0, 0),
        "attention_mask": mask,
        "completion_mask": mask[:, 5:],
        "advantages": torch.tensor(ADVANTAGES[advantages][rank]),
    }


def step(
    model: nn.Module, rank: int, advantages: str, options: dict[str, Any]
) -> tuple[Any, Tensor]:
    """(output of the loss, log-probabilities under no_grad)."""
    given = batch(rank, advantages)
    scored = {name: given[name] for name in ("input_ids", "attention_mask", "completion_mask")}
    layout = {name: x for name, x in options.items() if name != "zero_advantage"}
    with torch.no_grad():
        logps = completion_logprobs(model, **scored, **layout).logps
    loss_fn = GRPOLoss(loss_type="dapo", epsilon=0.1)
    return causal_lm_loss(model, loss_fn, **given, num_items_in_batch=20.0, **options), logps


@functools.cache
def of_one_process(
    kind: str, advantages: str
) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """(losses and log-probabilities by rank, mean gradients), all sequences padded and with a
    graph."""
    model = tiny_models.model(kind).train()
    losses, logps = [], []
    for rank in range(2):
        out, scores = step(model, rank, advantages, PADDED)
        (out.loss / 2).backward()
        losses.append(out.loss.detach())
        logps.append(scores)
    return losses, logps, {name: x.grad.clone() for name, x in model.named_parameters()}


def wrapped(wrap: str, model: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if "checkpointing" in wrap:
        model.gradient_checkpointing_enable({"use_reentrant": "reentrant" in wrap})
    if wrap.startswith("DDP"):
        if "reentrant" in wrap:
            model.enable_input_require_grads()
        return DistributedDataParallel(model, static_graph="static" in wrap)
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=True)
    for name, module in {"trunk": model.model, "head": model.lm_head}.items():
        if name in wrap:
            fully_shard(module, reshard_after_forward=True)
    return fully_shard(model)


def run_all(rank: int, world_size: int, jobs: list[Job]) -> list[Any]:
    """For `run_ranks`: (loss, log-probabilities, gradients, shares) of each job."""
    found = []
    for wrap, kind, advantages, options in jobs:
        model = tiny_models.model(kind).train()
        around = wrapped(wrap, model)
        for _ in range(2):  # the first step also tries the modes
            model.zero_grad()
            out, logps = step(around, rank, advantages, OPTIONS[options])
            out.loss.backward()
        gradients = {}
        for name, x in model.named_parameters():
            assert x.grad is not None, f"{name}: no gradient"
            gradients[name] = x.grad.full_tensor() if hasattr(x.grad, "full_tensor") else x.grad
        shares = {
            name: out.metrics[name].item() for name in ("sequences/gradient", "tokens/gradient")
        }
        found.append((out.loss.detach(), logps, gradients, shares))
    return found


def run_zero3(rank: int, world_size: int, jobs: list[Job]) -> list[Any]:
    package, found = zero3.deepspeed(), []
    for wrap, kind, advantages, options in jobs:
        model = tiny_models.model(kind).train()
        if "checkpointing" in wrap:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        config = {**zero3.CONFIG, "train_micro_batch_size_per_gpu": 1}
        engine, *_ = package.initialize(
            model=model, config=config, optimizer=torch.optim.SGD(model.parameters(), lr=0.0)
        )
        for _ in range(2):
            out, logps = step(engine, rank, advantages, OPTIONS[options])
            engine.backward(out.loss)
        gradients = {
            name: package.utils.safe_get_full_grad(x) / 2 for name, x in model.named_parameters()
        }
        shares = {
            name: out.metrics[name].item() for name in ("sequences/gradient", "tokens/gradient")
        }
        found.append((out.loss.detach(), logps, gradients, shares))
        engine.destroy()
    return found


def check(jobs: list[Job], ranks: list[list[Any]]) -> None:
    for i, (wrap, kind, advantages, options) in enumerate(jobs):
        losses, scores, gradients = of_one_process(kind, advantages)
        largest = max(x.abs().max() for x in gradients.values())
        for rank, found in enumerate(ranks):
            loss, logps, got, shares = found[i]
            where = f"{wrap}, {kind}, {advantages}, {options}, rank {rank}"
            torch.testing.assert_close(
                loss, losses[rank], rtol=1e-5, atol=1e-6, msg=lambda m, w=where: f"{w}: {m}"
            )
            torch.testing.assert_close(
                logps, scores[rank], rtol=1e-5, atol=1e-5, msg=lambda m, w=where: f"{w}: {m}"
            )
            assert (
                shares["sequences/gradient"]
                == sum(x != 0 for x in ADVANTAGES[advantages][rank]) / 4
            ), where
            assert shares["tokens/gradient"] < 0.8, where
            for name, x in gradients.items():
                error = (got[name] - x).abs().max()
                assert error <= 2e-6 * largest + 1e-9, (
                    f"{where}, {name}: {error:.1e} of {largest:.1e}"
                )


def test_ddp_and_fsdp2() -> None:
    check(JOBS, run_ranks(run_all, 2, JOBS))


@zero3.needs_deepspeed
def test_zero3() -> None:
    check(ZERO3_JOBS, run_ranks(run_zero3, 2, ZERO3_JOBS))
