"""The demo's table and picture, from its summary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MIB = 2**20
THEIRS, OURS, INK, CARD = (
    "#D55E00",
    "#0072B2",
    "#1f2328",
    "#fbfbf9",
)  # as in the figures of docs/benchmarks.md
SHARES = {
    "sequences/gradient": "sequences with gradient",
    "tokens/computed": "tokens that the model computes",
}
Costs = dict[str, tuple[float, float]]  # TRL's, ours


def _costs(summary: dict[str, Any]) -> list[tuple[str, Costs]]:
    """(title, {"seconds" | "memory" | "flops": (TRL's, ours)}) for the training and for each realistic head."""
    runs, shape = summary["runs"], summary["head_shape"]
    keys = {"seconds": "head_seconds_per_step", "memory": "head_peak_bytes", "flops": "head_flops"}
    found = [
        (
            "this training",
            {name: (runs["trl"][key], runs["ours"][key]) for name, key in keys.items()},
        )
    ]
    tokens = shape["sequences"] * shape["length"]
    keys = {"seconds": "seconds", "memory": "peak_bytes", "flops": "flops"}
    for case, words in (("all", "all groups"), ("half", "half of the groups with advantage 0")):
        pair = summary["head"][case]
        title = f"V {shape['vocab']}, H {shape['hidden_size']}, {tokens} tokens, {words}"
        found.append(
            (title, {name: (pair["trl"][key], pair["ours"][key]) for name, key in keys.items()})
        )
    return found


def _row(label: str, theirs: str, ours: str, note: str = "") -> str:
    return f"  {label:<34}{theirs:>14}{ours:>14}{note:>13}".rstrip()


def table(summary: dict[str, Any]) -> str:
    """The figures of the demo as text."""
    lines = ["", _row("", "stock TRL", "grpo_kernels", "better by")]
    lines.append(_row("reward at the start", *[f"{summary['reward_start']:.3f}"] * 2))
    lines.append(
        _row(
            "reward at the end", f"{summary['reward_end_trl']:.3f}", f"{summary['reward_end']:.3f}"
        )
    )
    compared = f"{summary['steps_compared']} of {summary['steps']} steps (those that sampled the same completions)"
    lines.append(
        f"  largest difference of the losses {summary['max_loss_difference']:.1e}, of the gradient norms"
    )
    lines.append(f"  {summary['max_gradient_norm_difference']:.1e}, over {compared}")
    lines += ["", "  Whole training step of this training, generation left out"]
    t0, t1 = whole_step(summary)
    lines.append(_row("CPU seconds", f"{t0:.3f}", f"{t1:.3f}", f"{t0 / t1:.1f} times"))
    for name, words in SHARES.items():
        lines.append(
            _row(words, *(f"{100 * summary['runs'][run][name]:.1f} %" for run in ("trl", "ours")))
        )
    for title, costs in _costs(summary):
        lines += ["", f"  Head, {title}"]
        (t0, t1), (m0, m1), (f0, f1) = costs["seconds"], costs["memory"], costs["flops"]
        lines.append(
            _row("seconds, forward + backward", f"{t0:.3f}", f"{t1:.3f}", f"{t0 / t1:.1f} times")
        )
        lines.append(
            _row("peak memory, MiB", f"{m0 / MIB:.1f}", f"{m1 / MIB:.1f}", f"{m0 / m1:.1f} times")
        )
        lines.append(
            _row(
                "10^9 floating-point operations",
                f"{f0 / 1e9:.1f}",
                f"{f1 / 1e9:.1f}",
                f"{f0 / f1:.1f} times",
            )
        )
    for case, words in (("all", "all groups"), ("half", "half of them")):
        pair = summary["head"][case]
        lines.append(
            f"  {words}: {pair['trl']['flops_nvh']:.2f} NVH against {pair['ours']['flops_nvh']:.2f} NVH, "
            f"gradients apart by {pair['gradient_difference']:.0e} of the largest"
        )
    lines += [
        "",
        "  Whole step: rewards, old policy, forward, backward, optimizer; the mean of every second pair of steps.",
        "  Head of this training: seconds of the median of these steps, FLOPs of the other pairs together; it includes",
        "  the scoring of the old policy; on a CPU stock TRL also projects prompt and padding positions. Large head:",
        "  best time of three. Peak: the largest sum of the head's tensors alive at once, gradients included; scratch",
        "  inside one operation is not seen.",
        f"  {_conditions(summary)}",
        "",
    ]
    return "\n".join(lines)


def whole_step(summary: dict[str, Any]) -> tuple[float, float]:
    """CPU seconds of a training step without generation: TRL's, ours."""
    return summary["runs"]["trl"]["step_cpu_seconds"], summary["runs"]["ours"]["step_cpu_seconds"]


def _conditions(summary: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in summary["versions"].items())
    return f"CPU, threads: {summary['threads']}, fp32, {versions}"


def draw(summary: dict[str, Any], path: Path) -> None:
    """Above, what the large head costs; below, the reward of both trainings."""
    (_, training), (_, whole), (_, half) = _costs(summary)
    shape = summary["head_shape"]
    tokens = shape["sequences"] * shape["length"]
    with plt.rc_context(
        {"font.size": 15, "font.family": "DejaVu Sans", "axes.facecolor": CARD, "text.color": INK}
    ):
        figure = plt.figure(figsize=(11, 8.6), facecolor=CARD)
        rewards = figure.add_axes((0.08, 0.15, 0.87, 0.27))
        figure.text(0.03, 0.965, claim(summary), fontsize=22, weight="bold", va="top")
        sizes = f"vocabulary {shape['vocab']:,}, hidden size {shape['hidden_size']:,}"
        words = f"Forward and backward on {tokens} tokens; {sizes}"
        figure.text(0.03, 0.905, words, va="top", color="#57606a")
        for i, (title, costs) in enumerate(
            (("every token has a gradient", whole), ("half of them have none", half))
        ):
            left, right = (
                figure.add_axes((x, 0.54, 0.19, 0.25))
                for x in (0.055 + 0.475 * i, 0.275 + 0.475 * i)
            )
            figure.text(0.055 + 0.475 * i, 0.845, title, weight="bold", va="top")
            _pair(
                left,
                "time",
                costs["seconds"],
                lambda x: f"{x:.0f} s" if x >= 9.95 else f"{x:#.2g} s",
            )
            _pair(right, "memory", costs["memory"], lambda x: f"{x / MIB:,.0f} MiB")
        _curves(rewards, summary)
        (theirs, ours), (t0, t1) = training["seconds"], whole_step(summary)
        note = (
            f"Of that training: the head {theirs / ours:.1f} times as fast, stock TRL's prompt and padding included; "
            f"the whole step without generation {t0 / t1:.1f} times."
        )
        figure.text(0.03, 0.02, f"{note}\n{_conditions(summary)}", fontsize=11, color="#57606a")
        figure.savefig(path, dpi=120)
        plt.close(figure)


def claim(summary: dict[str, Any]) -> str:
    """The title: how many times faster the large head was, and whether the training was the same."""
    pair = summary["head"]["all"]
    faster = pair["trl"]["seconds"] / pair["ours"]["seconds"]
    same = "the same training" if summary["steps_compared"] == summary["steps"] else "the same loss"
    return f"{same.capitalize()}, and a head that is {faster:.1f} times as fast"


def _pair(
    axes: Any, title: str, values: tuple[float, float], words: Callable[[float], str]
) -> None:
    """Two bars, TRL's and ours, each with its value in it or above it."""
    axes.bar((0, 1), values, width=0.8, color=(THEIRS, OURS))
    for x, value in enumerate(values):
        axes.text(x, value, words(value), ha="center", va="bottom")
    axes.set_xticks((0, 1), ("TRL", "ours"))
    for label, color in zip(axes.get_xticklabels(), (THEIRS, OURS), strict=True):
        label.set(color=color, fontweight="bold")
    axes.set(ylim=(0, 1.2 * max(values)), yticks=[])
    axes.set_title(title, fontsize=15, color="#57606a", pad=2)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0)


def _curves(axes: Any, summary: dict[str, Any]) -> None:
    """The mean reward of each batch; ours dashed on TRL's, which it lies on."""
    for name, label, width, color, dashes in (
        ("trl", "stock TRL", 7.0, THEIRS, "solid"),
        ("ours", "grpo_kernels", 3.0, OURS, (0, (2, 1))),
    ):
        rewards = summary["runs"][name]["rewards"]
        steps = [1 + i * summary["steps"] / len(rewards) for i in range(len(rewards))]
        axes.plot(steps, rewards, label=label, lw=width, color=color, linestyle=dashes)
    axes.set(xlabel="optimiser step", ylim=(0, 1.05), yticks=[0, 0.5, 1])
    axes.set_title(
        "right answers in a batch, from one seed", loc="left", weight="bold", fontsize=15
    )
    axes.legend(
        frameon=False,
        loc="lower right",
        labelcolor="linecolor",
        prop={"weight": "bold", "size": 15},
    )
    axes.spines[["top", "right"]].set_visible(False)
