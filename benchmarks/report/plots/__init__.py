"""Figures of the results, read from the JSON and from nothing else: the same results give the same bytes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def render(data: dict[str, Any], folder: Path) -> list[Path]:
    """The figures of which there are results, as PNG files in `folder`; which ones are not made is said on stderr."""
    # here and not above: whoever wants no figures needs no matplotlib
    from benchmarks.report.plots import cases, memory, step, style, time, training

    drawn = {
        "step": step.draw, "memory": memory.draw, "time": time.draw,
        "cases": cases.draw, "training": training.draw,
    }  # fmt: skip
    made = []
    for name, draw in drawn.items():
        with style.looks():
            figure = draw(data)
            if figure is None:
                print(f"plots: no figures for {name}", file=sys.stderr)
            else:
                made.append(style.save(figure, folder / f"{name}.png"))
    return made
