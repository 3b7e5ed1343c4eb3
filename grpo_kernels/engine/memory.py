"""How much temporary memory a call may use, and whether the device has it."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_kernels.engine.operands import Wants, accumulator_of

WORKSPACE_BYTES = 512 * 2**20
MOST_WORKSPACE_BYTES = 2 * 2**30


def default_workspace(weight: Tensor, wants: Wants) -> int:
    """Bytes: `WORKSPACE_BYTES`; on a GPU, where d weight is wanted, as much as its accumulator takes, up to 2 GiB.

    Each product with d weight reads and writes the whole accumulator. On a CPU the products of a chunk are slow enough
    for that not to matter; on a GPU few and large groups of rows do.
    """
    if not (weight.is_cuda and wants.weight):
        return WORKSPACE_BYTES
    return min(max(WORKSPACE_BYTES, accumulator_of(weight.dtype).itemsize * weight.numel()), MOST_WORKSPACE_BYTES)


def is_tight(weight: Tensor, wants: Wants, workspace_bytes: int) -> bool:
    """Whether a GPU lacks the memory for an accumulator of d weight besides the workspace and the gradient itself.

    False while a CUDA graph is captured, which must not depend on what is free now.
    """
    if not (weight.is_cuda and wants.weight) or torch.cuda.is_current_stream_capturing():
        return False
    free, _ = torch.cuda.mem_get_info(weight.device)
    unused = torch.cuda.memory_reserved(weight.device) - torch.cuda.memory_allocated(weight.device)
    return (
        weight.numel() * (accumulator_of(weight.dtype).itemsize + weight.element_size()) + workspace_bytes
        > free + unused
    )
