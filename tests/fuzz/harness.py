"""Trials drawn from seeds, bounded by time; what fails is told with its seed and made as small as it goes.

A trial is a dict of options: a category draws it from a seed, checks it, and treats an option that is absent as the
plain one. So a failure is minimised by leaving options out, one after the other, for as long as the same failure stays.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Options = dict[str, Any]
MINIMISE_SECONDS = 20.0


@dataclass(frozen=True)
class Category:
    """One kind of attack."""

    name: str
    draw: Callable[[random.Random], Options]
    check: Callable[[Options], None]  # raises if the library does not do what it promises
    share: float = 1.0  # of the time
    close: Callable[[], None] = lambda: None

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


@dataclass
class Tally:
    """What became of a category."""

    trials: int = 0
    seconds: float = 0.0
    failures: list[Failure] = field(default_factory=list)


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
    categories: Sequence[Category],
    seconds: float,
    start: int,
    *,
    most: Mapping[str, int] | None = None,
    tell: Callable[[str], None] = print,
) -> dict[str, Tally]:
    """Trials of all categories, each in its share of the time, until `seconds` are over or each had its `most`."""
    tallies = {category.name: Tally() for category in categories}
    streams = {category.name: seeds(start) for category in categories}
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end:
            open_ones = [x for x in categories if most is None or tallies[x.name].trials < most[x.name]]
            if not open_ones:
                break
            category = min(open_ones, key=lambda x: tallies[x.name].seconds / x.share)
            tally, began = tallies[category.name], time.monotonic()
            failure = trial(category, next(streams[category.name]))
            tally.trials += 1
            tally.seconds += time.monotonic() - began
            if failure is not None:
                tally.failures.append(failure)
                tell(str(failure))
    finally:
        for category in categories:
            category.close()
    return tallies


def table(tallies: dict[str, Tally]) -> str:
    """Counts by category, and the seeds that failed."""
    rows = [f"{'category':<12} {'trials':>7} {'failures':>9} {'seconds':>8}"]
    for name, tally in tallies.items():
        failed = "  seeds " + " ".join(str(x.seed) for x in tally.failures) if tally.failures else ""
        rows.append(f"{name:<12} {tally.trials:>7} {len(tally.failures):>9} {tally.seconds:>8.1f}{failed}")
    return "\n".join(rows)
