"""On-policy distillation: a student half as wide learns from a teacher on what the student writes itself.

Three losses from the same student with the same seeds: the teacher's log-probability of each sampled token as an
advantage, the forward KL from the teacher's 8 likeliest tokens (`topk_divergence`), and the
reverse KL over the whole vocabulary (`linear_divergence`). The claims at the end: each brings the student nearer to the
teacher, and more of its answers are right; the whole vocabulary brings it nearer than the sampled tokens alone. With
--seeds 5 --output FILE the curves of five seeds are written, which `python -m benchmarks.curves` draws.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from begin import begin

if __name__ == "__main__":
    begin(__doc__)

import torch
from arithmetic import (
    Rollout,
    accuracy,
    build_model,
    hidden_states,
    sample,
    take_step,
    warm_model,
    warm_start,
)
from torch import Tensor

from grpo_kernels import LossConfig, grpo_loss, linear_divergence, linear_logprob, topk_divergence

TOP_K = 8
GENERATIONS = 4
SEED = 3  # the first of them
PASS = 8  # steps: all problems have come


def of_sampled_tokens(
    student: Any, hidden: Tensor, teacher: Any, teacher_hidden: Tensor, rollout: Rollout
) -> Tensor:
    """Policy gradient: log q - log p of each token is its advantage."""
    ids, mask = rollout.completion_ids, rollout.completion_mask
    with torch.no_grad():
        of_teacher = linear_logprob(
            teacher_hidden, teacher.lm_head, ids, mask=mask, entropy=False
        ).logps
        of_student = linear_logprob(hidden, student.lm_head, ids, mask=mask, entropy=False).logps
    advantages = (of_teacher - of_student) * mask
    return grpo_loss(
        hidden, student.lm_head, ids, mask, advantages, config=LossConfig(loss_type="dapo")
    ).loss


def of_top_k(
    student: Any, hidden: Tensor, teacher: Any, teacher_hidden: Tensor, rollout: Rollout
) -> Tensor:
    """KL(teacher || student) over the teacher's likeliest tokens: all that an inference server tells of it."""
    with torch.no_grad():
        likeliest = torch.log_softmax(teacher.lm_head(teacher_hidden), dim=-1).topk(TOP_K)
    mask = rollout.completion_mask
    scores = topk_divergence(
        hidden, student.lm_head, likeliest.indices, likeliest.values, mask=mask
    )
    return scores.divergence.sum() / mask.sum()


def of_the_vocabulary(
    student: Any, hidden: Tensor, teacher: Any, teacher_hidden: Tensor, rollout: Rollout
) -> Tensor:
    """KL(student || teacher) over all tokens."""
    mask = rollout.completion_mask
    scores = linear_divergence(hidden, student.lm_head, teacher_hidden, teacher.lm_head, mask=mask)
    return scores.divergence.sum() / mask.sum()


LOSSES: dict[str, Callable[..., Tensor]] = {
    "sampled tokens": of_sampled_tokens,
    f"top-{TOP_K} forward KL": of_top_k,
    "full reverse KL": of_the_vocabulary,
}


def distil(
    student: Any,
    teacher: Any,
    tokenizer: Any,
    problems: list[Any],
    loss: Any,
    steps: int,
    seed: int,
) -> dict[str, list[float]]:
    """Train `student` in place; its KL to the teacher and its share of right answers at each step, on its own text."""
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-3, weight_decay=0.0)
    found: dict[str, list[float]] = {"kl": [], "right": []}
    for step in range(steps):
        first = step * 8 % len(problems)
        rollout = sample(
            student, tokenizer, problems[first : first + 16], num_generations=GENERATIONS
        )
        hidden = hidden_states(student, rollout)
        with torch.no_grad():
            teacher_hidden = hidden_states(teacher, rollout)
            kl = of_the_vocabulary(student, hidden.detach(), teacher, teacher_hidden, rollout)
        found["kl"].append(kl.item())
        found["right"].append(accuracy(rollout).mean().item())
        take_step(optimizer, loss(student, hidden, teacher, teacher_hidden, rollout))
    return found


def mean_of(values: list[float]) -> float:
    return sum(values) / len(values)


def end(runs: list[dict[str, Any]], name: str, key: str, first: bool = False) -> float:
    """The mean over the seeds of a loss's last pass over the problems, or of its first."""
    passes = [run[key][:PASS] if first else run[key][-PASS:] for run in runs if run["loss"] == name]
    return mean_of([mean_of(values) for values in passes])


def write(runs: list[dict[str, Any]], path: Path) -> None:
    """The curves, and what they were made with."""
    rounded = [
        {**run, **{key: [round(x, 4) for x in run[key]] for key in ("kl", "right")}} for run in runs
    ]
    made = {
        "date": datetime.date.today().isoformat(),
        "versions": {"torch": torch.__version__},
        "device": "cpu",
    }
    about = {
        "dtype": "float32",
        "pass": PASS,
        "student": "H 32, 1 layer",
        "teacher": "H 64, 2 layers",
        "v": 64,
    }
    head = json.dumps({**made, **about})[1:-1]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        f'{{{head}, "runs": [\n' + ",\n".join(json.dumps(run) for run in rounded) + "\n]}\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="optimiser steps with each loss")
    parser.add_argument("--seeds", type=int, default=1, help="runs with each loss")
    parser.add_argument("--output", type=Path, metavar="JSON", help="where to write the curves")
    options = parser.parse_args()

    teacher, tokenizer, problems = warm_model(noise=0.0)
    beginner = build_model(tokenizer, hidden_size=32, layers=1, seed=1)
    warm_start(
        beginner, tokenizer, problems, steps=150, noise=0.5, batch_size=32, learning_rate=5e-3
    )
    teacher.eval()
    runs = []
    for seed, (name, loss) in itertools.product(range(SEED, SEED + options.seeds), LOSSES.items()):
        print(f"{name:18}  seed {seed}, {options.steps} steps")
        found = distil(
            copy.deepcopy(beginner), teacher, tokenizer, problems, loss, options.steps, seed
        )
        runs.append({"loss": name, "seed": seed, **found})
        for step in range(0, options.steps, max(1, options.steps // 4)):
            print(
                f"{name:18}  step {step:3d}  KL {found['kl'][step]:.4f}  right {found['right'][step]:.3f}"
            )
    if options.output is not None:
        write(runs, options.output)
    ends = {name: end(runs, name, "kl") for name in LOSSES}
    for name in LOSSES:
        assert ends[name] < 0.8 * end(runs, name, "kl", first=True), (
            f"{name}: the student did not come nearer"
        )
        rise = end(runs, name, "right") - end(runs, name, "right", first=True)
        assert rise > 0.05, f"{name}: the share of right answers did not rise"
    assert ends["full reverse KL"] < ends["sampled tokens"], (
        "the whole vocabulary did not come nearer than its samples"
    )
    before = mean_of([run["kl"][0] for run in runs])
    print(
        f"nats from the teacher: {before:.3f} before; "
        + ", ".join(f"{x:.3f} by {name}" for name, x in ends.items())
    )


if __name__ == "__main__":
    main()
