"""Figures of the results, read from the JSON and from nothing else: the same results give the same bytes.

Every figure is a light card that any page can carry. Its title is the claim; its subtitle says what was measured, in
which dtype, on which device, at which shape and on which day. A provider has one colour.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks import claims, figures, labels
from benchmarks.claims import multiple
from benchmarks.figures import ALL_OPTIONS, DEFAULTS, OURS, REGROUPED, STOCK, Case, Scene, faster, step_seconds

WIDTH, DPI = 11.0, 120  # inches
CARD, INK, SOFT, GRID = "#fbfbf9", "#1f2328", "#57606a", "#d8dee4"
BLUE = "#0072B2"  # of ours
# Okabe and Ito's colours and some greys, which the colour-blind can tell apart; what is drawn has its name beside it.
COLORS = {
    "ours": BLUE,
    "eager": "#6E7781",
    "compiled": "#9AA5B1",
    "linear_ce": "#7B5EA7",
    "trl": "#D55E00",
    "liger_grpo": "#009E73",
    "liger_ce": "#009E73",
    "liger_torch": "#009E73",
    "verl_torch": "#CC79A7",
    "verl_triton": "#CC79A7",
    "unsloth": "#E69F00",
    "cce": "#7A5C00",
    "quack": "#56B4E9",
}
TEXT, SMALL = 17, 11  # points
MARGIN, TITLE, LINE, FOOT = 0.3, 0.43, 0.31, 0.2  # inches


@contextmanager
def looks() -> Iterator[None]:
    """Matplotlib's defaults and ours, whatever the user's own settings are."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "font.family": "DejaVu Sans",
                "font.size": TEXT,
                "figure.facecolor": CARD,
                "savefig.facecolor": CARD,
                "axes.facecolor": CARD,
                "text.color": INK,
                "axes.labelcolor": SOFT,
                "axes.labelsize": TEXT - 2,
                "axes.edgecolor": GRID,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.axisbelow": True,
                "grid.color": GRID,
                "grid.linewidth": 1.0,
                "xtick.color": SOFT,
                "ytick.color": INK,
                **{f"{axis}tick.{which}.size": 0 for axis in "xy" for which in ("major", "minor")},
                "svg.hashsalt": "grpo_kernels",
            }
        )
        yield


def sheet(claim: str, subtitle: Sequence[str], body: float, notes: Sequence[str] = ()) -> Figure:
    """A figure with `body` inches for its axes, under the claim and its conditions; `notes` stand below."""
    titles = balanced(claim, 54)
    about = balanced(re.sub(r"\b([NTHV]) (?=\d)", "\\1\u00a0", "; ".join(x for x in subtitle if x)), 92)
    small = [line for text in notes for line in textwrap.wrap(text, 124)]
    top = MARGIN + TITLE * len(titles) + LINE * len(about) + 0.15
    bottom = MARGIN + FOOT * len(small) + 0.1
    height = top + body + bottom
    figure = Figure(figsize=(WIDTH, height), dpi=DPI)
    at, left = MARGIN, MARGIN / WIDTH
    figure.text(left, 1 - at / height, "\n".join(titles), size=24, weight="bold", va="top", linespacing=1.15)
    at += TITLE * len(titles)
    figure.text(left, 1 - at / height, "\n".join(about), size=15, color=SOFT, va="top", linespacing=1.25)
    figure.text(left, MARGIN / height, "\n".join(small), size=SMALL, color=SOFT, va="bottom", linespacing=1.25)
    rect = (left, bottom / height, 1 - 2 * left, body / height)
    figure.set_layout_engine(ConstrainedLayoutEngine(rect=rect, w_pad=0.04, h_pad=0.04))
    return figure


def conditions(data: dict[str, Any], what: str, dtype: str, *shape: str) -> list[str]:
    """A subtitle: what was measured, dtype, device, shape, date."""
    device = labels.where(data).replace("; ", ", ")
    on = f"CPU: {device}" if data.get("device") == "cpu" else device
    return [", ".join(part for part in (what, dtype) if part), on, *shape, labels.day(data)]


