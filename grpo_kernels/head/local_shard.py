"""The head as this rank has it: plain tensors of its own rows, and which rows of the whole head those are.

A head is divided by rows of the vocabulary over a process group (tensor parallelism), in rank order; hidden states are
the same on every rank, and get their whole gradient there. Padding rows at the end of the head can be left out.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from grpo_kernels.base.agreement import Agreement, described
from grpo_kernels.base.checks import is_dtensor
from grpo_kernels.base.distributed import check_group
from grpo_kernels.engine.gradients import Wants
from grpo_kernels.engine.memory import Room
from grpo_kernels.engine.operands import HeadConfig
from grpo_kernels.engine.vocab_parallel import Shard
from grpo_kernels.head.lora import LoRA, check_kind

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_NAMES = {"u": "lora.a or lora.input", "b": "lora.b"}  # of what `Wants` calls otherwise


class LocalHead(NamedTuple):
    """The head's tensors of this rank, plain ones."""

    hidden: Tensor  # (..., H)
    weight: Tensor  # (V_r, H)
    bias: Tensor | None  # (V_r,)
    lora: LoRA | None

    def first_rows(self, count: int) -> LocalHead:
        """The head's first `count` ids."""
        if self.weight.shape[0] == count:
            return self

        def first(x: Any) -> Any:  # what does not fit the weight stays as it is, for the checks to come
            return x[:count] if isinstance(x, Tensor) and x.shape[:1] == self.weight.shape[:1] else x

        lora = None if self.lora is None else replace(self.lora, b=first(self.lora.b))
        return LocalHead(self.hidden, self.weight[:count], first(self.bias), lora)


def sharding_group(hidden: Any, weight: Any, process_group: Any) -> ProcessGroup | None:
    """The group over which the head is divided: `process_group`, or that of the DTensors hidden and weight; or None.

    Raises:
        TypeError, ValueError: no group; a DTensor that is not sharded once, by rows.
    """
    check_group("process_group", process_group)
    if process_group is None and is_dtensor(hidden) and is_dtensor(weight):
        return _sharding_group(weight)
    group: ProcessGroup | None = process_group
    return group


def local_head(
    hidden: Any,  # (..., H)
    weight: Any,  # (V_r, H)
    bias: Any,  # (V_r,)
    lora: LoRA | None,
    group: ProcessGroup | None,
    vocab_size: int | None,
) -> LocalHead:
    """hidden, weight, bias and adapter as this rank has them; of a whole head without the rows beyond `vocab_size`.

    Raises:
        TypeError, ValueError: a wrong argument.
    """
    if vocab_size is not None and (isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < 1):
        raise ValueError(f"vocab_size: expected an int > 0, got {vocab_size!r}")
    check_kind(lora)
    if group is None:
        head = LocalHead(hidden, weight, bias, lora)
        if vocab_size is None or not isinstance(weight, Tensor) or weight.dim() == 0:
            return head
        if vocab_size > weight.shape[0]:
            raise ValueError(f"vocab_size: expected at most the {weight.shape[0]} rows of weight, got {vocab_size}")
        return head.first_rows(vocab_size)
    if lora is not None:
        a, b = (_local(f"lora.{x}", getattr(lora, x), group, sharded=x == "b") for x in "ab")
        lora = replace(lora, a=a, b=b, input=_local("lora.input", lora.input, group, sharded=False))
    head = LocalHead(
        _local("hidden", hidden, group, sharded=False),
        _local("weight", weight, group, sharded=True),
        _local("bias", bias, group, sharded=True),
        lora,
    )
    if isinstance(head.weight, Tensor) and head.weight.dim() == 2 and head.weight.shape[0] == 0:
        raise ValueError("weight: expected at least one row of the vocabulary on every rank, got none")
    return head


def describe_shard(ranks: Agreement, head: LocalHead, wants: Wants, config: HeadConfig, vocab_size: int | None) -> None:
    """Say what of the head decides how its rows are divided, and which collectives there are."""
    ranks.same(described_head(head, wants, config, own_rows=True))
    ranks.same({"vocab_size": vocab_size})
    ranks.say({"rows of weight": head.weight.shape[0], "tight": config.room.tight, "ample": config.room.ample})


def described_head(head: LocalHead, wants: Wants, config: HeadConfig, *, own_rows: bool) -> dict[str, Any]:
    """The head's tensors but for `hidden`, whether they train, and how rows are projected.

    Args:
        own_rows: whether each rank has rows of the head of its own.
    """
    rows = (0,) if own_rows else ()
    lora = head.lora
    return {
        "weight": described(head.weight, own=rows),
        "bias": described(head.bias, own=rows),
        "lora.a": described(None if lora is None else lora.a),
        "lora.b": described(None if lora is None else lora.b, own=rows),
        "lora.input": lora is not None and lora.input is not None,
        "lora.scaling": None if lora is None else lora.scaling,
        **{f"gradients wanted of {_NAMES.get(x.name, x.name)}": getattr(wants, x.name) for x in fields(wants)},
        "dtype of the products (autocast)": str(config.compute_dtype),
        "the backend that serves": config.backend.name,
    }


def divided(head: LocalHead, ranks: Agreement, vocab_size: int | None) -> tuple[LocalHead, Shard | None]:
    """This rank's rows of the head, without padding, and which those are, once the ranks agree; None: they are all.

    Raises:
        ValueError: on all ranks: `vocab_size` does not fit the shards.
    """
    if ranks.group is None:
        return head, None
    import torch.distributed as dist

    sizes, rank = ranks.every["rows of weight"], dist.get_rank(ranks.group)
    if vocab_size is not None:
        if vocab_size > sum(sizes):
            raise ValueError(f"vocab_size: expected at most the {sum(sizes)} rows of all shards, got {vocab_size}")
        starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
        sizes = [min(size, max(0, vocab_size - start)) for size, start in zip(sizes, starts, strict=True)]
    if min(sizes) == 0:
        raise ValueError(f"weight: expected at least one row of the vocabulary on every rank, got {sizes}")
    room = Room(tight=any(ranks.every["tight"]), ample=all(ranks.every["ample"]))
    shard = Shard(ranks.group, rank, tuple(sizes), room)
    return head.first_rows(sizes[rank]), shard if len(sizes) > 1 else None


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
