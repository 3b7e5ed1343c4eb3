"""Log-probabilities by a sampler's own product with the head, with the sampler's bits.

A sampler with batch-invariant kernels replaces ``aten::mm``, or calls its kernel by name. This
library does neither. Here, `product` multiplies a few rows at a time with the whole head. The
logits then take the sampler's path: fp32, division by the temperature, ``torch.log_softmax``. The
backward computes them again. At the end, the script asserts that every token has the bits that such
a sampler would report.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from begin import begin

if __name__ == "__main__":
    begin(__doc__)

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from grpo_kernels import policy_loss_from_logps


class Multiply(torch.autograd.Function):
    """``product(rows (n, H), weight.T (H, V))``, differentiable whatever the product is."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, product: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return product(rows, weight.t())

    @staticmethod
    def backward(ctx: Any, d_logits: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight = ctx.saved_tensors
        return d_logits @ weight, d_logits.t() @ rows, None


def sampler_logprobs(
    hidden: Tensor,  # (N, H)
    weight: Tensor,  # (V, H)
    ids: Tensor,  # (N,)
    *,
    temperature: float = 1.0,
    product: Callable[[Tensor, Tensor], Tensor] = torch.mm,
    rows_at_once: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies of `ids`, (N,) each, with the bits of `product`."""

    def score(rows: Tensor, weight: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = Multiply.apply(rows, weight, product).float() / temperature
        log_probs = torch.log_softmax(logits, dim=-1)
        return log_probs.gather(1, ids[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)

    parts = zip(hidden.split(rows_at_once), ids.split(rows_at_once), strict=True)
    scores = [checkpoint(score, rows, weight, y, use_reentrant=False) for rows, y in parts]
    logps, entropies = (torch.cat(x) for x in zip(*scores, strict=True))
    return logps, entropies


def main() -> None:
    torch.manual_seed(0)
    temperature, (sequences, length, width, vocab) = 0.8, (4, 16, 32, 1000)
    ids, mask = torch.randint(vocab, (sequences, length)), torch.ones(sequences, length)
    advantages, equal = torch.tensor([1.0, -1.0, 0.5, -0.5]), 0
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        hidden = torch.randn(sequences * length, width).to(dtype).requires_grad_()
        weight = torch.randn(vocab, width).to(dtype)
        logps, _ = sampler_logprobs(hidden, weight, ids.flatten(), temperature=temperature)
        sampled = torch.log_softmax((hidden.detach() @ weight.t()).float() / temperature, -1)
        equal += (logps == sampled.gather(1, ids.reshape(-1, 1))[:, 0]).sum().item()
        out = policy_loss_from_logps(logps.view_as(ids), mask, advantages, loss_type="grpo")
        out.loss.backward()
        print(f"{dtype}: norm of d hidden {hidden.grad.norm().item():.4f}")
    print(f"tokens with the sampler's bits: {equal} of {3 * ids.numel()}")


if __name__ == "__main__":
    main()
