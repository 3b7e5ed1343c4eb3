"""Figures of the results, read from the JSON and from nothing else: the same results give the same bytes.

Every figure is a light card that any page can carry. Its title is the claim; its subtitle says what was measured, in
which dtype, on which device, at which shape and on which day. A provider has one colour.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks import figures, tables, words
from benchmarks.figures import ALL_OPTIONS, DEFAULTS, OURS, PRODUCTS, REGROUPED, STOCK
from benchmarks.words import multiple

WIDTH, DPI = 11.0, 120  # inches
CARD, INK, SOFT, GRID = "#fbfbf9", "#1f2328", "#57606a", "#d8dee4"
BLUE, GREEN, ORANGE, GREY, PURPLE, PINK = (
    "#0072B2",
    "#009E73",
    "#D55E00",
    "#6E7781",
    "#7B5EA7",
    "#CC79A7",
)
# Okabe and Ito's colours and some greys, which the colour-blind can tell apart; what is drawn has its name beside it.
COLORS = {
    "ours": BLUE, "eager": GREY, "compiled": "#9AA5B1", "linear_ce": PURPLE, "trl": ORANGE, "liger_grpo": GREEN,
    "liger_ce": GREEN, "verl_torch": PINK, "verl_triton": PINK, "unsloth": "#E69F00", "cce": "#7A5C00",
    "quack": "#56B4E9",
}  # fmt: skip
TEXT, SMALL = 17, 11  # points
MARGIN, TITLE, LINE, FOOT, BAR = 0.3, 0.43, 0.31, 0.2, 0.54  # inches
PERCENT = {y: f"{y} %" for y in (0, 25, 50, 75, 100)}
LOOKS = {
    "font.family": "DejaVu Sans",
    "font.size": TEXT,
    **dict.fromkeys(("figure.facecolor", "savefig.facecolor", "axes.facecolor"), CARD),
    "text.color": INK,
    "axes.labelcolor": SOFT,
    "axes.labelsize": TEXT - 2,
    "axes.edgecolor": GRID,
    **{f"axes.spines.{side}": False for side in ("top", "right", "bottom", "left")},
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 1.0,
    "xtick.color": SOFT,
    "ytick.color": INK,
    **{f"{axis}tick.{which}.size": 0 for axis in "xy" for which in ("major", "minor")},
}


@contextmanager
def looks() -> Iterator[None]:
    """Matplotlib's defaults and ours, whatever the user's own settings are."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(LOOKS)
        yield


def sheet(claim: str, subtitle: Sequence[str], body: float, notes: Sequence[str] = ()) -> Figure:
    """A figure with `body` inches for its axes, under the claim and its conditions; `notes` stand below."""
    titles = balanced(claim, 54)
    about = balanced(
        re.sub(r"\b([NTHV]) (?=\d)", "\\1\u00a0", "; ".join(x for x in subtitle if x)), 92
    )
    small = [line for text in notes for line in textwrap.wrap(text, 124)]
    top = MARGIN + TITLE * len(titles) + LINE * len(about) + 0.15
    bottom = MARGIN + FOOT * len(small) + 0.1
    height, left = top + body + bottom, MARGIN / WIDTH
    figure = Figure(figsize=(WIDTH, height), dpi=DPI)
    below = 1 - (MARGIN + TITLE * len(titles)) / height
    figure.text(
        left,
        1 - MARGIN / height,
        "\n".join(titles),
        size=24,
        weight="bold",
        va="top",
        linespacing=1.15,
    )
    figure.text(left, below, "\n".join(about), size=15, color=SOFT, va="top", linespacing=1.25)
    figure.text(
        left,
        MARGIN / height,
        "\n".join(small),
        size=SMALL,
        color=SOFT,
        va="bottom",
        linespacing=1.25,
    )
    rect = (left, bottom / height, 1 - 2 * left, body / height)
    figure.set_layout_engine(ConstrainedLayoutEngine(rect=rect, w_pad=0.04, h_pad=0.04))
    return figure


