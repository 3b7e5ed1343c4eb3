"""The share of the head in a whole training step, with TRL's head and with ours."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from benchmarks.report import figures, labels
from benchmarks.report.plots import style

ROW = 0.95  # inches a model
Shares = dict[str, float]  # by trainer


def draw(data: dict[str, Any]) -> Figure | None:
    """None: there is no model with the shares of both trainers."""
    training = data.get("training") or {}
    models = shares(training)
    if not models:
        return None
    notes = [f"{key}: {labels.tidy(text, 900)}" for key, text in (training.get("conditions") or {}).items()]
    subtitle = "Head and loss in a whole training step, generation included"
    run = figures.of_run(data, "training")
    figure = style.sheet(run, claim(training), subtitle, ROW * len(models) + 0.3, notes)
    axes = figure.subplots()
    most = max(share for found in models.values() for share in found.values())
    for y, found in enumerate(models.values()):
        for i, (trainer, share) in enumerate(sorted(found.items(), key=lambda item: _name(item[0]) == figures.OURS)):
            at, hue = y + 0.4 * (i - 0.5), style.color(_name(trainer))
            axes.barh(at, 100 * share, height=0.36, color=hue)
            axes.annotate(
                f"{100 * share:.1f} %  {trainer}", (100 * share, at), (9, 0), textcoords="offset points", va="center",
                color=hue, weight="bold", size=style.TEXT - 1,
            )  # fmt: skip
    style.rows(axes, list(models))
    axes.set_xlim(0, 135 * most)
    axes.set_xticks([])
    return figure


def claim(training: dict[str, Any]) -> str:
    """The title, of the first model."""
    title, found = next(iter(shares(training).items()))
    theirs, ours = (
        next(x for name, x in found.items() if (_name(name) == figures.OURS) is mine) for mine in (False, True)
    )
    return f"{title.splitlines()[0]}: the head is {100 * theirs:.0f} % of a step with TRL, {100 * ours:.0f} % with ours"


def shares(training: dict[str, Any]) -> dict[str, Shares]:
    """The head's, by model and whether it was measured or computed, where both trainers have one."""
    models: dict[str, Shares] = {}
    for entry in training.get("models") or []:
        if entry.get("head_share") is not None:
            title = f"{entry.get('model', '')}\n{entry.get('kind', '')}"
            models.setdefault(title, {})[entry.get("trainer", "")] = entry["head_share"]
    return {title: found for title, found in models.items() if len({_name(x) == figures.OURS for x in found}) == 2}


def _name(trainer: str) -> str:
    """The provider that a trainer's head is."""
    return figures.OURS if trainer == "grpo_kernels" else "trl"
