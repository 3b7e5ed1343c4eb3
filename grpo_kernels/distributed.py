"""Collectives over an optional process group: with ``None`` every function is the identity and communicates nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def all_reduce(x: Tensor, op: str, process_group: ProcessGroup | None) -> Tensor:
    """``x`` reduced over the group's ranks; ``op`` is "sum", "min" or "max". Reduces in place and returns ``x``."""
    if process_group is None:
        return x
    import torch.distributed as dist

    dist.all_reduce(x, op=getattr(dist.ReduceOp, op.upper()), group=process_group)
    return x


def gather_stacked(x: Tensor, process_group: ProcessGroup) -> Tensor:
    """(R, ...): the tensors of all R ranks, of one shape and dtype, in rank order."""
    import torch.distributed as dist

    parts = x.new_empty(dist.get_world_size(process_group), *x.shape)
    dist.all_gather([*parts.unbind(0)], x.contiguous(), group=process_group)
    return parts


def agree(own: dict[str, int], process_group: ProcessGroup, device: torch.device) -> dict[str, list[int]]:
    """Each name with the numbers of all ranks. On a GPU this waits for the device."""
    table = gather_stacked(torch.tensor([*own.values()], device=device), process_group).T.tolist()
    return dict(zip(own, table, strict=True))


def gather_rows(x: Tensor, process_group: ProcessGroup | None) -> tuple[Tensor, int]:
    """The rows of every rank in rank order, and the index of this rank's first row. Ranks may hold unequal numbers."""
    if process_group is None:
        return x, 0
    import torch.distributed as dist

    rank, world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
    own_size = torch.tensor([len(x)], device=x.device)
    sizes = [torch.empty_like(own_size) for _ in range(world_size)]
    dist.all_gather(sizes, own_size, group=process_group)
    lengths = [int(size) for size in sizes]
    if max(lengths) == 0:
        return x, 0
    padded = x.new_zeros(max(lengths), *x.shape[1:])
    padded[: len(x)] = x
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded, group=process_group)
    rows = torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
    return rows, sum(lengths[:rank])
