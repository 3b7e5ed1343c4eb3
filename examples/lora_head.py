"""LoRA on the head, in low-rank form: a policy gradient that trains only the adapter.

The task is a bandit with many prompts: the hidden state says which tokens are right. The head is
frozen, and the adapter's two factors learn. At the end, the script asserts that gradients match
autograd through the merged head, that the two factors are never multiplied together (it counts
operations), and that the reward rises.
"""

from __future__ import annotations

from begin import begin, steps_of

if __name__ == "__main__":
    begin(__doc__)

import torch
from torch.utils.flop_counter import FlopCounterMode

from grpo_kernels import Head, LoRA, grpo_loss

PROMPTS, GENERATIONS, H, V, RANK = 16, 8, 32, 500, 8
SCALING = 2.0


def main() -> None:
    steps = steps_of(__doc__, 60, "optimizer steps")

    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(PROMPTS, 1, H, generator=g).repeat_interleave(GENERATIONS, 0)  # (B, 1, H)
    weight = torch.randn(V, H, generator=g) * 0.05  # frozen
    # ids of one residue mod 10
    right = torch.randint(10, (PROMPTS,), generator=g).repeat_interleave(GENERATIONS)
    a = (torch.randn(RANK, H, generator=g) * 0.1).requires_grad_()
    b = torch.zeros(V, RANK, requires_grad=True)  # as PEFT starts: the adapter adds nothing
    optimizer = torch.optim.Adam([a, b], lr=0.03)
    first = worst = 0.0
    for step in range(steps):
        merged = weight + SCALING * b.detach() @ a.detach()
        # (B, 1)
        ids = torch.multinomial(torch.softmax(hidden[:, 0] @ merged.T, -1), 1, generator=g)
        reward = (ids[:, 0] % 10 == right).float()
        advantages = reward - reward.view(PROMPTS, -1).mean(1).repeat_interleave(GENERATIONS)
        optimizer.zero_grad()
        with FlopCounterMode(display=False) as counter:
            out = grpo_loss(hidden, Head(weight, lora=LoRA(a, b, SCALING)), ids, None, advantages)
            out.loss.backward()
        logits = hidden @ (weight + SCALING * b @ a).T
        exact = -(
            advantages * torch.log_softmax(logits, -1).gather(2, ids[..., None])[:, 0, 0]
        ).mean()
        for got, want in zip((a.grad, b.grad), torch.autograd.grad(exact, (a, b)), strict=True):
            worst = max(worst, ((got - want).abs().max() / want.abs().max().clamp(min=1e-6)).item())
        optimizer.step()
        first = reward.mean().item() if step == 0 else first
        if step % 20 == 0 or step == steps - 1:
            print(
                f"step {step:3d}  reward {reward.mean():.3f}  operations "
                f"{counter.get_total_flops():,}"
            )
    # rows with and without gradient are two products, each padded if it has less than 16
    n = len(ids) + 2 * 16
    graded = int((advantages != 0).sum()) + 16
    scored = 2 * n * V * H + 2 * n * RANK * (V + H)
    assert counter.get_total_flops() <= scored + 4 * graded * RANK * V + 2 * n * RANK * H
    print(
        f"reward {first:.3f} before, {reward.mean():.3f} after; gradients off by {worst:.1e} of "
        "the largest entry"
    )
    assert worst < 1e-4, "the gradients are not those of the merged head"
    assert reward.mean() > first + 0.3, "the reward did not rise"


if __name__ == "__main__":
    main()
