"""The trial of a layout where FSDP2 has divided the model: no gradient is lost to a cast, and no
rank waits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
from benchmarks import tiny_models
from grpo_kernels import GRPOLoss
from grpo_kernels.transformers import causal_lm_loss
from tests.support import tiny_architectures as tiny
from tests.support.ranks import run_ranks
from tests.support.training_step import PADDED, reader

LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": PADDED,
    "padded, scored": {"layout": "padded"},
    "trim": {"layout": "trim"},
    "defaults": {},
}
Job = tuple[bool, str]  # LoRA, layout


def divided(model: Any, layers: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in layers:
        fully_shard(layer)
    return fully_shard(model)


def batch(rank: int, length: int = 13) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(20 + rank)
    ids = torch.randint(3, 60, (4, length), generator=draw)
    ids[1, :5], ids[3, :5] = ids[0, :5], ids[2, :5]
    lengths = torch.randint(2, 9, (4, 1), generator=draw)
    mask = (torch.arange(length) < 5 + lengths).long()
    advantages = torch.tensor([[1.0, 0.0, -1.0, 0.0], [0.0, 0.0, 0.7, 0.0]][rank])
    return {
        "input_ids": ids * mask, "attention_mask": mask, "completion_mask": mask[:, 5:],
        "advantages": advantages,
    }  # fmt: skip


def loss_of(
    model: nn.Module, rank: int, given: dict[str, Any] | None = None, **options: Any
) -> Tensor:
    loss_fn = GRPOLoss(loss_type="dapo")
    return causal_lm_loss(
        model, loss_fn, **(given or batch(rank)), num_items_in_batch=20.0, **options
    ).loss


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    found: dict[str, Tensor | None] = {}
    for name, x in model.named_parameters():
        if x.requires_grad:
            grad: Any = x.grad
            found[name] = None if grad is None else grad.full_tensor().clone()
    return found


def train(rank: int, world_size: int, jobs: list[Job]) -> list[Any]:
    """For `run_ranks`: gradients of three steps of a model with fp32 parameters in bf16
    autocast."""
    found = []
    for has_lora, layout in jobs:
        model: Any = tiny_models.model("qwen3").train()
        layers = model.model.layers
        if has_lora:
            import peft

            torch.manual_seed(3)
            places = ["q_proj", "v_proj", "up_proj"]
            model = peft.get_peft_model(
                model, peft.LoraConfig(r=4, target_modules=places, init_lora_weights=False)
            )
        around = divided(model, layers)
        steps = []
        for _ in range(3):
            around.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(around, rank, **LAYOUTS[layout])
            loss.backward()
            steps.append((loss.detach(), gradients_of(around)))
        found.append(steps)
    return found


def test_a_cast_made_without_graph_takes_no_gradient() -> None:
    jobs: list[Job] = [*itertools.product((False, True), LAYOUTS)]
    for found in run_ranks(train, 2, jobs):
        want: Any = None
        for (_, layout), steps in zip(jobs, found, strict=True):
            want = steps if layout == "padded" else want
            for (loss, gradients), (of_padded, expected) in zip(steps, want, strict=True):
                assert abs(loss - of_padded) < 0.02
                for name, x in expected.items():
                    got = gradients[name]
                    assert got is not None, f"{layout}, {name}: no gradient"
                    assert (got - x).norm() <= 0.1 * x.norm() + 1e-4, f"{layout}, {name}"


def images_on_one_rank(rank: int, world_size: int) -> list[bool]:
    """Text first; then an image on one rank and text on the other."""
    model, ids, inputs = tiny.qwen2_vl()
    model = model.float()
    for x in (
        model.model.visual.parameters()
    ):  # a unit reduces the gradients that it has: as many on each rank
        x.requires_grad_(False)
    around = divided(model, model.model.language_model.layers)
    completion = torch.ones(2, 5, dtype=torch.long)
    given: dict[str, Any] = {
        "input_ids": ids,
        "completion_mask": completion,
        "advantages": torch.tensor([1.0, -1.0]),
    }
    image = {
        **given,
        **{name: x.float() if x.is_floating_point() else x for name, x in inputs.items()},
    }
    text = {**given, "input_ids": ids.clamp(max=80), "attention_mask": torch.ones_like(ids)}
    text["mm_token_type_ids"] = torch.zeros_like(ids)
    found = []
    for case in (text, image if rank else text, text, text if rank else image):
        around.zero_grad()
        loss_of(around, rank, case).backward()
        found.append(any(x is not None and bool(x.any()) for x in gradients_of(around).values()))
    return found


def hooks_on_one_rank(rank: int, world_size: int) -> list[bool]:
    model = tiny_models.model("qwen3").train()
    around, found = divided(model, model.model.layers), []
    for i in range(4):
        if rank == 1 and i in (0, 2):
            handle = model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
        around.zero_grad()
        loss_of(around, rank).backward()
        found.append(all(x is not None for x in gradients_of(around).values()))
        if rank == 1 and i == 2:
            handle.remove()
    return found


def lengths_and_failures_on_one_rank(rank: int, world_size: int) -> list[bool]:
    """A longer batch is tried on one rank alone; a trial or a call that raises on one rank
    alone."""
    model = tiny_models.model("qwen3").train()
    around, found, fails = divided(model, model.model.layers), [], [False]
    forward = model.model.forward

    def failing(*args: Any, **kwargs: Any) -> Any:
        if fails[0] is not False and kwargs.get("segments") is not None:
            error, fails[0] = fails[0], False
            raise error  # type: ignore[misc]
        return forward(*args, **kwargs)

    failing.__signature__ = __import__("inspect").signature(forward)  # type: ignore[attr-defined]
    model.model.forward = failing
    errors: list[Any] = [
        torch.OutOfMemoryError("of a trial"),
        False,
        ValueError("of a call"),
        False,
    ]
    for i, error in enumerate(errors):
        fails[0] = error if rank == 0 else False
        around.zero_grad()
        loss_of(around, rank, batch(rank, 13 if rank == 0 else 13 + 4 * i)).backward()
        found.append(all(x is not None for x in gradients_of(around).values()))
    return found


def scalars_on_one_rank(rank: int, world_size: int) -> list[bool]:
    """The model's output has a number of its own; the rows of one rank run as given, since a hook
    looks at them."""
    model = reader().train()
    model.adds_loss = True
    around, found = divided(model, model.model.layers), []
    for _ in range(3):
        if rank:
            model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
        around.zero_grad()
        loss_of(around, rank, router_aux_loss_coef=1.0).backward()
        found.append(
            all(
                x is not None
                for name, x in gradients_of(around).items()
                if "value_head" not in name
            )
        )
    return found


@pytest.mark.parametrize(
    "task",
    [images_on_one_rank, hooks_on_one_rank, lengths_and_failures_on_one_rank, scalars_on_one_rank],
)
def test_ranks_agree_on_what_they_run(task: Any) -> None:
    for found in run_ranks(task, 2, seconds=60.0):
        assert all(found), found
