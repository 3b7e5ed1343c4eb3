"""Functions that TRL's modules look up at call time, with ours in their place, if this TRL is one that we know."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import trl

from grpo_kernels.integrations.patching import Patches, parameters_of


class Seam:
    """A function of TRL's, and ours for it.

    Args:
        owner, name: the module, and the name that the function has there: a plain one or an autograd function.
        ours: our function.
        parameters: those of TRL's. A release that changes them has changed what the results mean.
        unknown: the function in words, and what happens without it, for the warning that this TRL has another.
        needed: other names of the module that ours uses.
    """

    def __init__(
        self, owner: Any, name: str, ours: Any, parameters: Sequence[str], *, unknown: str, needed: Sequence[str] = ()
    ) -> None:
        self.owner, self.name, self.ours, self.parameters = owner, name, ours, tuple(parameters)
        self.unknown, self.needed = unknown, needed

    def is_filled(self) -> bool:
        """Return True if ours is there."""
        return getattr(self.owner, self.name, None) is self.ours

    def is_known(self) -> bool:
        """Return True if ours is there, or TRL's has the parameters that are known here."""
        theirs = getattr(self.owner, self.name, None)
        function = getattr(theirs, "forward", theirs)
        is_same = callable(function) and parameters_of(function) == self.parameters
        return self.is_filled() or (is_same and all(hasattr(self.owner, name) for name in self.needed))

    def warn_unknown(self) -> None:
        """Warn once, at the source line of the caller's caller."""
        text = f"grpo_kernels: trl {trl.__version__} has no {self.unknown}, without grpo_kernels"
        warnings.warn(text, stacklevel=3)

    def fill(self, patches: Patches) -> None:
        """Put ours in the place of TRL's, if that is known."""
        if self.is_known():
            patches.replace(self.owner, self.name, self.ours)

    @contextmanager
    def filled(self) -> Iterator[None]:
        """Inside, TRL's is ours, if it is known; afterwards it is what it was."""
        patches = Patches()
        self.fill(patches)
        try:
            yield
        finally:
            patches.restore()