def balanced(text: str, width: int) -> list[str]:
    """Lines of at most `width`, as few as there have to be, of about the same length."""
    lines = textwrap.wrap(text, width)
    while len(shorter := textwrap.wrap(text, width - 1)) == len(lines) and len(lines) > 1:
        lines, width = shorter, width - 1
    return lines


def color(name: str) -> str:
    """Of a provider, the same in every figure."""
    if figures.is_ours(name):
        return BLUE
    return COLORS.get(name, COLORS.get(name.split("/")[0], INK))


def rows(axes: Axes, words: Sequence[str], ours: Sequence[bool] = ()) -> None:
    """One row for each of `words`, the first on top; those of ours in its colour."""
    axes.set_yticks(range(len(words)), list(words))
    axes.set_ylim(len(words) - 0.45, -0.55)
    axes.spines[["left", "bottom"]].set_visible(False)
    for text, is_ours in zip(axes.get_yticklabels(), ours, strict=False):
        if is_ours:
            text.set(color=BLUE, fontweight="bold")


def three(value: float) -> str:
    """Three digits, zeros at the end included."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def save(figure: Figure, path: Path) -> Path:
    """Write a PNG, the same bytes for the same results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
    return path


# The whole optimizer step.

STEP_BAR = 0.56  # inches a variant
# Of the variants that were timed; the table has all of them.
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
    "layout='tree'. Each + adds to the line above it. Saved activations: of the largest micro-batch."
)


def draw_step(data: dict[str, Any]) -> Figure | None:
    """None: the step of stock TRL or of ours was not timed."""
    scene = claims.first_scene(data)
    if scene is None or not claims.step_claim(data):
        return None
    found = {name: x for name, x in step_seconds(scene).items() if name in STEP_SHOWN}
    run = figures.of_run(data, "step")
    model, batch, *others = scene["about"].split("; ")
    dtype = model.rpartition(", ")[2]
    subtitle = conditions(run, "An optimizer step without generation", dtype, model.removesuffix(f", {dtype}"), batch)
    notes = [OPTIONS, *_step_notes(figures.scenes(data), "; ".join(others)), labels.made(run)]
    figure = sheet(claims.step_claim(data), subtitle, STEP_BAR * len(found) + 0.8, notes)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    _bars(left, found, "s", {name: faster(scene, name) for name in found})
    _bars(right, {name: scene["variants"][name]["saved_mib"]["max"] for name in found}, "MiB", {})
    rows(left, [STEP_SHOWN[name] for name in found], [name == DEFAULTS for name in found])
    right.spines[["left", "bottom"]].set_visible(False)
    left.set_xlabel("CPU seconds, times as fast")
    right.set_xlabel("saved activations")
    return figure


def _step_notes(found: dict[str, Scene], batch: str) -> list[str]:
    """The rest of the first scene's batch; of the other scenes stock TRL's seconds over those of the defaults."""
    said = [f"{_sentence(batch)}."] if batch else []
    over = {name: times[0] for name, scene in list(found.items())[1:] if (times := faster(scene, DEFAULTS))}
    if over:
        said.append(
            f"Our defaults elsewhere: {'; '.join(f'{x}, {multiple(y)} times as fast' for x, y in over.items())}."
        )
    return said


def _bars(axes: Axes, found: dict[str, float], unit: str, over: dict[str, Any]) -> None:
    """A bar for each variant, its value at its end, and how many times as fast as stock TRL it is."""
    colours = [color("trl" if name == STOCK else OURS) for name in found]
    axes.barh(range(len(found)), list(found.values()), height=0.68, color=colours)
    for y, (name, value) in enumerate(found.items()):
        times = "" if name == STOCK or not over.get(name) else f"   {multiple(over[name][0])}x"
        axes.annotate(
            f"{three(value)} {unit}{times}", (value, y), (9, 0), textcoords="offset points", va="center",
            weight="bold" if name == DEFAULTS else "normal",
        )  # fmt: skip
    axes.set_xlim(0, 1.45 * max(found.values()))
    axes.set_xticks([])


