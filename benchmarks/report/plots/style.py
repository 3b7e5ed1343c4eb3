"""How every plot looks: size, colours that the colour-blind can tell apart, title, footer with the conditions, file."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from benchmarks.report import figures, labels

WIDTH, DPI = 11.0, 150  # inches; a page shows it at half the pixels
INK, SOFT, GRID = "#1f2328", "#57606a", "#d8dee4"
OURS, VARIANT, PEER = "#0072B2", "#7FB8DA", "#B4BAC2"
# Okabe and Ito's colours, and a marker each, so that nothing hangs on the colour alone
LINES: dict[str, tuple[str, str]] = {
    "ours": (OURS, "o"),
    "products": ("#000000", "|"),
    "eager": ("#8A8F98", "s"),
    "eager/selective": ("#8A8F98", "X"),
    "compiled": ("#4D535B", "p"),
    "linear_ce": ("#56B4E9", "h"),
    "trl": ("#D55E00", "s"),
    "liger_grpo": ("#009E73", "^"),
    "liger_ce": ("#009E73", "v"),
    "liger_torch": ("#009E73", "<"),
    "verl_torch": ("#CC79A7", "D"),
    "verl_triton": ("#CC79A7", "d"),
    "unsloth": ("#E69F00", "P"),
    "cce": ("#7A5C00", "*"),
    "quack": ("#000000", "*"),
}
OTHER_MARKERS = ("o", "v", "^", "D", "s", "P")
HEADER, FOOTER, LINE = 0.58, 0.2, 0.24  # inches


@dataclass(frozen=True)
class Sheet:
    """A figure, and where in it the legend begins (a share of its height)."""

    figure: Figure
    legend_top: float


@contextmanager
def looks() -> Iterator[None]:
    """Matplotlib's defaults and ours, whatever the user's own settings are."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(
            {
                "font.family": "DejaVu Sans",
                "font.size": 12.5,
                "text.color": INK,
                "axes.labelcolor": SOFT,
                "axes.edgecolor": GRID,
                "axes.titlesize": 13,
                "axes.titlelocation": "left",
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.axisbelow": True,
                "grid.color": GRID,
                "grid.linewidth": 0.8,
                "xtick.color": SOFT,
                "ytick.color": INK,
                "xtick.major.size": 0,
                "ytick.major.size": 0,
                "xtick.minor.size": 0,
                "ytick.minor.size": 0,
                "legend.frameon": False,
                "svg.hashsalt": "grpo_kernels",
            }
        )
        yield


def sheet(
    data: dict[str, Any],
    title: str,
    subtitle: Sequence[str],
    body: float,
    legend_lines: int = 0,
    notes: Sequence[str] = (),
) -> Sheet:
    """A figure with `body` inches for its axes, and `legend_lines` lines free for `legend` above them.

    The conditions of the run stand below; `notes`, those of this plot, above them.
    """
    about = [line for text in subtitle for line in textwrap.wrap(text, 118)]
    conditions = [line for text in (*notes, labels.footer(data)) for line in textwrap.wrap(text, 145)]
    top = HEADER + LINE * len(about) + 0.29 * legend_lines + (0.06 if legend_lines else 0.0)
    bottom = FOOTER + 0.19 * len(conditions)
    height = top + body + bottom
    figure = Figure(figsize=(WIDTH, height), dpi=DPI)
    figure.text(0.012, 1 - 0.16 / height, title, size=17, weight="bold", va="top")
    figure.text(0.012, 1 - 0.51 / height, "\n".join(about), size=12, color=SOFT, va="top", linespacing=1.25)
    figure.text(0.012, 0.09 / height, "\n".join(conditions), size=9.5, color=SOFT, va="bottom", linespacing=1.25)
    figure.add_artist(
        matplotlib.lines.Line2D([0.012, 0.988], [(bottom - 0.03) / height] * 2, color=GRID, linewidth=0.8)
    )
    rect = (0.006, bottom / height, 0.988, body / height)
    figure.set_layout_engine(ConstrainedLayoutEngine(rect=rect, w_pad=0.06, h_pad=0.06, wspace=0.05, hspace=0.05))
    return Sheet(figure, 1 - (HEADER + LINE * len(about) + 0.02) / height)


def legend(sheet: Sheet, handles: Sequence[Any], columns: int) -> None:
    """Above the axes, in the lines that `sheet` kept free, read row by row."""
    rows = -(-len(handles) // columns)
    across = [handles[i] for column in range(columns) for i in range(column, len(handles), columns)]
    sheet.figure.legend(
        handles=across if rows > 1 else list(handles),
        loc="upper left",
        bbox_to_anchor=(0.004, sheet.legend_top),
        ncols=columns,
        fontsize=12,
        handletextpad=0.5,
        columnspacing=1.6,
        labelspacing=0.35,
        borderaxespad=0.0,
    )


def line_of(name: str) -> tuple[str, str]:
    """(colour, marker) of a provider, the same in every plot."""
    if name in LINES:
        return LINES[name]
    marker = OTHER_MARKERS[sum(map(ord, name)) % len(OTHER_MARKERS)]
    return (VARIANT if figures.is_ours(name) else "#000000"), marker


def emphasize(axes: Axes, names: Sequence[str]) -> None:
    """Ours among the labels of the y axis, which are those of `names`."""
    for text, name in zip(axes.get_yticklabels(), names, strict=True):
        if figures.is_ours(name):
            text.set_color(OURS)
            text.set_fontweight("bold" if name == figures.OURS else "normal")


def three(value: float) -> str:
    """Three digits, zeros at the end included."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def save(figure: Figure, path: Path) -> Path:
    """Write a PNG, the same bytes for the same results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI, metadata={"Software": None})
    return path
