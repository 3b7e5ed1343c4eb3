"""Outcome supervision: one score per completion, from three reward functions with weights.

Rewards (B, 3) become group-relative advantages (B,) for the loss (DeepSeekMath, section 4.1.2,
https://arxiv.org/abs/2402.03300). At the end, the script asserts that the weighted reward and the
share of right answers rise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from begin import begin, steps_of

if __name__ == "__main__":
    begin(__doc__)

import torch
from arithmetic import final_answer, hidden_states, sample, warm_model

from grpo_kernels import grpo_loss, presets
from grpo_kernels.advantages import group_advantages
from grpo_kernels.rewards import compute_rewards, reward_names


def right(completions: list[str], answer: list[int], **_: Any) -> list[float]:
    """1 for the right number."""
    return [
        float(final_answer(text) == number)
        for text, number in zip(completions, answer, strict=True)
    ]


async def close(completions: list[str], answer: list[int], **_: Any) -> list[float | None]:
    """1 less a fifth for each unit that the number is off; None, not scored, where there is no
    number.
    """
    found = [final_answer(text) for text in completions]
    return [
        None if n is None else max(0.0, 1 - abs(n - a) / 5)
        for n, a in zip(found, answer, strict=True)
    ]


def finished(completion_ids: list[list[int]], eos: list[int], **_: Any) -> list[float]:
    """1 for a completion that ends by itself."""
    return [float(end in ids) for ids, end in zip(completion_ids, eos, strict=True)]


FUNCTIONS: list[Callable[..., Any]] = [right, close, finished]
WEIGHTS = torch.tensor([1.0, 0.5, 0.25])


def main() -> None:
    steps = steps_of(__doc__, 30, "optimizer steps")

    model, tokenizer, problems = warm_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    config, batch, history = presets.DAPO, 16, []
    for step in range(steps):
        first = step * batch % len(problems)
        rollout = sample(model, tokenizer, problems[first : first + batch], num_generations=8)
        rewards = compute_rewards(
            FUNCTIONS,
            [problem.prompt for problem in rollout.problems],
            rollout.texts,
            rollout.completion_ids.tolist(),
            answer=[problem.answer for problem in rollout.problems],
            eos=[tokenizer.eos_token_id] * len(rollout.texts),
        )
        advantages = group_advantages(rewards, num_generations=8, reward_weights=WEIGHTS)
        out = grpo_loss(
            hidden_states(model, rollout),
            model.lm_head,
            rollout.completion_ids,
            rollout.completion_mask,
            advantages,
            config=config,
        )
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        history.append(rewards.nanmean(0))
        if step % 5 == 0 or step == steps - 1:
            means = zip(reward_names(FUNCTIONS), history[-1].tolist(), strict=True)
            print(f"step {step + 1:3d}  " + "  ".join(f"{name} {mean:.3f}" for name, mean in means))
    rounds = min(4, max(steps // 2, 1))
    before, after = torch.stack(history[:rounds]).mean(0), torch.stack(history[-rounds:]).mean(0)
    print(
        f"weighted reward: {before @ WEIGHTS:.3f} in the first {rounds} steps, "
        f"{after @ WEIGHTS:.3f} in the last"
    )
    assert after @ WEIGHTS > before @ WEIGHTS + 0.1, "the weighted reward did not rise"
    assert after[0] > before[0] + 0.1, "the share of right answers did not rise"


if __name__ == "__main__":
    main()
