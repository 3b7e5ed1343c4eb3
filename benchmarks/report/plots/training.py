"""The share of the head in a whole training step: measured in seconds, or computed from operations."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.report import labels
from benchmarks.report.plots import style

PARTS = {
    "generation": ("generation", "#AEB6C0"),
    "body": ("body of the model", "#7C9CBF"),
    "head": ("head and loss", "#D55E00"),
    "optimizer": ("optimizer", "#E8C56B"),
    "other": ("other", "#D5DAE0"),
}
HATCHES = {"measured": "///", "computed": None}
BAR, TITLE = 0.36, 0.42  # inches of a bar, and of the name of a model above its bars
ROOM = 9  # percent that a bar must have to hold its figure


def draw(data: dict[str, Any]) -> Figure | None:
    """None: there is no model with seconds or operations."""
    training = data.get("training") or {}
    models: dict[str, list[dict[str, Any]]] = {}
    for entry in training.get("models") or []:
        if _parts(entry):
            models.setdefault(_title(entry), []).append(entry)
    if not models:
        return None
    bars = sum(map(len, models.values()))
    met = {name for entries in models.values() for entry in entries for name in _parts(entry)}
    kinds = {entry.get("kind") for entries in models.values() for entry in entries}
    handles = [Patch(facecolor=color, label=words) for name, (words, color) in PARTS.items() if name in met]
    handles += [
        Patch(facecolor="#AEB6C0", edgecolor="white", hatch=hatch, label=kind)
        for kind, hatch in HATCHES.items()
        if kind in kinds
    ]
    notes = [f"{key}: {labels.tidy(text, 900)}" for key, text in (training.get("conditions") or {}).items()]
    title, body = "The head in a whole training step", BAR * bars + TITLE * len(models) + 0.7
    sheet = style.sheet({**data, **(training.get("run") or {})}, title, [], body, -(-len(handles) // 4), notes)
    axes = sheet.figure.subplots()
    _fill(axes, models)
    axes.set_xlabel("share of the step, %: of the seconds where measured, of the operations where computed")
    style.legend(sheet, handles, 4)
    return sheet.figure


def _fill(axes: Axes, models: dict[str, list[dict[str, Any]]]) -> None:
    """Inches from the top down: the name of each model, then its bars."""
    at, places, words = 0.0, [], []
    for title, entries in models.items():
        at += TITLE
        axes.text(0, at - 0.09, title, weight="bold", va="bottom", size=12)
        for entry in entries:
            _bar(axes, at + BAR / 2, entry)
            places.append(at + BAR / 2)
            words.append(entry.get("trainer", ""))
            at += BAR
    axes.set_yticks(places, words)
    style.emphasize(axes, ["ours" if x == "grpo_kernels" else x for x in words])
    axes.set(xlim=(0, 100), ylim=(at + 0.05, 0))
    axes.spines["left"].set_visible(False)


def _bar(axes: Axes, y: float, entry: dict[str, Any]) -> None:
    """Its parts one after another, and the figure of the head."""
    parts = _parts(entry)
    whole, left = sum(parts.values()), 0.0
    hatch = HATCHES.get(entry.get("kind", ""))
    for name in [*(x for x in PARTS if x in parts), *(x for x in parts if x not in PARTS)]:
        share, color = 100 * parts[name] / whole, PARTS.get(name, PARTS["other"])[1]
        axes.barh(y, share, left=left, height=0.82 * BAR, color=color, edgecolor="white", hatch=hatch, linewidth=0.8)
        if name == "head":
            inside = share >= ROOM
            place, align = (left + share / 2, "center") if inside else (left - 0.6, "right")
            ink, paper = ("white", color) if inside else (color, "white")
            box = {"facecolor": paper, "edgecolor": "none", "pad": 1.5}
            words = f"{share:.3g} %"
            axes.text(place, y, words, ha=align, va="center", color=ink, weight="bold", size=11, bbox=box)
        left += share


def _title(entry: dict[str, Any]) -> str:
    head = entry.get("head") or []
    return f"{entry.get('model', '')}" + (f": V {head[0]}, H {head[1]}" if len(head) == 2 else "")


def _parts(entry: dict[str, Any]) -> dict[str, float]:
    """What is drawn: seconds if they were measured, else operations."""
    found = (entry.get("seconds") if entry.get("kind") == "measured" else None) or entry.get("flops") or {}
    return {name: value for name, value in found.items() if value}
