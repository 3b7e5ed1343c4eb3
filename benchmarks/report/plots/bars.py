"""A bar for each provider of a main case: time with its quantiles and the products' limit, and memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.report import figures, labels
from benchmarks.report.figures import Case, ratio
from benchmarks.report.plots import style

BAR = 0.40  # inches a provider
TITLES = {
    "full": "Time of one loss, forward and backward",
    "score": "Time of log-probabilities, without gradients",
    "forward": "Time of one loss, forward only",
    "backward": "Time of one loss, backward only",
}


def time(data: dict[str, Any], case: Case) -> Figure | None:
    """None: nobody was timed."""
    mode = (figures.timed_modes(case) or ["full"])[0]
    times = {x: figures.median(case, x, mode) for x in figures.providers(case)}
    bars = {x: ms for x, ms in times.items() if ms is not None and not figures.is_products(x)}
    if not bars:
        return None
    unit, scale = ("s", 1e3) if figures.in_seconds({"": case}, mode) else ("ms", 1.0)
    names = sorted(bars, key=lambda x: bars[x])
    title = TITLES[mode]
    figure, axes = _bars(data, case, title, names, [bars[x] / scale for x in names], unit)
    for y, name in enumerate(names):
        found = figures.timing(figures.providers(case)[name], mode) or {}
        if found.get("p20") is not None and found.get("p80") is not None:
            low, high = found["p20"] / scale, found["p80"] / scale
            axes.plot([low, high], [y, y], color=style.INK, linewidth=1.6, marker="|", markersize=7)
    limit = times.get(figures.PRODUCTS)
    if limit is not None:
        axes.axvline(limit / scale, color=style.INK, linewidth=1.4, linestyle=(0, (4, 3)))
        words = f"its matrix products alone: {style.three(limit / scale)} {unit}"
        axes.text(limit / scale, -0.72, f" {words}", color=style.INK, size=11, va="center")
        axes.set_ylim(len(names) - 0.4, -1.1)
    axes.set_xlabel(f"{'seconds' if unit == 's' else 'milliseconds'}, median; line: 20 to 80 %")
    return figure


def memory(data: dict[str, Any], case: Case) -> Figure | None:
    """None: nobody's memory was measured."""
    found = {x: figures.extra_mib(case, x) for x in figures.providers(case) if not figures.is_products(x)}
    bars = {x: mib for x, mib in found.items() if mib is not None}
    if not bars:
        return None
    unit, scale = ("GiB", 1024.0) if max(bars.values()) >= 8192 else ("MiB", 1.0)
    names = sorted(bars, key=lambda x: bars[x])
    title = "Memory beyond inputs and gradients"
    figure, axes = _bars(data, case, title, names, [bars[x] / scale for x in names], unit)
    axes.set_xlabel(f"{unit}, peak of one step beyond the inputs and the returned gradients")
    return figure


def _bars(
    data: dict[str, Any],
    case: Case,
    title: str,
    names: Sequence[str],
    values: Sequence[float],
    unit: str,
) -> tuple[Figure, Axes]:
    """Bars from the top down, each with its value and its ratio to ours."""
    sheet = style.sheet(data, title, [labels.brief(case), *_missing(case, names)], BAR * len(names) + 1.0)
    axes = sheet.figure.subplots()
    kinds = [style.OURS if x == figures.OURS else style.VARIANT if figures.is_ours(x) else style.PEER for x in names]
    axes.barh(range(len(names)), values, height=0.66, color=kinds)
    axes.set_yticks(range(len(names)), [labels.label(x, data.get("versions")) for x in names])
    style.emphasize(axes, names)
    ours = dict(zip(names, values, strict=True)).get(figures.OURS)
    ends = [max(value, _high(case, name, unit)) for name, value in zip(names, values, strict=True)]
    for y, (name, value, end) in enumerate(zip(names, values, ends, strict=True)):
        over = ratio(value, ours)
        words = "" if over is None or name == figures.OURS else f"   {over:.2f}x"
        axes.annotate(
            f"{style.three(value)} {unit}{words}", (end, y), (7, 0), textcoords="offset points", va="center", size=12,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
            weight="bold" if name == figures.OURS else "normal",
        )  # fmt: skip
    axes.set(xlim=(0, 1.27 * max(ends)), ylim=(len(names) - 0.4, -0.6))
    axes.grid(axis="x")
    axes.spines["left"].set_visible(False)
    return sheet.figure, axes


def _high(case: Case, name: str, unit: str) -> float:
    """Where the whisker of a time ends."""
    mode = (figures.timed_modes(case) or ["full"])[0]
    found = figures.timing(figures.providers(case)[name], mode) or {}
    scale = {"s": 1e3, "ms": 1.0}.get(unit)
    return (found.get("p80") or 0.0) / scale if scale else 0.0


def _missing(case: Case, names: Sequence[str]) -> list[str]:
    """Who is not in the plot, and how it ended."""
    absent = {x: found for x, found in figures.providers(case).items() if x not in names and not figures.is_products(x)}
    ended = [f"{x} ({'no figure' if figures.ran(found) else found.get('status')})" for x, found in absent.items()]
    return [f"Not here: {', '.join(ended)}"] if ended else []
