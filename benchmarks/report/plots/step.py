"""The whole optimizer step: CPU seconds and saved activations of stock TRL and of each saving."""

from __future__ import annotations

import textwrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.report import figures, step
from benchmarks.report.plots import style

BAR = 0.56  # inches a variant
OPTIONS = (
    "Fused head alone: zero_advantage='train', padding='keep'. Defaults: 'score', 'trim'. Free, split: padding. Skip: "
    "zero_advantage. Shared, regrouped: shared_prompts, regroup. Saved activations: of the largest micro-batch."
)


def draw(data: dict[str, Any]) -> Figure | None:
    """None: the step of stock TRL or of ours was not timed."""
    found = step.scenes(data)
    scene = next(iter(found.values()), None)
    if scene is None or step.faster(scene, step.DEFAULTS) is None:
        return None
    names = list(step.timed(scene))
    run = figures.of_run(data, "step")
    subtitle = f"An optimizer step without generation, one thread; {scene['about']}"
    figure = style.sheet(run, claim(scene), subtitle, BAR * len(names) + 0.8, notes(found))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    _bars(left, step.timed(scene), "s", {name: step.faster(scene, name) for name in names})
    _bars(right, {name: scene["variants"][name]["saved_mib"]["max"] for name in names}, "MiB", {})
    style.rows(left, [textwrap.fill(name, 18) for name in names], [name == step.DEFAULTS for name in names])
    right.spines[["left", "bottom"]].set_visible(False)
    left.set_xlabel("CPU seconds, times as fast")
    right.set_xlabel("saved activations")
    return figure


def claim(scene: step.Scene) -> str:
    """The title: stock TRL's time over ours with default options."""
    found = step.faster(scene, step.DEFAULTS)
    return "" if found is None else f"Stock TRL's training step takes {style.times(found[0])} times our CPU time"


def notes(found: dict[str, step.Scene]) -> list[str]:
    """The options, and the other scenes: stock TRL's seconds over those of each variant."""
    said = [OPTIONS]
    for name, scene in list(found.items())[1:]:
        over = {x: times[0] for x in step.timed(scene) if x != step.STOCK and (times := step.faster(scene, x))}
        said.append(f"Times as fast, {name}: {'; '.join(f'{x} {style.times(y)}' for x, y in over.items())}.")
    return said


def _bars(axes: Axes, found: dict[str, float], unit: str, over: dict[str, Any]) -> None:
    """A bar for each variant, its value at its end, and how many times as fast as stock TRL it is."""
    colours = [style.color("trl" if name == step.STOCK else figures.OURS) for name in found]
    axes.barh(range(len(found)), list(found.values()), height=0.68, color=colours)
    for y, (name, value) in enumerate(found.items()):
        times = "" if name == step.STOCK or not over.get(name) else f"   {style.times(over[name][0])}x"
        axes.annotate(
            f"{style.three(value)} {unit}{times}", (value, y), (9, 0), textcoords="offset points", va="center",
            weight="bold" if name == step.DEFAULTS else "normal",
        )  # fmt: skip
    axes.set_xlim(0, 1.45 * max(found.values()))
    axes.set_xticks([])
