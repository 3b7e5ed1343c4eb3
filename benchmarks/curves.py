"""``python -m benchmarks.curves``: the figures of quality against training, from the JSON that two examples write.

``examples/distillation.py --seeds 5 --output FILE`` and ``examples/unified_view.py``. Without files: the newest of each
in benchmarks/results, into docs/plots. Nothing is trained here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import plots, words
from benchmarks.machine import ROOT

RESULTS, PLOTS = ROOT / "benchmarks" / "results", ROOT / "docs" / "plots"
Runs = list[dict[str, Any]]

FULL, SAMPLED = "full reverse KL", "sampled tokens"
LOSSES = {
    FULL: ("whole vocabulary", plots.BLUE),
    "top-8 forward KL": ("teacher's top 8", plots.GREEN),
    SAMPLED: ("sampled tokens", plots.GREY),
}
NATS = {y: f"{y:g}" for y in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)}
METHODS = {
    "SFT": plots.GREY,
    "RFT": plots.PURPLE,
    "online RFT": plots.GREEN,
    "GRPO, outcome": plots.ORANGE,
    "GRPO, process": plots.BLUE,
    "iterative GRPO": plots.INK,
    "iterative GRPO, learnt reward": plots.PINK,
}
SELF_SAMPLED = (
    "online RFT",
    "GRPO, outcome",
    "GRPO, process",
    "iterative GRPO",
)  # and a right reward


def draw_distillation(data: dict[str, Any]) -> Figure:
    """KL to the teacher, and right answers, against steps: means over a pass and over the seeds, and their range."""
    runs, width = data["runs"], data["pass"]
    shape = f"teacher {data['teacher']}; student {data['student']}; V {data['v']}"
    notes = [
        f"Lines: means of {_seeds(runs)} and of {width} steps, in which all problems come. "
        "Bands: from the seed with the least to the seed with the most. One step: 64 completions.",
        f"torch {words.short(data['versions']['torch'])}; examples/distillation.py",
    ]
    what = "Distillation on the student's own text"
    figure = plots.sheet(distillation_claim(data), _subtitle(data, what, shape), 4.6, notes)
    steps = [i + (width + 1) / 2 for i in range(len(runs[0]["kl"]) - width + 1)]
    left, right = figure.subplots(1, 2)
    left.set_yscale("log")
    for axes, title, key, end in (
        (left, "nats from the teacher", "kl", "{:.2f}"),
        (right, "right answers", "right", "{:.0f} %"),
    ):
        factor = 1.0 if key == "kl" else 100.0
        ends = []
        for name, (text, color) in LOSSES.items():
            curves = [
                smooth([factor * x for x in run[key]], width) for run in runs if run["loss"] == name
            ]
            ends.append(plots.band(axes, steps, curves, f"{text}: {end}", color))
        plots.scale(axes, *((NATS, *axes.get_ylim()) if key == "kl" else (plots.PERCENT, 0, 100)))
        _along(axes, "optimizer step", range(0, 80, 20), 1.62 * steps[-1])
        plots.name_ends(axes, ends, steps[-1])
        axes.set_title(title, size=plots.TEXT - 1, loc="left")
    return figure


def distillation_claim(data: dict[str, Any]) -> str:
    """The title: where the last pass of the fullest and of the sparsest loss ends."""
    full, sampled = (final(data["runs"], name, data["pass"]) for name in (FULL, SAMPLED))
    first = (
        f"Distilled over the whole vocabulary, the student ends {full:.2f} nats from its teacher"
    )
    return f"{first}; {sampled:.2f} over sampled tokens"


def final(runs: Runs, name: str, width: int) -> float:
    """The mean KL of the last pass over the problems, and of the seeds."""
    return statistics.fmean(
        statistics.fmean(run["kl"][-width:]) for run in runs if run["loss"] == name
    )


def draw_unified_view(data: dict[str, Any]) -> Figure:
    """Right answers of each method against the completions that it used: the mean of the seeds, and their range."""
    runs = data["runs"]
    shape = f"Qwen3-like model with V {data['v']}, {data['model']}"
    notes = [
        f"Lines: means of {_seeds(runs)}; bands: from the least to the most. Completions: samples, or demonstrations "
        "for SFT. All rewards but the learnt one are checks of the answer. The order of the four on top is that of "
        "this task.",
        "examples/unified_view.py",
    ]
    figure = plots.sheet(
        unified_claim(data), _subtitle(data, "Right answers while training", shape), 5.6, notes
    )
    axes = figure.subplots()
    ends, last = [], 0.0
    for name, color in METHODS.items():
        of_method = [run for run in runs if run["method"] == name]
        used, curves = (
            of_method[0]["completions"],
            [[100 * x for x in run["reward"]] for run in of_method],
        )
        text = f"{name}: {{:.0f}} %".replace(", learnt", ",\nlearnt")
        ends.append(plots.band(axes, used, curves, text, color))
        last = max(last, used[-1])
    plots.scale(axes, plots.PERCENT, 0, 100)
    _along(axes, "completions used", range(0, 10000, 2000), 1.5 * last)
    plots.name_ends(axes, ends, last)
    return figure


def unified_claim(data: dict[str, Any]) -> str:
    """The title: the methods with the policy's own samples, and RFT."""
    rewards = {
        name: [run["reward"][-1] for run in data["runs"] if run["method"] == name]
        for name in METHODS
    }
    means = {name: 100 * statistics.fmean(x) for name, x in rewards.items()}
    low, high = (bound(means[name] for name in SELF_SAMPLED) for bound in (min, max))
    first = f"Trained on its own checked samples, the model gets {low:.0f} to {high:.0f} % right"
    return f"{first}; on the first model's, {means['RFT']:.0f} %"


def smooth(values: Sequence[float], width: int) -> list[float]:
    return [statistics.fmean(values[i : i + width]) for i in range(len(values) - width + 1)]


def _seeds(runs: Runs) -> str:
    return words.count(len({run["seed"] for run in runs}), "seed")


def _subtitle(data: dict[str, Any], what: str, shape: str) -> list[str]:
    return [f"{what}, {words.DTYPES[data['dtype']]}", data["device"].upper(), shape, data["date"]]


def _along(axes: Axes, label: str, ticks: Sequence[int], end: float) -> None:
    axes.set_xlim(0, end)
    axes.set_xticks(ticks, [f"{x:,}" for x in ticks])
    axes.set_xlabel(label, loc="left")


DRAWN: dict[
    str, tuple[str, Callable[[dict[str, Any]], Figure]]
] = {  # figure: a key of each of its runs, and how
    "distillation": ("loss", draw_distillation),
    "unified-view": ("method", draw_unified_view),
}


def read(path: Path) -> tuple[str, dict[str, Any]]:
    """The figure that the curves of a file are for, and the curves."""
    data = json.loads(path.read_text())
    name = next(
        (
            figure
            for figure, (key, _) in DRAWN.items()
            if data.get("runs") and key in data["runs"][0]
        ),
        None,
    )
    if name is None:
        raise ValueError(
            f"{path.name}: expected the curves of examples/distillation.py or examples/unified_view.py"
        )
    return name, data


def newest() -> list[Path]:
    return [sorted(RESULTS.glob(f"{name}-*.json"))[-1] for name in DRAWN]


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.curves", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "files", type=Path, nargs="*", help="curves (default: the newest in benchmarks/results)"
    )
    parser.add_argument("--output", type=Path, default=PLOTS, help="folder (default docs/plots)")
    options = parser.parse_args(given)
    for name, data in map(read, options.files or newest()):
        with plots.looks():
            print(plots.save(DRAWN[name][1](data), options.output / f"{name}.png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
