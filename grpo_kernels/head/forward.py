"""Run a computation in the place of a head's forward, which makes its parameters whole.

FSDP2 and DeepSpeed ZeRO-3 divide parameters over ranks and make them whole around the forward of the module that owns
them. Code that reads ``lm_head.weight`` from outside gets a part of it; and ``weight.full_tensor()`` is a copy whose
gradient is not summed over the ranks. A call in the place of the head's forward has those hooks around it: it sees the
whole weight, in forward and backward, and its gradient goes where that of ``lm_head(hidden)`` would go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from grpo_kernels.head.hooks import check_hooks
from grpo_kernels.head.module import divided_modules, linear_of

Compute = Callable[[Tensor], tuple[Tensor, ...]]


def check_module(lm_head: nn.Module, name: str = "lm_head") -> None:
    """Raise unless a head can score in the place of its forward; errors call it `name`.

    Raises:
        TypeError: another kind of module, a linear layer with a forward of its own, or hooks that would be handed
            logits.
    """
    for module in (lm_head, linear_of(lm_head, name)):
        if "forward" in vars(module) and not hasattr(
            module, "_hf_hook"
        ):  # accelerate's changes no number
            raise TypeError(
                f"{name}: expected an nn.Linear with its own forward, got one whose forward was replaced"
            )
    check_hooks(lm_head, name)


def check_present(lm_head: nn.Module, name: str = "lm_head") -> None:
    """Raise if accelerate has offloaded the weight until the head's own forward."""
    linear = linear_of(lm_head, name)
    if hasattr(linear, "_hf_hook") and linear.weight.is_meta:
        raise ValueError(
            f"{name}: expected its weight on a device, got it offloaded by accelerate: leave the head on a device "
            "(device_map), or use causal_lm_loss and completion_logprobs of grpo_kernels.transformers, "
            "which score within its forward"
        )


def is_fsdp_unit(head: nn.Module) -> bool:
    """Return True if `head` is a unit of FSDP2, which is not imported (a second) where nothing is distributed."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(head, FSDPModule)


def within_head(head: nn.Module, compute: Compute, hidden: Tensor) -> tuple[Tensor, ...]:
    """Return ``compute(hidden)``, for which FSDP2 or ZeRO-3 makes the parameters of `head` whole; in the backward too.

    The results have the values and dtypes that `compute` gives; ZeRO-3's are new tensors, with its backward hooks.
    """
    if not is_fsdp_unit(head):
        return within_forwards(divided_modules(head), compute, hidden)
    # FSDP2's mixed precision rounds tensors among the arguments and results of a forward: old log-probabilities,
    # advantages. It does not look into a function, so `compute` holds the arguments. It must see the results, to hook
    # the backward to them; the rounded results that it may return are not used.
    done: list[tuple[Tensor, ...]] = []

    def recorded(hidden: Tensor) -> tuple[Tensor, ...]:
        done.append(compute(hidden))
        return done[0]

    # The module is called, since `register_fsdp_forward_method` of torch 2.11 begins a unit of several modules anew.
    within_forwards([head], recorded, hidden)
    return done[0]


def within_forwards(
    modules: Sequence[nn.Module], compute: Compute, hidden: Tensor
) -> tuple[Tensor, ...]:
    """Run ``compute(hidden)`` in the place of the forward of each of `modules`, so that the hooks around them run.

    ZeRO-3's hooks make the parameters whole for the forward, and from the backward until gradients are accumulated.
    """
    if not modules:
        return compute(hidden)
    first, others = modules[0], modules[1:]
    replaced = vars(first).get(
        "forward"
    )  # a forward that was set on the object, such as accelerate's
    first.forward = partial(within_forwards, others, compute)
    try:
        return first(hidden)
    finally:
        del first.forward
        if replaced is not None:
            first.forward = replaced
