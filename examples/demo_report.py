"""The demo's table and picture, from its summary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

MIB = 2**20
THEIRS, OURS = "#8a8f98", "#d9622b"


def _costs(summary: dict[str, Any]) -> list[tuple[str, dict[str, tuple[float, float]]]]:
    """(title, {"seconds" | "memory" | "flops": (TRL's, ours)}) for the training and for each realistic head."""
    runs, shape = summary["runs"], summary["head_shape"]
    keys = {"seconds": "head_seconds_per_step", "memory": "head_peak_bytes", "flops": "head_flops"}
    found = [("this training", {name: (runs["trl"][key], runs["ours"][key]) for name, key in keys.items()})]
    tokens = shape["sequences"] * shape["length"]
    keys = {"seconds": "seconds", "memory": "peak_bytes", "flops": "flops"}
    for case, words in (("all", "all groups"), ("half", "half of the groups with advantage 0")):
        pair = summary["head"][case]
        title = f"V {shape['vocab']}, H {shape['hidden_size']}, {tokens} tokens, {words}"
        found.append((title, {name: (pair["trl"][key], pair["ours"][key]) for name, key in keys.items()}))
    return found


def _row(label: str, theirs: str, ours: str, note: str = "") -> str:
    return f"  {label:<34}{theirs:>14}{ours:>14}{note:>11}".rstrip()


def table(summary: dict[str, Any]) -> str:
    """The figures of the demo as text."""
    lines = ["", _row("", "stock TRL", "grpo_kernels")]
    lines.append(_row("reward at the start", *[f"{summary['reward_start']:.3f}"] * 2))
    lines.append(_row("reward at the end", f"{summary['reward_end_trl']:.3f}", f"{summary['reward_end']:.3f}"))
    compared = f"{summary['steps_compared']} of {summary['steps']} steps (those that sampled the same completions)"
    lines.append(f"  largest difference of the losses {summary['max_loss_difference']:.1e}, of the gradient norms")
    lines.append(f"  {summary['max_gradient_norm_difference']:.1e}, over {compared}")
    for title, costs in _costs(summary):
        lines += ["", f"  Head, {title}"]
        (t0, t1), (m0, m1), (f0, f1) = costs["seconds"], costs["memory"], costs["flops"]
        lines.append(_row("seconds, forward + backward", f"{t0:.3f}", f"{t1:.3f}", f"x {t1 / t0:.2f}"))
        lines.append(_row("peak memory, MiB", f"{m0 / MIB:.1f}", f"{m1 / MIB:.1f}", f"x {m1 / m0:.2f}"))
        lines.append(_row("10^9 floating-point operations", f"{f0 / 1e9:.1f}", f"{f1 / 1e9:.1f}", f"x {f1 / f0:.2f}"))
    for case, words in (("all", "all groups"), ("half", "half of them")):
        pair = summary["head"][case]
        lines.append(
            f"  {words}: {pair['trl']['flops_nvh']:.2f} NVH against {pair['ours']['flops_nvh']:.2f} NVH, "
            f"gradients apart by {pair['gradient_difference']:.0e} of the largest"
        )
    lines += [
        "",
        "  Training: seconds of the median step, FLOPs of all of them, passes that score the old policy included; on a",
        "  CPU stock TRL also projects prompt and padding positions. Large head: best time of three. Peak: the largest",
        "  sum of the head's tensors alive at once, gradients included; scratch inside one operation is not seen.",
        f"  {_conditions(summary)}",
        "",
    ]
    return "\n".join(lines)


def _conditions(summary: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in summary["versions"].items())
    return f"CPU, threads: {summary['threads']}, fp32, {versions}"


def draw(summary: dict[str, Any], path: Path) -> None:
    """The reward curves and, relative to stock TRL, the head's time, memory and operations."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5), gridspec_kw={"width_ratios": [1, 1.5]})
    _curves(left, summary)
    _bars(right, _costs(summary))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.text(0.01, 0.01, _conditions(summary), fontsize=7, color="#666666")
    figure.subplots_adjust(left=0.05, right=0.99, top=0.92, bottom=0.31, wspace=0.13)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _curves(axes: Any, summary: dict[str, Any]) -> None:
    for name, label, width, color in (("trl", "stock TRL", 5.0, THEIRS), ("ours", "grpo_kernels", 1.8, OURS)):
        rewards = summary["runs"][name]["rewards"]
        steps = [1 + i * summary["steps"] / len(rewards) for i in range(len(rewards))]
        axes.plot(steps, rewards, label=label, lw=width, color=color)
    axes.set(xlabel="optimiser step", ylabel="mean reward of the batch", ylim=(0, 1.02), title="Reward, same seed")
    axes.legend(frameon=False, loc="lower right")


def _bars(axes: Any, costs: list[tuple[str, dict[str, tuple[float, float]]]]) -> None:
    words: dict[str, tuple[str, Callable[[float], str]]] = {
        "seconds": ("time", lambda x: f"{x:.2g} s"),
        "memory": ("memory", lambda x: f"{x / MIB:.0f} MiB"),
        "flops": ("FLOPs", lambda x: f"{x / 1e12:.2g} T"),
    }
    positions, names = [], []
    for group, (title, figures) in enumerate(costs):
        for i, (name, (theirs, ours)) in enumerate(figures.items()):
            word, text = words[name]
            position = 3.5 * group + i
            axes.bar(position - 0.2, 1.0, 0.38, color=THEIRS)
            axes.bar(position + 0.2, ours / theirs, 0.38, color=OURS)
            axes.text(position + 0.2, ours / theirs + 0.01, f"{ours / theirs:.2f}", ha="center", fontsize=7)
            positions.append(position)
            names.append(f"{word}\n{text(theirs)}\n{text(ours)}")
        title = title.replace(", H", ",\nH").replace("tokens, ", "tokens,\n")
        axes.text(3.5 * group + 1, -0.22, title, ha="center", va="top", fontsize=8)
    axes.set(ylim=(0, 1.1), ylabel="relative to stock TRL", title="Head: forward + backward")
    axes.set_xticks(positions, names, fontsize=7.5)
