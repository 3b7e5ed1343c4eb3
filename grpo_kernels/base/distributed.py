"""Collectives over a process group.

Functions import `torch.distributed` when they need it: a build of torch may lack it, and calls
without a group do not need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def check_group(process_group: Any) -> None:
    """Require a process group or None, as ``process_group``."""
    if process_group is None:
        return
    from torch.distributed import ProcessGroup

    if not isinstance(process_group, ProcessGroup):
        raise TypeError(
            "process_group: expected a torch.distributed.ProcessGroup that this rank is in, or "
            f"None, got {type(process_group).__name__}"
        )


def all_reduce(
    x: Tensor, op: Literal["sum", "min", "max"], process_group: ProcessGroup | None
) -> Tensor:
    """Reduce `x` in place over the ranks of the group, if there is one, and return it."""
    if process_group is None:
        return x
    import torch.distributed as dist

    dist.all_reduce(x, op=getattr(dist.ReduceOp, op.upper()), group=process_group)
    return x


def gather_stacked(x: Tensor, process_group: ProcessGroup) -> Tensor:
    """Gather one tensor per rank into (R, ...), in rank order; shapes and dtypes must be equal."""
    import torch.distributed as dist

    parts = x.new_empty(dist.get_world_size(process_group), *x.shape)
    dist.all_gather([*parts.unbind(0)], x.contiguous(), group=process_group)
    return parts


def group_device(process_group: ProcessGroup) -> torch.device:
    """Choose the device for exchanging tensors: the GPU if the group supports it, else the CPU."""
    import torch.distributed as dist

    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if here is not None:
        # the config looks like "cpu:gloo,cuda:nccl"
        served = dict(x.split(":") for x in dist.get_backend_config(process_group).split(","))
        if served.get(here.type, "gloo") != "gloo":
            return here
    return torch.device("cpu")


def gather_uneven(x: Tensor, sizes: list[int], process_group: ProcessGroup) -> Tensor:
    """Gather the rows of all ranks in rank order; rank r has ``sizes[r]`` rows."""
    if max(sizes) == 0:
        return x
    padded = x.new_zeros(max(sizes), *x.shape[1:])
    padded[: len(x)] = x
    parts = gather_stacked(padded, process_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def most_of_ranks(groups: Sequence[ProcessGroup], counts: list[int]) -> list[int]:
    """Take the elementwise maximum of `counts` over the ranks of `groups`, if there are any."""
    for group in groups:
        counts = all_reduce(torch.tensor(counts, device=group_device(group)), "max", group).tolist()
    return counts
