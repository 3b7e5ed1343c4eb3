"""The page and the figure of the real run (`benchmarks.real`)."""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from benchmarks import tables
from benchmarks.figures import DEFAULTS, STOCK
from benchmarks.step import PHASES
from benchmarks.tables import SHARES, markdown, multiple, number, share, small, times, with_range

Run = dict[str, Any]
EQUAL, REWARD, LENGTH = "frac_reward_zero_std", "reward", "completions/mean_length"
LEARNING = slice(7)  # steps before the task is solved, in which few groups have equal rewards
SHORT = {x: x for x in PHASES} | {"loss": "forward and backward"}
TITLES = {DEFAULTS: "grpo_kernels"}  # of trainings; not "defaults", since the run sets `regroup`


def trained(data: dict[str, Any]) -> dict[str, Run]:
    return {key: run for key, run in data["runs"].items() if run.get("steps")}


def named(data: dict[str, Any], name: str) -> list[Run]:
    runs = (run for run in trained(data).values() if run["name"] == name)
    return sorted(runs, key=lambda run: run["seed"])


def seconds(run: Run, steps: slice, *phases: str) -> float:
    return statistics.fmean(sum(step["seconds"][x] for x in phases) for step in run["steps"][steps])


def over(data: dict[str, Any], run: Run, steps: slice, *phases: str) -> float:
    """The seconds of stock TRL's training at that seed, in the same steps, over those of `run`."""
    stock = next(x for x in named(data, STOCK) if x["seed"] == run["seed"])
    return seconds(stock, steps, *phases) / seconds(run, steps, *phases)


def title(run: Run) -> str:
    return TITLES.get(run["name"], run["name"])


def gained(data: dict[str, Any], run: Run, *phases: str) -> str:
    """A cell: the gain over all steps and, in brackets, while the model learns."""
    every, first = slice(len(run["steps"])), LEARNING
    return "{} ({})".format(*(times(over(data, run, x, *phases)) for x in (every, first)))


def claim(data: dict[str, Any]) -> str:
    runs = named(data, DEFAULTS)
    if not runs:
        return ""
    every, first = (
        multiple(statistics.fmean(over(data, run, steps, "loss") for run in runs))
        for steps in (slice(None), LEARNING)
    )
    return (
        "While SmolLM2 learns sums on a CPU, forward and backward are "
        f"{every} times as fast as stock TRL's, {first} times in steps 1 to {LEARNING.stop}"
    )


def lines(data: dict[str, Any]) -> list[str]:
    return [*_trainings(data), *_steps(data), *_options(data), *_errors(data)]


def _trainings(data: dict[str, Any]) -> list[str]:
    ours = named(data, DEFAULTS)
    gains = [
        {
            "seed": str(run["seed"]),
            "forward and backward": gained(data, run, "loss"),
            "whole step": gained(data, run, *PHASES),
            "matching steps": f"{run['alike']} of {len(run['steps'])}" if "alike" in run else "",
            "largest difference": small(run["worst"][1]) if "worst" in run else "",
        } for run in ours
    ]  # fmt: skip
    costs = [
        {
            "training": title(run), "seed": str(run["seed"]),
            **{SHORT[x]: number(seconds(run, slice(len(run["steps"])), x), 3) for x in PHASES},
            "peak MiB": f"{run['peak_mib']:,}",
            "right answers": " to ".join(share(x) for x in run["right"]),
        } for run in (*named(data, STOCK), *ours)
    ]  # fmt: skip
    brackets = f"the figures in brackets cover steps 1 to {LEARNING.stop}"
    about = f"Speedup over stock TRL at the same seed; {brackets}:"
    means = "CPU seconds per step, averaged over all steps:"
    return [about, "", *markdown(gains), "", means, "", *markdown(costs)]


def _steps(data: dict[str, Any]) -> list[str]:
    stock, ours = (next(iter(named(data, name)), None) for name in (STOCK, DEFAULTS))
    if stock is None or ours is None:
        return []
    rows = []
    for i, (theirs, mine) in enumerate(zip(stock["steps"], ours["steps"], strict=True)):
        logs = mine["logs"]
        rows.append({
            "step": str(i + 1), "reward": number(logs[REWARD], 3),
            "equal groups": share(logs[EQUAL]),
            "mean length": number(logs[LENGTH], 3), **{f"`{x}`": share(logs[x]) for x in SHARES},
            "stock, s": number(theirs["seconds"]["loss"], 3),
            "ours, s": number(mine["seconds"]["loss"], 3),
            "stock / ours": times(over(data, ours, slice(i, i + 1), "loss")),
        })  # fmt: skip
    return ["", f"Forward and backward of each step, seed {ours['seed']}:", "", *markdown(rows)]


def _options(data: dict[str, Any]) -> list[str]:
    first = [run for run in trained(data).values() if run["seed"] == 0]
    steps = slice(min((len(run["steps"]) for run in first), default=0))
    if len(first) <= 2:
        return []
    rows = []
    for run in first:
        gains = (times(over(data, run, steps, *x)) for x in (("loss",), PHASES))
        gain, of_step = ("", "") if run["name"] == STOCK else gains
        options = ", ".join(f"{name}={x!r}" for name, x in (run["options"] or {}).items())
        rows.append({
            "training": title(run), "options": f"`{options}`" if options else "",
            "forward and backward, seconds": number(seconds(run, steps, "loss"), 3),
            "speedup, forward and backward": gain,
            "speedup, whole step": of_step,
            "peak MiB": f"{run['peak_mib']:,}",
        })  # fmt: skip
    about = f"Options, over the first {steps.stop} steps of seed 0"
    return ["", f"{about}; seconds are CPU seconds per step:", "", *markdown(rows)]


