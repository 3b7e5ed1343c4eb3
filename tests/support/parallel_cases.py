"""A tiny language model, with PEFT's adapters or without, under the ways to divide it over ranks,
and its gradients from one process in float64."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import grpo_kernels
from grpo_kernels import LossConfig
from tests.support.case_builder import seeded

VOCAB, WIDTH = 37, 12
SEQUENCES, COLUMNS = 4, 5  # of one rank


class TinyModel(nn.Module):
    """Its forward gives hidden states, or what `then` makes of them."""

    def __init__(self, *, tied: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.mid = nn.Linear(WIDTH, WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=bias)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Tensor, then: Callable[[Tensor], Any] | None = None) -> Any:
        hidden = torch.tanh(self.mid(self.embed(tokens)))
        return hidden if then is None else then(hidden)


@dataclass(frozen=True)
class Loss:
    config: dict[str, Any]
    old: bool = True
    engine: str = "auto"
    frozen_head: bool = False
    serves: str = "one_pass"  # the engine that is to serve it


SEQUENCE = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
LOSSES = {
    "on-policy": Loss({}, old=False),
    "off-policy": Loss({}),
    "entropy bonus": Loss({"entropy_coef": 0.01, "epsilon": 0.1}),
    "sequence ratio": Loss(SEQUENCE, serves="two_pass"),
    "lean": Loss({}, engine="lean", serves="lean"),
    "frozen head": Loss({}, frozen_head=True, serves="frozen"),
    "frozen head, sequence ratio": Loss(
        {**SEQUENCE, "entropy_coef": 0.01}, frozen_head=True, serves="two_pass"
    ),
}


def make_model(dtype: torch.dtype, loss: Loss, **options: Any) -> TinyModel:
    made = TinyModel(**options)
    with torch.no_grad():
        for i, x in enumerate(made.parameters()):
            draw = torch.Generator().manual_seed(i)
            x.copy_(torch.randn(x.shape, generator=draw, dtype=torch.float64) * 2.0 / WIDTH**0.5)
    made.lm_head.requires_grad_(not loss.frozen_head)
    return made.to(dtype)


@dataclass(frozen=True)
class Batch:
    tokens: Tensor  # (B, T), what the model reads
    completion_ids: Tensor  # (B, T)
    completion_mask: Tensor  # (B, T)
    advantages: Tensor  # (B,)
    old_per_token_logps: Tensor  # (B, T)


def make_batch(rank: int, world_size: int, dtype: torch.dtype, *, last_empty: bool) -> Batch:
    """Ranks differ in how many tokens count; with `last_empty` none of the last one's do."""
    g = seeded(f"batch of rank {rank}")
    tokens, ids = torch.randint(VOCAB, (2, SEQUENCES, COLUMNS), generator=g)
    mask = torch.rand(SEQUENCES, COLUMNS, generator=g) < (rank + 1) / (world_size + 1)
    mask[:, 0] = True
    if last_empty and rank == world_size - 1:
        mask[:] = False
    advantages = torch.randn(SEQUENCES, generator=g)
    old = -3.0 - torch.rand(SEQUENCES, COLUMNS, generator=g)
    return Batch(tokens, ids, mask, advantages.to(dtype), old.to(dtype))


def arguments(loss: Loss, batch: Batch, num_items: float) -> dict[str, Any]:
    given = {name: x for name, x in vars(batch).items() if name != "tokens"}
    if not loss.old:
        given["old_per_token_logps"] = None
    return {**given, "num_items_in_batch": num_items}


def items_per_rank(world_size: int, **options: Any) -> float:
    """Counted tokens of all ranks over their number."""
    batches = (make_batch(x, world_size, torch.float64, **options) for x in range(world_size))
    return sum(int(batch.completion_mask.sum()) for batch in batches) / world_size


def micro_batches(batch: Batch, accumulate: int) -> list[Batch]:
    parts = zip(*(x.chunk(accumulate) for x in vars(batch).values()), strict=True)
    return [Batch(*part) for part in parts]


def truth(
    loss: Loss,
    world_size: int,
    *,
    accumulate: int = 1,
    last_empty: bool = False,
    adapter: str = "",
    **options: Any,
) -> dict[str, Tensor]:
    """Gradients by name of one process in float64: the mean over the batches of the ranks."""
    made = adapted(adapter) if adapter else make_model(torch.float64, loss, **options)
    items = items_per_rank(world_size, last_empty=last_empty)
    for rank in range(world_size):
        whole_batch = make_batch(rank, world_size, torch.float64, last_empty=last_empty)
        for batch in micro_batches(whole_batch, accumulate):
            given = arguments(loss, batch, items) | {"config": LossConfig(**loss.config)}
            out = grpo_kernels.grpo_loss(made(batch.tokens), made.lm_head, **given)
            (out.loss / world_size).backward()
    return gradients_of(made)


@dataclass(frozen=True)
class Setup:
    wrap: Callable[[TinyModel, DeviceMesh | None], nn.Module]
    # within the model's forward; or after it, from the hidden states it returns
    inside: bool = True


def ddp(model: TinyModel, mesh: DeviceMesh | None) -> nn.Module:
    return DistributedDataParallel(model)


