"""Training with sparse gradients against exact ones: ``python -m benchmarks.sparse_training``, on a small policy.

The examples' sums (`benchmarks.gradient_kinds`), from the same start, with Adam and with SGD, a few seeds of what is
sampled: with the exact gradient, with sparse ones, and with logits and d logits rounded to bf16. Prints the reward and
the entropy that each ends with, writes all curves to a JSON file, and draws them.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gradient_kinds import Fused, Loss, Rounded, Start, loss_of, start
from benchmarks.providers.ours import spent
from benchmarks.report.columns import markdown
from grpo_kernels.advantages import group_advantages

from arithmetic import accuracy, sample, take_step  # isort: skip (in examples, which `gradient_kinds` makes importable)

KINDS: dict[str, Callable[[int], Loss]] = {  # of a seed
    "exact": lambda seed: Fused(),
    "sparse d hidden, 3e-3": lambda seed: Fused(3e-3, seed=seed),
    "sparse d hidden, 3e-2": lambda seed: Fused(3e-2, seed=seed),
    "both sparse, 1e-2": lambda seed: Fused(1e-2, weight=True, seed=seed),
    "bf16 logits": lambda seed: Rounded(logits=True),
}
OPTIMIZERS: dict[str, Any] = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}
PROMPTS, GENERATIONS = 16, 4
PASS = 4  # steps: all problems have come
COLORS = ("#22262b", "#3d7ea6", "#d9622b", "#7a4fa3", "#8a8f98")
CURVES = {"reward": "share of right answers", "entropy": "entropy, nats a token"}


def train(begin: Start, kind: str, optimizer: str, seed: int, steps: int) -> dict[str, Any]:
    """Reward and entropy of each step, and what the sparse gradients were made of."""
    torch.manual_seed(seed)
    model, problems, method = copy.deepcopy(begin.model), begin.problems, KINDS[kind](seed)
    updates = OPTIMIZERS[optimizer](model.parameters())
    found: dict[str, Any] = {"kind": kind, "optimizer": optimizer, "seed": seed, "reward": [], "entropy": []}
    for step in range(steps):
        first = step * PROMPTS % len(problems)
        rollout = sample(model, begin.tokenizer, problems[first : first + PROMPTS], num_generations=GENERATIONS)
        right = accuracy(rollout)
        advantages = group_advantages(right, num_generations=GENERATIONS)
        loss, entropy = loss_of(method, model, rollout, advantages)
        take_step(updates, loss)
        found["reward"].append(round(right.mean().item(), 4))
        found["entropy"].append(round(entropy.item(), 4))
    thinned = method.sparse if isinstance(method, Fused) else None
    return found if thinned is None else {**found, "spent": spent(thinned)}


def ends(runs: Sequence[dict[str, Any]], which: str) -> list[float]:
    """Of each run the mean over its last quarter."""
    curves = [run[which] for run in runs]
    return [statistics.fmean(curve[-max(1, len(curve) // 4) :]) for curve in curves]


def chosen(runs: Sequence[dict[str, Any]], kind: str, optimizer: str) -> list[dict[str, Any]]:
    return [run for run in runs if (run["kind"], run["optimizer"]) == (kind, optimizer)]


def table(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Reward and entropy at the end, mean and deviation over the seeds; how far from exact, in standard errors."""
    head = ["optimizer", "gradient", "reward", "off, in standard errors", "entropy", "off", "entries a row"]
    cells = []
    for optimizer in OPTIMIZERS:
        for kind in KINDS:
            some = chosen(runs, kind, optimizer)
            if not some:
                continue
            line = [optimizer, kind]
            for which in CURVES:
                values = ends(some, which)
                line += [f"{statistics.fmean(values):.3f} +- {_spread(values):.3f}"]
                line += ["" if kind == "exact" else f"{off(runs, kind, optimizer, which):+.1f}"]
            entries = [run["spent"]["entries"] for run in some if run.get("spent")]
            line += [f"{statistics.fmean(entries):.0f}" if entries else ""]
            cells.append(line)
    return markdown(head, cells)


