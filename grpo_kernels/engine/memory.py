"""Temporary memory that a call may use, and whether the device has it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kernels.engine.device import CUDA, Device, device_of
from grpo_kernels.engine.products import accumulator_of, converted_dtype
from grpo_kernels.engine.records import NeedsGrad

CHUNKS_OF_A_GROUP = (
    8,
    4,
    2,
)  # the most with `LARGE_CHUNK_ROWS` each, else with `LEAST_CHUNK_ROWS`; see `chunks`
LARGE_CHUNK_ROWS, LEAST_CHUNK_ROWS = 1024, 256


@dataclass(frozen=True)
class FreeMemory:
    """Decisions by the memory that a device has free, after the gradients have taken theirs."""

    tight: bool  # too little for an accumulator of d weight: `lean` serves
    converts: bool  # enough for a copy of the weight in the operands' dtype
    workspace: int  # bytes that chunks may take by default: one of `Device.workspaces`

    @staticmethod
    def of(
        weight: Tensor,
        hidden: Tensor,
        needs_grad: NeedsGrad,
        compute_dtype: torch.dtype,
        workspace_bytes: int | None,
        *,
        asks_tight: bool,
        reference: tuple[Tensor, torch.dtype] | None = None,
    ) -> FreeMemory:
        """Ask the device of `weight` for its free memory, and decide. On a CPU return `AMPLE`.

        So, too, while a CUDA graph is captured: a graph must not depend on the memory that is free now.

        Args:
            hidden: hidden states of all positions.
            compute_dtype: dtype that the products' operands are rounded to.
            workspace_bytes: the budget, None for the default.
            asks_tight: True if an engine is still to be chosen.
            reference: the weight of the reference head, and the dtype that its products' operands are rounded to.
        """
        device = device_of(weight.device)
        if device.free is None or device.is_capturing():
            return AMPLE
        copies = 0
        for x, wanted in ((weight, compute_dtype), *([] if reference is None else [reference])):
            dtype = converted_dtype(x, wanted)
            copies += 0 if dtype is None else x.numel() * dtype.itemsize
        gradients = sum(
            x.numel() * (accumulator_of(x.dtype).itemsize + x.element_size())
            for x, wanted in ((weight, needs_grad.weight), (hidden, needs_grad.hidden))
            if wanted
        )
        if workspace_bytes is None:
            budgets = _steps(
                large_workspace(weight, needs_grad, heads=1 if reference is None else 2), device
            )
        else:
            budgets = [workspace_bytes]
        free = device.free(weight.device)
        if (
            gradients + copies + budgets[-1] > free
        ):  # only then ask the allocator, which takes longer
            free += device.unused(weight.device)
        converts = gradients + copies + budgets[0] <= free
        held = gradients + (copies if converts else 0)
        return FreeMemory(
            tight=asks_tight and needs_grad.weight and gradients + budgets[0] > free,
            converts=converts,
            workspace=max((x for x in budgets if held + x <= free), default=budgets[0]),
        )


AMPLE = FreeMemory(tight=False, converts=True, workspace=max(CUDA.workspaces))


def default_workspace(
    weight: Tensor, needs_grad: NeedsGrad, memory: FreeMemory = AMPLE, *, heads: int = 1
) -> int:
    """Return the default budget in bytes: `large_workspace`, but at most `memory.workspace`."""
    return min(large_workspace(weight, needs_grad, heads), memory.workspace)


def large_workspace(weight: Tensor, needs_grad: NeedsGrad, heads: int = 1) -> int:
    """Return the bytes of chunks of `LARGE_CHUNK_ROWS` rows, within the range of the device's `workspaces`; `heads` is
    the number of heads whose logits exist at a time.

    On a GPU a product with fewer rows is bound by reading the weight. On a CPU products are too slow for that to
    matter.
    """
    device, (vocab, width) = device_of(weight.device), weight.shape
    chunks = (
        CHUNKS_OF_A_GROUP[0] if needs_grad.weight else 1
    )  # chunks whose d logits exist at a time
    d_logits = 2 * chunks if needs_grad.hidden or needs_grad.head else 0
    row_bytes = device.row_width(vocab) * (4 * heads + d_logits) + width * 4 * chunks
    return min(max(device.workspaces[0], LARGE_CHUNK_ROWS * row_bytes), device.workspaces[-1])


def _steps(wanted: int, device: Device) -> list[int]:
    """The workspaces of `device` up to the first that is as large as `wanted`."""
    smaller = [x for x in device.workspaces if x < wanted]
    return [*smaller, device.workspaces[len(smaller)]]