def units(*names: str, **options: Any) -> Callable[[TinyModel, DeviceMesh | None], nn.Module]:
    """FSDP2 with these modules as units ("mid + lm_head": one unit), the rest in the root's."""

    def wrap(model: TinyModel, mesh: DeviceMesh | None) -> nn.Module:
        given = options if mesh is None else {**options, "mesh": mesh}
        for name in names:
            modules = [getattr(model, part) for part in name.split(" + ")]
            fully_shard(modules if len(modules) > 1 else modules[0], **given)
        return fully_shard(model, **given)

    return wrap


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SETUPS = {
    "DDP": Setup(ddp),
    "DDP, after the forward": Setup(ddp, inside=False),
    "FSDP2, head in the root unit": Setup(units("mid")),
    "FSDP2, head in the root unit, after the forward": Setup(units("mid"), inside=False),
    "FSDP2, head its own unit": Setup(units("mid", "lm_head")),
    "FSDP2, head its own unit, after the forward": Setup(units("mid", "lm_head"), inside=False),
    "FSDP2, head its own unit, kept whole": Setup(units("lm_head", reshard_after_forward=False)),
    "FSDP2, head in a unit with another layer": Setup(units("mid + lm_head")),
}
TIED = ("DDP", "FSDP2, head in the root unit", "FSDP2, head in the root unit, after the forward")


@dataclass
class Run:
    setup: Setup
    loss: Loss
    device: torch.device
    dtype: torch.dtype
    mesh: DeviceMesh | None = None
    last_empty: bool = False

    def __post_init__(self) -> None:
        self.world_size = dist.get_world_size()
        batch = make_batch(dist.get_rank(), self.world_size, self.dtype, last_empty=self.last_empty)
        self.batch = Batch(**{name: x.to(self.device) for name, x in vars(batch).items()})
        self.items = items_per_rank(self.world_size, last_empty=self.last_empty)

    def gradients(
        self, accumulate: int = 1, *, adapter: str = "", **options: Any
    ) -> dict[str, Tensor]:
        model = adapted(adapter) if adapter else make_model(self.dtype, self.loss, **options)
        model = model.to(self.device)
        wrapped, head = self.setup.wrap(model, self.mesh), model.lm_head
        parts = micro_batches(self.batch, accumulate)
        for i, batch in enumerate(parts):
            with synchronised(wrapped, i == len(parts) - 1):
                backward(wrapped, self.score(wrapped, head, batch))
        return gradients_of(model)

    def score(self, wrapped: nn.Module, head: Any, batch: Batch) -> Tensor:
        """Of tensors alone, since ZeRO-3 sees none in other objects."""
        given = arguments(self.loss, batch, self.items)

        def then(hidden: Tensor) -> Tensor:
            run = grpo_kernels.Run(engine=self.loss.engine)
            config = LossConfig(**self.loss.config)
            out = grpo_kernels.grpo_loss(hidden, head, config=config, run=run, **given)
            assert out.engine == self.loss.serves, f"expected {self.loss.serves}, got {out.engine}"
            return out.loss

        return wrapped(batch.tokens, then) if self.setup.inside else then(wrapped(batch.tokens))


def synchronised(model: Any, now: bool) -> AbstractContextManager[Any]:
    """Gradients are reduced in the backward to come, or, not `now`, left for a later one."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
        return nullcontext()
    return nullcontext() if now else model.no_sync()


def backward(model: Any, loss: Tensor) -> None:
    """Under ZeRO-3 by its engine, which divides the weights again."""
    if not hasattr(model, "module") or not hasattr(model.module.lm_head.weight, "ds_id"):
        loss.backward()
        return
    model.backward(loss)
    assert model.module.lm_head.weight.numel() == 0


def whole(x: Tensor) -> Tensor:
    """All of a gradient, which FSDP2 divides."""
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().cpu()


def gradients_of(model: Any) -> dict[str, Tensor]:
    if hasattr(model.lm_head.weight, "ds_id"):
        from deepspeed.utils import safe_get_full_grad

        trained = [(name, x) for name, x in model.named_parameters() if x.requires_grad]
        return {name: safe_get_full_grad(x).clone() for name, x in trained}
    return {name: whole(x.grad) for name, x in model.named_parameters() if x.grad is not None}


def relative_error(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference over the largest entry, by name; the names must be the same."""
    assert got.keys() == want.keys(), f"gradients of {sorted(got)}, expected of {sorted(want)}"
    error = lambda x, y: float((x.double() - y).abs().max() / y.abs().max())  # noqa: E731
    return {name: error(got[name], x) for name, x in want.items()}


def gradients(
    setup: Setup, loss: str, dtype: torch.dtype = torch.float64, *, adapter: str = "",
    accumulate: int = 1, mesh: DeviceMesh | None = None, last_empty: bool = False, **options: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """Of one run on this rank, on a CPU."""
    of_loss = adapted_loss(adapter, loss) if adapter else LOSSES[loss]
    run = Run(setup, of_loss, torch.device("cpu"), dtype, mesh, last_empty)
    return run.gradients(accumulate, adapter=adapter, **options)


def hsdp_mesh(device: str, world_size: int) -> DeviceMesh:
    """(replicas, shards)."""
    return init_device_mesh(device, (2, world_size // 2), mesh_dim_names=("replicate", "shard"))


# PEFT's adapters on body or head.
PLACES = ("mid", "lm_head")


def adapted(where: str) -> TinyModel:
    """With PEFT's adapters on `where`, both factors random, and everything else frozen."""
    import peft

    model = make_model(torch.float64, LOSSES["off-policy"])
    peft.inject_adapter_in_model(peft.LoraConfig(r=3, lora_alpha=4, target_modules=[where]), model)
    model.double()
    with torch.no_grad():
        for i, (name, x) in enumerate(model.named_parameters()):
            x.requires_grad_("lora_" in name)
            if "lora_" in name:
                x.normal_(0.0, 0.5, generator=torch.Generator().manual_seed(i))
    return model


def adapted_loss(where: str, loss: str) -> Loss:
    """One of `LOSSES` and the engine that serves it: a head of which nothing trains has its own."""
    return Loss(LOSSES[loss].config, serves="frozen" if where == "mid" else LOSSES[loss].serves)
