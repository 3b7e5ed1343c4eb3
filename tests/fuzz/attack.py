"""Attacks on the library: hypothesis draws a call's options and shrinks them, a check says what has
to hold.

An option that is absent is the plain one. `tests/fuzz/test_fuzz.py` runs a few examples, always the
same; `python -m tests.fuzz` (`make fuzz`) runs others for ten minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

X = TypeVar("X")
Options = dict[str, Any]
# No phase that explains failures: it traces every line of every trial.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink)
SETTINGS = settings(
    max_examples=120, deadline=None, print_blob=False, phases=PHASES,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


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


@dataclass(frozen=True)
class Attack:
    """A kind of call: how its options are drawn, by `random.Random` or `Draws`, and what they are
    checked by."""

    draw: Callable[[Any], Options]
    check: Callable[[Options], None]  # raises if the library does not do what it promises

    def run(self, profile: settings, first: int | None = None) -> None:
        """Check `profile.max_examples` calls; of one that fails, raise the error of the smallest
        that fails alike.

        Without a seed `first`, begin with the failures that the profile's database kept: a seed
        turns that off.
        """
        options = st.composite(lambda draw: self.draw(Draws(draw)))()
        attack = profile(given(options=options)(self.check))
        (attack if first is None else seed(first)(attack))()
