"""GRPO in a plain PyTorch loop: no trainer, and the loss straight from the model's hidden states.

Each round samples groups of completions, scores them, and takes two optimizer steps on them. The
first step is on-policy. The second uses the log-probabilities of the policy that sampled, from
`linear_logps` without a gradient. At the end, the script asserts that the share of right answers
rises.
"""

from __future__ import annotations

from begin import begin, steps_of

if __name__ == "__main__":
    begin(__doc__)

import torch
from arithmetic import accuracy, evaluate, hidden_states, sample, warm_model

from grpo_kernels import GRPOLoss, linear_logps
from grpo_kernels.advantages import group_advantages


def main() -> None:
    steps = steps_of(__doc__, 40, "optimizer steps")

    model, tokenizer, problems = warm_model()
    head = model.lm_head
    before = evaluate(model, tokenizer, problems * 4)
    loss_function = GRPOLoss(loss_type="dapo", epsilon_high=0.28)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    model.train()
    step = 0
    while step < steps:
        first = step * 8 % len(problems)
        rollout = sample(model, tokenizer, problems[first : first + 16], num_generations=8)
        ids, mask = rollout.completion_ids, rollout.completion_mask
        advantages = group_advantages(accuracy(rollout), num_generations=8)
        with torch.no_grad():
            old = linear_logps(
                hidden_states(model, rollout), head, ids, completion_mask=mask, entropy=False
            ).logps
        for _ in range(2):
            out = loss_function(
                hidden_states(model, rollout), head, ids, mask, advantages, old_per_token_logps=old
            )
            optimizer.zero_grad()
            out.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
        if step % 10 == 0:
            metrics = {name: f"{value.item():.3f}" for name, value in out.metrics.items()}
            print(
                f"step {step:3d}  right {accuracy(rollout).mean():.3f}  loss "
                f"{out.loss.item():+.4f}  "
                f"entropy {metrics['entropy']}  clipped {metrics['clip_ratio/region_mean']}  "
                f"rows with gradient {metrics['rows/gradient']}"
            )
    after = evaluate(model, tokenizer, problems * 4)
    print(f"right answers: {before:.3f} before, {after:.3f} after")
    assert after > before + 0.1, "the share of right answers did not rise"


if __name__ == "__main__":
    main()
