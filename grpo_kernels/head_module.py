"""Calls that replace the forward of a head module: gathered parameters, and the module's hooks.

FSDP2 and DeepSpeed ZeRO-3 shard parameters over ranks and gather them around the forward of the
module that owns them. Code that reads ``lm_head.weight`` from outside gets only a shard, and
``weight.full_tensor()`` is a copy whose gradient is not summed over the ranks. A call that replaces
the head's forward runs inside those hooks. It sees the whole weight in forward and backward, and
its gradient goes where the gradient of ``lm_head(hidden)`` would go.

Of the head's own hooks, only the forward pre-hooks run: they compute the weight
(`torch.nn.utils.spectral_norm`, `weight_norm`, `prune`) or change the input. Forward and backward
hooks raise an error: they expect logits, which are never computed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from grpo_kernels.base.checks import is_dtensor
from grpo_kernels.head import Head, LoRA, StatesAndHead

# of a `Head`: logits that a weight or a module cannot state
_CONSTANTS = ("final_logit_softcapping", "logit_scale", "logits_dtype")
_PEFT_LORA = ("peft.tuners.lora.layer", "Linear")
# Modules whose hooks are left alone: FSDP2's and ZeRO-3's, which `forward` runs, and
# `causal_lm_loss`'s
_KNOWN = ("torch.distributed.", "deepspeed.", "grpo_kernels.")
# Hooks that do not look at columns of a batch, or that gather parameters and activations
_OF_NO_COLUMNS = (
    *("torch.distributed.", "torch.nn.", "torch.utils."),
    *("deepspeed.", "accelerate.", "transformers.", "peft."),
)
_REFUSED = {
    "_forward_hooks": "forward hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_forward_pre_hooks": "forward pre-hook",
}
R = TypeVar("R")
Compute = Callable[[Tensor], tuple[Tensor, ...]]


def read_reference(reference: Any, head: Head, prefix: str) -> StatesAndHead:
    """Read a call's second model, whose `Head` states its own constants.

    Its head's module becomes whole weight and bias. This is a collective if FSDP2 or ZeRO-3 has
    divided them. A head that is divided over a process group stays divided.
    """
    is_pair = isinstance(reference, tuple) and len(reference) == 2
    hidden, other = reference if is_pair else (reference, None)
    if other is None:
        name, got = prefix.rstrip("."), type(reference).__name__
        got += f" of {len(reference)}" if isinstance(reference, tuple) else ""
        if isinstance(reference, nn.Module):
            got += "; for a whole model, call causal_lm_"
            got += "divergence(student, teacher, ...)" if name == "teacher" else "loss(model, ...)"
        raise TypeError(f"{name}: expected a tuple (hidden, head), got {got}")
    for name in () if isinstance(other, Head) else _CONSTANTS:
        if getattr(head, name) != getattr(Head, name):
            raise ValueError(
                f"{prefix}head: expected a Head that states its own {name}, since the other head's "
                f"is {getattr(head, name)!r}, got {type(other).__name__}"
            )
    other = Head.of(other, f"{prefix}head")
    if other.lora is not None:
        raise ValueError(
            f"{prefix}head.lora: expected None, since the head is a constant, got a LoRA"
        )
    if isinstance(other.weight, nn.Module):
        if other.bias is not None:
            raise ValueError(
                f"{prefix}head.bias: expected None, since the module has its own bias, got another "
                "one"
            )
        check_module(other.weight, f"{prefix}head")
        check_present(other.weight, f"{prefix}head")
        sharded = head.process_group is not None
        weight, bias = constant_parameters(other.weight, f"{prefix}head", sharded=sharded)
        other = replace(other, weight=weight, bias=bias)
    return StatesAndHead(hidden, other, prefix)


def linear_of(lm_head: nn.Module, name: str = "lm_head") -> nn.Linear:
    """`lm_head`, or the linear layer within PEFT's LoRA layer; errors call it `name`."""
    base: Any = lm_head.base_layer if _is_peft_lora(lm_head) else lm_head
    if not isinstance(base, nn.Linear) or type(base).forward is not nn.Linear.forward:
        if hasattr(lm_head, "get_output_embeddings"):
            call = "causal_lm_loss(model, ...)"
            if name.startswith("teacher"):
                call = "causal_lm_divergence(student, teacher, ...)"
            raise TypeError(
                f"{name}: expected the head, got a whole model, {type(lm_head).__name__}; pass "
                f"model.lm_head, or call {call}"
            )
        within = "" if base is lm_head else f" around {type(base).__module__}.{type(base).__name__}"
        way_out = "remove or merge the layer around it"
        if isinstance(lm_head, nn.Embedding):
            way_out = "pass its weight"
        if type(lm_head).__module__.startswith("peft."):
            way_out = (
                "train it by LoRA (target_modules=['lm_head']), whole (modules_to_save="
                "['lm_head']) or not at all (training a tied embedding trains it, too)"
            )
        raise TypeError(
            f"{name}: expected an nn.Linear with its own forward, or PEFT's LoRA layer around one, "
            f"got {type(lm_head).__module__}.{type(lm_head).__name__}{within}; {way_out}"
        )
    return base


