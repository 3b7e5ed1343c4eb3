"""Two processes: gradients are those of one padded process, and nobody hangs."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
from benchmarks import tiny_models
from grpo_kernels import GRPOLoss
from grpo_kernels.transformers import causal_lm_divergence, causal_lm_loss, completion_logprobs
from tests.support import tiny_architectures as tiny
from tests.support import zero3
from tests.support.ranks import Ranks
from tests.support.training_step import PADDED, SCORED, reader

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


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(seconds=120.0) as made:
        yield made


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
    """(output of the loss, log-probabilities under no_grad)."""
    given = batch(rank, advantages)
    layout = {name: x for name, x in options.items() if name != "zero_advantage"}
    with torch.no_grad():
        logps = completion_logprobs(model, **{x: given[x] for x in SCORED}, **layout).logps
    return loss_of(model, given, **options), logps


def gradients_of(model: nn.Module) -> dict[str, Any]:
    """The whole gradient of each parameter that trains; None where it has none."""
    if hasattr(model.lm_head.weight, "ds_id"):  # ZeRO-3 has added those of both steps
        whole = zero3.deepspeed().utils.safe_get_full_grad
        return {name: whole(x) / 2 for name, x in model.named_parameters()}
    trained = {name: x.grad for name, x in model.named_parameters() if x.requires_grad}
    return {
        name: x.full_tensor().clone() if hasattr(x, "full_tensor") else x
        for name, x in trained.items()
    }


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
        config = {**zero3.CONFIG, "train_micro_batch_size_per_gpu": 1}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        return zero3.deepspeed().initialize(model=model, config=config, optimizer=optimizer)[0]
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
        found.append((out.loss.detach(), logps, gradients_of(model), shares))
        if wrap.startswith("ZeRO"):
            around.destroy()
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
                assert got[name] is not None, f"{where}, {name}: no gradient"
                error = (got[name] - x).abs().max()
                assert error <= 2e-6 * largest + 1e-9, f"{where}, {name}: {error:.1e}"


def test_ddp_and_fsdp2(ranks: Ranks) -> None:
    check(JOBS, ranks.run(run_all, JOBS))


@zero3.needs_deepspeed
def test_zero3() -> None:
    with Ranks() as made:
        check(ZERO3_JOBS, made.run(run_all, ZERO3_JOBS))


# (the student's way, the teacher's, the divergence, layout)
DIVERGENCES = [
    ("FSDP2", "whole", "reverse_kl", "tree"),
    ("FSDP2", "FSDP2", "jsd", "tree"),
    ("FSDP2, head a unit", "FSDP2, head a unit", "forward_kl", "tree"),
    ("FSDP2, trunk a unit", "FSDP2, head a unit", "jsd", "trim"),
]


def divergence_step(
    student: nn.Module, teacher: nn.Module, rank: int, divergence: Any, layout: Any
) -> tuple[dict[str, Tensor], Tensor]:
    """(scores, loss)."""
    given = {name: x for name, x in batch(rank).items() if name in SCORED}
    options = {"divergence": divergence, "layout": layout, "entropy": True}
    scores = causal_lm_divergence(student, teacher, **given, **options)
    loss = scores.divergence.sum() / 20.0
    return {name: x.detach() for name, x in scores.given.items()}, loss


def run_divergences(rank: int, world_size: int) -> list[Any]:
    """(scores, gradients) of each case."""
    found = []
    for student_way, teacher_way, divergence, layout in DIVERGENCES:
        student = wrapped(student_way, tiny_models.model("qwen3").train())
        teacher: Any = tiny_models.model("qwen3", seed=1).eval()
        teacher = teacher if teacher_way == "whole" else wrapped(teacher_way, teacher)
        for _ in range(2):  # the first step also looks at the logits
            student.zero_grad()
            scores, loss = divergence_step(student, teacher, rank, divergence, layout)
            loss.backward()
        assert all(x.grad is None for x in teacher.parameters())
        found.append((scores, gradients_of(student)))
    return found


def test_divergence_of_divided_models(ranks: Ranks) -> None:
    found = ranks.run(run_divergences)
    for i, (*_, divergence, _) in enumerate(DIVERGENCES):
        student, teacher = tiny_models.model("qwen3").train(), tiny_models.model("qwen3", seed=1)
        for rank, of_rank in enumerate(found):
            want, loss = divergence_step(student, teacher.eval(), rank, divergence, "padded")
            (loss / 2).backward()
            assert want.keys() == {"divergence", "logps", "entropies"}
            assert want["divergence"].max() > 0.1
            torch.testing.assert_close(of_rank[i][0], want, rtol=1e-5, atol=1e-5)
        gradients = gradients_of(student)
        largest = max(x.abs().max() for x in gradients.values())
        for _, got in (of_rank[i] for of_rank in found):
            for name, x in gradients.items():
                error = (got[name] - x).abs().max()
                assert error <= 2e-6 * largest + 1e-9, f"{DIVERGENCES[i]}, {name}: {error:.1e}"


def images_on_one_rank(rank: int, world_size: int) -> list[bool]:
    """Text first; then an image on one rank and text on the other."""
    model, ids, inputs = tiny.qwen2_vl()
    model = model.float()
    # a unit reduces the gradients that it has: as many on each rank
    model.model.visual.requires_grad_(False)
    around = wrapped("FSDP2", model, model.model.language_model.layers)
    given: dict[str, Any] = {"input_ids": ids, "advantages": torch.tensor([1.0, -1.0])}
    given["completion_mask"] = torch.ones(2, 5, dtype=torch.long)
    floats = {name: x.float() if x.is_floating_point() else x for name, x in inputs.items()}
    image = {**given, **floats}
    text = {**given, "input_ids": ids.clamp(max=80), "attention_mask": torch.ones_like(ids)}
    text["mm_token_type_ids"] = torch.zeros_like(ids)
    found = []
    for case in (text, image if rank else text, text, text if rank else image):
        around.zero_grad()
        loss_of(around, case).loss.backward()
        found.append(any(x is not None and bool(x.any()) for x in gradients_of(around).values()))
    return found


def hooks_on_one_rank(rank: int, world_size: int) -> list[bool]:
    model = tiny_models.model("qwen3").train()
    around, found = wrapped("FSDP2", model), []
    for i in range(4):
        if rank == 1 and i in (0, 2):
            handle = model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
        around.zero_grad()
        loss_of(around, batch(rank)).loss.backward()
        found.append(all(x is not None for x in gradients_of(around).values()))
        if rank == 1 and i == 2:
            handle.remove()
    return found


def lengths_and_failures_on_one_rank(rank: int, world_size: int) -> list[bool]:
    """A longer batch is tried on one rank alone; a trial or a call that raises on one rank
    alone."""
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
        around.zero_grad()
        given = batch(rank, length=13 if rank == 0 else 13 + 4 * i)
        loss_of(around, given).loss.backward()
        found.append(all(x is not None for x in gradients_of(around).values()))
    return found


def scalars_on_one_rank(rank: int, world_size: int) -> list[bool]:
    """The model's output has a number of its own; the rows of one rank run as given, since a hook
    looks at them."""
    model = reader().train()
    model.adds_loss = True
    around, found = wrapped("FSDP2", model), []
    for _ in range(3):
        if rank:
            model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
        around.zero_grad()
        loss_of(around, batch(rank), router_aux_loss_coef=1.0).loss.backward()
        of_values = {name for name, x in gradients_of(around).items() if x is None}
        found.append(all("value_head" in name for name in of_values))
    return found


TASKS = images_on_one_rank, hooks_on_one_rank, lengths_and_failures_on_one_rank, scalars_on_one_rank


@pytest.mark.parametrize("task", TASKS)
def test_ranks_agree_on_what_they_run(task: Any, ranks: Ranks) -> None:
    for found in ranks.run(task):
        assert all(found), found
