"""Errors by the size of the logits: of a log-probability, and the share of ratios that are off by more than 1 %."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator

from benchmarks.report import figures, labels
from benchmarks.report.figures import Case
from benchmarks.report.plots import style

PANELS = {"logp_mean": "mean error of a log-probability", "ratio_off": "ratios off by more than 1 %"}
MARKS = (("#9ECAE1", "o"), ("#4292C6", "s"), ("#08306B", "D"), ("#000000", "v"))  # light to dark with the logits
PEAKED = ("#D55E00", "^")
SMALLEST_SHARE = 0.001  # where the scale of the shares turns linear, to have a place for 0


def draw(data: dict[str, Any]) -> Figure | None:
    """None: no errors were measured. A row of panels for each model and dtype."""
    groups: dict[str, dict[str, Case]] = {}
    for name, case in figures.of_part(data, "accuracy").items():
        if _names({name: case}):
            title = labels.shape({key: case.get(key) for key in ("model", "dtype")})
            groups.setdefault(title, {})[name] = case
    if not groups:
        return None
    everything = {name: case for cases in groups.values() for name, case in cases.items()}
    marks = _marks(everything)
    panels = [x for x in PANELS if any(_has(case, x) for case in everything.values())]
    heights = [0.34 * len(_names(cases)) + 0.9 for cases in groups.values()]
    said = {key: value for key, value in labels.common(everything).items() if key not in ("rounds", "scale")}
    sheet = style.sheet(data, "How exact: errors against float64", [labels.brief(said)], sum(heights), 1)
    grid = sheet.figure.subplots(len(groups), len(panels), squeeze=False, sharey="row", height_ratios=heights)
    for line, (title, cases) in zip(grid, groups.items(), strict=True):
        names = _names(cases)
        for axes, which in zip(line, panels, strict=True):
            _panel(axes, which, cases, names, marks)
        line[0].set_yticks(range(len(names)), [labels.label(x, data.get("versions")) for x in names])
        line[0].set_ylim(len(names) - 0.5, -0.5)
        style.emphasize(line[0], names)
        if len(groups) > 1:
            line[0].set_title(title)
    for axes, which in zip(grid[-1], panels, strict=True):
        axes.set_xlabel(f"{PANELS[which]}, log scale")
    handles = [
        Line2D([], [], color=color, marker=marker, linestyle="", markersize=9, label=label)
        for label, (color, marker) in marks.items()
    ]
    style.legend(sheet, handles, len(handles))
    return sheet.figure


def _mark(case: Case) -> str:
    """What distinguishes the case from the others of its group."""
    return "peaked" if case.get("peaked") else f"logits to about {case.get('scale') or 0.0:g}"


def _marks(cases: dict[str, Case]) -> dict[str, tuple[str, str]]:
    """(colour, marker) by name, the smallest logits first, peaked last."""
    ordered = sorted(cases.values(), key=figures.by_logits)
    found = dict.fromkeys(map(_mark, ordered))
    return {name: PEAKED if name == "peaked" else MARKS[i % len(MARKS)] for i, name in enumerate(found)}


def _has(case: Case, which: str) -> bool:
    return any(figures.error(case, name, which) is not None for name in figures.providers(case))


def _names(cases: dict[str, Case]) -> list[str]:
    """Who has an error of the log-probabilities, the most exact (of the largest logits) first."""
    ordered = sorted(cases.values(), key=lambda case: (bool(case.get("peaked")), -(case.get("scale") or 0.0)))
    found = {}
    for name in figures.names(cases):
        known = [x for case in ordered if (x := figures.error(case, name, "logp_mean")) is not None]
        if known and not figures.is_products(name):
            found[name] = known[0]
    return sorted(found, key=lambda x: found[x])


def _panel(axes: Axes, which: str, cases: dict[str, Case], names: list[str], marks: dict[str, tuple[str, str]]) -> None:
    for y, name in enumerate(names):
        points = {_mark(case): figures.error(case, name, which) for case in cases.values()}
        known = {label: x for label, x in points.items() if x is not None}
        if known:
            axes.plot([min(known.values()), max(known.values())], [y, y], color=style.GRID, linewidth=3, zorder=1)
        for label in (x for x in marks if x in known):
            color, marker = marks[label]
            axes.plot(known[label], y, marker, color=color, markersize=8.5, markeredgecolor="white", clip_on=False)
    if which == "ratio_off":
        axes.set_xscale("symlog", linthresh=SMALLEST_SHARE, linscale=0.6)
        axes.set_xlim(-0.0001, 1.3)
        axes.set_xticks([0, 0.001, 0.01, 0.1, 1.0])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: labels.share(x)))
    else:
        axes.set_xscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid()
    axes.spines["left"].set_visible(False)
