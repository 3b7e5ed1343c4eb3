"""Plots of the results, read from the JSON and from nothing else: the same results give the same bytes."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.report import figures, labels


def render(data: dict[str, Any], folder: Path) -> list[Path]:
    """The plots for which there are figures, as PNG files in `folder`; which ones are not made is said on stderr."""
    # here and not above: whoever wants no plots needs no matplotlib
    from benchmarks.report.plots import accuracy, bars, relative, scaling, style, training

    plots = {}
    for name, case in figures.of_part(data, "main").items():
        plots[f"time-{labels.slug(name)}"] = partial(bars.time, data, case)
        plots[f"memory-{labels.slug(name)}"] = partial(bars.memory, data, case)
    plots["shapes"] = partial(relative.draw, data, "shapes", "Shapes: time relative to grpo_kernels")
    plots["workloads"] = partial(relative.draw, data, "workloads", "Workloads: time relative to grpo_kernels")
    plots["scaling"] = partial(scaling.draw, data)
    plots["accuracy"] = partial(accuracy.draw, data)
    plots["training"] = partial(training.draw, data)
    made = []
    for name, draw in plots.items():
        with style.looks():
            figure = draw()
            if figure is None:
                print(f"plots: no figures for {name}", file=sys.stderr)
            else:
                made.append(style.save(figure, folder / f"{name}.png"))
    return made
