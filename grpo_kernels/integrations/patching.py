"""Replace attributes of other packages and restore them; check that a function has the parameters we know."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

_logger = logging.getLogger(__name__)


class Patches:
    """Replacements of attributes, which `restore` takes back.

    Args:
        package: its name in the log lines; None: no log.
    """

    def __init__(self, package: str | None = None) -> None:
        self._package = package
        self._restorations: list[Callable[[], None]] = []

    def replace(self, owner: Any, attribute: str, ours: Any, *, importers: Sequence[str] = ()) -> None:
        """Replace an attribute of `owner`, a module or a class, by `ours`; no effect if `ours` is there already.

        `importers` names modules that copy the attribute when they are imported, before this call or after it.
        """
        theirs = getattr(owner, attribute)
        if theirs is ours:
            return
        is_class = inspect.isclass(owner)
        inherited = is_class and attribute not in vars(owner)
        where = f"{owner.__module__}.{owner.__qualname__}" if is_class else owner.__name__

        def restore() -> None:
            is_ours = vars(owner).get(attribute) is ours
            if inherited and is_ours:
                delattr(owner, attribute)
            _swap([owner, *_loaded(importers)], attribute, ours, theirs)
            whose = "its own again" if is_ours else "left as somebody else has made it since"
            self._log(f"unpatched %s: %s.%s is {whose}", where, attribute)

        self._restorations.append(restore)
        setattr(owner, attribute, ours)
        _swap(_loaded(importers), attribute, theirs, ours)
        self._log("patched %s: %s.%s is that of grpo_kernels", where, attribute)

    def restore(self) -> None:
        """Restore each attribute that is still ours; leave one alone that somebody else has replaced since."""
        while self._restorations:
            self._restorations.pop()()

    def _log(self, message: str, where: str, attribute: str) -> None:
        if self._package is not None:
            _logger.info(message, self._package, where, attribute)


def _loaded(names: Sequence[str]) -> list[Any]:
    return [sys.modules[name] for name in names if sys.modules.get(name) is not None]


def _swap(owners: list[Any], attribute: str, old: Any, new: Any) -> None:
    for owner in owners:
        if vars(owner).get(attribute) is old:
            setattr(owner, attribute, new)


def parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the parameters of `function`, by which it is recognised."""
    return tuple(inspect.signature(function).parameters)


def function_of(owner: Any, name: str, parameters: Sequence[str]) -> Callable[..., Any]:
    """Return the function `name` of a module or class.

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
