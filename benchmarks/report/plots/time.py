"""A bar for each provider of the main case: its time with the quantiles, and how many times faster ours is."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from benchmarks.report import figures, labels
from benchmarks.report.figures import Case, ratio
from benchmarks.report.plots import style

BAR = 0.52  # inches a provider


def draw(data: dict[str, Any]) -> Figure | None:
    """None: nobody but ours was timed in the main case."""
    case, mode = main_case(data), "full"
    shown = [x for x in figures.providers(case) if not figures.is_products(x) and ("/" not in x and "@" not in x)]
    found = {x: ms / 1e3 for x in shown if (ms := figures.median(case, x, mode)) is not None}
    if len(found) < 2 or figures.OURS not in found:
        return None
    names = sorted(found, key=lambda x: found[x])
    subtitle = f"Forward and backward of one loss; {labels.brief(case)}"
    figure = style.sheet(data, claim(data), subtitle, BAR * len(names) + 0.75, notes(case))
    axes = figure.subplots()
    axes.barh(range(len(names)), [found[x] for x in names], height=0.68, color=[style.color(x) for x in names])
    for y, name in enumerate(names):
        spread = figures.timing(figures.providers(case)[name], mode) or {}
        low, high = ((spread.get(q) or 1e3 * found[name]) / 1e3 for q in ("p20", "p80"))
        axes.plot([low, high], [y, y], color=style.INK, linewidth=2, marker="|", markersize=12)
        over = found[name] / found[figures.OURS]
        words = "" if name == figures.OURS else f"   {style.times(over)}x"
        axes.annotate(
            f"{style.three(found[name])} s{words}", (max(high, found[name]), y), (9, 0), textcoords="offset points",
            va="center", weight="bold" if name == figures.OURS else "normal",
        )  # fmt: skip
    style.rows(axes, [labels.brief_name(x) for x in names], [x == figures.OURS for x in names])
    _limit(axes, limit(case), min(found.values()))
    axes.set_xlim(0, 1.28 * max(found.values()))
    axes.set_xticks([])
    axes.set_xlabel("seconds, and times ours; lines: 20 to 80 % of the rounds")
    return figure


def claim(data: dict[str, Any]) -> str:
    """The title."""
    case = main_case(data)
    over = ratio(figures.median(case, "trl", "full"), figures.median(case, figures.OURS, "full"))
    if over is None:
        return "Time of one loss"
    return f"{labels.brief_name('trl')} takes {style.times(over)} times our time"


def notes(case: Case) -> list[str]:
    """Where the limit cannot be told from ours."""
    ours, products = figures.median(case, figures.OURS, "full"), limit(case)
    if products is None or ours is None or 1e3 * products < ours:
        return []
    return ["The case's matrix products alone take as long as ours, within noise."]


def limit(case: Case) -> float | None:
    """Seconds of the case's matrix products alone."""
    ms = figures.median(case, figures.PRODUCTS, "full")
    return None if ms is None else ms / 1e3


def main_case(data: dict[str, Any]) -> Case:
    """The first of the main part that has forward and backward."""
    cases = figures.of_part(data, "main").values()
    return next((x for x in cases if "full" in figures.timed_modes(x)), {})


def _limit(axes: Any, seconds: float | None, fastest: float) -> None:
    """A line, where it is below whatever does more."""
    if seconds is None or seconds >= fastest:
        return
    axes.axvline(seconds, color=style.INK, linewidth=2, linestyle=(0, (3, 2)), ymax=0.97)
    axes.annotate(
        f"its matrix products alone: {style.three(seconds)} s", (seconds, -0.75), (8, 0), textcoords="offset points",
        va="center", color=style.INK, size=style.TEXT - 2,
    )  # fmt: skip
    bottom, _ = axes.get_ylim()
    axes.set_ylim(bottom, -1.1)
