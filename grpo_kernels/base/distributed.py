"""Collectives over a process group.

`torch.distributed` is imported inside the functions that use it: a build of torch may lack it, and calls without a
group do not need it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def check_group(name: str, process_group: Any) -> None:
    """Raise TypeError unless `process_group`, the argument `name` of a call, is a process group or None."""
    if process_group is None:
        return
    from torch.distributed import ProcessGroup

    if not isinstance(process_group, ProcessGroup):
        raise TypeError(
            f"{name}: expected a torch.distributed.ProcessGroup that this rank is in, or None, got "
            f"{type(process_group).__name__}"
        )


def all_reduce(
    x: Tensor, op: Literal["sum", "min", "max"], process_group: ProcessGroup | None
) -> Tensor:
    """Reduce `x` in place over the group's ranks and return it; without a group, return it as it is."""
    if process_group is None:
        return x
    import torch.distributed as dist

    dist.all_reduce(x, op=getattr(dist.ReduceOp, op.upper()), group=process_group)
    return x


def gather_stacked(x: Tensor, process_group: ProcessGroup) -> Tensor:
    """Return (R, ...): the tensors of all R ranks, of one shape and dtype, in rank order."""
    import torch.distributed as dist

    parts = x.new_empty(dist.get_world_size(process_group), *x.shape)
    dist.all_gather([*parts.unbind(0)], x.contiguous(), group=process_group)
    return parts


def group_device(process_group: ProcessGroup) -> torch.device:
    """Return the device of tensors that ranks exchange: the GPU if the group serves it, even for CPU tensors."""
    import torch.distributed as dist

    if (
        torch.accelerator.is_available()
        and (here := torch.accelerator.current_accelerator()) is not None
    ):
        served = dict(
            x.split(":") for x in dist.get_backend_config(process_group).split(",")
        )  # cpu:gloo,cuda:nccl
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