def _errors(data: dict[str, Any]) -> list[str]:
    errors = data.get("errors") or {}
    if not (cases := errors.get("cases")):
        return []
    names = list(dict.fromkeys(name for case in cases.values() for name in case.get("found", {})))
    rows = [
        {
            "loss": name, "precision": case.get("precision", "").replace("lora", "fp32, LoRA"),
            **{x: _error(case.get("found", {}).get(x)) for x in names},
            "failed": case.get("reason", ""),
        }
        for name, case in cases.items()
    ]  # fmt: skip
    about = f"""Errors of the gradient of one batch ({errors["sequences"]} sequences,
        {errors["with_gradient"]} with an advantage) against TRL's loss in float64: the norm of the
        difference over the norm of the gradient; in bf16 the mean and the range of several draws of
        the old log-probabilities, since most of it comes from a few tokens on the other side of
        their clip bound."""
    return ["", " ".join(about.split()), "", *markdown(rows)]


def _error(draws: list[float] | None) -> str:
    if not draws:
        return ""
    mean = statistics.fmean(draws)
    return with_range((mean, min(draws), max(draws)), small) if len(draws) > 1 else small(mean)


COLORS = {STOCK: "#D55E00", DEFAULTS: "#0072B2"}  # Okabe and Ito's
LOOKS = {
    "font.size": 17, "axes.grid": True, "axes.grid.axis": "y", "grid.color": "#d8dee4",
    "axes.axisbelow": True,
    **{f"axes.spines.{side}": False for side in ("top", "right", "bottom", "left")},
    **dict.fromkeys(("figure.facecolor", "savefig.facecolor", "axes.facecolor"), "#fbfbf9"),
}  # fmt: skip
SHADE, SHADE_TEXT = "#b9c1c7", "#5f6a72"


def draw(data: dict[str, Any]) -> Figure:
    """Seconds of each step, stock and ours, as means over the seeds. A strip below shows the share
    of groups with equal rewards. Few words, so that it can be read on a phone."""
    trainers = {name: named(data, name) for name in (STOCK, DEFAULTS)}
    count = len(trainers[DEFAULTS][0]["steps"])
    figure = Figure(figsize=(8, 4.8), dpi=150, layout="constrained")
    axis, strip = figure.subplots(2, sharex=True, height_ratios=(4, 1))
    title = "Forward and backward, CPU seconds per step"
    axis.set_title(title, loc="left", weight="bold", size=18, pad=30)
    seeds = len(trainers[STOCK])
    run = f"SmolLM2-135M, fp32, one core, mean of {seeds} seeds; lower is better"
    axis.annotate(run, (0, 1.03), xycoords="axes fraction", color=SHADE_TEXT, size=14)

    def means(name: str, kind: str, key: str) -> list[float]:
        runs = [[step[kind][key] for step in run["steps"]] for run in trainers[name]]
        return [statistics.fmean(column) for column in zip(*runs, strict=True)]

    x, top = range(1, count + 1), 1.1 * max(means(STOCK, "seconds", "loss"))
    for name, step in ((STOCK, min(5, count)), (DEFAULTS, min(3, count))):
        values = means(name, "seconds", "loss")
        axis.plot(x, values, color=COLORS[name], linewidth=4)
        who = name if name == STOCK else "grpo_kernels"
        place = (step, max(values[step - 1 : step + 2]) + 0.03 * top)
        axis.annotate(who, place, color=COLORS[name], weight="bold", va="bottom")
    axis.set_ylim(0, top)
    axis.tick_params(labelbottom=False)

    strip.bar(x, [100 * y for y in means(DEFAULTS, "logs", EQUAL)], width=1.0, color=SHADE)
    about = "groups with equal rewards (grpo_kernels skips their backward)"
    strip.set_title(about, loc="left", color=SHADE_TEXT, size=15)
    strip.set_ylim(0, 100)
    strip.set_yticks([0, 100], ["0%", "100%"], size=14)
    strip.set_xlim(0.5, count + 0.5)
    strip.set_xticks([1, *range(5, count + 1, 5)])
    strip.set_xlabel("optimizer step")
    for panel in (axis, strip):
        panel.tick_params(length=0)
    return figure


BEGIN, END = "<!-- measured -->", "<!-- /measured -->"
ABOUT = "Written by `python -m benchmarks.real`; do not edit. What it means: "
ABOUT += "[results](../../docs/results.md#a-real-run)."


def write(data: dict[str, Any], folder: Path, results: Path) -> None:
    """Draw ``plots/real.png``, and replace what ``results.md`` has between its marks; both are in
    `folder`. All tables go into ``real.md`` in `results`."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(LOOKS)
        (folder / "plots").mkdir(exist_ok=True)
        draw(data).savefig(folder / "plots" / "real.png", metadata={"Software": None})
    path = folder / "results.md"
    before, *rest = re.split(f"{BEGIN}|{END}", path.read_text(encoding="utf-8"))
    if len(rest) != 2:
        raise ValueError(f"{path}: expected one {BEGIN} and one {END}, got {len(rest)} marks")
    picture = f"![{claim(data)}](plots/real.png)"
    conditions = f"Conditions: {tables.footer(data)}."
    short = [*_trainings(data), *_options(data)]
    middle = tables.page(["", picture, "", *short, "", conditions])
    path.write_text(f"{before}{BEGIN}\n{middle}{END}{rest[1]}", encoding="utf-8")
    text = tables.page(["# A real run", "", ABOUT, "", *lines(data), "", conditions])
    (results / "real.md").write_text(text, encoding="utf-8")
