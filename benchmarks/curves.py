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
from matplotlib.ticker import FixedLocator, NullLocator

from benchmarks import labels
from benchmarks.machine import ROOT
from benchmarks.plots import BLUE, CARD, INK, TEXT, looks, save, sheet

RESULTS, PLOTS = ROOT / "benchmarks" / "results", ROOT / "docs" / "plots"
Runs = list[dict[str, Any]]
Curve = list[float]

FULL, SAMPLED, TOP = "full reverse KL", "sampled tokens", "top-8 forward KL"
LOSSES = {
    FULL: ("whole vocabulary", BLUE),
    TOP: ("teacher's top 8", "#009E73"),
    SAMPLED: ("sampled tokens", "#6E7781"),
}
NATS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
METHODS = {
    "SFT": "#6E7781",
    "RFT": "#7B5EA7",
    "online RFT": "#009E73",
    "GRPO, outcome": "#D55E00",
    "GRPO, process": BLUE,
    "iterative GRPO": INK,
    "iterative GRPO, learnt reward": "#CC79A7",
}
OWN = ("online RFT", "GRPO, outcome", "GRPO, process", "iterative GRPO")  # the policy's samples, a right reward
DRAWN_FROM = {"loss": "distillation", "method": "unified-view"}  # a key of each run: the figure


def draw_distillation(data: dict[str, Any]) -> Figure:
    """KL to the teacher, and right answers, against steps: means over a pass and over the seeds, and their range."""
    runs, width = data["runs"], data["pass"]
    shape = f"teacher {data['teacher']}; student {data['student']}; V {data['v']}"
    what = "Distillation on the student's own text"
    subtitle = [f"{what}, {labels.DTYPES[data['dtype']]}", data["device"].upper(), shape, data["date"]]
    seeds = len({run["seed"] for run in runs})
    notes = [
        f"Lines: means of {labels.count(seeds, 'seed')} and of {width} steps, in which all problems come. "
        "Bands: from the seed with the least to the seed with the most. One step: 64 completions.",
        f"torch {labels.short(data['versions']['torch'])}; examples/distillation.py",
    ]
    figure = sheet(distillation_claim(data), subtitle, 4.6, notes)
    left, right = figure.subplots(1, 2)
    for axes, key, scale in ((left, "kl", 1.0), (right, "right", 100.0)):
        ends = {}
        for name, (words, color) in LOSSES.items():
            curves = [smooth([scale * x for x in run[key]], width) for run in runs if run["loss"] == name]
            steps = [i + (width + 1) / 2 for i in range(len(curves[0]))]
            band(axes, steps, curves, color)
            end = statistics.fmean(curve[-1] for curve in curves)
            ends[words] = (end, f"{end:.2f}" if key == "kl" else f"{end:.0f} %", color)
        axes.set_xlabel("optimizer step", loc="left")
        axes.set_xlim(0, 1.62 * steps[-1])
        axes.set_xticks([0, 20, 40, 60])
        _grid(axes)
        if key == "kl":
            _plain_logarithm(axes)
        else:
            axes.set_ylim(0, 100)
            axes.set_yticks([0, 25, 50, 75, 100], ["0 %", "25 %", "50 %", "75 %", "100 %"])
        _name_ends(axes, ends, steps[-1])
        axes.set_title("nats from the teacher" if key == "kl" else "right answers", size=TEXT - 1, loc="left")
    return figure


def distillation_claim(data: dict[str, Any]) -> str:
    """The title: where the last pass of the fullest and of the sparsest loss ends."""
    full, sampled = (final(data["runs"], name, data["pass"]) for name in (FULL, SAMPLED))
    first = f"Distilled over the whole vocabulary, the student ends {full:.2f} nats from its teacher"
    return f"{first}; {sampled:.2f} over sampled tokens"


def final(runs: Runs, name: str, width: int) -> float:
    """The mean KL of the last pass over the problems, and of the seeds."""
    return statistics.fmean(statistics.fmean(run["kl"][-width:]) for run in runs if run["loss"] == name)


def draw_unified_view(data: dict[str, Any]) -> Figure:
    """Right answers of each method against the completions that it used: the mean of the seeds, and their range."""
    runs = data["runs"]
    shape = f"Qwen3-like model with V {data['v']}, {data['model']}"
    subtitle = [
        f"Right answers while training, {labels.DTYPES[data['dtype']]}",
        data["device"].upper(),
        shape,
        data["date"],
    ]
    seeds = labels.count(len({run["seed"] for run in runs}), "seed")
    notes = [
        f"Lines: means of {seeds}; bands: from the least to the most. Completions: samples, or demonstrations for SFT. "
        "All rewards but the learnt one are checks of the answer. The order of the four on top is that of this task.",
        "examples/unified_view.py",
    ]
    figure = sheet(unified_claim(data), subtitle, 5.6, notes)
    axes = figure.subplots()
    ends, last = {}, 0.0
    for name, color in METHODS.items():
        some = [run for run in runs if run["method"] == name]
        curves = [[100 * x for x in run["reward"]] for run in some]
        band(axes, some[0]["completions"], curves, color)
        end = statistics.fmean(curve[-1] for curve in curves)
        ends[name.replace(", learnt", ",\nlearnt")] = (end, f"{end:.0f} %", color)
        last = max(last, some[0]["completions"][-1])
    axes.set_ylim(0, 100)
    axes.set_yticks([0, 25, 50, 75, 100], ["0 %", "25 %", "50 %", "75 %", "100 %"])
    axes.set_xlim(0, 1.5 * last)
    axes.set_xticks([0, 2000, 4000, 6000, 8000], ["0", "2,000", "4,000", "6,000", "8,000"])
    axes.set_xlabel("completions used", loc="left")
    _grid(axes)
    _name_ends(axes, ends, last)
    return figure


