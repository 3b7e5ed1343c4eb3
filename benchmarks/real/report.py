"""The page and the figure of the real run (`benchmarks.real`)."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from benchmarks import plots, words
from benchmarks.figures import DEFAULTS, OURS, STOCK
from benchmarks.real.train import PHASES
from benchmarks.tables import with_range
from benchmarks.words import markdown, multiple, number, share, small, times

Run = dict[str, Any]
EQUAL, REWARD, LENGTH = "frac_reward_zero_std", "reward", "completions/mean_length"
SHORT = {"generation": "generation", "scoring": "scoring", "loss": "forward and backward", "optimizer": "optimizer"}
TASK = "SmolLM2-135M-Instruct, one-digit sums, groups of 8, all parameters, fp32, beta 0"


def trained(data: dict[str, Any]) -> dict[str, Run]:
    """The trainings that have steps, by key."""
    return {key: run for key, run in data["runs"].items() if run.get("steps")}


def named(data: dict[str, Any], name: str) -> list[Run]:
    """The trainings of one variant, by seed."""
    return sorted((run for run in trained(data).values() if run["name"] == name), key=lambda run: run["seed"])


def stock_of(data: dict[str, Any], run: Run) -> Run:
    """Stock TRL's training at the seed of `run`."""
    return next(x for x in named(data, STOCK) if x["seed"] == run["seed"])


def seconds(run: Run, steps: slice, *phases: str) -> float:
    """CPU seconds of a step in `phases`, the mean over `steps`."""
    return statistics.fmean(sum(step["seconds"][x] for x in phases) for step in run["steps"][steps])


def over(data: dict[str, Any], run: Run, steps: slice, *phases: str) -> float:
    """Stock TRL's seconds in the same steps over those of `run`."""
    return seconds(stock_of(data, run), steps, *phases) / seconds(run, steps, *phases)


def claim(data: dict[str, Any]) -> str:
    """What the defaults gain, over the seeds; empty without a training of both."""
    found = [over(data, run, slice(len(run["steps"])), "loss") for run in named(data, DEFAULTS)]
    if not found:
        return ""
    return f"SmolLM2 learns sums, forward and backward {multiple(statistics.fmean(found))} times as fast as stock TRL's"


def lines(data: dict[str, Any]) -> list[str]:
    """The trainings, the steps, the options, and the errors."""
    return [*_trainings(data), *_steps(data), *_options(data), *_errors(data)]


def _trainings(data: dict[str, Any]) -> list[str]:
    cells = []
    for run in [x for name in (STOCK, DEFAULTS) for x in named(data, name)]:
        every = slice(len(run["steps"]))
        cells.append([
            run["name"], str(run["seed"]), *(number(seconds(run, every, x), 3) for x in PHASES),
            *(times(over(data, run, every, *x)) if run["name"] != STOCK else "" for x in (("loss",), PHASES)),
            " to ".join(share(x) for x in run["right"]), f"{run['peak_mib']:,}",
            f"{run['alike']} of {len(run['steps'])}" if "alike" in run else "",
            small(run["worst"][1]) if "worst" in run else "",
        ])  # fmt: skip
    head = [
        "training", "seed", *(SHORT[x] for x in PHASES), "times as fast, forward and backward",
        "times as fast, all",
        "right answers", "peak MiB", "steps alike", "largest difference",
    ]  # fmt: skip
    return ["CPU seconds of a step, the mean of all steps:", "", *markdown(head, cells)]


