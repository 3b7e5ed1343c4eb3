"""Trials drawn from seeds, bounded by time; what fails is told with its seed and made as small as it goes.

A trial is a dict of options: a category draws it from a seed, checks it, and treats an option that is absent as the
plain one. So a failure is minimised by leaving options out, one after the other, for as long as the same failure stays.
"""

from __future__ import annotations

import itertools
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Options = dict[str, Any]
MINIMISE_SECONDS = 20.0


@dataclass(frozen=True)
class Category:
    """One kind of attack."""

    name: str
    draw: Callable[[random.Random], Options]
    check: Callable[[Options], None]  # raises if the library does not do what it promises

    def options(self, seed: int) -> Options:
        """The trial of a seed: the same on every machine."""
        return self.draw(random.Random(f"{self.name} {seed}"))


@dataclass(frozen=True)
class Failure:
    """A trial that failed, and the smallest one that fails alike."""

    category: str
    seed: int
    options: Options
    error: str
    smallest: Options
    smallest_error: str

    def __str__(self) -> str:
        return (
            f"{self.category}:{self.seed} failed: {self.error}\n"
            f"  replay: python -m tests.fuzz --replay {self.category}:{self.seed}\n"
            f"  smallest of {len(self.options)} options: {self.smallest}\n"
            f"  with it: {self.smallest_error}"
        )


def error_of(category: Category, options: Options) -> Exception | None:
    """What the check raised, None if all is right."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            category.check(options)
    except Exception as error:
        return error
    return None


def told(error: Exception) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text if len(text) < 700 else f'{text[:200]} ... {text[-500:]}'}"


def minimised(category: Category, options: Options, error: Exception) -> tuple[Options, Exception]:
    """The options without those that the failure does not need, and how it then fails: in an error of that type."""
    end, again = time.monotonic() + MINIMISE_SECONDS, True
    while again:
        again = False
        for name in [*options]:
            if time.monotonic() > end:
                return options, error
            fewer = {key: value for key, value in options.items() if key != name}
            found = error_of(category, fewer)
            if type(found) is type(error):
                assert found is not None
                options, error, again = fewer, found, True
    return options, error


def trial(category: Category, seed: int) -> Failure | None:
    """One seed."""
    options = category.options(seed)
    error = error_of(category, options)
    if error is None:
        return None
    smallest, smallest_error = minimised(category, options, error)
    return Failure(category.name, seed, options, told(error), smallest, told(smallest_error))


def seeds(start: int) -> Iterator[int]:
    """The seeds of a run."""
    draw = random.Random(start)
    while True:
        yield draw.getrandbits(40)


def fuzz(
    categories: Sequence[Category], seconds: float, start: int, *, most: int | None = None
) -> dict[str, tuple[int, list[Failure]]]:
    """Trials of all categories in turn, until `seconds` are over or each had its `most`: their number, and failures."""
    found: dict[str, tuple[int, list[Failure]]] = {category.name: (0, []) for category in categories}
    end = time.monotonic() + seconds
    for seed in itertools.islice(seeds(start), most):
        for category in categories:
            if time.monotonic() > end:
                return found
            trials, failures = found[category.name]
            failure = trial(category, seed)
            if failure is not None:
                print(failure)
                failures.append(failure)
            found[category.name] = (trials + 1, failures)
    return found