def off(runs: Sequence[dict[str, Any]], kind: str, optimizer: str, which: str) -> float:
    """How far the mean at the end is from that with exact gradients, in standard errors of the difference."""
    values, exact = (ends(chosen(runs, name, optimizer), which) for name in (kind, "exact"))
    error = ((_spread(values) ** 2 + _spread(exact) ** 2) / len(exact)) ** 0.5
    return (statistics.fmean(values) - statistics.fmean(exact)) / error if error else 0.0


def _spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Mean and range over the seeds, of means of a pass over the problems."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(len(OPTIMIZERS), 2, figsize=(11, 7.4), sharex=True, squeeze=False)
    for row, optimizer in zip(panels, OPTIMIZERS, strict=True):
        for axes, (which, words) in zip(row, CURVES.items(), strict=True):
            for color, kind in zip(COLORS, KINDS, strict=True):
                curves = torch.tensor([run[which] for run in chosen(runs, kind, optimizer)])
                smooth = curves.unfold(1, PASS, 1).mean(dim=-1)
                steps = range(PASS, PASS + smooth.shape[1])
                axes.plot(steps, smooth.mean(dim=0), color=color, lw=1.7, label=kind)
                axes.fill_between(steps, smooth.amin(dim=0), smooth.amax(dim=0), color=color, alpha=0.10, lw=0)
            axes.set(title=f"{optimizer}: {words}", ylim=(0, 1.02) if which == "reward" else (0, None))
            axes.spines[["top", "right"]].set_visible(False)
    for axes in panels[-1]:
        axes.set(xlabel="optimiser step")
    panels[0][0].legend(frameon=False, fontsize=9, loc="lower right")
    figure.suptitle(claim(runs), fontsize=12, x=0.01, ha="left")
    seeds = len({run["seed"] for run in runs})
    note = f"lines: mean of {seeds} seeds; bands: from the least to the most; means of {PASS} steps"
    figure.text(0.01, 0.01, note, fontsize=8, color="#666666")
    figure.tight_layout(rect=(0, 0.025, 1, 0.99))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def claim(runs: Sequence[dict[str, Any]]) -> str:
    """How far a sparse gradient's reward at the end is from the exact one's, at most."""
    worst = max(abs(off(runs, kind, name, "reward")) for kind in KINDS if "sparse" in kind for name in OPTIMIZERS)
    return f"With sparse gradients the reward ends within {worst:.1f} standard errors of what it does with exact ones"


def _run(arguments: tuple[Any, ...]) -> dict[str, Any]:
    torch.set_num_threads(1)
    return train(*arguments)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sparse_training", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument("--save", type=Path, default=Path("sparse-curves.json"), help="where the curves are written")
    parser.add_argument("--report", type=Path, metavar="JSON", help="train nothing: show these curves")
    parser.add_argument("--picture", type=Path, help="where to draw them (needs matplotlib)")
    options = parser.parse_args()

    if options.report:
        runs = json.loads(options.report.read_text())["runs"]
    else:
        begin = start()
        work = [
            (begin, kind, name, seed, options.steps)
            for seed in range(1, options.seeds + 1)
            for name in OPTIMIZERS
            for kind in KINDS
        ]
        runs = []
        with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
            for run in pool.imap(_run, work):
                print(
                    f"{run['optimizer']}, {run['kind']}, seed {run['seed']}: {ends([run], 'reward')[0]:.3f}", flush=True
                )
                runs.append(run)
        lines = ",\n".join(json.dumps(run) for run in runs)
        options.save.write_text(f'{{"steps": {options.steps}, "runs": [\n{lines}\n]}}\n')
    print("\n".join(table(runs)))
    print(claim(runs))
    if options.picture is not None:
        draw(runs, options.picture)


if __name__ == "__main__":
    main()
