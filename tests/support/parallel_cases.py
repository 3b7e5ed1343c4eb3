"""A tiny language model, with PEFT's adapters or without, under the ways to divide it over ranks,
and its gradients from one process in float64.

Shared by the gloo tests and by `tests/gpu/test_gpu_ranks.py`, which runs the same on GPUs.
"""

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
from tests.support.case_builder import Case, seeded
from tests.support.reference import reference_loss

VOCAB, WIDTH = 37, 12
SEQUENCES, COLUMNS = 4, 5  # of one rank


class TinyModel(nn.Module):
    """Embedding, one layer with tanh, head. Its forward gives hidden states, or what `then` makes
    of them."""

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
    """One loss: its config, whether it is off-policy, and how it is to be computed."""

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
    """The same weights in every process."""
    made = TinyModel(**options)
    with torch.no_grad():
        for i, x in enumerate(made.parameters()):
            values = torch.randn(
                x.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64
            )
            x.copy_(values * 2.0 / WIDTH**0.5)
    made.lm_head.requires_grad_(not loss.frozen_head)
    return made.to(dtype)


@dataclass(frozen=True)
class Batch:
    """What one rank trains on."""

    tokens: Tensor  # (B, T), what the model reads
    completion_ids: Tensor  # (B, T)
    completion_mask: Tensor  # (B, T)
    advantages: Tensor  # (B,)
    old_per_token_logps: Tensor  # (B, T)

    def part(self, rows: slice) -> Batch:
        """Some of its sequences: a micro-batch."""
        return Batch(**{name: x[rows] for name, x in vars(self).items()})


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
    """What the loss takes besides hidden states and head."""
    given = {name: x for name, x in vars(batch).items() if name != "tokens"}
    if not loss.old:
        given["old_per_token_logps"] = None
    return {**given, "num_items_in_batch": num_items}


def items_per_rank(world_size: int, **options: Any) -> float:
    """Counted tokens of all ranks over their number: the normalizer of a loss whose gradients are
    averaged."""
    batches = (make_batch(x, world_size, torch.float64, **options) for x in range(world_size))
    return sum(int(batch.completion_mask.sum()) for batch in batches) / world_size


def micro_batches(batch: Batch, accumulate: int) -> list[Batch]:
    """The batch in `accumulate` parts."""
    size = SEQUENCES // accumulate
    return [batch.part(slice(i * size, (i + 1) * size)) for i in range(accumulate)]


def truth(
    loss: Loss, world_size: int, *, accumulate: int = 1, last_empty: bool = False, **options: Any
) -> dict[str, Tensor]:
    """Gradients by name, float64: the mean over ranks of the reference's, which has all logits."""
    model = make_model(torch.float64, loss, **options)
    items = items_per_rank(world_size, last_empty=last_empty)
    for rank in range(world_size):
        whole_batch = make_batch(rank, world_size, torch.float64, last_empty=last_empty)
        for batch in micro_batches(whole_batch, accumulate):
            backward_by_reference(model, batch, loss, items, 1.0 / world_size)
    return gradients_of(model)


def backward_by_reference(
    model: TinyModel, batch: Batch, loss: Loss, items: float, factor: float
) -> Tensor:
    """Add `factor` times the gradient of the reference's loss to the model's; the loss."""
    hidden = model(batch.tokens)
    weight, bias = model.lm_head.weight, model.lm_head.bias
    given = arguments(loss, batch, items)
    case = Case("", hidden.detach(), weight.detach(), bias=bias, config=loss.config, **given)
    want = reference_loss(case)
    if hidden.requires_grad:
        hidden.backward(factor * want.d_hidden)
    for x, grad in ((weight, want.d_weight), (bias, want.d_bias)):
        if x is not None and grad is not None and x.requires_grad:
            x.grad = factor * grad if x.grad is None else x.grad + factor * grad
    return want.loss


@dataclass(frozen=True)
class Setup:
    """How the model is divided, and where its loss is computed."""

    wrap: Callable[[TinyModel, DeviceMesh | None], nn.Module]
    # within the model's forward; or after it, from the hidden states it returns
    inside: bool = True


def ddp(model: TinyModel, mesh: DeviceMesh | None) -> nn.Module:
    return DistributedDataParallel(model)