def conditions(data: dict[str, Any], what: str, dtype: str, *shape: str) -> list[str]:
    """A subtitle: what was measured, dtype, device, shape, date."""
    device = words.where(data).replace("; ", ", ")
    on = f"CPU: {device}" if data.get("device") == "cpu" else device
    return [", ".join(part for part in (what, dtype) if part), on, *shape, words.day(data)]


def balanced(text: str, width: int) -> list[str]:
    """Lines of at most `width`, as few as there have to be, of about the same length."""
    lines = textwrap.wrap(text, width)
    while len(shorter := textwrap.wrap(text, width - 1)) == len(lines) and len(lines) > 1:
        lines, width = shorter, width - 1
    return lines


def color(name: str) -> str:
    return COLORS.get(re.split("[/@]", name)[0], INK)


def three(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def save(figure: Figure, path: Path) -> Path:
    """Write a PNG, the same bytes for the same results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
    return path


# Bars with their names; lines with their names at the end.


def bars(
    axes: Axes,
    values: Mapping[str, float],
    colors: Sequence[str],
    texts: Sequence[str],
    ours: int,
    ends: Sequence[float] = (),
) -> None:
    """A named bar for each value, the first on top, with its text at its end, or at `ends`; ours stands out."""
    axes.barh(range(len(values)), [*values.values()], height=0.68, color=colors)
    for y, (end, text) in enumerate(zip(ends or values.values(), texts, strict=True)):
        weight = "bold" if y == ours else "normal"
        axes.annotate(
            text, (end, y), (9, 0), textcoords="offset points", va="center", weight=weight
        )
    axes.set_xlim(0, 1.45 * max(values.values()))
    axes.set_xticks([])
    axes.set_yticks(range(len(values)), [*values])
    axes.set_ylim(len(values) - 0.45, -0.55)
    for label in axes.get_yticklabels()[
        ours : ours + 1
    ]:  # none where a panel to the left has the names
        label.set(color=BLUE, fontweight="bold")


End = tuple[float, str, str]  # of a line: y, what stands there, its colour


def band(
    axes: Axes, x: Sequence[float], runs: Sequence[Sequence[float]], text: str, shade: str
) -> End:
    """Draw the mean of some runs and the range that they fill; return the end of the mean, which `text` may show."""
    columns = list(zip(*runs, strict=True))
    mean = [sum(c) / len(c) for c in columns]
    axes.fill_between(
        x,
        [min(c) for c in columns],
        [max(c) for c in columns],
        color=shade,
        alpha=0.15,
        linewidth=0,
    )
    axes.plot(x, mean, color=shade, linewidth=3.5)
    return mean[-1], text.format(mean[-1]), shade


def name_ends(axes: Axes, ends: Sequence[End], x: float) -> None:
    """At the end of each line its name in its colour; moved apart from each other."""
    move, back = axes.transData.transform, axes.transData.inverted().transform
    ordered = sorted(ends)
    low, high = (move((x, y))[1] for y in axes.get_ylim())
    pixels = [move((x, y))[1] for y, _, _ in ordered]
    for (_, name, shade), pixel in zip(ordered, apart(pixels, 0.066 * (high - low)), strict=True):
        axes.annotate(
            name, (x, back((0, pixel))[1]), (10, 0), textcoords="offset points", va="center", color=shade,
            size=TEXT - 3, bbox={"facecolor": CARD, "edgecolor": "none", "pad": 1},
        )  # fmt: skip


def apart(heights: Sequence[float], least: float) -> list[float]:
    """Rising heights, moved as little up as down so that there is a distance of `least` between them."""
    up, down = list(heights[:1]), list(heights[-1:])
    for height in heights[1:]:
        up.append(max(height, up[-1] + least))
    for height in heights[-2::-1]:
        down.insert(0, min(height, down[0] - least))
    return [(a + b) / 2 for a, b in zip(up, down, strict=True)]


def scale(axes: Axes, ticks: dict[float, str], low: float, high: float) -> None:
    """A vertical axis from `low` to `high` with these ticks alone, and lines at them."""
    axes.set_ylim(low, high)
    shown = {y: text for y, text in ticks.items() if low <= y <= high}
    axes.set_yticks(list(shown), list(shown.values()))
    axes.yaxis.set_major_locator(FixedLocator(list(shown)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize=TEXT - 3)
    axes.grid(axis="y")


# The whole optimizer step: of the variants that were timed; the table has all of them.
STEP_SHOWN = {
    STOCK: "stock TRL",
    "fused head alone": "our head alone",
    "trim": "layout='trim'",
    DEFAULTS: "our defaults",
    REGROUPED: "+ regroup",
    ALL_OPTIONS: "+ zero_advantage='skip'",
}
OPTIONS = (
    "Our head alone: zero_advantage='train', layout='padded'. Below it zero_advantage is 'score'; our defaults have "
    "layout='tree'. Each + adds to the line above it. Times as fast: the median of the rounds' ratios."
)


def draw_step(data: dict[str, Any]) -> Figure | None:
    """Seconds and saved memory of each variant; None: the step of stock TRL or of ours was not timed."""
    if not (claim := tables.step_claim(data)):
        return None
    scene, run = next(iter(figures.scenes(data).values())), figures.of_run(data, "step")
    seconds = {name: x for name, x in figures.step_seconds(scene).items() if name in STEP_SHOWN}
    model, batch, *others = scene["about"].split("; ")
    model, _, dtype = model.rpartition(", ")
    subtitle = conditions(run, "An optimizer step without generation", dtype, model, batch)
    figure = sheet(
        claim,
        subtitle,
        BAR * len(seconds) + 0.8,
        [OPTIONS, f"{_sentence(others)}.", words.made(run)],
    )
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    colors, ours = (
        [color("trl" if name == STOCK else OURS) for name in seconds],
        [*seconds].index(DEFAULTS),
    )
    over = {
        name: "" if name == STOCK else f"   {multiple(figures.faster(scene, name)[0])}x"
        for name in seconds
    }
    mib = {STEP_SHOWN[name]: scene["variants"][name]["saved_mib"]["max"] for name in seconds}
    bars(right, mib, colors, [f"{three(x)} MiB" for x in mib.values()], ours)
    shown = {STEP_SHOWN[name]: x for name, x in seconds.items()}
    bars(left, shown, colors, [f"{three(x)} s{over[name]}" for name, x in seconds.items()], ours)
    left.set_xlabel("CPU seconds, times as fast")
    right.set_xlabel("activations that the largest\nmicro-batch saves")
    return figure


def _sentence(clauses: Sequence[str]) -> str:
    text = "; ".join(clauses)
    return text[:1].upper() + text[1:]


# Extra memory of one loss against tokens: a line for each provider, its name at its end.
MIB = {64: "64 MiB", 256: "256 MiB", 1024: "1 GiB", 4096: "4 GiB", 16384: "16 GiB", 65536: "64 GiB"}


def draw_memory(data: dict[str, Any]) -> Figure | None:
    """Extra memory of each provider; None: memory of ours was not measured on several numbers of tokens."""
    cases = tables.memory_cases(data)
    lines = {
        name: line
        for name in figures.names(cases)
        if len(line := {x["n"]: mib for x in cases.values() if (mib := figures.extra_mib(x, name))})
        > 1
    }
    if OURS not in lines:
        return None
    about = {
        key: x for key, x in words.common(cases).items() if key != "model"
    }  # of which there is the V only
    run, dtype = figures.of_run(data, "memory"), words.DTYPES.get(about.get("dtype", ""), "")
    what = "Peak memory of one loss beyond its inputs and gradients"
    subtitle = conditions(run, what, dtype, words.shape({**about, "dtype": ""}))
    notes = [
        f"H is {about.get('h')}, which keeps the measurement cheap: the size of the logits does not depend on H."
    ]
    notes += [
        f"No point of {words.brief_name(name)} at {case['n']:,}: {words.tidy(x.get('reason'))}."
        for case in cases.values()
        for name, x in figures.providers(case).items()
        if not figures.ran(x)
    ]
    figure = sheet(
        tables.memory_claim(data) or "Extra memory of one loss",
        subtitle,
        5.3,
        [*notes, words.made(run)],
    )
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log", xlabel="tokens")
    ends = []
    for name, line in lines.items():
        style = "--" if figures.is_ours(name) and name != OURS else "-"
        axes.plot(
            [*line],
            [*line.values()],
            style,
            color=color(name),
            linewidth=5 if name == OURS else 3.5,
            marker="o",
        )
        text = f"set to {name.partition('@')[2]} MiB" if style == "--" else words.brief_name(name)
        last = line[max(line)]
        size = f"{last / 1024:.1f} GiB" if last >= 1000 else f"{last:.0f} MiB"
        ends.append((last, f"{text}: {size}", color(name)))
    tokens, mib = (
        [case["n"] for case in cases.values()],
        [y for line in lines.values() for y in line.values()],
    )
    axes.set_xticks(tokens, [f"{n:,}" for n in tokens])
    axes.set_xlim(0.85 * min(tokens), 7 * max(tokens))
    scale(axes, MIB, 0.6 * min(mib), 1.6 * max(mib))
    name_ends(axes, ends, max(tokens))
    return figure


def draw_time(data: dict[str, Any]) -> Figure | None:
    """The time of each provider in the main case, with its quantiles; None: TRL's head or ours was not timed."""
    case = tables.main_case(data)
    if not (claim := tables.time_claim(data)):
        return None
    plain = [x for x in figures.providers(case) if not re.search("[/@]", x) and x != PRODUCTS]
    spreads = {
        x: figures.measured(case, x, "ms", "full")
        for x in plain
        if figures.median(case, x) is not None
    }
    names = sorted(spreads, key=lambda x: spreads[x]["median"])
    middle, low, high = ([spreads[x][q] / 1e3 for x in names] for q in ("median", "p20", "p80"))
    dtype, ours = words.DTYPES.get(case.get("dtype", ""), ""), names.index(OURS)
    subtitle = conditions(
        data, "Forward and backward of one loss", dtype, words.shape({**case, "dtype": ""})
    )
    notes = [f"{_sentence([words.features(case), words.count(case['rounds'], 'round')])}."]
    if (limit := figures.median(case, PRODUCTS)) is not None:
        least = f"{three(limit / 1e3)} s" if limit / 1e3 < middle[0] else "no less"
        notes.append(f"The case's matrix products alone take {least}.")
    figure = sheet(claim, subtitle, BAR * len(names) + 0.75, [*notes, words.made(data)])
    axes = figure.subplots()
    shown = dict(zip(map(words.brief_name, names), middle, strict=True))
    texts = [
        f"{three(x)} s" + ("" if y == ours else f"   {multiple(x / middle[ours])}x")
        for y, x in enumerate(middle)
    ]
    bars(axes, shown, [color(x) for x in names], texts, ours, ends=high)
    for y in range(len(names)):
        axes.plot([low[y], high[y]], [y, y], color=INK, linewidth=2, marker="|", markersize=12)
    axes.set_xlim(0, 1.28 * max(high))
    axes.set_xlabel("seconds, and times ours; lines: 20 to 80 % of the rounds")
    return figure


DRAWN = {"step": draw_step, "memory": draw_memory, "time": draw_time}


def render(data: dict[str, Any], folder: Path) -> list[Path]:
    """The figures of which there are results, as PNG files in `folder`; which ones are not made is said on stderr."""
    made = []
    for name, draw in DRAWN.items():
        with looks():
            figure = draw(data)
            if figure is None:
                print(f"plots: no figures for {name}", file=sys.stderr)
            else:
                made.append(save(figure, folder / f"{name}.png"))
    return made
