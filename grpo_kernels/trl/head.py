"""Heads that TRL's fused forward must not read from outside: with an adapter on them, or divided over ranks.

TRL's forward asks the model for its head and passes on ``lm_head.weight``. For a head with LoRA that is the base weight
alone, and TRL refuses such models. For a head that is an FSDP2 unit of its own it is a shard, which TRL gathers by
``full_tensor()``: a copy whose gradient is not summed over ranks. Here the model returns a `ModelHead` instead, and
TRL's computation with it runs in place of the head's own forward (`grpo_kernels.head.forward`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import trl.trainer.grpo_trainer as trl_grpo
from torch import Tensor, nn

from grpo_kernels.call.output import Scores
from grpo_kernels.engine.request import Gather
from grpo_kernels.head.forward import is_fsdp_unit, within_head
from grpo_kernels.head.head import Head
from grpo_kernels.head.hooks import check_hooks
from grpo_kernels.head.module import (
    active_adapters,
    divided_modules,
    gather_of,
    linear_of,
    parameters_of,
)
from grpo_kernels.host import replaced
from grpo_kernels.transformers.head import causal_lm, inner_head

_TUNED = "BaseTunerLayer"  # PEFT's class, which TRL's module imports if PEFT is installed


class ModelHead:
    """A head for TRL's forward, which passes `weight`, that is this object, to the function that scores."""

    bias = None  # TRL passes none: `score` reads the head's

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @property
    def weight(self) -> ModelHead:
        return self

    @property
    def device(self) -> torch.device:
        return linear_of(inner_head(self._module)).weight.device

    @property
    def ds_status(self) -> Any:
        """Tell TRL, which asks under ZeRO-3, that this parameter needs no gathering."""
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

        return ZeroParamStatus.AVAILABLE

    def score(
        self, hidden: Tensor, compute: Callable[[Tensor, Head, Gather | None], Scores]
    ) -> Scores:
        """Call ``compute(hidden, head, gather)`` with the head's parameters, which are whole inside."""
        head = inner_head(self._module)
        unit = self._module if is_fsdp_unit(self._module) else head
        check_hooks(unit)
        names: list[str] = []

        def whole(hidden: Tensor) -> tuple[Tensor, ...]:
            weight, bias, lora = parameters_of(head, hidden)
            found = compute(hidden, Head(weight, bias, lora), gather_of(head.parameters())).given
            names[:] = found
            return tuple(
                x.clone() for x in found.values()
            )  # no views: FSDP2 may lose its hooks on them

        return Scores(**dict(zip(names, within_head(unit, whole, hidden), strict=False)))


@contextmanager
def whole_heads(model: nn.Module) -> Iterator[None]:
    """Inside, `model` has a `ModelHead` if TRL must not read the weight of its head."""
    base: Any = causal_lm(model)
    head = base.get_output_embeddings()
    if not (is_fsdp_unit(head) or divided_modules(head) or _is_tuned(inner_head(head))):
        yield
        return
    try:
        with replaced(base, "get_output_embeddings", lambda: ModelHead(head)):
            yield
    finally:
        if not torch.is_grad_enabled():
            _reshard(model)


def _reshard(model: nn.Module) -> None:
    """Divide what FSDP2 has left whole after a forward that has no backward.

    PEFT switches the gradient of adapters off for the reference, and on again, at the parameters that it finds. If it
    finds shards first and whole parameters then, the gradient of the shards stays off.
    """
    for module in model.modules():
        if is_fsdp_unit(module):
            module.reshard()  # type: ignore[operator]


def adapters_allowed() -> AbstractContextManager[None]:
    """Inside, TRL's trainers accept models with an adapter on their head; `check_head` checks it afterwards."""
    if not hasattr(trl_grpo, _TUNED):
        return nullcontext()
    return replaced(trl_grpo, _TUNED, type(_TUNED, (), {}))  # a class that has no instances


def check_head(model: nn.Module, args: Any) -> None:
    """Raise unless the head of `model`, with its adapters if there are any, can be computed with TRL's options `args`.

    Raises:
        TypeError: a head that is not ``nn.Linear``, or has something other than LoRA around it.
        ValueError: a variant of LoRA, such as DoRA; or ``cast_lm_head_to_fp32``.
    """
    head = inner_head(causal_lm(model).get_output_embeddings())
    if linear_of(head) is head:
        return
    active_adapters(head)
    if getattr(args, "cast_lm_head_to_fp32", False):
        raise ValueError(
            "cast_lm_head_to_fp32: expected False with an adapter on lm_head, which would go on in its own precision, "
            "got True"
        )


def _is_tuned(head: nn.Module) -> bool:
    """Return True if PEFT has put an adapter on the head."""
    layer = getattr(trl_grpo, _TUNED, None)
    return layer is not None and isinstance(head, layer)