def _steps(data: dict[str, Any]) -> list[str]:
    """A line for a few steps of the first seed."""
    stock, ours = (next(iter(named(data, name)), None) for name in (STOCK, DEFAULTS))
    if stock is None or ours is None:
        return []
    cells = []
    for i, (theirs, mine) in enumerate(zip(stock["steps"], ours["steps"], strict=True)):
        logs, one = mine["logs"], slice(i, i + 1)
        cells.append([
            str(i + 1), number(logs[REWARD], 3), share(logs[EQUAL]), number(logs[LENGTH], 3),
            share(logs["sequences/gradient"]), share(logs["tokens/computed"]), share(logs["tokens/gradient"]),
            *(number(step["seconds"]["loss"], 3) for step in (theirs, mine)), times(over(data, ours, one, "loss")),
        ])  # fmt: skip
    head = [
        "step", "reward", "equal groups", "mean length", "`sequences/gradient`", "`tokens/computed`",
        "`tokens/gradient`", "stock, s", "ours, s", "stock / ours",
    ]  # fmt: skip
    return ["", f"Forward and backward of each step, seed {ours['seed']}:", "", *markdown(head, cells)]


def _options(data: dict[str, Any]) -> list[str]:
    """A line for each variant, over the steps that all have."""
    first = [run for run in trained(data).values() if run["seed"] == 0]
    steps = slice(min((len(run["steps"]) for run in first), default=0))
    if len(first) <= 2:
        return []
    cells = []
    for run in first:
        options = ", ".join(f"{name}={x!r}" for name, x in (run["options"] or {}).items())
        is_stock = run["name"] == STOCK
        cells.append([
            run["name"], f"`{options}`" if options else "", number(seconds(run, steps, "loss"), 3),
            "" if is_stock else times(over(data, run, steps, "loss")),
            "" if is_stock else times(over(data, run, steps, *PHASES)), f"{run['peak_mib']:,}",
        ])  # fmt: skip
    head = ["training", "options", "forward and backward, seconds", "times as fast", "times as fast, all", "peak MiB"]
    return [
        "",
        f"Every option, the first {steps.stop} steps of seed 0, CPU seconds of a step:",
        "",
        *markdown(head, cells),
    ]


def _errors(data: dict[str, Any]) -> list[str]:
    found = (data.get("errors") or {}).get("cases") or {}
    if not found:
        return []
    names = list(dict.fromkeys(name for case in found.values() for name in case.get("found", {})))
    cells = [
        [
            name,
            "fp32, LoRA" if case["precision"] == "lora" else case["precision"],
            *(_error(case.get("found", {}).get(x)) for x in names),
            case.get("reason", ""),
        ]
        for name, case in found.items()
    ]
    return [
        "",
        f"Errors of the gradient of one batch ({data['errors']['sequences']} sequences, "
        f"{data['errors']['with_gradient']} with an advantage) against TRL's loss in float64: the norm of the "
        "difference over the norm of the gradient; in bf16 the mean and the range of several draws of the old "
        "log-probabilities, since most of it comes from a few tokens on the other side of their clip bound.",
        "",
        *markdown(["loss", "precision", *names, "failed"], cells),
    ]


def _error(draws: list[float] | None) -> str:
    """The mean of an error over draws, and its range."""
    if not draws:
        return ""
    mean = statistics.fmean(draws)
    return with_range((mean, min(draws), max(draws)), small) if len(draws) > 1 else small(mean)


class Expected(NamedTuple):
    """A run of Qwen3-8B in numbers: matrix products of trunk and head, attention left out."""

    name: str
    backward: float  # products of the trunk's backward over those of its forward
    head: tuple[float, float, float]  # operations over N V H: stock's; ours a token, and more for one with a gradient
    kl: bool

    def ratio(self, equal: float, prompt: int, longest: int, mean: int, group: int) -> float:
        """Stock TRL's operations over ours, without generation."""
        trunk, head = 6.95e9, 151_936 * 4096
        padded, distinct, counted = group * (prompt + longest), prompt + group * mean, group * mean
        live = 1.0 if self.kl else 1.0 - equal
        reference = 1.0 if self.kl else 0.0
        stock = 2 * trunk * padded * (1 + self.backward + reference)
        stock += head * counted * (self.head[0] + 2 * reference)
        ours = 2 * trunk * distinct * (1 + self.backward * live + reference)
        ours += head * counted * (self.head[1] + self.head[2] * live + 2 * reference)
        return stock / ours


