"""How much temporary memory a call may use, and whether the device has it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kernels.engine.device import device_of
from grpo_kernels.engine.gradients import NeedsGrad
from grpo_kernels.engine.plan import CHUNKS_OF_A_GROUP, LARGE_CHUNK_ROWS
from grpo_kernels.engine.products import accumulator_of, converted_dtype

WORKSPACE_BYTES = 512 * 2**20


@dataclass(frozen=True)
class Room:
    """What a device has room for, besides the gradients themselves."""

    tight: bool  # not for an accumulator of d weight: `lean`
    ample: bool  # for `large_workspace`, and for a copy of the weight in the operands' dtype

    @staticmethod
    def of(
        weight: Tensor,
        needs_grad: NeedsGrad,
        compute_dtype: torch.dtype,
        workspace_bytes: int | None,
        *,
        asks_tight: bool,
        reference: tuple[Tensor, torch.dtype] | None = None,
    ) -> Room:
        """That of the device of `weight`. A CPU is not asked.

        Nor is a GPU while a CUDA graph is captured, which must not depend on what is free now.

        Args:
            compute_dtype: what the products' operands are rounded to.
            workspace_bytes: the budget, None for the default.
            asks_tight: whether an engine is still to be chosen.
            reference: the weight of another head, and what its products' operands are rounded to.
        """
        device = device_of(weight.device)
        if device.free is None or device.is_capturing():
            return AMPLE
        held = 0
        for x, wanted in ((weight, compute_dtype), *([] if reference is None else [reference])):
            dtype = converted_dtype(x, wanted)
            held += 0 if dtype is None else x.numel() * dtype.itemsize
        heads = 1 if reference is None else 2
        least = WORKSPACE_BYTES if workspace_bytes is None else workspace_bytes
        most = large_workspace(weight, needs_grad, heads) if workspace_bytes is None else workspace_bytes
        if needs_grad.weight:
            least += (gradients := weight.numel() * (accumulator_of(weight.dtype).itemsize + weight.element_size()))
            held += gradients
        free, unused = device.free(weight.device), 0
        if max(held + most, least) > free:  # the allocator takes longer to ask
            unused = device.unused(weight.device)
        return Room(
            tight=asks_tight and needs_grad.weight and least > free + unused,
            ample=held + most <= free + unused,
        )


AMPLE = Room(tight=False, ample=True)


def default_workspace(weight: Tensor, needs_grad: NeedsGrad, *, ample: bool, heads: int = 1) -> int:
    """Bytes: `WORKSPACE_BYTES`; with `ample` room, `large_workspace`."""
    return large_workspace(weight, needs_grad, heads) if ample else WORKSPACE_BYTES


def large_workspace(weight: Tensor, needs_grad: NeedsGrad, heads: int = 1) -> int:
    """What chunks of `LARGE_CHUNK_ROWS` rows take, from `WORKSPACE_BYTES` to the device's `most_workspace`; `heads` is
    how many rows of logits a token has at a time.

    On a GPU a product with fewer rows waits for the weight that it reads. On a CPU it is slow enough for that not to
    matter.
    """
    device, (vocab, width) = device_of(weight.device), weight.shape
    chunks = CHUNKS_OF_A_GROUP[0] if needs_grad.weight else 1  # whose d logits are kept at a time
    d_logits = 2 * chunks if needs_grad.hidden or needs_grad.head else 0
    row_bytes = device.row_width(vocab) * (4 * heads + d_logits) + width * 4 * chunks
    return min(max(WORKSPACE_BYTES, LARGE_CHUNK_ROWS * row_bytes), device.most_workspace)
