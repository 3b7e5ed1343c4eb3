"""The page and the figure of the real run (`benchmarks.real`)."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.cells import markdown, number, small, times
from benchmarks.labels import share
from benchmarks.real.train import PHASES, STOCK

Run = dict[str, Any]


def trained(data: dict[str, Any]) -> dict[str, Run]:
    """The trainings that have steps, by key."""
    return {key: run for key, run in data["runs"].items() if run.get("steps")}


def stock_of(runs: dict[str, Run], run: Run) -> Run:
    """Stock TRL's training at the seed of `run`."""
    return runs[f"{STOCK}, seed {run['seed']}"]


def seconds(run: Run, count: int, *phases: str) -> float:
    """CPU seconds of a step in `phases`, the mean of the first `count` steps."""
    return statistics.fmean(sum(step["seconds"][x] for x in phases) for step in run["steps"][:count])


def lines(data: dict[str, Any]) -> list[str]:
    """A line for each training."""
    runs, cells = trained(data), []
    for run in runs.values():
        count, stock = len(run["steps"]), stock_of(runs, run)
        over = [seconds(stock, count, *x) / seconds(run, count, *x) for x in (("loss",), PHASES)]
        right = [share(x) for x in run["right"]]
        cells.append([
            run["name"], str(run["seed"]), str(count), *(number(seconds(run, count, x), 3) for x in PHASES),
            *(times(x) for x in over), " to ".join(right), str(run["peak_mib"]),
            str(run.get("alike", "")), small(run["worst"][1]) if "worst" in run else "",
        ])  # fmt: skip
    head = [
        "training", "seed", "steps", *PHASES, "stock / it, loss", "stock / it, whole step", "right answers",
        "peak MiB", "steps alike", "largest difference",
    ]  # fmt: skip
    return markdown(head, cells)


def write(data: dict[str, Any], folder: Path) -> None:
    """Write the tables to ``real.md`` in `folder`."""
    (folder / "real.md").write_text("\n".join(["# A real run", "", *lines(data)]) + "\n", encoding="utf-8")
