"""Hypothesis draws the options of a call, and shrinks them; an option that is absent is the plain
one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hypothesis import strategies as st

X = TypeVar("X")
Options = dict[str, Any]


class Draws:
    """The methods of `random.Random` that draw a call, by hypothesis: it shrinks each draw towards
    the plain call."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self._draw = draw

    def choice(self, values: Sequence[X]) -> X:
        """One of `values`, the first if it can be."""
        return self._draw(st.sampled_from(values))

    def random(self) -> float:
        """A multiple of 0.01 in [0, 1), the largest if it can be: what is there in a share p of the
        calls goes."""
        return 0.99 - self._draw(st.integers(0, 99)) / 100

    def uniform(self, low: float, high: float) -> float:
        return self._draw(st.floats(low, high))

    def randint(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def randrange(self, end: int) -> int:
        return self.randint(0, end - 1)

    def getrandbits(self, bits: int) -> int:
        return self.randrange(2**bits)


def calls(draw: Callable[[Any], Options]) -> st.SearchStrategy[Options]:
    """All that `draw` makes of a `random.Random` or `Draws`."""
    return st.composite(lambda one: draw(Draws(one)))()
