"""Tables of markdown, and the numbers in their cells."""

from __future__ import annotations

from collections.abc import Sequence


def markdown(head: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """A table of these cells; a column that would be empty is left out."""
    kept = [i for i in range(len(head)) if not cells or any(line[i] for line in cells)]
    rows = (head, ["---"] * len(head), *cells)
    return [f"| {' | '.join(line[i] for i in kept)} |" for line in rows]


def number(value: float | None, digits: int = 4) -> str:
    """That many digits, and no exponent for what is large; blank for None."""
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def small(value: float | None) -> str:
    """An error, in two digits."""
    return "" if value is None else f"{value:.1e}" if value else "0"


def times(value: float | None) -> str:
    """A ratio."""
    return "" if value is None else f"{value:.2f}"
