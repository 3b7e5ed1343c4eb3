"""A loss of your own: a torch function of per-token numbers, as fast as the built-in losses.

The loss is a policy gradient. Its ratio is a constant weight, at most 2 for rewarded tokens and at
most 1 for others, and it has a small entropy bonus. With `token_level`, it takes one pass, that is,
three matrix products. At the end, the script asserts that gradients match autograd through full
logits, and that training works.
"""

from __future__ import annotations

from begin import begin, steps_of

if __name__ == "__main__":
    begin(__doc__)

import torch
from arithmetic import accuracy, evaluate, hidden_states, sample, warm_model
from torch import Tensor

from grpo_kernels import TokenInputs, grpo_loss, linear_logps, token_level
from grpo_kernels.advantages import group_advantages


@token_level
def asymmetric(tokens: TokenInputs) -> Tensor:
    """-min(ratio, cap) A log p - 0.001 entropy, with the cap by the sign of A and the weight held
    constant."""
    ratio = torch.exp(tokens.logps - tokens.old_per_token_logps).detach()
    cap = torch.where(tokens.advantages > 0, 2.0, 1.0)
    return -torch.minimum(ratio, cap) * tokens.advantages * tokens.logps - 0.001 * tokens.entropies


def by_autograd(
    hidden: Tensor, weight: Tensor, ids: Tensor, mask: Tensor, advantages: Tensor, old: Tensor
) -> Tensor:
    """The same loss in plain torch, with all logits in memory: mean over the counted tokens."""
    logps = torch.log_softmax(hidden @ weight.T, dim=-1)
    entropies = -(logps.exp() * logps).sum(-1)
    chosen = logps.gather(-1, ids[..., None]).squeeze(-1)
    given = advantages[:, None].expand_as(ids)
    per_token = asymmetric(
        TokenInputs(chosen, entropies, mask.bool(), given, old, None, None, None)
    )
    return (per_token * mask).sum() / mask.sum()


def main() -> None:
    steps = steps_of(__doc__, 40, "optimizer steps, two a batch")

    model, tokenizer, problems = warm_model()
    head = model.lm_head.weight
    before = evaluate(model, tokenizer, problems * 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    worst = 0.0
    for step in range(0, steps, 2):
        first = step * 8 % len(problems)
        rollout = sample(model, tokenizer, problems[first : first + 16], num_generations=8)
        ids, mask = rollout.completion_ids, rollout.completion_mask
        advantages = group_advantages(accuracy(rollout), num_generations=8)
        with torch.no_grad():
            old = linear_logps(
                hidden_states(model, rollout), head, ids, completion_mask=mask, entropy=False
            ).logps
        for _ in range(2):
            states = hidden_states(model, rollout)
            out = grpo_loss(
                states, head, ids, mask, advantages, old_per_token_logps=old, objective=asymmetric
            )
            plain = by_autograd(states, head, ids, mask, advantages, old)
            ours = torch.autograd.grad(out.loss, (states, head), retain_graph=True)
            theirs = torch.autograd.grad(plain, (states, head), retain_graph=True)
            gaps = [
                ((a - b).abs().max() / b.abs().max()).item()
                for a, b in zip(ours, theirs, strict=True)
            ]
            worst = max(worst, *gaps)
            optimizer.zero_grad()
            out.loss.backward()
            optimizer.step()
        if step % 10 == 0 or step >= steps - 2:
            print(
                f"step {step + 2:3d}  right {accuracy(rollout).mean():.3f}  loss "
                f"{out.loss.item():+.4f}  {out.engine}"
            )
    after = evaluate(model, tokenizer, problems * 4)
    print(f"right answers: {before:.3f} before, {after:.3f} after")
    print(f"largest difference from autograd's gradients: {worst:.1e} of the largest entry")
    assert out.engine == "one_pass", f"expected the one-pass engine, got {out.engine}"
    assert worst < 1e-4, "the gradients are not those of autograd"
    assert after > before + 0.1, "the share of right answers did not rise"


if __name__ == "__main__":
    main()
