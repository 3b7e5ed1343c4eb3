"""A row for each case: how many times faster ours is than TRL's head, and than all logits at once."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from benchmarks.report import figures, labels
from benchmarks.report.figures import Case
from benchmarks.report.plots import style

ROW = 0.43  # inches
OTHERS = ("trl", "eager")
MARKS = {"trl": ("o", "●"), "eager": ("s", "■")}
TICKS = (0.125, 0.25, 0.5, 1, 2, 4, 8, 16)
Spread = tuple[float, float, float]  # of the median, and between the quantiles


def draw(data: dict[str, Any]) -> Figure | None:
    """None: there are fewer than two cases in which ours and one of the others were timed."""
    cases = figures.compared(data)
    found = {name: {x: over for x in OTHERS if (over := faster(case, x))} for name, case in cases.items()}
    found = {name: x for name, x in found.items() if x}
    if len(found) < 2:
        return None
    names = [x for x in OTHERS if any(x in over for over in found.values())]
    notes = ["Lines: what the 20 and 80 % quantiles of the rounds of both allow."]
    figure = style.sheet(
        data,
        claim(data),
        f"Time over that of grpo_kernels, case by case{_conditions(data, found)}",
        ROW * len(found) + 1.1,
        notes,
    )
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.axvline(1.0, color=style.OURS, linewidth=4)
    for y, over in enumerate(found.values()):
        for name, (middle, low, high) in over.items():
            axes.plot([low, high], [y, y], color=style.color(name), linewidth=2.5, alpha=0.6)
            axes.plot(middle, y, MARKS[name][0], color=style.color(name), markersize=12)
    style.rows(axes, [labels.case_name(name, cases[name]) for name in found])
    ends = [x for over in found.values() for spread in over.values() for x in spread]
    low, high = 0.85 * min(*ends, 1.0), 1.15 * max(ends)
    axes.set_xlim(low, high)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks([x for x in TICKS if low <= x <= high])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}x"))
    axes.grid(axis="x")
    axes.set_xlabel("how many times faster grpo_kernels is")
    axes.annotate(
        "grpo_kernels", (1.0, 1.0), (0, 6), xycoords=("data", "axes fraction"), textcoords="offset points", ha="center",
        color=style.OURS, weight="bold",
    )  # fmt: skip
    for name, at, side in zip(names, (1.0, 0.0), ("right", "left"), strict=False):
        words = f"{MARKS[name][1]} {labels.brief_name(name)}"
        axes.text(at, 1.012, words, transform=axes.transAxes, color=style.color(name), weight="bold", ha=side)
    return figure


def _conditions(data: dict[str, Any], found: dict[str, Any]) -> str:
    """The kind of device, and the dtype of most cases; those of another one carry it in their name."""
    dtypes = [figures.compared(data)[name].get("dtype") for name in found]
    most = max({x for x in dtypes if x}, key=dtypes.count, default=None)
    parts = ["on a CPU" if data.get("device") == "cpu" else "", labels.DTYPES.get(most or "", "")]
    said = ", ".join(x for x in parts if x)
    return f"; {said} where no other dtype is named" if said else ""


def faster(case: Case, name: str) -> Spread | None:
    """The time of `name` over ours: of the medians, and from the least to the most that the quantiles allow."""
    mode = (figures.timed_modes(case) or ["full"])[0]
    if figures.median(case, name, mode) is None or figures.median(case, figures.OURS, mode) is None:
        return None
    theirs, ours = (figures.timing(figures.providers(case)[x], mode) or {} for x in (name, figures.OURS))
    middle = theirs["median"] / ours["median"]
    low, high = (
        (theirs.get(a) or theirs["median"]) / (ours.get(b) or ours["median"])
        for a, b in (("p20", "p80"), ("p80", "p20"))
    )
    return middle, low, high


def claim(data: dict[str, Any]) -> str:
    """The title: in how many cases ours is faster than TRL's head."""
    found = [over for case in figures.compared(data).values() if (over := faster(case, "trl"))]
    won = sum(middle > 1 for middle, *_ in found)
    return f"Faster than {labels.brief_name('trl')} in {won} of {len(found)} cases"
