"""The gradient of a policy loss, made in several ways, and the small policy on which what they do is looked at.

The policy is the examples', its vocabulary filled up to 4096 ids that the task does not use, so that rows of d logits
have a tail. Of the default cap on a row's entries, 128 of 4096, that tail would make two rows in three dense, and they
would be exact; here no row is: `most` is the vocabulary, and every row has the error that it is allowed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo_kernels import LossConfig, SparseGradient, grpo_loss
from grpo_kernels.engine.thinning import Thinning
from grpo_kernels.head.lm_head import LMHead

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from arithmetic import Rollout, all_problems, build_model, build_tokenizer, hidden_states, warm_start

VOCAB = 4096
ON_POLICY = LossConfig(loss_type="dapo")
Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(hidden (B, T, H), weight (V, H), ids (B, T), mask (B, T), advantages (B,)) -> (loss, mean entropy)."""


@dataclass(frozen=True)
class Start:
    """Where all training begins."""

    model: Any
    tokenizer: Any
    problems: list[Any]


def start(steps: int = 150, vocab: int = VOCAB) -> Start:
    """A model that has learnt the format, and gets two sums in five right."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer(vocab)
    model, problems = build_model(tokenizer), all_problems(largest=3)
    warm_start(model, tokenizer, problems, steps=steps, noise=0.3, batch_size=32, learning_rate=5e-3)
    return Start(model, tokenizer, problems)


class Uncapped(SparseGradient):
    """No row is dense for the number of its entries."""

    def thinning(self, head: LMHead) -> Thinning:
        return replace(super().thinning(head), most=head.weight.shape[0])


class Fused:
    """`grpo_loss`; with a tolerance its gradient is sparse, d weight's too if `weight`."""

    def __init__(self, tolerance: float | None = None, *, weight: bool = False, seed: int = 0) -> None:
        self.sparse = None if tolerance is None else Uncapped(tolerance, weight=weight, seed=seed)

    def __call__(
        self, hidden: Tensor, weight: Tensor, ids: Tensor, mask: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Tensor]:
        gradient = "exact" if self.sparse is None else self.sparse
        out = grpo_loss(hidden, weight, ids, mask, advantages, config=ON_POLICY, gradient=gradient)
        return out.loss, out.metrics["entropy"]


@dataclass(frozen=True)
class Rounded:
    """All logits in torch; d logits are rounded to bf16 for their products, and `logits` too, as in a bf16 head."""

    logits: bool

    def __call__(
        self, hidden: Tensor, weight: Tensor, ids: Tensor, mask: Tensor, advantages: Tensor
    ) -> tuple[Tensor, Tensor]:
        log_p = torch.log_softmax(_ToBfloat16.apply(hidden @ weight.t(), self.logits), dim=-1)
        logps = log_p.gather(-1, ids[..., None])[..., 0]
        with torch.no_grad():
            entropy = -((log_p.exp() * log_p).sum(dim=-1) * mask).sum() / mask.sum()
        return -(logps * advantages[:, None] * mask).sum() / mask.sum(), entropy


class _ToBfloat16(torch.autograd.Function):
    """What arrives in the backward, rounded to bf16; and in the forward `x`, if it is to be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounds: bool) -> Tensor:
        return x.bfloat16().to(x.dtype) if rounds else x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad.bfloat16().to(grad.dtype), None


def loss_of(kind: Loss, model: Any, rollout: Rollout, advantages: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, mean entropy) on completions whose probabilities are taken to be the policy's own."""
    hidden = hidden_states(model, rollout)
    ids, mask = rollout.completion_ids, rollout.completion_mask
    return kind(hidden, model.lm_head.weight, ids, mask, advantages)
