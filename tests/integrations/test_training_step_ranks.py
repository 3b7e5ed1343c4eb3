"""Two processes: gradients are those of one padded process, and nobody hangs."""

from __future__ import annotations

import functools
import inspect
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
from benchmarks import tiny_models
from grpo_kernels import GRPOLoss
from grpo_kernels.transformers import causal_lm_logps, causal_lm_loss
from tests.support import zero3
from tests.support.parallel_cases import gradients_of
from tests.support.ranks import Ranks
from tests.support.training_step import PADDED, SCORED, reader

ADVANTAGES = {
    "uneven": ([1.0, 0.0, -1.0, 0.0], [0.0, 0.0, 0.7, 0.0]),
    "one rank without": ([1.0, -1.0, 0.5, 0.0], [0.0] * 4),
    "both without": ([0.0] * 4, [0.0] * 4),
}
OPTIONS = {"defaults": {}, "trim": {"layout": "trim"}, "skip": {"zero_advantage": "skip"}}
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


def batch(rank: int, advantages: str = "uneven", length: int = 13) -> dict[str, Tensor]:
    """Four sequences of two prompts, padded on both sides, of lengths that differ between ranks."""
    draw = torch.Generator().manual_seed(20 + rank)
    prompts, lengths = torch.tensor([2, 2, 5, 5]), torch.randint(2, 9, (4,), generator=draw)
    ids = torch.randint(3, 60, (4, length), generator=draw)
    ids[1, :5], ids[3, :5] = ids[0, :5], ids[2, :5]
    begin, end = 5 - prompts[:, None], 5 + lengths[:, None]
    mask = ((torch.arange(length) >= begin) & (torch.arange(length) < end)).long()
    found = {"input_ids": ids * mask, "attention_mask": mask, "completion_mask": mask[:, 5:]}
    return {**found, "advantages": torch.tensor(ADVANTAGES[advantages][rank])}


def loss_of(model: nn.Module, given: dict[str, Any], **options: Any) -> Any:
    loss_fn = GRPOLoss(loss_type="dapo", epsilon=0.1)
    return causal_lm_loss(model, loss_fn, **given, num_items_in_batch=20.0, **options)


def step(
    model: nn.Module, rank: int, advantages: str, options: dict[str, Any]
) -> tuple[Any, Tensor]:
    given = batch(rank, advantages)
    layout = {name: x for name, x in options.items() if name != "zero_advantage"}
    with torch.no_grad():
        logps = causal_lm_logps(model, **{x: given[x] for x in SCORED}, **layout).logps
    return loss_of(model, given, **options), logps


def lacking(model: nn.Module, given: dict[str, Any], **options: Any) -> set[str]:
    """The parameters that a step leaves without a gradient."""
    model.zero_grad()
    loss_of(model, given, **options).loss.backward()
    return {name for name, x in model.named_parameters() if x.grad is None}


@functools.cache
def of_one_process(
    kind: str, advantages: str
) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """(losses and log-probabilities by rank, mean gradients), all padded and with a graph."""
    model = tiny_models.model(kind).train()
    losses, logps = [], []
    for rank in range(2):
        out, scores = step(model, rank, advantages, PADDED)
        (out.loss / 2).backward()
        losses.append(out.loss.detach())
        logps.append(scores)
    return losses, logps, {name: x.grad.clone() for name, x in model.named_parameters()}


def wrapped(wrap: str, model: Any, layers: Any = None) -> Any:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if "checkpointing" in wrap:
        model.gradient_checkpointing_enable({"use_reentrant": "reentrant" in wrap})
    if wrap.startswith("DDP"):
        if "reentrant" in wrap:
            model.enable_input_require_grads()
        return DistributedDataParallel(model, static_graph="static" in wrap)
    if wrap.startswith("ZeRO"):
        return zero3.divided(model)
    for layer in model.model.layers if layers is None else layers:
        fully_shard(layer, reshard_after_forward=True)
    for name in ("trunk", "head"):
        if name in wrap:
            unit = model.model if name == "trunk" else model.lm_head
            fully_shard(unit, reshard_after_forward=True)
    return fully_shard(model)


def run_all(rank: int, world_size: int, jobs: list[Job]) -> list[Any]:
    """(loss, log-probabilities, gradients, shares) of each job."""
    found = []
    for wrap, kind, advantages, options in jobs:
        model = tiny_models.model(kind).train()
        around = wrapped(wrap, model)
        backward = around.backward if wrap.startswith("ZeRO") else torch.autograd.backward
        for _ in range(2):  # the first step also tries the modes
            model.zero_grad()
            out, logps = step(around, rank, advantages, OPTIONS[options])
            backward(out.loss)
        names = ("sequences/gradient", "tokens/gradient")
        shares = {x: out.metrics[x].item() for x in names}
        gradients = gradients_of(model)
        if wrap.startswith("ZeRO"):  # which has added those of both steps
            gradients = {name: x / 2 for name, x in gradients.items()}
            around.destroy()
        found.append((out.loss.detach(), logps, gradients, shares))
    return found


