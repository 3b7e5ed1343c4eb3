"""A loss of one's own, whose ratio is the sequence's, bounded smoothly by tanh, with all that may belong to a loss.

That is a KL to a reference (k3), a bonus for entropy that fades along the sequence, process advantages, packed rows,
and a value head on the same hidden states. The claim at the end: the loss falls.
"""

from __future__ import annotations

from begin import begin

if __name__ == "__main__":
    begin(__doc__)

import torch
from torch import Tensor, nn

from grpo_kernels import TokenInputs, grpo_loss, linear_logprob
from grpo_kernels.advantages import process_advantages

V, H, STEPS = 500, 32, 10
LENGTHS = torch.tensor([7, 3, 12, 5, 9, 2, 6, 4])  # of four completions for each of two prompts


def objective(tokens: TokenInputs) -> Tensor:
    """The loss of each token, (B, T): a row for each sequence, whose inputs are 0 after its end."""
    log_ratio = (tokens.logps - tokens.old_per_token_logps).sum(1, keepdim=True) / tokens.mask.sum(
        1, keepdim=True
    )
    ratio = 1 + 0.2 * torch.tanh((torch.exp(log_ratio) - 1) / 0.2)
    gap = tokens.ref_per_token_logps - tokens.logps
    bonus = 0.01 * 0.9**tokens.position * tokens.entropies
    return -ratio * tokens.advantages + 0.04 * (torch.exp(gap) - gap - 1) - bonus


def main() -> None:
    torch.manual_seed(0)
    body, value_head = (
        nn.Sequential(nn.Embedding(V, H), nn.Linear(H, H), nn.Tanh()),
        nn.Linear(H, 1),
    )
    lm_head, reference = nn.Linear(H, V, bias=False), nn.Linear(H, V, bias=False)
    optimizer, losses = (
        torch.optim.Adam(nn.ModuleList([body, lm_head, value_head]).parameters(), lr=0.01),
        [],
    )
    tokens, ids = torch.randint(
        V, (2, int(LENGTHS.sum()))
    )  # (N,) each, the sequences one after the other
    mask = torch.arange(int(LENGTHS.max())) < LENGTHS[:, None]
    rewards, ends = (
        torch.rand(len(LENGTHS), 2),
        torch.stack([LENGTHS // 2, LENGTHS - 1], dim=1),
    )  # of two steps each
    advantages = process_advantages(rewards, ends, num_generations=4, completion_mask=mask)[
        mask
    ]  # (N,)
    returns = rewards.sum(1).repeat_interleave(LENGTHS)
    given = {
        "cu_seqlens": nn.functional.pad(LENGTHS.cumsum(0), (1, 0)),
        "objective": objective,
        "loss_type": "grpo",
    }
    with torch.no_grad():
        for name, head in (("old_per_token_logps", lm_head), ("ref_per_token_logps", reference)):
            given[name] = linear_logprob(body(tokens), head, ids, entropy=False).logps
    for step in range(STEPS):
        hidden = body(tokens)
        out = grpo_loss(hidden, lm_head, ids, None, advantages, **given)
        error = (value_head(hidden).squeeze(-1) - returns).square().mean()
        losses.append(out.loss + 0.5 * error)
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
        print(
            f"step {step}  loss {losses[-1]:+.4f}, of the policy {out.loss:+.4f}, error of the values {error:.4f}"
        )
    assert losses[-1] < losses[0] - 0.1, "the loss did not fall"


if __name__ == "__main__":
    main()
