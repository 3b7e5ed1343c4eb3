"""Replace functions that TRL's modules look up at call time, if this TRL is one that we know."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import trl

from grpo_kernels.integrations.patching import Patches, parameters_of


class Seam:
    """A function of TRL, and our function that replaces it.

    Args:
        owner, name: the module, and the name of the function there: a plain function or an autograd function.
        ours: our function.
        parameters: those of TRL's function. A release that changes them may have changed the meaning of the results.
        unknown: end of the warning "trl has no ...": a description of the function, and what happens then.
        needed: other names of the module that our function uses.
    """

    def __init__(
        self, owner: Any, name: str, ours: Any, parameters: Sequence[str], *, unknown: str, needed: Sequence[str] = ()
    ) -> None:
        self.owner, self.name, self.ours, self.parameters = owner, name, ours, tuple(parameters)
        self.unknown, self.needed = unknown, needed

    def is_filled(self) -> bool:
        """Return True if our function is in place."""
        return getattr(self.owner, self.name, None) is self.ours

    def is_known(self) -> bool:
        """Return True if our function is in place, or TRL's has the known parameters (and `needed` exist)."""
        theirs = getattr(self.owner, self.name, None)
        function = getattr(theirs, "forward", theirs)
        is_same = callable(function) and parameters_of(function) == self.parameters
        return self.is_filled() or (is_same and all(hasattr(self.owner, name) for name in self.needed))

    def warn_unknown(self) -> None:
        """Warn, at the source line of the caller's caller."""
        text = f"grpo_kernels: trl {trl.__version__} has no {self.unknown}, without grpo_kernels"
        warnings.warn(text, stacklevel=3)

    def fill(self, patches: Patches) -> None:
        """Replace TRL's function by ours, if it is known."""
        if self.is_known():
            patches.replace(self.owner, self.name, self.ours)

    @contextmanager
    def filled(self) -> Iterator[None]:
        """Inside, our function replaces TRL's, if that is known; afterwards the module is as before."""
        patches = Patches()
        self.fill(patches)
        try:
            yield
        finally:
            patches.restore()
