"""A line for each case, shapes or workloads: the time of every provider over that of ours."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator

from benchmarks.report import figures, labels
from benchmarks.report.figures import Case, ratio
from benchmarks.report.plots import style

TICKS = (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)


def draw(data: dict[str, Any], part: str, title: str) -> Figure | None:
    """None: there is no case in which ours and something else were timed."""
    cases = figures.of_part(data, part)
    found = {name: _ratios(case) for name, case in cases.items()}
    rows = [name for name in cases if len(found[name]) > 1]
    if not rows:
        return None
    names = [x for x in figures.names(cases) if any(x in found[row] for row in rows)]
    same = labels.common({row: cases[row] for row in rows})
    columns = 3
    lines = -(-len(names) // columns)
    words = [_words(row, cases[row], same) for row in rows]
    height = 0.56 if any("\n" in x for x in words) else 0.42
    sheet = style.sheet(data, title, [labels.brief(same)], height * len(rows) + 0.8, lines)
    axes = sheet.figure.subplots()
    axes.axvline(1.0, color=style.OURS, linewidth=2)
    for y, row in enumerate(rows):
        others = [x for name, x in found[row].items() if name != figures.OURS]
        axes.plot([min(1.0, *others), max(1.0, *others)], [y, y], color=style.GRID, linewidth=2, zorder=1)
        for name, over in found[row].items():
            color, marker = style.line_of(name)
            axes.plot(over, y, marker, color=color, markersize=12 if marker == "|" else 9, **_edge(marker))
    axes.set_yticks(range(len(rows)), words)
    own = axes.twinx()
    own.set_yticks(range(len(rows)), [_time(cases[row]) for row in rows], color=style.OURS, weight="bold")
    for panel in (axes, own):
        panel.set_ylim(len(rows) - 0.5, -0.6)
        panel.spines[["left", "bottom" if panel is own else "left"]].set_visible(False)
    axes.set_xscale("log")
    low = min(min(x.values()) for x in found.values() if x)
    high = max(max(x.values()) for x in found.values() if x)
    ticks = [x for x in TICKS if 0.9 * low <= x <= 1.1 * high]
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(ticks)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}x"))
    axes.set_xlim(0.93 * low, 1.07 * high)
    axes.grid(axis="x")
    axes.set_xlabel("time over that of grpo_kernels (its own on the right); log scale, less is faster")
    style.legend(sheet, [_handle(data, name) for name in names], columns)
    return sheet.figure


def _ratios(case: Case) -> dict[str, float]:
    mode = (figures.timed_modes(case) or ["full"])[0]
    ours = figures.median(case, figures.OURS, mode)
    found = {name: ratio(figures.median(case, name, mode), ours) for name in figures.providers(case)}
    return {name: x for name, x in found.items() if x is not None}


def _time(case: Case) -> str:
    ms = figures.median(case, figures.OURS, figures.timed_modes(case)[0]) or 0.0
    return f"{style.three(ms / 1e3)} s" if ms >= 1e3 else f"{style.three(ms)} ms"


def _words(name: str, case: Case, same: Case) -> str:
    """What its shape has of its own, else its name."""
    own = labels.shape({key: value for key, value in case.items() if key not in same})
    return own.replace(": ", "\n") or name.replace("_", " ")


def _edge(marker: str) -> dict[str, Any]:
    return (
        {"markeredgewidth": 2.5, "zorder": 3} if marker == "|" else {"markeredgecolor": "white", "markeredgewidth": 0.8}
    )


def _handle(data: dict[str, Any], name: str) -> Line2D:
    color, marker = style.line_of(name)
    words = labels.label(name, data.get("versions"))
    return Line2D([], [], color=color, marker=marker, linestyle="", markersize=9, label=words, **_edge(marker))
