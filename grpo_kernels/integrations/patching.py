"""Attributes of other packages, replaced by ours and given back, and how to tell whether a package is as we know it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any


class Patches:
    """What was replaced, and with what."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any, Sequence[str]]] = []  # (owner, attribute, theirs, ours, importers)

    def replace(self, owner: Any, attribute: str, ours: Any, *, importers: Sequence[str] = ()) -> None:
        """Put `ours` in the place of an attribute of `owner`, a module or a class; no effect if it is there already.

        `importers` names modules that take the attribute over when they are imported, before this or after it.
        """
        theirs = getattr(owner, attribute)
        if theirs is ours:
            return
        self._done.append((owner, attribute, theirs, ours, importers))
        setattr(owner, attribute, ours)
        _swap(_loaded(importers), attribute, theirs, ours)

    def restore(self) -> None:
        """Give everything back that is still ours: what somebody else has replaced meanwhile is left alone."""
        while self._done:
            owner, attribute, theirs, ours, importers = self._done.pop()
            _swap([owner, *_loaded(importers)], attribute, ours, theirs)


def _loaded(names: Sequence[str]) -> list[Any]:
    return [sys.modules[name] for name in names if sys.modules.get(name) is not None]


def _swap(owners: list[Any], attribute: str, old: Any, new: Any) -> None:
    for owner in owners:
        if vars(owner).get(attribute) is old:
            setattr(owner, attribute, new)


def parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names of its parameters, by which a function is known."""
    return tuple(inspect.signature(function).parameters)


def function_of(owner: Any, name: str, parameters: Sequence[str]) -> Callable[..., Any]:
    """The function `name` of a module or class.

    Raises:
        LookupError: there is none, or it has other parameters.
    """
    found = getattr(owner, name, None)
    if not callable(found):
        raise LookupError(f"{owner.__name__} has no function {name}")
    names = parameters_of(found)
    if names != tuple(parameters):
        raise LookupError(f"{owner.__name__}.{name}: expected the parameters {tuple(parameters)}, got {names}")
    return found
