"""One of verl's losses by name: Clip-Cov.

It is PPO's loss without some of the tokens that would lower the entropy most: those whose
log-probability and advantage vary together. It looks at the whole batch, and still comes straight
from hidden states. The claims at the end: its gradients are those of autograd through full logits,
with the same tokens drawn; tokens were drawn; and training with it works.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from begin import begin

if __name__ == "__main__":
    begin(__doc__)

import torch
from arithmetic import accuracy, evaluate, hidden_states, sample, warm_model
from torch import Tensor

from grpo_kernels import LossConfig, TokenInputs, grpo_loss, linear_logprob, objectives
from grpo_kernels.advantages import group_advantages

CLIP_COV = partial(objectives.clip_cov, clip_cov_ratio=0.02, clip_cov_lb=0.05, clip_cov_ub=5.0)
SEED = 3


def drawing() -> Any:
    """The loss with a fresh generator, so that both ways of computing it draw the same tokens."""
    return partial(CLIP_COV, generator=torch.Generator().manual_seed(SEED))


def by_autograd(
    hidden: Tensor, weight: Tensor, ids: Tensor, mask: Tensor, advantages: Tensor, old: Tensor
) -> tuple[Tensor, int]:
    """The same loss in plain torch, with all logits in memory, and how many tokens it has dropped."""
    logps = torch.log_softmax(hidden @ weight.T, dim=-1).gather(-1, ids[..., None]).squeeze(-1)
    given = advantages[:, None].expand_as(ids)
    per_token = drawing()(
        TokenInputs(logps, torch.zeros_like(logps), mask.bool(), given, old, None, None, None)
    )
    dropped = int(((per_token == 0) & (given != 0) & mask.bool()).sum())
    return (per_token * mask).sum() / mask.sum(), dropped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="optimiser steps, two a batch")
    steps = parser.parse_args().steps

    model, tokenizer, problems = warm_model()
    head, token_mean = model.lm_head.weight, LossConfig(loss_type="bnpo")
    before = evaluate(model, tokenizer, problems * 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    worst, drawn = 0.0, 0
    for step in range(0, steps, 2):
        first = step * 8 % len(problems)
        rollout = sample(model, tokenizer, problems[first : first + 16], num_generations=8)
        ids, mask = rollout.completion_ids, rollout.completion_mask
        advantages = group_advantages(accuracy(rollout), num_generations=8)
        with torch.no_grad():
            old = linear_logprob(
                hidden_states(model, rollout), head, ids, mask=mask, entropy=False
            ).logps
        for _ in range(2):
            states = hidden_states(model, rollout)
            batch = (states, head, ids, mask, advantages)
            out = grpo_loss(*batch, old_per_token_logps=old, objective=drawing(), config=token_mean)
            plain, dropped = by_autograd(*batch, old)
            ours = torch.autograd.grad(out.loss, (states, head), retain_graph=True)
            theirs = torch.autograd.grad(plain, (states, head), retain_graph=True)
            gaps = [
                ((a - b).abs().max() / b.abs().max()).item()
                for a, b in zip(ours, theirs, strict=True)
            ]
            worst, drawn = max(worst, *gaps), drawn + dropped
            optimizer.zero_grad()
            out.loss.backward()
            optimizer.step()
        if step % 10 == 0 or step >= steps - 2:
            right, loss = accuracy(rollout).mean(), out.loss.item()
            print(f"step {step + 2:3d}  right {right:.3f}  loss {loss:+.4f}  {dropped} drawn")
    after = evaluate(model, tokenizer, problems * 4)
    print(f"right answers: {before:.3f} before, {after:.3f} after; {drawn} tokens drawn")
    print(f"largest difference from autograd's gradients: {worst:.1e} of the largest entry")
    assert drawn > steps, "hardly a token was drawn"
    assert worst < 1e-4, "the gradients are not those of autograd"
    assert after > before + 0.1, "the share of right answers did not rise"


if __name__ == "__main__":
    main()
