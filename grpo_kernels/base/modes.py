"""Call a module without leaving a trace in it, and list the facts that its results depend on."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# Attributes whose names contain one of these make a forward random, unless they are 0.0.
_RANDOM = ("drop", "jitter", "noise")
_SWITCHES = (bool, int, float, str)  # attributes of modules that may change what they compute
_COUNTERS = ("_", "ds_", "applied_")  # prefixes of attributes to skip: DeepSpeed's counters


def random_rates(module: nn.Module) -> list[str]:
    """List the attributes, rates above 0, with which `module` draws random numbers in training."""
    names = (*_RANDOM, "p") if isinstance(module, nn.modules.dropout._DropoutNd) else _RANDOM
    rates = [name for name, x in vars(module).items() if isinstance(x, float) and x > 0.0]
    return [rate for rate in rates if any(part in rate for part in names)]


def draws_random(module: nn.Module) -> bool:
    """True if `module` or a part is in train mode and has dropout or noise.

    PEFT's dropout of an adapter that does not run does not count.
    """
    idle: set[nn.Module] = set()
    for x in module.modules():  # a layer comes before its parts
        dropouts: Any = x._modules.get("lora_dropout")
        if isinstance(dropouts, nn.ModuleDict):
            layer: Any = x
            skipped = layer.disable_adapters or layer.merged
            idle |= {y for k, y in dropouts.items() if skipped or k not in layer.active_adapters}
        if x.training and x not in idle and random_rates(x):
            return True
    return False


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Keep `module` and its submodules in evaluation mode, where they draw no random numbers."""
    modes = [(x, x.training) for x in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for x, training in modes:
            x.training = training


@contextmanager
def guest(
    module: nn.Module, device: torch.device, parameters: Iterable[nn.Parameter] = ()
) -> Iterator[list[Tensor]]:
    """Let calls of `module` on `device` leave no trace and draw no random numbers.

    Dropout rates are 0 inside the context. On exit, random states are restored, and so are the
    buffers, attributes and children of the modules. The caller's autocast cache gets no new entry:
    a cast made without a graph would otherwise serve the caller's own forward. The caller's hooks
    on saved tensors, such as a checkpoint's, do not run. Leaves that share the memory of
    `parameters` replace them, so their gradients run no hooks.

    Yields:
        the leaves, in the order of `parameters`.
    """
    leaves = {id(x): nn.Parameter(x.detach()) for x in parameters}
    modules = [*module.modules()]
    places = [(x, name, p) for x in modules for name, p in x._parameters.items() if id(p) in leaves]
    before = [(x, dict(vars(x)), dict(x._buffers), dict(x._modules)) for x in modules]
    not_reentrant = partial(checkpoint, use_reentrant=False)
    kind = "cuda" if device.type in ("cpu", "meta") else device.type
    with ExitStack() as stack:
        devices = [device] if kind == device.type else []
        stack.enter_context(torch.random.fork_rng(devices, device_type=kind))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda x: x))
        stack.callback(random.setstate, random.getstate())
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        try:
            for owner, name, live in places:
                owner._parameters[name] = leaves[id(live)]
            for x, attributes, buffers, _ in before:
                x._buffers.update(
                    {name: b if b is None else b.clone() for name, b in buffers.items()}
                )
                x.training = x.training and not isinstance(x, nn.modules.dropout._DropoutNd)
                for name in random_rates(x) if attributes["training"] else ():
                    vars(x)[name] = 0.0
                # transformers' function; a reentrant checkpoint would write into live `.grad`s
                if "_gradient_checkpointing_func" in attributes:
                    vars(x)["_gradient_checkpointing_func"] = not_reentrant
            yield [*leaves.values()]
        finally:
            for owner, name, live in places:
                owner._parameters[name] = live
            for x, attributes, buffers, children in before:
                _restore(vars(x), attributes)
                _restore(x._buffers, buffers)
                _restore(x._modules, children)


def _restore(entries: dict[str, Any], before: dict[str, Any]) -> None:
    if entries.keys() != before.keys() or any(entries[name] is not x for name, x in before.items()):
        entries.clear()
        entries.update(before)


def identity(function: Any) -> Any:
    """Make a key that identifies `function` without keeping it, or a method's module, alive."""
    owner, function = getattr(function, "__self__", None), getattr(function, "__func__", function)
    return weakref.ref(function) if isinstance(function, FunctionType) else id(function), id(owner)


def facts_of(module: nn.Module, forward: Any) -> Any:
    """Collect the facts besides tensors that results of `module` depend on, as comparable values.

    The facts are code, attributes, and which parameters train. `forward` is the module's own
    forward.
    """
    found = list[Any]()
    for x in module.modules():
        own = vars(x)
        ours = forward if x is module else own.get("forward")
        found += [weakref.ref(x), identity(type(x).forward)]
        found.append(None if ours is None else identity(ours))
        switches = ((name, value) for name, value in own.items() if type(value) in _SWITCHES)
        found += [value for name, value in switches if not name.startswith(_COUNTERS)]
        found += [p is not None and p.requires_grad for p in own["_parameters"].values()]
    return tuple(found)


def random_state(device: torch.device) -> Tensor:
    """Concatenate the states of the torch generators that calls on `device` may use."""
    own = []
    if device.type not in ("cpu", "meta"):
        own.append(torch.get_device_module(device.type).get_rng_state(device))
    return torch.cat([torch.get_rng_state(), *own])