# Extra memory of one loss against tokens: a line for each provider, its name at its end.

MIB = {64: "64 MiB", 256: "256 MiB", 1024: "1 GiB", 4096: "4 GiB", 16384: "16 GiB", 65536: "64 GiB"}
APART = 0.3  # least distance of two labels, in factors of e on an axis of some 6 of them


def draw_memory(data: dict[str, Any]) -> Figure | None:
    """None: memory was not measured on several numbers of tokens."""
    cases = claims.memory_cases(data)
    lines = {name: line for name in figures.names(cases) if len(line := claims.memory_along(cases, name)) > 1}
    if len(cases) < 2 or OURS not in lines:
        return None
    about = {key: x for key, x in labels.common(cases).items() if key != "model"}  # of which there is the V only
    run, dtype = figures.of_run(data, "memory"), labels.DTYPES.get(about.get("dtype", ""), "")
    shape = labels.shape({key: x for key, x in about.items() if key != "dtype"})
    subtitle = conditions(run, "Peak memory of one loss beyond its inputs and gradients", dtype, shape)
    notes = [*_memory_notes(data, about), labels.made(run)]
    figure = sheet(claims.memory_claim(data), subtitle, 5.3, notes)
    axes = figure.subplots()
    axes.set(xscale="log", yscale="log")
    for name, line in lines.items():
        dashes = (0, (2.5, 1.5)) if figures.is_ours(name) and name != OURS else "solid"
        width = 5.0 if name == OURS else 3.5
        axes.plot(
            *zip(*line, strict=True), color=color(name), linewidth=width, linestyle=dashes, marker="o",
            markersize=8, zorder=4 if figures.is_ours(name) else 3,
        )  # fmt: skip
    _memory_scales(axes, [case["n"] for case in cases.values()], [y for line in lines.values() for _, y in line])
    _name_lines(axes, lines)
    axes.set_xlabel("tokens")
    return figure


def _memory_notes(data: dict[str, Any], about: Case) -> list[str]:
    """What the figure does not show: why H is small, what hides there, and who no longer fitted."""
    said = [f"H is {about.get('h')}, which keeps the measurement cheap: the size of the logits does not depend on H."]
    main = figures.of_part(data, "main").get("main", {})
    theirs, ours = (figures.extra_mib(main, name) for name in ("liger_grpo", OURS)) if main else (None, None)
    if theirs and ours:
        said[0] += (
            f" The weight's gradient does, and copies of it hardly show here: at H {main['h']} and {main['n']} tokens "
            f"Liger takes {theirs:.0f} MiB, grpo_kernels {ours:.0f} MiB."
        )
    for case in claims.memory_cases(data).values():
        for name, x in figures.providers(case).items():
            if not figures.ran(x):
                said.append(f"No point of {labels.brief_name(name)} at {case['n']:,}: {labels.tidy(x.get('reason'))}.")
    return said


def _memory_scales(axes: Axes, tokens: list[int], mib: list[float]) -> None:
    axes.set_xticks(tokens, [f"{n:,}" for n in tokens], size=TEXT - 3)
    axes.set_xlim(0.85 * min(tokens), 5.5 * max(tokens))
    shown = {y: words for y, words in MIB.items() if 0.5 * min(mib) <= y <= 1.5 * max(mib)}
    axes.set_yticks(list(shown), list(shown.values()))
    axes.set_ylim(0.6 * min(mib), 1.6 * max(mib))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(FixedLocator(list(shown)))
    axes.grid(axis="y")
    axes.spines[["left", "bottom"]].set_visible(False)


