"""Calls of a module that leave no trace in it, and the facts that its results depend on."""

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

# Parts of names of attributes that make a forward random; 0.0 if nothing is drawn.
_RANDOM = ("drop", "jitter", "noise")
_SWITCHES = (bool, int, float, str)  # attributes of modules that may change what they compute
_COUNTERS = ("_", "ds_", "applied_")  # prefixes to skip, such as DeepSpeed's counters


def random_rates(module: nn.Module) -> list[str]:
    """Return the attributes by which `module` draws random numbers in training: rates above 0."""
    names = (*_RANDOM, "p") if isinstance(module, nn.modules.dropout._DropoutNd) else _RANDOM
    rates = [name for name, x in vars(module).items() if isinstance(x, float) and x > 0.0]
    return [rate for rate in rates if any(part in rate for part in names)]


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Context in which `module` and its submodules are in evaluation mode, so nothing random is
    drawn."""
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
    """Context in which calls of `module` on `device` leave no trace and draw no random numbers.

    Dropout rates are 0. Buffers, attributes and children of the modules, and random states, are
    restored. The caller's autocast cache gets no entry (a cast made without graph would serve the
    caller's own forward), and the caller's hooks on saved tensors, such as a checkpoint's, do not
    run. Leaves that share their memory stand in for `parameters`, so gradients run no hooks.

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
                # transformers' function; a reentrant checkpoint fills live gradients
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
    """Return a key that identifies `function`, without keeping it or a method's module alive."""
    owner, function = getattr(function, "__self__", None), getattr(function, "__func__", function)
    return weakref.ref(function) if isinstance(function, FunctionType) else id(function), id(owner)


def facts_of(module: nn.Module, forward: Any) -> Any:
    """Return what results of `module` depend on besides tensors, in a form that compares.

    These are code, attributes, and which parameters train. `forward` is the module's own forward.
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
    """Return the state of torch's generators for calls on `device`."""
    own = []
    if device.type not in ("cpu", "meta"):
        own.append(torch.get_device_module(device.type).get_rng_state(device))
    return torch.cat([torch.get_rng_state(), *own])
