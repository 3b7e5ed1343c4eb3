"""Read a head module: weight, bias, PEFT adapters, and ZeRO-3's gathering."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from grpo_kernels.base.checks import is_dtensor
from grpo_kernels.engine.request import Gather
from grpo_kernels.head.lora import LoRA

_PEFT_LORA = ("peft.tuners.lora.layer", "Linear")


def linear_of(lm_head: nn.Module, name: str = "lm_head") -> nn.Linear:
    """Return `lm_head` if it is a linear layer, or the one within PEFT's LoRA layer; errors call it `name`.

    Raises:
        TypeError: another kind of module, or a linear layer with a forward of its own.
    """
    base: Any = lm_head.base_layer if _is_peft_lora(lm_head) else lm_head
    if not isinstance(base, nn.Linear) or type(base).forward is not nn.Linear.forward:
        within = "" if base is lm_head else f" around {type(base).__module__}.{type(base).__name__}"
        way_out = "take off, or merge, what is around it"
        if type(lm_head).__module__.startswith("peft."):
            way_out = (
                "train it by LoRA (target_modules=['lm_head']), whole (modules_to_save=['lm_head']) or not at all "
                "(what trains a tied embedding trains it, too)"
            )
        raise TypeError(
            f"{name}: expected an nn.Linear with its own forward, or PEFT's LoRA layer around one, "
            f"got {type(lm_head).__module__}.{type(lm_head).__name__}{within}; {way_out}"
        )
    return base


def parameters_of(lm_head: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor | None, LoRA | None]:
    """Return the weight, bias and adapter that the forward of `lm_head` would use on `hidden`; several adapters as one.

    Raises:
        TypeError: as `linear_of`.
        ValueError: an active adapter that is not plain LoRA, or several with dropout.
    """
    base = linear_of(lm_head)
    weight, bias = base.weight, base.bias
    layers: list[Any] = [] if base is lm_head else active_adapters(lm_head)
    if not layers:
        return weight, bias, None
    for _, b, scaling, _ in layers:
        if b.bias is not None:
            bias = scaling * b.bias if bias is None else bias + scaling * b.bias
    drops = [
        isinstance(dropout, nn.Dropout) and dropout.training and dropout.p > 0.0
        for *_, dropout in layers
    ]
    if len(layers) == 1:
        a, b, scaling, dropout = layers[0]
        dtype = torch.promote_types(
            hidden.dtype, a.weight.dtype
        )  # PEFT casts its input for `a` before dropout
        return (
            weight,
            bias,
            LoRA(a.weight, b.weight, scaling, dropout(hidden.to(dtype)) if drops[0] else None),
        )
    if any(drops):
        raise ValueError(
            f"lm_head: expected one active adapter if there is dropout, got {len(layers)}: lora_dropout=0"
        )
    low = torch.cat([scaling * a.weight for a, _, scaling, _ in layers])
    return weight, bias, LoRA(low, torch.cat([b.weight for _, b, _, _ in layers], dim=1))


@contextmanager
def constants_of(
    head: nn.Module, name: str, *, sharded: bool = False
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the whole weight and bias of a head that does not train here: the second head of a call.

    Both may be kept after the context. If FSDP2 or ZeRO-3 has divided them, all ranks gather them together, each into a
    copy: a backward that has kept it gathers nothing. A head that is `sharded` over a process group is not gathered:
    each rank gets its rows.

    Raises:
        TypeError: as `linear_of`.
        ValueError: an adapter that is active.
    """
    base = linear_of(head, name)
    if base is not head and active_adapters(head):
        raise ValueError(
            f"{name}: expected no active adapter on a head that others are compared with, got some: merge it, or pass "
            "the layer within (base_layer)"
        )
    if sharded:
        yield base.weight, base.bias
        return
    gather = gather_of(base.parameters(recurse=False)) or nullcontext
    with gather():
        yield whole_constant(base.weight), None if base.bias is None else whole_constant(base.bias)


def whole_constant(x: Any) -> Tensor:
    """Return `x` detached; if FSDP2 has divided it, the whole tensor, by a collective."""
    whole: Tensor = x.detach().full_tensor() if is_dtensor(x) else x.detach()
    return whole


def gather_of(parameters: Iterable[Tensor]) -> Gather | None:
    """Return a context that gathers parameters which DeepSpeed ZeRO-3 has divided; None if none is divided.

    ZeRO-3 needs them whole once more, when their gradients are accumulated: see `within_forwards`.
    """
    divided: list[Any] = [x for x in parameters if hasattr(x, "ds_status")]

    def gather() -> AbstractContextManager[Any]:
        missing = [x for x in divided if x.ds_status.name != "AVAILABLE"]
        if not missing:
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters(missing)

    return gather if divided else None


def divided_modules(lm_head: nn.Module) -> list[nn.Module]:
    """Return those modules of the head, itself included, that own parameters which ZeRO-3 has divided."""
    return [
        x
        for x in lm_head.modules()
        if any(hasattr(p, "ds_status") for p in x.parameters(recurse=False))
    ]


def _is_peft_lora(lm_head: nn.Module) -> bool:
    """Return True for PEFT's LoRA layer, without importing PEFT; classes that FSDP2 derives count too."""
    return any((x.__module__, x.__name__) == _PEFT_LORA for x in type(lm_head).__mro__)


def active_adapters(layer: Any) -> list[tuple[Any, Any, float, Any]]:
    """Return (A, B, scaling, dropout) of each adapter that the forward of PEFT's `layer` adds to its base layer.

    Raises:
        ValueError: an adapter is not plain LoRA.
    """
    if layer.disable_adapters:
        if layer.merged:  # as its forward does
            layer.unmerge()
        return []
    names = [] if layer.merged else [name for name in layer.active_adapters if name in layer.lora_A]
    for name in names:
        if name in getattr(layer, "lora_variant", {}):
            kind = type(layer.lora_variant[name]).__name__
            raise ValueError(
                f"lm_head: expected adapters that are plain LoRA, got {kind} as {name!r}"
            )
    return [
        (layer.lora_A[x], layer.lora_B[x], layer.scaling[x], layer.lora_dropout[x]) for x in names
    ]
