"""Process supervision: every step has a score, and a token's advantage sums the scores to come.

For "3+4+1=", the working "7+1=8" has two steps: "7+1=" (is the partial sum right?), and "8" with
the end of the sequence (is the last addition right, whatever it starts from?). Step rewards are
normalized over all steps of a group. A token gets the sum over the steps that end at or after it
(DeepSeekMath, section 4.1.3, https://arxiv.org/abs/2402.03300). At the end, the script asserts that
both steps and the final answer improve.
"""

from __future__ import annotations

from begin import begin, steps_of

if __name__ == "__main__":
    begin(__doc__)

import torch
from arithmetic import Rollout, accuracy, evaluate, hidden_states, sample, warm_model

from grpo_kernels import grpo_loss, presets
from grpo_kernels.advantages import process_advantages


def score_steps(rollout: Rollout) -> tuple[list[list[float]], list[list[int]]]:
    """Rewards of each completion's steps, and the index of each step's last token (one token a
    character)."""
    rewards, ends = [], []
    for text, problem, mask in zip(
        rollout.texts, rollout.problems, rollout.completion_mask, strict=True
    ):
        last = int(mask.sum()) - 1
        first, equals, second = text.partition("=")
        terms = first.split("+")
        if not equals or len(terms) != 2 or not all(term.isdigit() for term in terms):
            rewards.append([0.0])  # not a working at all: one step, wrong
            ends.append([last])
            continue
        right = problem.working.partition("=")[0]
        rewards.append([float(first == right), float(second == str(sum(map(int, terms))))])
        ends.append([len(first), last])
    return rewards, ends


def main() -> None:
    steps = steps_of(__doc__, 30, "optimizer steps")

    model, tokenizer, problems = warm_model()
    before = evaluate(model, tokenizer, problems * 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    batch, history = 16, []
    for step in range(steps):
        first = step * batch % len(problems)
        rollout = sample(model, tokenizer, problems[first : first + batch], num_generations=8)
        ids, mask = rollout.completion_ids, rollout.completion_mask
        rewards, ends = score_steps(rollout)
        # (B, T)
        advantages = process_advantages(rewards, ends, num_generations=8, completion_mask=mask)
        states = hidden_states(model, rollout)
        out = grpo_loss(states, model.lm_head, ids, mask, advantages, config=presets.DAPO)
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        whole = torch.tensor([row for row in rewards if len(row) == 2])
        history.append(whole.mean(0))
        if step % 5 == 0 or step == steps - 1:
            partial, final = history[-1].tolist()
            print(
                f"step {step + 1:3d}  first step right {partial:.3f}  second step right "
                f"{final:.3f}  "
                f"answer right {accuracy(rollout).mean():.3f}  "
                f"rows with gradient {out.metrics['rows/gradient'].item():.3f}"
            )
    after = evaluate(model, tokenizer, problems * 4)
    rounds = min(4, max(steps // 2, 1))
    early, late = torch.stack(history[:rounds]).mean(0), torch.stack(history[-rounds:]).mean(0)
    print(f"right answers: {before:.3f} before, {after:.3f} after")
    assert bool((late > early).all()), "one of the two steps did not improve"
    assert after > before + 0.1, "the share of right answers did not rise"


if __name__ == "__main__":
    main()
