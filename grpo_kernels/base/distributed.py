"""Collectives over a process group. If a group may be ``None``, the function is then the identity and sends nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def check_group(name: str, group: Any) -> None:
    """Raise TypeError unless `group` is a process group, or None."""
    if group is None:
        return
    from torch.distributed import ProcessGroup

    if not isinstance(group, ProcessGroup):
        raise TypeError(
            f"{name}: expected a torch.distributed.ProcessGroup that this rank is in, or None, got "
            f"{type(group).__name__}"
        )


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


def group_device(process_group: ProcessGroup) -> torch.device:
    """Return the device on which ranks exchange tensors: the GPU if the group serves it, whatever a call's tensors."""
    import torch.distributed as dist

    if torch.accelerator.is_available() and (here := torch.accelerator.current_accelerator()) is not None:
        served = dict(x.split(":") for x in dist.get_backend_config(process_group).split(","))  # cpu:gloo,cuda:nccl
        if served.get(here.type, "gloo") != "gloo":
            return here
    return torch.device("cpu")


def gather_uneven(x: Tensor, sizes: list[int], process_group: ProcessGroup) -> Tensor:
    """Return the rows of all ranks in rank order; rank r has ``sizes[r]`` of them."""
    if max(sizes) == 0:
        return x
    padded = x.new_zeros(max(sizes), *x.shape[1:])
    padded[: len(x)] = x
    parts = gather_stacked(padded, process_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