EXPECTED = [
    Expected(f"{what}, beta {beta}", backward, head, kl=beta > 0)
    for what, backward, head in (("all parameters", 2.0, (8.0, 2.0, 4.0)), ("LoRA", 1.0, (6.0, 2.0, 2.0)))
    for beta in (0, 0.04)
]
GROUPS = ((0.25, 256, 1024, 512, 8), (0.5, 256, 1024, 512, 8), (0.5, 2048, 1024, 512, 8), (0.0, 256, 512, 512, 8))


def _expected() -> list[str]:
    """What Qwen3-8B may expect, by arithmetic."""
    cells = [[x.name, *(f"{x.ratio(*group):.1f}" for group in GROUPS)] for x in EXPECTED]
    head = [
        f"{share(equal)} of the groups equal; prompt {prompt}, completions {mean} in the mean, {longest} the longest"
        for equal, prompt, longest, mean, _ in GROUPS
    ]
    return [
        "**By arithmetic, not measured**: stock TRL's matrix products over ours for Qwen3-8B, without generation and",
        "attention, one group in a micro-batch:",
        "",
        *markdown(["Qwen3-8B", *head], cells),
    ]


def draw(data: dict[str, Any]) -> Figure:
    """Reward, share of groups with equal rewards, and seconds of both, over the steps."""
    stock, ours = named(data, STOCK), named(data, DEFAULTS)
    count = len(ours[0]["steps"])
    seeds = f"{words.count(len(ours), 'seed')}: their mean, and their range"
    notes = [
        "Forward and backward of an optimizer step of 32 completions, generation left out. A group whose rewards are "
        "equal has no gradient: what ours saves follows their share, and the padding.",
        words.made(data),
    ]
    figure = plots.sheet(claim(data), [TASK, words.where(data), seeds, words.day(data)], 6.2, notes)
    axes = figure.subplots(3, 1, sharex=True, height_ratios=(2, 2, 3))
    curves: list[tuple[str, list[tuple[str, list[Run]]], Callable[[Any], float]]] = [
        ("reward", [(OURS, ours)], lambda step: step["logs"][REWARD]),
        ("groups with\nequal rewards", [(OURS, ours)], lambda step: step["logs"][EQUAL]),
        ("CPU seconds", [("trl", stock), (OURS, ours)], lambda step: step["seconds"]["loss"]),
    ]
    for axis, (title, trainers, value) in zip(axes, curves, strict=True):
        ends = []
        for name, runs in trainers:
            values = [[value(step) for step in run["steps"]] for run in runs]
            end = plots.band(axis, range(1, count + 1), values, plots.color(name))
            ends.append((end, "stock TRL" if name == "trl" else "grpo_kernels", plots.color(name)))
        axis.set_ylabel(title)
        axis.set_ylim(bottom=0)
        axis.grid(axis="y")
        plots.name_ends(axis, ends, count)
    axes[2].set_xlabel("optimizer step")
    axes[2].set_xlim(1, count * 1.2)
    axes[2].set_xticks([1, *range(5, count + 1, 5)])
    figure.align_ylabels(axes)
    return figure


BEGIN, END = "<!-- measured -->", "<!-- /measured -->"


def write(data: dict[str, Any], folder: Path) -> None:
    """Draw ``plots/real.png`` and replace what ``real.md`` has between its marks; both are in `folder`.

    Raises:
        ValueError: the page has not one pair of marks.
    """
    with plots.looks():
        plots.save(draw(data), folder / "plots" / "real.png")
    path = folder / "real.md"
    before, *rest = re.split(f"{BEGIN}|{END}", path.read_text(encoding="utf-8"))
    if len(rest) != 2:
        raise ValueError(f"{path}: expected one {BEGIN} and one {END}, got {len(rest)} marks")
    picture = f"![{claim(data)}](plots/real.png)"
    conditions = f"Conditions: {words.footer(data)}."
    middle = words.page(["", picture, "", *lines(data), "", *_expected(), "", conditions])
    path.write_text(f"{before}{BEGIN}\n{middle}{END}{rest[1]}", encoding="utf-8")