def unified_claim(data: dict[str, Any]) -> str:
    """The title: the methods with the policy's own samples, and RFT."""
    found = {name: [run["reward"][-1] for run in data["runs"] if run["method"] == name] for name in METHODS}
    means = {name: 100 * statistics.fmean(rewards) for name, rewards in found.items()}
    own = [means[name] for name in OWN]
    first = f"Trained on its own checked samples, the model gets {min(own):.0f} to {max(own):.0f} % right"
    return f"{first}; on the first model's, {means['RFT']:.0f} %"


def smooth(values: Curve, width: int) -> Curve:
    """Means of `width` values in a row."""
    return [statistics.fmean(values[i : i + width]) for i in range(len(values) - width + 1)]


def band(axes: Axes, x: Sequence[float], curves: Sequence[Curve], color: str) -> None:
    """The mean of some curves, and the range that they fill."""
    columns = list(zip(*curves, strict=True))
    axes.fill_between(x, [min(c) for c in columns], [max(c) for c in columns], color=color, alpha=0.15, linewidth=0)
    axes.plot(x, [statistics.fmean(c) for c in columns], color=color, linewidth=3.5)


def apart(heights: Sequence[float], least: float) -> list[float]:
    """Rising heights, moved as little up as down so that there is a distance of `least` between them."""
    up, down = list(heights[:1]), list(heights[-1:])
    for height in heights[1:]:
        up.append(max(height, up[-1] + least))
    for height in heights[-2::-1]:
        down.insert(0, min(height, down[0] - least))
    return [(a + b) / 2 for a, b in zip(up, down, strict=True)]


def _name_ends(axes: Axes, ends: dict[str, tuple[float, str, str]], x: float) -> None:
    """The names at the ends of the lines, apart from each other."""
    move = axes.transData.transform
    back = axes.transData.inverted().transform
    ordered = sorted(ends.items(), key=lambda item: item[1][0])
    low, high = (move((0, y))[1] for y in axes.get_ylim())
    pixels = [move((x, end))[1] for _, (end, _, _) in ordered]
    for (name, (_, value, color)), pixel in zip(ordered, apart(pixels, 0.066 * (high - low)), strict=True):
        axes.annotate(
            f"{name}: {value}", (x, back((0, pixel))[1]), (9, 0), textcoords="offset points", va="center", color=color,
            size=TEXT - 3, bbox={"facecolor": CARD, "edgecolor": "none", "pad": 1},
        )  # fmt: skip


def _grid(axes: Axes) -> None:
    axes.grid(axis="y")
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(labelsize=TEXT - 3)


def _plain_logarithm(axes: Axes) -> None:
    """A logarithmic axis with the numbers of `NATS` that are within it."""
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    shown = [y for y in NATS if low <= y <= high]
    axes.set_yticks(shown, [f"{y:g}" for y in shown])
    axes.yaxis.set_major_locator(FixedLocator(shown))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylim(low, high)


DRAWN: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "distillation": draw_distillation,
    "unified-view": draw_unified_view,
}


def read(path: Path) -> tuple[str, dict[str, Any]]:
    """The figure that the curves of a file are for, and the curves."""
    data = json.loads(path.read_text())
    name = next((figure for key, figure in DRAWN_FROM.items() if data.get("runs") and key in data["runs"][0]), None)
    if name is None:
        raise ValueError(f"{path.name}: expected the curves of examples/distillation.py or examples/unified_view.py")
    return name, data


def newest() -> list[Path]:
    """The newest results of each figure."""
    return [sorted(RESULTS.glob(f"{name}-*.json"))[-1] for name in DRAWN]


def render(files: Sequence[Path], folder: Path) -> list[Path]:
    """A PNG in `folder` for each file of curves."""
    made = []
    for path in files:
        name, data = read(path)
        with looks():
            made.append(save(DRAWN[name](data), folder / f"{name}.png"))
    return made


def main(given: Sequence[str] | None = None) -> int:
    """Run the command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.curves", description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="*", help="curves (default: the newest in benchmarks/results)")
    parser.add_argument("--output", type=Path, default=PLOTS, help="folder (default docs/plots)")
    options = parser.parse_args(given)
    for path in render(options.files or newest(), options.output):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
