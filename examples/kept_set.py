"""GRPO with a truncating sampler: log-probabilities over the ids that top-k and top-p kept.

A sampler with top-k or top-p draws from a part of the vocabulary, renormalized. Scored over the
whole vocabulary, its tokens look off-policy before the first step. Scored over the kept sets, they
are exactly on-policy. The sampler returns the ids that it kept, and the loss takes them as
`kept_ids`. At the end, the script asserts that the ratio to the sampler is 1, and that the share of
right answers rises.
"""

from __future__ import annotations

from begin import begin, steps_of

if __name__ == "__main__":
    begin(__doc__)

import torch
from arithmetic import accuracy, evaluate, hidden_states, sample, take_step, warm_model

from grpo_kernels import LossConfig, grpo_loss, linear_logps
from grpo_kernels.advantages import group_advantages


def main() -> None:
    steps = steps_of(__doc__, 40, "optimizer steps, two a batch")

    model, tokenizer, problems = warm_model()
    head = model.lm_head.weight
    before = evaluate(model, tokenizer, problems * 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    config = LossConfig(loss_type="dapo", epsilon_high=0.28)
    off_kept = off_full = 0.0
    for step in range(0, steps, 2):
        first = step * 8 % len(problems)
        batch = problems[first : first + 16]
        rollout = sample(model, tokenizer, batch, 8, top_k=12, top_p=0.95)
        ids, mask = rollout.completion_ids, rollout.completion_mask
        advantages = group_advantages(accuracy(rollout), num_generations=8)
        largest = int(rollout.scores.isfinite().sum(-1).max())
        kept = rollout.scores.topk(largest, dim=-1)
        kept_ids = kept.indices.masked_fill(kept.values.isinf(), -1)  # (B, T, K)
        sampler = rollout.scores.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)
        for update in range(2):
            states = hidden_states(model, rollout)
            given = {"old_per_token_logps": sampler, "kept_ids": kept_ids, "config": config}
            out = grpo_loss(states, head, ids, mask, advantages, **given)
            if update == 0:  # nothing has moved since the sampler
                frozen = states.detach(), head.detach()
                full = linear_logps(*frozen, ids, completion_mask=mask, entropy=False).logps
                counted = mask.bool()
                ratios = [((x - sampler).exp() - 1)[counted].abs() for x in (out.logps, full)]
                off_kept = max(off_kept, ratios[0].max().item())
                off_full = max(off_full, ratios[1].mean().item())
            take_step(optimizer, out.loss)
        if step % 8 == 0 or step >= steps - 2:
            size = out.metrics["kept/size"].item()
            print(
                f"step {step + 2:3d}  right {accuracy(rollout).mean():.3f}  loss "
                f"{out.loss.item():+.4f}  "
                f"ids kept {size:.1f} of {head.shape[0]}  clipped "
                f"{out.metrics['clip_ratio/region_mean'].item():.3f}"
            )
    after = evaluate(model, tokenizer, problems * 4)
    print(f"right answers: {before:.3f} before, {after:.3f} after")
    print(
        f"ratio to the sampler: off by {off_kept:.1e} at most; {off_full:.3f} on average over the "
        "whole vocabulary"
    )
    assert off_kept < 1e-3, "the ratio over the kept set is not 1"
    assert off_full > 0.005, "the ratio over the whole vocabulary shows no truncation"
    assert after > before + 0.1, "the share of right answers did not rise"


if __name__ == "__main__":
    main()