def parameters_of(
    lm_head: nn.Module, hidden: Tensor, name: str = "lm_head"
) -> tuple[Tensor, Tensor | None, LoRA | None]:
    """Weight, bias and adapter that the forward of `lm_head` would use on `hidden`.

    Several adapters become one.
    """
    base = linear_of(lm_head, name)
    weight, bias = base.weight, base.bias
    layers: list[Any] = [] if base is lm_head else active_adapters(lm_head, name)
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
        # PEFT casts its input for `a` before dropout
        dtype = torch.promote_types(hidden.dtype, a.weight.dtype)
        x = dropout(hidden.to(dtype)) if drops[0] else None
        return weight, bias, LoRA(a.weight, b.weight, scaling, x)
    if any(drops):
        raise ValueError(
            f"{name}: expected a single active adapter if it has dropout, got {len(layers)}; set "
            "lora_dropout=0"
        )
    low = torch.cat([scaling * a.weight for a, _, scaling, _ in layers])
    return weight, bias, LoRA(low, torch.cat([b.weight for _, b, _, _ in layers], dim=1))


def constant_parameters(
    head: nn.Module, name: str, *, sharded: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Whole weight and bias of a call's second head, which does not train here.

    If FSDP2 or ZeRO-3 has divided them, all ranks gather them together, each into a copy, so a
    backward that kept the copy gathers nothing. A head that is `sharded` over a process group is
    not gathered: each rank gets its rows.
    """
    base = without_adapter(head, name)
    if sharded:
        return base.weight, base.bias
    gather = gather_of(base.parameters(recurse=False)) or nullcontext
    with gather():
        return whole_constant(base.weight), None if base.bias is None else whole_constant(base.bias)


def without_adapter(head: nn.Module, name: str) -> nn.Linear:
    """The linear layer of a second head; raise ValueError if an adapter is active."""
    base = linear_of(head, name)
    if base is not head and active_adapters(head, name):
        raise ValueError(
            f"{name}: expected no active adapter on a second head, which is a constant, got "
            "some: merge them, or pass the base layer (base_layer)"
        )
    return base


def whole_constant(x: Any) -> Tensor:
    """`x` detached; if FSDP2 has divided it, the whole tensor, by a collective."""
    whole: Tensor = x.detach().full_tensor() if is_dtensor(x) else x.detach()
    return whole


def gather_of(
    parameters: Iterable[Tensor],
) -> Callable[[], AbstractContextManager[Any]] | None:
    """Make a context that gathers the parameters that ZeRO-3 has divided; None if none is divided.

    ZeRO-3 needs them whole again when their gradients are accumulated: see `within_forwards`.
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
    """The modules of the head that own parameters which ZeRO-3 has divided."""
    return [
        x
        for x in lm_head.modules()
        if any(hasattr(p, "ds_status") for p in x.parameters(recurse=False))
    ]


def _is_peft_lora(lm_head: nn.Module) -> bool:
    """True for PEFT's LoRA layer, including a class that FSDP2 derives from it."""
    return any((x.__module__, x.__name__) == _PEFT_LORA for x in type(lm_head).__mro__)


def active_adapters(layer: Any, name: str = "lm_head") -> list[tuple[Any, Any, float, Any]]:
    """(A, B, scaling, dropout) of each adapter that PEFT's `layer` adds to its base layer."""
    if layer.disable_adapters:
        if layer.merged:  # as its forward does
            layer.unmerge()
        return []
    names = [] if layer.merged else [x for x in layer.active_adapters if x in layer.lora_A]
    for x in names:
        if x in getattr(layer, "lora_variant", {}):
            kind = type(layer.lora_variant[x]).__name__
            raise ValueError(f"{name}: expected adapters that are plain LoRA, got {kind} as {x!r}")
    return [
        (layer.lora_A[x], layer.lora_B[x], layer.scaling[x], layer.lora_dropout[x]) for x in names
    ]


def adapters_of(module: Any) -> list[tuple[str, str]]:
    """(name, variant of LoRA) of each PEFT adapter that is active in a layer."""
    if not hasattr(type(module), "disable_adapters") or module.disable_adapters:
        return []
    variants = getattr(module, "lora_variant", {})
    return [(name, type(variants.get(name)).__name__) for name in module.active_adapters]


def check_module(lm_head: nn.Module, name: str = "lm_head") -> None:
    """Raise unless a call may replace the head's forward; errors call the head `name`.

    The call could not respect hooks on logits, of the head or of its submodules.
    """
    for module in (lm_head, linear_of(lm_head, name)):
        # accelerate's forward changes no number
        if "forward" in vars(module) and not hasattr(module, "_hf_hook"):
            raise TypeError(
                f"{name}: expected an nn.Linear with its own forward, got one whose forward was "
                "replaced"
            )
    for path, module in lm_head.named_modules():
        for attribute, kind in _REFUSED.items():
            if module is lm_head and attribute == "_forward_pre_hooks":
                continue
            hooks = foreign_hooks(module, attribute)
            if hooks:
                where = f"{name}.{path}" if path else name
                raise TypeError(
                    f"{where}: expected no {kind}, since no logits are computed for it, got "
                    f"{', '.join(hooks)}"
                )


def check_present(lm_head: nn.Module, name: str = "lm_head") -> None:
    """Raise if accelerate has offloaded the weight until the head's own forward."""
    linear = linear_of(lm_head, name)
    if hasattr(linear, "_hf_hook") and linear.weight.is_meta:
        raise ValueError(
            f"{name}: expected its weight on a device, got one offloaded by accelerate: keep the "
            "head on a device (device_map), or use causal_lm_loss and causal_lm_logps of "
            "grpo_kernels.transformers, which run inside its forward"
        )


def is_fsdp_unit(head: nn.Module) -> bool:
    """True if `head` is a unit of FSDP2."""
    # FSDP2 is not imported, which takes a second, where nothing is distributed
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.fsdp import FSDPModule

    return isinstance(head, FSDPModule)


def rank_groups(module: nn.Module) -> Sequence[Any]:
    """Find the groups of ranks that run `module` together because FSDP2 or ZeRO-3 shards it."""
    largest: Any = None
    for x in module.parameters():
        parameter: Any = x
        if hasattr(parameter, "ds_status"):
            return [parameter.ds_process_group]
        if is_dtensor(parameter):
            mesh = parameter.device_mesh
            largest = mesh if largest is None or mesh.size() > largest.size() else largest
    return [] if largest is None else [largest.get_group(i) for i in range(largest.ndim)]


def within_module(call: Callable[..., R], arguments: dict[str, Any]) -> R:
    """Make a public call whose head is a module, with a head of the module's parameters.

    They are whole in forward and backward. `arguments` are the call's arguments by name, as passed.
    """
    head = Head.of(arguments["head"])
    module: nn.Module = head.weight
    check_module(module, "head")
    check_present(module, "head")
    if head.bias is not None:
        raise ValueError(
            "head.bias: expected None with a module as the weight, got a tensor; pass the module's "
            "weight, or set the module's own bias"
        )
    is_unit = is_fsdp_unit(module)
    # The module is called, since `register_fsdp_forward_method` of torch 2.11 begins a unit of
    # several modules anew.
    called = [module] if is_unit else divided_modules(module)
    done: list[tuple[Any, tuple[Tensor, ...]]] = []  # the call's result, and tensors of it

    def attached(output: Any) -> dict[str, Tensor]:  # of a `LossOutput` or `Scores`
        return {"loss": output.loss} if "loss" in vars(output) else output.given

    def compute(hidden: Tensor) -> tuple[Tensor, ...]:
        if module not in called:  # a call of the module runs its hooks
            hidden = run_pre_hooks(module, hidden, "head")
        weight, bias, lora = parameters_of(module, hidden, "head")
        if lora is not None and head.lora is not None:
            raise ValueError(
                "head.lora: expected None, since PEFT's adapters are taken from the module, got a "
                "LoRA"
            )
        own = replace(head, weight=weight, bias=bias, lora=lora or head.lora)
        output: Any = call(**{**arguments, "hidden": hidden, "head": own})
        tensors = tuple(x.clone() for x in attached(output).values())  # no views: FSDP2 warns
        done.append((output, tensors))
        return tensors

    results = within_forwards(called, compute, arguments["hidden"])
    output, tensors = done[0]
    # FSDP2's mixed precision rounds tensors among the arguments and results of a forward: old
    # log-probabilities, advantages. It does not look into a function, so `compute` holds the
    # arguments. It must see the results, to hook the backward to them; the rounded results that it
    # may return are not used. Those of ZeRO-3 are new tensors with its backward hooks.
    results = tensors if is_unit else results
    return replace(output, **dict(zip(attached(output), results, strict=True)))


def within_forwards(
    modules: Sequence[nn.Module], compute: Compute, hidden: Tensor
) -> tuple[Tensor, ...]:
    """Run ``compute(hidden)`` instead of the forwards of `modules`, inside their hooks.

    ZeRO-3's hooks gather the parameters for the forward, and again from the backward until
    gradients are accumulated.
    """
    if not modules:
        return compute(hidden)
    first, others = modules[0], modules[1:]
    replaced = vars(first).get("forward")  # set on the object, such as accelerate's
    first.forward = functools.partial(within_forwards, others, compute)
    try:
        return first(hidden)
    finally:
        del first.forward
        if replaced is not None:
            first.forward = replaced


def foreign_hooks(module: nn.Module, attribute: str = "_forward_hooks") -> list[str]:
    """Names of the hooks of one kind, except those of grpo_kernels, FSDP2 and DeepSpeed."""
    return [name_of(hook) for hook in getattr(module, attribute).values() if not is_known(hook)]


def foreign_hook(body: nn.Module) -> str | None:
    """Name of a hook below `body` that may look at columns or change values, or None."""
    everywhere: Any = torch.nn.modules.module
    found = [getattr(everywhere, f"_global{kind}") for kind in _REFUSED]
    for x in body.modules():
        if x is not body:
            own = vars(x)
            found += [own[kind] for kind in _REFUSED if own.get(kind)]
    hooks = (hook for each in found for hook in each.values())
    return next(
        (name_of(hook) for hook in hooks if not origin(hook).startswith(_OF_NO_COLUMNS)), None
    )


def run_pre_hooks(lm_head: nn.Module, hidden: Tensor, name: str = "lm_head") -> Tensor:
    """Apply the forward pre-hooks of `lm_head` to its input."""
    for key, hook in lm_head._forward_pre_hooks.items():
        if is_known(hook):
            continue
        args: Any = (hidden,)
        kwargs: dict[str, Any] = {}
        if key in lm_head._forward_pre_hooks_with_kwargs:
            args, kwargs = hook(lm_head, args, kwargs) or (args, kwargs)
        else:
            changed = hook(lm_head, args)
            if changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
        if len(args) != 1 or kwargs:
            got = [*(type(x).__name__ for x in args), *kwargs]
            raise TypeError(
                f"{name}: expected its forward pre-hooks to return one input, got {got} from "
                f"{name_of(hook)}"
            )
        hidden = args[0]
    return hidden


def is_known(hook: Callable[..., Any]) -> bool:
    """True for a hook of grpo_kernels, FSDP2 or DeepSpeed."""
    return origin(hook).startswith(_KNOWN)


def origin(hook: Any) -> str:
    """Name of the module that a hook, object or partial, comes from."""
    hook = getattr(hook, "func", hook)
    return str(getattr(hook, "__module__", None) or type(hook).__module__)


def name_of(hook: Any) -> str:
    """The name by which a person would look for the hook."""
    hook = getattr(hook, "func", hook)
    return f"{origin(hook)}.{getattr(hook, '__qualname__', type(hook).__name__)}"
