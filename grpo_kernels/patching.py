"""Helpers for the trainer integrations: patching, row counts, logging, batching by prompt."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer  # has the attributes of any trainer
else:
    _Trainer = object

_logger = logging.getLogger(__name__)
Number = Tensor | int


class Patches(ExitStack):
    """Replaced attributes. `restore`, or the end of a ``with`` block, restores them.

    If other code has replaced an attribute in the meantime, it stays replaced. If a `package` is
    named, the log says what is patched.
    """

    def __init__(self, package: str | None = None) -> None:
        super().__init__()
        self._package = package

    def replace(
        self, owner: Any, attribute: str, ours: Any, *, importers: Sequence[str] = ()
    ) -> None:
        """Replace an attribute of `owner` (a module, class or object) with `ours`.

        `importers` names modules that copy the attribute when they are imported.
        """
        theirs = getattr(owner, attribute)
        if theirs is ours:
            return
        inherited = attribute not in vars(owner)

        def swap_copies(old: Any, new: Any) -> None:
            for module in filter(None, map(sys.modules.get, importers)):
                if vars(module).get(attribute) is old:
                    setattr(module, attribute, new)

        def log(message: str) -> None:
            if self._package is not None:
                of_class = inspect.isclass(owner)
                name = f"{owner.__module__}.{owner.__qualname__}" if of_class else owner.__name__
                _logger.info(message, self._package, f"{name}.{attribute}")

        def restore() -> None:
            is_ours = vars(owner).get(attribute) is ours
            if is_ours and inherited:
                delattr(owner, attribute)
            elif is_ours:
                setattr(owner, attribute, theirs)
            swap_copies(ours, theirs)
            whose = "restored" if is_ours else "kept, since somebody else replaced it later"
            log(f"unpatched %s: %s is {whose}")

        self.callback(restore)
        setattr(owner, attribute, ours)
        swap_copies(theirs, ours)
        log("patched %s: %s now comes from grpo_kernels")

    restore = ExitStack.close


class Patch(int):
    """1 if a package is patched, else 0. Used as a context manager, it undoes the patch on exit."""

    undo: Callable[[], None] | None = None

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_: object) -> None:
        if self.undo is not None:
            self.undo()


@contextmanager
def all_replaced(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Replace attributes inside the context; each change is (owner, attribute, replacement)."""
    with Patches() as patches:
        for change in changes:
            patches.replace(*change)
        yield


def replaced(owner: Any, attribute: str, ours: Any) -> AbstractContextManager[None]:
    """Replace one attribute of `owner` (a module, class or object) inside the context."""
    return all_replaced([(owner, attribute, ours)])


