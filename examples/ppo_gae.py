"""PPO with a value head: advantages from GAE, two epochs on each batch.

The policy's loss is `grpo_loss` with `presets.PPO` (https://arxiv.org/abs/1707.06347). Advantages
(B, T) come from `gae` (https://arxiv.org/abs/1506.02438). The value head reads the same hidden
states, and plain torch trains it. At the end, the script asserts that the share of right answers
rises and that the error of the values falls.
"""

from __future__ import annotations

from begin import begin, steps_of

if __name__ == "__main__":
    begin(__doc__)

import torch
from arithmetic import accuracy, evaluate, hidden_states, sample, warm_model
from torch import nn

from grpo_kernels import grpo_loss, linear_logps, presets
from grpo_kernels.advantages import gae


def main() -> None:
    steps = steps_of(__doc__, 40, "optimizer steps, two a batch")

    model, tokenizer, problems = warm_model()
    head = model.lm_head
    value_head = nn.Sequential(nn.Linear(head.in_features, 64), nn.Tanh(), nn.Linear(64, 1))
    before = evaluate(model, tokenizer, problems * 4)
    groups = [
        {"params": model.parameters(), "lr": 1e-3},
        {"params": value_head.parameters(), "lr": 5e-3},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    errors = []
    for step in range(0, steps, 2):
        first = step * 16 % len(problems)
        rollout = sample(model, tokenizer, problems[first : first + 32], num_generations=8)
        ids, mask = rollout.completion_ids, rollout.completion_mask
        counted = mask.bool()
        with torch.no_grad():
            states = hidden_states(model, rollout)
            old = linear_logps(states, head, ids, completion_mask=mask, entropy=False).logps
            values = value_head(states).squeeze(-1)
        advantages, returns = gae(
            accuracy(rollout), values, mask, gamma=1.0, lam=0.95, whiten_advantages=True
        )
        for epoch in range(2):
            states = hidden_states(model, rollout)
            out = grpo_loss(
                states, head, ids, mask, advantages, old_per_token_logps=old, config=presets.PPO
            )
            value_loss = (
                (value_head(states.detach()).squeeze(-1) - returns)[counted].square().mean()
            )
            optimizer.zero_grad()
            (out.loss + 0.5 * value_loss).backward()
            optimizer.step()
            if epoch == 0:
                errors.append(value_loss.item())
        if step % 8 == 0 or step >= steps - 2:
            print(
                f"step {step + 2:3d}  right {accuracy(rollout).mean():.3f}  error of the values "
                f"{errors[-1]:.4f}  "
                f"ratio {out.metrics['ratio'].item():.3f}  clipped "
                f"{out.metrics['clip_ratio/region_mean'].item():.3f}"
            )
    after = evaluate(model, tokenizer, problems * 4)
    print(f"right answers: {before:.3f} before, {after:.3f} after")
    assert after > before + 0.1, "the share of right answers did not rise"
    assert errors[-1] < 0.5 * errors[0], "the error of the values did not fall"


if __name__ == "__main__":
    main()
