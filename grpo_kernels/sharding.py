"""The head as this rank has it: plain tensors of its own rows, and which rows of the whole head those are.

A head is divided by rows of the vocabulary over a process group (tensor parallelism), in rank order; hidden states are
the same on every rank, and get their whole gradient there. Padding rows at the end of the head can be left out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from grpo_kernels.checks import is_dtensor
from grpo_kernels.distributed import agree
from grpo_kernels.engine.memory import Room
from grpo_kernels.engine.operands import Wants
from grpo_kernels.engine.shard import Shard
from grpo_kernels.lora import LoRA, check_kind

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def localise(
    hidden: Any,  # (..., H)
    weight: Any,  # (V_r, H)
    bias: Any,  # (V_r,)
    lora: LoRA | None,
    process_group: ProcessGroup | None,
    vocab_size: int | None,
    engine: str,
    backend: str,
    workspace_bytes: int | None,
) -> tuple[Any, Any, Any, LoRA | None, Shard | None]:
    """hidden, weight, bias and adapter as plain tensors of this rank's rows; and the shard, None for a whole head.

    Sharded, all ranks gather a few integers first, which on a GPU waits for the device: the sizes of the shards, and
    whether they agree on the call.

    Args:
        process_group: over which the head is divided. None: it is whole; or weight and hidden are DTensors, sharded by
            rows and replicated, and say it themselves.
        vocab_size: ids of the head; its rows from there on are padding and do not exist. None: all do.
        engine, backend, workspace_bytes: those asked for, by which rows are divided into chunks: alike on all ranks.

    Raises:
        TypeError, ValueError: a wrong argument; what the ranks do not agree on; raised on all of them.
    """
    if process_group is None and is_dtensor(hidden) and is_dtensor(weight):
        process_group = _sharding_group(weight)
    if vocab_size is not None and (isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < 1):
        raise ValueError(f"vocab_size: expected an int > 0, got {vocab_size!r}")
    check_kind(lora)
    if process_group is None:
        if vocab_size is None or not isinstance(weight, Tensor) or weight.dim() == 0:
            return hidden, weight, bias, lora, None
        if vocab_size > weight.shape[0]:
            raise ValueError(f"vocab_size: expected at most the {weight.shape[0]} rows of weight, got {vocab_size}")
        return hidden, *_first_rows(vocab_size, weight, bias, lora), None
    import torch.distributed as dist

    if not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(f"process_group: expected a torch.distributed.ProcessGroup, got {type(process_group).__name__}")
    hidden = _local("hidden", hidden, process_group, sharded=False)
    weight = _local("weight", weight, process_group, sharded=True)
    bias = _local("bias", bias, process_group, sharded=True)
    if lora is not None:
        a, b = (_local(f"lora.{x}", getattr(lora, x), process_group, sharded=x == "b") for x in "ab")
        lora = replace(lora, a=a, b=b, input=_local("lora.input", lora.input, process_group, sharded=False))
    matrices = (hidden, weight, *(() if lora is None else (lora.a, lora.b)))
    if not all(isinstance(x, Tensor) and x.dim() >= 2 for x in matrices):
        return hidden, weight, bias, lora, None  # the checks to come say what is wrong
    shard = _agreed(hidden, weight, bias, lora, process_group, vocab_size, engine, backend, workspace_bytes)
    return hidden, *_first_rows(shard.sizes[shard.rank], weight, bias, lora), shard if len(shard.sizes) > 1 else None


def _agreed(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora: LoRA | None,
    process_group: ProcessGroup,
    vocab_size: int | None,
    engine: str,
    backend: str,
    workspace_bytes: int | None,
) -> Shard:
    """The shard, once all ranks have told each other what they were called with."""
    import torch.distributed as dist

    budget = workspace_bytes if isinstance(workspace_bytes, int) else None
    own = _described(hidden, weight, bias, lora, budget, engine)
    own |= {
        "vocab_size": vocab_size or 0,
        "engine": str(engine),
        "backend": str(backend),
        "workspace_bytes": budget or 0,
    }
    every = agree("process_group", own, process_group, hidden.device, may_differ=("rows of weight", "tight", "ample"))
    sizes, vocab = every["rows of weight"], sum(every["rows of weight"])
    if vocab_size is not None:
        if vocab_size > vocab:
            raise ValueError(f"vocab_size: expected at most the {vocab} rows of all shards, got {vocab_size}")
        starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
        sizes = [min(size, max(0, vocab_size - start)) for size, start in zip(sizes, starts, strict=True)]
    if min(sizes) == 0:
        raise ValueError(f"weight: expected at least one row of the vocabulary on every rank, got {sizes}")
    room = Room(tight=any(every["tight"]), ample=all(every["ample"]))
    return Shard(process_group, dist.get_rank(process_group), tuple(sizes), room)


def _described(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, lora: LoRA | None, workspace_bytes: int | None, engine: str
) -> dict[str, int | str]:
    """What of the tensors decides how rows are divided, and which collectives there are."""
    device = hidden.device.type
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    tensors = {"hidden": hidden, "weight": weight, "bias": bias}
    tensors |= {f"lora.{name}": getattr(lora, name, None) for name in ("a", "b", "input")}
    grad = torch.is_grad_enabled()
    trains = {name: isinstance(x, Tensor) and x.requires_grad and grad for name, x in tensors.items()}
    wants = Wants(hidden=trains["hidden"], weight=trains["weight"])
    room = Room.of(weight, wants, cast or weight.dtype, workspace_bytes, asks_tight=engine == "auto")
    return {
        "rows of weight": weight.shape[0],
        "positions of hidden": hidden.shape[:-1].numel(),
        "H of hidden": hidden.shape[-1],
        "bytes of an element of hidden": hidden.element_size(),
        "bytes of an element of weight": weight.element_size(),
        "r of lora (0: none)": 0 if lora is None else lora.a.shape[0],
        **{f"gradients wanted of {name}": wanted for name, wanted in trains.items()},
        "autocast's dtype": str(cast),
        "tight": room.tight,
        "ample": room.ample,
    }


def _first_rows(count: int, weight: Tensor, bias: Any, lora: LoRA | None) -> tuple[Tensor, Any, LoRA | None]:
    if weight.shape[0] == count:
        return weight, bias, lora

    def first(x: Any) -> Any:  # what does not fit the weight stays as it is, for the checks to come
        return x[:count] if isinstance(x, Tensor) and x.shape[:1] == weight.shape[:1] else x

    return weight[:count], first(bias), None if lora is None else replace(lora, b=first(lora.b))


def _sharding_group(weight: Any) -> ProcessGroup:
    """The group of the one dimension of the mesh that `weight`, a DTensor, is sharded over."""
    dims = [i for i, placement in enumerate(weight.placements) if not placement.is_replicate()]
    if len(dims) != 1 or not weight.placements[dims[0]].is_shard(0):
        raise ValueError(f"weight: expected a DTensor sharded once, by rows: Shard(0), got {weight.placements}")
    return weight.device_mesh.get_group(dims[0])


def _local(name: str, x: Any, process_group: ProcessGroup, *, sharded: bool) -> Any:
    """This rank's part of a DTensor, sharded by rows over the group or replicated; anything else as it is."""
    if not is_dtensor(x):
        return x
    if sharded:
        if _sharding_group(x) is not process_group and _ranks(_sharding_group(x)) != _ranks(process_group):
            raise ValueError(f"{name}: expected a DTensor sharded over process_group, got {x.placements}")
        return x.to_local()
    if not all(placement.is_replicate() for placement in x.placements):
        raise ValueError(f"{name}: expected a replicated DTensor, or a plain tensor, got {x.placements}")
    return x.to_local(grad_placements=x.placements)


def _ranks(process_group: ProcessGroup) -> list[int]:
    import torch.distributed as dist

    return dist.get_process_group_ranks(process_group)
