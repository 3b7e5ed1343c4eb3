"""Time and memory along N, V and the share of rows with gradient."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from benchmarks.report import figures, labels
from benchmarks.report.columns import number
from benchmarks.report.figures import Case
from benchmarks.report.plots import style

AXES = {"n": "tokens, N", "v": "vocabulary, V", "share": "rows with gradient"}
COLUMNS = 3


def draw(data: dict[str, Any]) -> Figure | None:
    """None: nothing was timed along any axis. A panel of which there are no figures is left out."""
    found = {axis: cases for axis, cases in figures.series(data) if any(map(figures.timed_modes, cases.values()))}
    if not found:
        return None
    everything = {name: case for cases in found.values() for name, case in cases.items()}
    names = [x for x in figures.names(everything) if any(_time(case, x) for case in everything.values())]
    names.sort(key=lambda x: x != figures.OURS)
    has_memory = any(figures.extra_mib(case, x) is not None for case in everything.values() for x in names)
    rows = 2 if has_memory else 1
    title = "How time and memory grow" if has_memory else "How time grows"
    lines = -(-len(names) // COLUMNS)
    sheet = style.sheet(data, title, [labels.brief(labels.common(everything))], 2.9 * rows + 0.3, lines)
    grid = sheet.figure.subplots(rows, len(found), squeeze=False, sharex="col", sharey="row")
    seconds = figures.in_seconds(everything)
    for column, (axis, cases) in enumerate(found.items()):
        _panel(grid[0][column], axis, cases, names, 1e3 if seconds else 1.0, is_memory=False)
        if has_memory:
            _panel(grid[1][column], axis, cases, names, 1.0, is_memory=True)
        grid[-1][column].set_xlabel(AXES.get(axis, axis))
    grid[0][0].set_ylabel(f"{'seconds' if seconds else 'milliseconds'}, median")
    if has_memory:
        grid[1][0].set_ylabel("extra MiB")
    style.legend(sheet, [_handle(data, name) for name in names], COLUMNS)
    return sheet.figure


def _time(case: Case, name: str) -> float | None:
    return figures.median(case, name, (figures.timed_modes(case) or ["full"])[0])


def _panel(axes: Axes, axis: str, cases: dict[str, Case], names: list[str], scale: float, *, is_memory: bool) -> None:
    """Log scales, so that what is proportional is a straight line, and equal factors are equal distances."""
    for name in names:
        found = {
            figures.along(case, axis): figures.extra_mib(case, name) if is_memory else _time(case, name)
            for case in cases.values()
        }
        points = [(x, y / scale) for x, y in found.items() if y]
        if points:
            color, marker = style.line_of(name)
            axes.plot(*zip(*points, strict=True), color=color, marker=marker, **_weight(name))
    at = sorted({figures.along(case, axis) for case in cases.values()})
    if axis != "share":
        axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(at, [labels.share(x) if axis == "share" else _thousands(x) for x in at])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: number(y)))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid()


def _thousands(value: float) -> str:
    """151936 as 152k, 512 as it is."""
    return f"{value / 1000:.3g}k" if value >= 10_000 else f"{value:g}"


def _weight(name: str) -> dict[str, Any]:
    if figures.is_products(name):
        return {"linewidth": 1.4, "linestyle": (0, (4, 3)), "markersize": 8, "zorder": 4}
    if name == figures.OURS:  # wide, and behind what may lie on it
        return {"linewidth": 4.0, "markersize": 9, "zorder": 2}
    return {"linewidth": 1.7, "zorder": 3}


def _handle(data: dict[str, Any], name: str) -> Line2D:
    color, marker = style.line_of(name)
    return Line2D([], [], color=color, marker=marker, label=labels.label(name, data.get("versions")), **_weight(name))
