"""How every figure looks: a light card that any page can carry, a claim as its title, one colour a provider."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from benchmarks.report import figures, labels

WIDTH, DPI = 11.0, 120  # inches
CARD, INK, SOFT, GRID = "#fbfbf9", "#1f2328", "#57606a", "#d8dee4"
OURS, SEVERAL = "#0072B2", "#B9A58C"  # what several providers share is in nobody's colour
# Okabe and Ito's colours and some greys, which the colour-blind can tell apart; what is drawn has its name beside it.
COLORS = {
    "ours": OURS,
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


def sheet(data: dict[str, Any], claim: str, subtitle: str, body: float, notes: Sequence[str] = ()) -> Figure:
    """A figure with `body` inches for its axes, under the claim and what was measured.

    Below stand `notes`, what has to be known of this figure, and the conditions of the run.
    """
    titles = textwrap.wrap(claim, 54)
    about = textwrap.wrap(re.sub(r"\b([NTHV]) (?=\d)", "\\1\u00a0", subtitle), 90)
    small = [line for text in (*notes, labels.footer(data)) for line in textwrap.wrap(text, 130)]
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


def color(name: str) -> str:
    """Of a provider, the same in every figure."""
    if figures.is_ours(name):
        return OURS
    return COLORS.get(name, COLORS.get(name.split("/")[0], INK))


def rows(axes: Axes, words: Sequence[str], ours: Sequence[bool] = ()) -> None:
    """One row for each of `words`, the first on top; those of ours in its colour."""
    axes.set_yticks(range(len(words)), list(words))
    axes.set_ylim(len(words) - 0.45, -0.55)
    axes.spines[["left", "bottom"]].set_visible(False)
    for text, is_ours in zip(axes.get_yticklabels(), ours, strict=False):
        if is_ours:
            text.set(color=OURS, fontweight="bold")


def three(value: float) -> str:
    """Three digits, zeros at the end included."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def times(value: float) -> str:
    """How many times: 1.6, 16, 1,600."""
    return f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


def save(figure: Figure, path: Path) -> Path:
    """Write a PNG, the same bytes for the same results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
    return path