@contextmanager
def during(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Set a context variable to `value` inside the context."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the parameters of `function`, which identify a known release."""
    return tuple(inspect.signature(function).parameters)


def found_in(owner: Any, name: str) -> Any:
    """Get attribute `name` of a module or class; LookupError if there is none."""
    found = getattr(owner, name, None)
    if found is None:
        raise LookupError(f"{owner.__name__} has no {name}")
    return found


def function_of(owner: Any, name: str, parameters: Sequence[str]) -> Callable[..., Any]:
    """Get function `name` of a module or class; LookupError unless it has these parameters."""
    function: Callable[..., Any] = found_in(owner, name)
    names, expected = parameter_names(function) if callable(function) else (), tuple(parameters)
    if names != expected:
        raise LookupError(
            f"{owner.__name__}.{name}: expected the parameters {expected}, got {names}"
        )
    return function


def forward_name(module: Any) -> str:
    """Name of the attribute that holds a module's forward, inside accelerate's hook if any."""
    return "_old_forward" if hasattr(module, "_hf_hook") else "forward"


@contextmanager
def needed(install: str, *packages: str) -> Iterator[None]:
    """Make errors of imports from `packages` suggest ``pip install {install}``."""
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in packages:
            raise
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise ModuleNotFoundError(
                f"expected the package {package}, which is not installed: pip install {install}",
                name=package,
            ) from error
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            version = "of unknown version"
        raise ImportError(
            f"expected a release of {package} that grpo_kernels supports, got {package} {version}, "
            f"where an import fails ({error}): pip install --upgrade {install}",
            name=error.name,
            path=error.path,
        ) from error


class Shares:
    """Counts and totals by name, summed over calls. Only `take` synchronizes with the device."""

    def __init__(self) -> None:
        self.pairs: dict[str, tuple[Number, Number]] = {}  # name -> (count, total)

    def add(self, pairs: Mapping[str, tuple[Number, Number]]) -> None:
        for name, (count, total) in pairs.items():
            counted, all_counted = self.pairs.get(name, (0, 0))
            self.pairs[name] = _sum(counted, count), _sum(all_counted, total)

    def add_rows(self, mask: Tensor, results: Sequence[Tensor | None]) -> None:
        """Count the rows of a scoring with gradient; `mask` marks the projected positions.

        ``rows/projected``: share of positions that the head projected.
        ``rows/gradient``: share of projected rows whose `results` get a gradient.
        """
        attached = [x for x in results if x is not None and x.requires_grad]
        if not attached:
            return
        projected, counted = mask.sum(), torch.zeros_like(mask)
        self.add({"rows/projected": (projected, mask.numel()), "rows/gradient": (0, projected)})

        # One hook per tensor: torch's hook for several tensors makes a reference cycle with their
        # nodes.
        def look(gradient: Tensor | None) -> None:
            nonlocal counted
            if gradient is None:  # nobody reads this result of a node that has several
                return
            graded = (gradient != 0) & mask
            self.add({"rows/gradient": ((graded & ~counted).sum(), 0)})
            counted = counted | graded

        for x in attached:
            x.register_hook(look)

    def take(self) -> dict[str, float]:
        """The shares since the last call, which resets the counts; empty if nothing was counted."""
        pairs = {name: (int(count), int(total)) for name, (count, total) in self.pairs.items()}
        self.pairs.clear()
        if not any(total for _, total in pairs.values()):
            return {}
        return {name: count / max(1, total) for name, (count, total) in pairs.items()}


def _sum(total: Number, x: Number) -> Number:
    if isinstance(total, Tensor) and isinstance(x, Tensor):
        return total + x.to(total.device)
    return total + x


class LogsShares(_Trainer):
    """Mixin for a trainer: adds this process's `_shares` since the last log to the log."""

    _shares: Shares

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self.model.training:
            logs.update(self._shares.take())
        super().log(logs, *args, **kwargs)


def numbered(prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, int]]:
    """For each sample, (first sample with the same prompt, number of the prompt's tokens)."""
    first: dict[tuple[int, ...], int] = {}
    return [(first.setdefault(prompt, i), len(prompt)) for i, prompt in enumerate(prompts)]


def divided(
    prompts: Sequence[tuple[int, int]],
    lengths: Sequence[int],
    live: Sequence[bool],
    parts: int,
    *,
    tokens: int | None = None,
    rows: int | None = None,
) -> list[list[int]]:
    """Divide samples into `parts`, keeping prompts together.

    A part has at most so many `tokens`, counting a prompt once, and at most so many `rows`, one per
    sample. A sample that fits nowhere goes to the part with the fewest tokens. Prompts with live
    samples come first, and among these the prompts with the most completion tokens. `prompts` come
    from `numbered`.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for i, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(i)
    result: list[list[int]] = [[] for _ in range(parts)]
    used, inside = [0] * parts, [set[tuple[int, int]]() for _ in range(parts)]

    def place(prompt: tuple[int, int], samples: Sequence[int], *, anywhere: bool) -> bool:
        own = sum(lengths[i] for i in samples)
        added = [own if prompt in inside[k] else own + prompt[1] for k in range(parts)]
        room = [k for k in range(parts) if rows is None or len(result[k]) + len(samples) <= rows]
        fits = [k for k in room if tokens is None or used[k] + added[k] <= tokens]
        if not fits and not anywhere:
            return False
        part = min(fits, key=added.__getitem__) if fits else min(room, key=used.__getitem__)
        used[part] += added[part]
        inside[part].add(prompt)
        result[part] += samples
        return True

    def rank(samples: Sequence[int]) -> tuple[bool, int]:
        return not any(live[i] for i in samples), -sum(lengths[i] for i in samples)

    for prompt, samples in sorted(groups.items(), key=lambda item: rank(item[1])):
        if not place(prompt, samples, anywhere=False):
            for i in sorted(samples, key=lambda i: -lengths[i]):
                place(prompt, [i], anywhere=True)
    return result
