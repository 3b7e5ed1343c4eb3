"""On-policy distillation: a student half as wide learns from a teacher on what the student writes itself.

Three losses from the same student with the same seeds: the teacher's log-probability of each sampled token as an
advantage (`distillation_advantages`), the forward KL from the teacher's 8 likeliest tokens (`topk_divergence`), and the
reverse KL over the whole vocabulary (`linear_divergence`). The claims at the end: each brings the student nearer to the
teacher, and more of its answers are right; the whole vocabulary brings it nearer than the sampled tokens alone. With
--picture FILE the curves are drawn.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from begin import begin

if __name__ == "__main__":
    begin(__doc__)

import torch
from arithmetic import Rollout, accuracy, build_model, hidden_states, sample, take_step, warm_model, warm_start
from torch import Tensor

from grpo_kernels import LossConfig, grpo_loss, linear_divergence, linear_logprob, topk_divergence
from grpo_kernels.advantages import distillation_advantages

TOP_K = 8
GENERATIONS = 4
SEED = 3
PASS = 8  # steps: all problems have come


def of_sampled_tokens(student: Any, hidden: Tensor, teacher: Any, teacher_hidden: Tensor, rollout: Rollout) -> Tensor:
    """Policy gradient: log q - log p of each token is its advantage."""
    ids, mask = rollout.completion_ids, rollout.completion_mask
    with torch.no_grad():
        of_teacher, _ = linear_logprob(teacher_hidden, teacher.lm_head.weight, ids, mask=mask, entropy=False)
        of_student, _ = linear_logprob(hidden, student.lm_head.weight, ids, mask=mask, entropy=False)
    advantages = distillation_advantages(of_teacher, of_student, mask)
    return grpo_loss(hidden, student.lm_head.weight, ids, mask, advantages, config=LossConfig(loss_type="dapo")).loss


def of_top_k(student: Any, hidden: Tensor, teacher: Any, teacher_hidden: Tensor, rollout: Rollout) -> Tensor:
    """KL(teacher || student) over the teacher's likeliest tokens: all that an inference server tells of it."""
    with torch.no_grad():
        likeliest = torch.log_softmax(teacher.lm_head(teacher_hidden), dim=-1).topk(TOP_K)
    mask = rollout.completion_mask
    values = topk_divergence(hidden, student.lm_head.weight, likeliest.indices, likeliest.values, mask=mask)
    return values.sum() / mask.sum()


def of_the_vocabulary(student: Any, hidden: Tensor, teacher: Any, teacher_hidden: Tensor, rollout: Rollout) -> Tensor:
    """KL(student || teacher) over all tokens."""
    heads = student.lm_head.weight, teacher.lm_head.weight
    mask = rollout.completion_mask
    return linear_divergence(hidden, heads[0], teacher_hidden, heads[1], mask=mask).sum() / mask.sum()


LOSSES: dict[str, Callable[..., Tensor]] = {
    "sampled tokens": of_sampled_tokens,
    f"top-{TOP_K} forward KL": of_top_k,
    "full reverse KL": of_the_vocabulary,
}


def distil(student: Any, teacher: Any, tokenizer: Any, problems: list[Any], loss: Any, steps: int) -> dict[str, Any]:
    """Train `student` in place; its KL to the teacher and its share of right answers at each step, on its own text."""
    torch.manual_seed(SEED)
    optimizer = torch.optim.AdamW(student.parameters(), lr=5e-3, weight_decay=0.0)
    found: dict[str, list[float]] = {"kl": [], "right": []}
    for step in range(steps):
        first = step * 8 % len(problems)
        rollout = sample(student, tokenizer, problems[first : first + 16], num_generations=GENERATIONS)
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


def draw(curves: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Both curves of each loss, means of a pass over the problems."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 4.2))
    for axes, name, words in zip(
        panels, ("kl", "right"), ("KL(student || teacher), nats a token", "share of right answers"), strict=True
    ):
        for (title, curve), color in zip(curves.items(), ("#8a8f98", "#3d7ea6", "#d9622b"), strict=True):
            smooth = torch.tensor(curve[name]).unfold(0, PASS, 1).mean(dim=1)
            axes.plot(range(PASS // 2, PASS // 2 + len(smooth)), smooth, label=title, lw=1.8, color=color)
        axes.set(xlabel="optimiser step", title=words)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set(yscale="log")
    panels[0].legend(frameon=False)
    panels[1].set(ylim=(0, 1.02))
    note = f"one seed, the same for all; means of {PASS} steps, in which all problems come"
    figure.text(0.01, 0.01, note, fontsize=7, color="#666666")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="optimiser steps with each loss")
    parser.add_argument("--picture", type=Path, help="where to draw the curves (needs matplotlib)")
    options = parser.parse_args()

    teacher, tokenizer, problems = warm_model(noise=0.0)
    beginner = build_model(tokenizer, hidden_size=32, layers=1, seed=1)
    warm_start(beginner, tokenizer, problems, steps=150, noise=0.5, batch_size=32, learning_rate=5e-3)
    teacher.eval()
    curves = {}
    for name, loss in LOSSES.items():
        print(f"{name:18}  {options.steps} steps")
        curves[name] = distil(copy.deepcopy(beginner), teacher, tokenizer, problems, loss, options.steps)
        kl, right = curves[name]["kl"], curves[name]["right"]
        for step in range(0, options.steps, max(1, options.steps // 4)):
            print(f"{name:18}  step {step:3d}  KL {kl[step]:.4f}  right {right[step]:.3f}")
    if options.picture is not None:
        draw(curves, options.picture)
    ends = {name: mean_of(curve["kl"][-PASS:]) for name, curve in curves.items()}
    for name, curve in curves.items():
        assert ends[name] < 0.8 * mean_of(curve["kl"][:PASS]), f"{name}: the student did not come nearer to the teacher"
        rise = mean_of(curve["right"][-PASS:]) - mean_of(curve["right"][:PASS])
        assert rise > 0.05, f"{name}: the share of right answers did not rise"
    assert ends["full reverse KL"] < ends["sampled tokens"], "the whole vocabulary did not come nearer than its samples"
    start = curves["full reverse KL"]["kl"][0]
    print(f"nats from the teacher: {start:.3f} before; " + ", ".join(f"{x:.3f} by {name}" for name, x in ends.items()))


if __name__ == "__main__":
    main()