def check(jobs: list[Job], ranks: list[list[Any]]) -> None:
    for i, (wrap, kind, advantages, options) in enumerate(jobs):
        losses, scores, gradients = of_one_process(kind, advantages)
        largest = max(x.abs().max() for x in gradients.values())
        for rank, found in enumerate(ranks):
            loss, logps, got, shares = found[i]
            where = f"{wrap}, {kind}, {advantages}, {options}, rank {rank}"
            assert abs(loss - losses[rank]) <= 1e-5 * abs(losses[rank]) + 1e-6, where
            assert torch.allclose(logps, scores[rank], rtol=1e-5, atol=1e-5), where
            live = sum(x != 0 for x in ADVANTAGES[advantages][rank]) / 4
            assert shares["sequences/gradient"] == live, where
            assert shares["tokens/gradient"] < 0.8, where
            for name, x in gradients.items():
                assert name in got, f"{where}, {name}: no gradient"
                error = (got[name] - x).abs().max()
                assert error <= 2e-6 * largest + 1e-9, f"{where}, {name}: {error:.1e}"


def test_ddp_and_fsdp2(ranks: Ranks) -> None:
    check(JOBS, ranks.run(run_all, JOBS))


@zero3.needs_deepspeed
def test_zero3() -> None:
    with Ranks() as made:
        check(ZERO3_JOBS, made.run(run_all, ZERO3_JOBS))


def autocast(rank: int, world_size: int, has_lora: bool) -> list[Any]:
    """(loss, gradients) of three steps in bf16 autocast, padded and by default."""
    found = []
    for options in (PADDED, {}):
        model: Any = tiny_models.model("qwen3").train()
        layers = model.model.layers
        if has_lora:
            import peft

            torch.manual_seed(3)
            fields = {"target_modules": ["q_proj", "v_proj", "up_proj"], "init_lora_weights": False}
            model = peft.get_peft_model(model, peft.LoraConfig(r=4, **fields))
        around, steps = wrapped("FSDP2", model, layers), []
        for _ in range(3):
            around.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(around, batch(rank), **options).loss
            loss.backward()
            steps.append((loss.detach(), gradients_of(around)))
        found.append(steps)
    return found


@pytest.mark.parametrize("has_lora", [False, True])
def test_a_cast_made_without_graph_takes_no_gradient(has_lora: bool, ranks: Ranks) -> None:
    for padded, by_default in ranks.run(autocast, has_lora):
        for (want, expected), (loss, gradients) in zip(padded, by_default, strict=True):
            assert abs(loss - want) < 0.02
            for name, x in expected.items():
                assert name in gradients, f"{name}: no gradient"
                assert (gradients[name] - x).norm() <= 0.1 * x.norm() + 1e-4, name


def hooks_on_one_rank(rank: int, world_size: int) -> list[bool]:
    model = tiny_models.model("qwen3").train()
    around, found = wrapped("FSDP2", model), []
    for i in range(4):
        if rank == 1 and i in (0, 2):
            handle = model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
        found.append(not lacking(around, batch(rank)))
        if rank == 1 and i == 2:
            handle.remove()
    return found


def lengths_and_failures_on_one_rank(rank: int, world_size: int) -> list[bool]:
    """A trial or a call raises on one rank alone, whose batch is not longer each time."""
    model = tiny_models.model("qwen3").train()
    around, found = wrapped("FSDP2", model), list[bool]()
    fails: list[Any] = [False]
    forward = model.model.forward

    def failing(*args: Any, **kwargs: Any) -> Any:
        if fails[0] is not False and kwargs.get("segments") is not None:
            error, fails[0] = fails[0], False
            raise error
        return forward(*args, **kwargs)

    failing.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    model.model.forward = failing
    of_trial, of_call = torch.OutOfMemoryError("of a trial"), ValueError("of a call")
    for i, error in enumerate((of_trial, False, of_call, False)):
        fails[0] = error if rank == 0 else False
        found.append(not lacking(around, batch(rank, length=13 if rank == 0 else 13 + 4 * i)))
    return found


def scalars_on_one_rank(rank: int, world_size: int) -> list[bool]:
    """The model has a loss of its own; a hook makes the rows of one rank run as given."""
    model = reader().train()
    model.adds_loss = True
    around, found = wrapped("FSDP2", model), []
    for _ in range(3):
        if rank:
            model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
        without = lacking(around, batch(rank), router_aux_loss_coef=1.0)
        found.append(all("value_head" in name for name in without))
    return found


TASKS = hooks_on_one_rank, lengths_and_failures_on_one_rank, scalars_on_one_rank


@pytest.mark.parametrize("task", TASKS)
def test_ranks_agree_on_what_they_run(task: Any, ranks: Ranks) -> None:
    for found in ranks.run(task):
        assert all(found), found
