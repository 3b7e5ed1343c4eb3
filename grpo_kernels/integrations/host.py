"""Change a trainer's or model's package for as long as ours is wanted, and no longer.

`Patches`       replaces attributes until it is told to restore them: ``patch_trl``, ``patch_verl``, ``patch_liger``
`replaced`      replaces one attribute for the length of a call
`HostFunction`  one function of a package, replaced in either way if it is as we know it
`during`        sets a context variable for the length of a call: what our function is to know there
"""

from __future__ import annotations

import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

_logger = logging.getLogger(__name__)
_Value = TypeVar("_Value")


class Patches:
    """Replacements of attributes, which `restore` takes back.

    Args:
        package: its name in the log lines; None: no log.
    """

    def __init__(self, package: str | None = None) -> None:
        self._package = package
        self._restorations: list[Callable[[], None]] = []

    def replace(self, owner: Any, attribute: str, ours: Any, *, importers: Sequence[str] = ()) -> None:
        """Replace an attribute of `owner`, a module, class or object, by `ours`; no effect if `ours` is there already.

        `importers` names modules that copy the attribute when they are imported, before this call or after it.
        """
        theirs = getattr(owner, attribute)
        if theirs is ours:
            return
        inherited = attribute not in vars(owner)

        def restore() -> None:
            is_ours = vars(owner).get(attribute) is ours
            if inherited and is_ours:
                delattr(owner, attribute)
            _swap([owner, *_loaded(importers)], attribute, ours, theirs)
            whose = "its own again" if is_ours else "left as somebody else has made it since"
            self._log(f"unpatched %s: %s.%s is {whose}", owner, attribute)

        self._restorations.append(restore)
        setattr(owner, attribute, ours)
        _swap(_loaded(importers), attribute, theirs, ours)
        self._log("patched %s: %s.%s is that of grpo_kernels", owner, attribute)

    def restore(self) -> None:
        """Restore each attribute that is still ours; leave one alone that somebody else has replaced since."""
        while self._restorations:
            self._restorations.pop()()

    def _log(self, message: str, owner: Any, attribute: str) -> None:
        if self._package is not None:
            where = f"{owner.__module__}.{owner.__qualname__}" if inspect.isclass(owner) else owner.__name__
            _logger.info(message, self._package, where, attribute)


def _loaded(names: Sequence[str]) -> list[Any]:
    return [sys.modules[name] for name in names if sys.modules.get(name) is not None]


def _swap(owners: list[Any], attribute: str, old: Any, new: Any) -> None:
    for owner in owners:
        if vars(owner).get(attribute) is old:
            setattr(owner, attribute, new)


@contextmanager
def replaced(owner: Any, attribute: str, ours: Any) -> Iterator[None]:
    """Inside, the attribute of `owner`, a module, class or object, is `ours`."""
    patches = Patches()
    patches.replace(owner, attribute, ours)
    try:
        yield
    finally:
        patches.restore()


@contextmanager
def during(variable: ContextVar[_Value], value: _Value) -> Iterator[_Value]:
    """Inside, a context variable has `value`."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


class HostFunction:
    """A function of a host package, and our function that replaces it.

    Args:
        owner, name: the module, and the name of the function there: a plain function or an autograd function.
        ours: our function, or a class with the ``apply`` of an autograd function. It has the parameters that theirs has
            where we know it: a release that changes them may have changed the meaning of the results.
        unknown: end of the warning "{package} has no ...": a description of the function, and what happens then.
        needed: other names of the module that our function uses.
    """

    def __init__(self, owner: Any, name: str, ours: Any, *, unknown: str, needed: Sequence[str] = ()) -> None:
        self.owner, self.name, self.ours = owner, name, ours
        self.unknown, self.needed = unknown, needed
        apply = getattr(ours, "apply", None)
        self.parameters = parameter_names(ours) if apply is None else ("ctx", *parameter_names(apply))

    def is_ours(self) -> bool:
        """Return True if our function is in place."""
        return getattr(self.owner, self.name, None) is self.ours

    def is_known(self) -> bool:
        """Return True if our function is in place, or theirs has the known parameters (and `needed` exist)."""
        theirs = getattr(self.owner, self.name, None)
        function = getattr(theirs, "forward", theirs)
        is_same = callable(function) and parameter_names(function) == self.parameters
        return self.is_ours() or (is_same and all(hasattr(self.owner, name) for name in self.needed))

    def warn_unknown(self) -> None:
        """Warn, at the source line of the caller's caller."""
        package = sys.modules[self.owner.__name__.partition(".")[0]]
        text = f"grpo_kernels: {package.__name__} {package.__version__} has no {self.unknown}, without grpo_kernels"
        warnings.warn(text, stacklevel=3)

    def replace(self, patches: Patches) -> None:
        """Replace the function by ours, if it is known, until `patches` are restored."""
        if self.is_known():
            patches.replace(self.owner, self.name, self.ours)

    def replaced(self) -> AbstractContextManager[None]:
        """Return a context in which our function replaces theirs, if that is known."""
        return replaced(self.owner, self.name, self.ours) if self.is_known() else nullcontext()


def parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the parameters of `function`, by which it is recognised."""
    return tuple(inspect.signature(function).parameters)


def function_of(owner: Any, name: str, parameters: Sequence[str]) -> Callable[..., Any]:
    """Return the function `name` of a module or class.

    Raises:
        LookupError: there is none, or it has other parameters.
    """
    function = getattr(owner, name, None)
    if not callable(function):
        raise LookupError(f"{owner.__name__} has no function {name}")
    names = parameter_names(function)
    if names != tuple(parameters):
        raise LookupError(f"{owner.__name__}.{name}: expected the parameters {tuple(parameters)}, got {names}")
    return function


def forward_name(module: Any) -> str:
    """Return the name of the attribute that holds a module's forward; accelerate's hook goes on running around it."""
    return "_old_forward" if hasattr(module, "_hf_hook") else "forward"