def _name_lines(axes: Axes, lines: dict[str, list[tuple[int, float]]]) -> None:
    """At the end of each line; those that would lie on each other are moved up."""
    height = 0.0
    for name, line in sorted(lines.items(), key=lambda item: item[1][-1][1]):
        n, mib = line[-1]
        place = max(mib, height)
        height = place * (1 + APART)
        set_to = name.partition("@")[2] if figures.is_ours(name) else ""
        words = f"set to {set_to} MiB: {_size(mib)}" if set_to else f"{labels.brief_name(name)}: {_size(mib)}"
        axes.annotate(
            words, (n, place), (12, 0), textcoords="offset points", va="center", color=color(name),
            weight="bold" if figures.is_ours(name) else "normal", size=TEXT - 1,
            bbox={"facecolor": CARD, "edgecolor": "none", "pad": 2},
        )  # fmt: skip


def _size(mib: float) -> str:
    return f"{mib / 1024:.1f} GiB" if mib >= 1000 else f"{mib:.0f} MiB"


# The main case: the time of each provider with the quantiles, and how many times faster ours is.

TIME_BAR = 0.52  # inches a provider


def draw_time(data: dict[str, Any]) -> Figure | None:
    """None: nobody but ours was timed in the main case."""
    case, mode = claims.main_case(data), "full"
    shown = [x for x in figures.providers(case) if not figures.is_products(x) and ("/" not in x and "@" not in x)]
    found = {x: ms / 1e3 for x in shown if (ms := figures.median(case, x, mode)) is not None}
    if len(found) < 2 or OURS not in found:
        return None
    names = sorted(found, key=lambda x: found[x])
    dtype = labels.DTYPES.get(case.get("dtype", ""), "")
    shape = labels.shape({key: x for key, x in case.items() if key != "dtype"})
    subtitle = conditions(data, "Forward and backward of one loss", dtype, shape)
    notes = [f"{_sentence(labels.features(case))}; {labels.count(case['rounds'], 'round')}.", *_time_notes(case)]
    figure = sheet(claims.time_claim(data), subtitle, TIME_BAR * len(names) + 0.75, [*notes, labels.made(data)])
    axes = figure.subplots()
    axes.barh(range(len(names)), [found[x] for x in names], height=0.68, color=[color(x) for x in names])
    for y, name in enumerate(names):
        spread = figures.timing(figures.providers(case)[name], mode) or {}
        low, high = ((spread.get(q) or 1e3 * found[name]) / 1e3 for q in ("p20", "p80"))
        axes.plot([low, high], [y, y], color=INK, linewidth=2, marker="|", markersize=12)
        over = found[name] / found[OURS]
        words = "" if name == OURS else f"   {multiple(over)}x"
        axes.annotate(
            f"{three(found[name])} s{words}", (max(high, found[name]), y), (9, 0), textcoords="offset points",
            va="center", weight="bold" if name == OURS else "normal",
        )  # fmt: skip
    rows(axes, [labels.brief_name(x) for x in names], [x == OURS for x in names])
    _draw_limit(axes, _limit(case), min(found.values()))
    axes.set_xlim(0, 1.28 * max(found.values()))
    axes.set_xticks([])
    axes.set_xlabel("seconds, and times ours; lines: 20 to 80 % of the rounds")
    return figure


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _time_notes(case: Case) -> list[str]:
    """Where the limit cannot be told from ours."""
    ours, products = figures.median(case, OURS, "full"), _limit(case)
    if products is None or ours is None or 1e3 * products < ours:
        return []
    return ["The case's matrix products alone take as long as ours, within noise."]


def _limit(case: Case) -> float | None:
    """Seconds of the case's matrix products alone."""
    ms = figures.median(case, figures.PRODUCTS, "full")
    return None if ms is None else ms / 1e3


def _draw_limit(axes: Any, seconds: float | None, fastest: float) -> None:
    """A line, where it is below whatever does more."""
    if seconds is None or seconds >= fastest:
        return
    axes.axvline(seconds, color=INK, linewidth=2, linestyle=(0, (3, 2)), ymax=0.97)
    axes.annotate(
        f"its matrix products alone: {three(seconds)} s", (seconds, -0.75), (8, 0), textcoords="offset points",
        va="center", color=INK, size=TEXT - 2,
    )  # fmt: skip
    bottom, _ = axes.get_ylim()
    axes.set_ylim(bottom, -1.1)


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
