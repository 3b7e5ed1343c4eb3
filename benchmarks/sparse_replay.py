"""Where sparse gradients take the weights: ``python -m benchmarks.sparse_replay``, on a small policy.

Some steps of training with the exact gradient are recorded (`benchmarks.gradient_kinds`: the completions, and what
each was worth), and repeated from the same start with other gradients of the same loss. Printed, in markdown, is how
far apart the weights are in the end, as a share of the way that the exact gradient took them::

    |w - w_exact| / |w_exact - w_start|

of the body, of the head's rows of ids that occurred, and of its rows of ids that never did.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.gradient_kinds import Fused, Loss, Rounded, Start, loss_of, start
from benchmarks.report.columns import markdown
from benchmarks.sparse_training import GENERATIONS, PROMPTS
from grpo_kernels.advantages import group_advantages

from arithmetic import Rollout, accuracy, sample, take_step  # isort: skip (see `gradient_kinds`)

KINDS: dict[str, Callable[[int], Loss]] = {  # of a seed
    "bf16 d logits": lambda seed: Rounded(logits=False),
    "bf16 logits": lambda seed: Rounded(logits=True),
    "sparse d hidden, 3e-3": lambda seed: Fused(3e-3, seed=seed),
    "sparse d hidden, 1e-2": lambda seed: Fused(1e-2, seed=seed),
    "both sparse, 3e-3": lambda seed: Fused(3e-3, weight=True, seed=seed),
    "both sparse, 1e-2": lambda seed: Fused(1e-2, weight=True, seed=seed),
}
REPLAYED = {"Adam": tuple(KINDS), "SGD": ("sparse d hidden, 1e-2", "both sparse, 3e-3", "both sparse, 1e-2")}
# Rates at which a rounding error stays what it is: at those of `sparse_training` it grows from step to step.
OPTIMIZERS: dict[str, Any] = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.03),
}
PARTS = ("body", "head, ids that occurred", "head, other ids")


@dataclass(frozen=True)
class Recorded:
    """The batches of a run with the exact gradient, and the weights it ended with."""

    batches: list[tuple[Rollout, Tensor]]  # with advantages (B,)
    end: dict[str, Tensor]


def record(begin: Start, optimizer: str, seed: int, steps: int) -> Recorded:
    """Train with the exact gradient."""
    torch.manual_seed(seed)
    model, problems = copy.deepcopy(begin.model), begin.problems
    updates, batches = OPTIMIZERS[optimizer](model.parameters()), []
    for step in range(steps):
        first = step * PROMPTS % len(problems)
        rollout = sample(model, begin.tokenizer, problems[first : first + PROMPTS], num_generations=GENERATIONS)
        advantages = group_advantages(accuracy(rollout), num_generations=GENERATIONS)
        batches.append((rollout, advantages))
        take_step(updates, loss_of(Fused(), model, rollout, advantages)[0])
    return Recorded(batches, _weights(model))


def replay(begin: Start, recorded: Recorded, kind: Loss, optimizer: str) -> dict[str, Tensor]:
    """The weights that the same batches lead to."""
    model = copy.deepcopy(begin.model)
    updates = OPTIMIZERS[optimizer](model.parameters())
    for rollout, advantages in recorded.batches:
        take_step(updates, loss_of(kind, model, rollout, advantages)[0])
    return _weights(model)


def distances(begin: Start, recorded: Recorded, got: dict[str, Tensor]) -> list[float]:
    """Of each of `PARTS`."""
    before, occurred = _weights(begin.model), occurring(recorded, len(begin.tokenizer))

    def of_parts(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[Tensor]:
        head = a["lm_head.weight"] - b["lm_head.weight"]
        body = torch.cat([(a[name] - b[name]).flatten() for name in a if name != "lm_head.weight"])
        return [body.norm(), head[occurred].norm(), head[~occurred].norm()]

    apart, way = of_parts(got, recorded.end), of_parts(recorded.end, before)
    return [float(a / b) for a, b in zip(apart, way, strict=True)]


def occurring(recorded: Recorded, vocab: int) -> Tensor:
    """(V,) bool: the ids of the completions, up to their ends."""
    found = torch.zeros(vocab, dtype=torch.bool)
    for rollout, _ in recorded.batches:
        found[rollout.completion_ids[rollout.completion_mask.bool()]] = True
    return found


def table(begin: Start, steps: int, seeds: Sequence[int]) -> list[str]:
    """A row for each optimizer and gradient: means over the seeds."""
    cells = []
    for optimizer, kinds in REPLAYED.items():
        runs = {seed: record(begin, optimizer, seed, steps) for seed in seeds}
        for name in kinds:
            found = [
                distances(begin, run, replay(begin, run, KINDS[name](seed), optimizer)) for seed, run in runs.items()
            ]
            cells.append([optimizer, name, *(f"{statistics.fmean(x):.1e}" for x in zip(*found, strict=True))])
    return markdown(["optimizer", "gradient", *PARTS], cells)


def _weights(model: Any) -> dict[str, Tensor]:
    return {name: x.detach().double().clone() for name, x in model.named_parameters()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sparse_replay", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = table(start(), options.steps, range(1, options.seeds + 1))
    print(f"{options.steps} steps, means of {options.seeds} recordings\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