def units(*names: str, **options: Any) -> Callable[[TinyModel, DeviceMesh | None], nn.Module]:
    """FSDP2 with these modules as units of their own ("mid + lm_head": one unit), and the rest in
    the root's."""

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
    """One model on this rank, ready to train."""

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

    def gradients(self, accumulate: int = 1, **options: Any) -> dict[str, Tensor]:
        """Gradients by name, averaged over the ranks, whole and on the CPU."""
        model = make_model(self.dtype, self.loss, **options).to(self.device)
        return self.train(model, accumulate)

    def train(self, model: TinyModel, accumulate: int = 1) -> dict[str, Tensor]:
        wrapped, head = self.setup.wrap(model, self.mesh), model.lm_head
        parts = micro_batches(self.batch, accumulate)
        for i, batch in enumerate(parts):
            with synchronised(wrapped, i == len(parts) - 1):
                self.score(wrapped, head, batch).backward()
        return gradients_of(model)

    def score(self, wrapped: nn.Module, head: Any, batch: Batch) -> Tensor:
        """The loss of one micro-batch. A forward has to return tensors: in other objects ZeRO-3
        does not see them."""
        given = arguments(self.loss, batch, self.items)

        def then(hidden: Tensor) -> Tensor:
            run = grpo_kernels.Run(engine=self.loss.engine)
            config = LossConfig(**self.loss.config)
            out = grpo_kernels.grpo_loss(hidden, head, config=config, run=run, **given)
            assert out.engine == self.loss.serves, f"expected {self.loss.serves}, got {out.engine}"
            return out.loss

        return wrapped(batch.tokens, then) if self.setup.inside else then(wrapped(batch.tokens))


def synchronised(model: nn.Module, now: bool) -> AbstractContextManager[Any]:
    """Gradients are reduced in the backward to come, or, not `now`, left for a later one."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(now)
        return nullcontext()
    assert isinstance(model, DistributedDataParallel)
    return nullcontext() if now else model.no_sync()


def whole(x: Tensor) -> Tensor:
    """All of a gradient, which FSDP2 divides after it has reduced it."""
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().cpu()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """Those that there are, by name, whole and on the CPU."""
    return {name: whole(x.grad) for name, x in model.named_parameters() if x.grad is not None}


def relative_error(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference over the largest entry, by name; the names must be the same."""
    assert got.keys() == want.keys(), f"gradients of {sorted(got)}, expected of {sorted(want)}"
    return {
        name: float((got[name].double() - x).abs().max() / x.abs().max())
        for name, x in want.items()
    }


def hsdp_mesh(device: str, world_size: int) -> DeviceMesh:
    """(replicas, shards)."""
    return init_device_mesh(device, (2, world_size // 2), mesh_dim_names=("replicate", "shard"))


# PEFT's adapters on body or head.
PLACES = ("mid", "lm_head")


def adapted(where: str) -> TinyModel:
    """PEFT's adapters on `where`, both factors random, and everything else frozen."""
    import peft

    model = make_model(torch.float64, LOSSES["off-policy"])
    peft.inject_adapter_in_model(peft.LoraConfig(r=3, lora_alpha=4, target_modules=[where]), model)
    model.double()
    with torch.no_grad():
        for i, (name, x) in enumerate(model.named_parameters()):
            x.requires_grad_("lora_" in name)
            if "lora_" in name:
                values = torch.randn(
                    x.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64
                )
                x.copy_(values * 0.5)
    return model


def adapted_truth(where: str, loss: Loss) -> dict[str, Tensor]:
    """With the adapter of the head multiplied out, which the library never does."""
    model, items = adapted(where), items_per_rank(2, last_empty=False)
    for rank in range(2):
        batch = make_batch(rank, 2, torch.float64, last_empty=False)
        hidden, weight, head = model(batch.tokens), model.lm_head.weight, model.lm_head
        if where == "lm_head":
            factors = head.lora_B["default"].weight @ head.lora_A["default"].weight
            weight = weight + head.scaling["default"] * factors
        given = arguments(loss, batch, items)
        case = Case("", hidden.detach(), weight.detach(), config=loss.config, **given)
        want = reference_loss(case)
        for x, grad in ((hidden, want.d_hidden), (weight, want.d_weight)):
            if x.requires_grad:
                x.backward(0.5 * grad, retain_graph=True)
    return gradients_of(model)


def adapted_loss(where: str, loss: str) -> Loss:
    """One of `LOSSES` and the engine that serves it here: a head of which nothing trains has one of
    its own."""
    return Loss(LOSSES[loss].config, serves="frozen" if where == "mid" else LOSSES[loss].serves)
