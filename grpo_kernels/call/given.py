"""A loss of log-probabilities and entropies that were made before it: by another call, or over kept sets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_kernels.base.checks import warn_of_ratio
from grpo_kernels.batch.tokens import Layout, Tokens
from grpo_kernels.call.loss import Objective
from grpo_kernels.call.output import LossOutput
from grpo_kernels.engine.first_order import first_order
from grpo_kernels.objective.config import LossConfig
from grpo_kernels.objective.evaluation import Evaluation
from grpo_kernels.objective.measure import loss_metrics


def given_loss(
    logps: Tensor,
    entropies: Tensor,
    config: LossConfig,
    tokens: Tokens,
    policy: Objective,
    *,
    num_items: bool,
    engine: str = "given",
) -> LossOutput:
    """Return the loss `policy` of the `tokens`, with its gradient in `logps` and `entropies`, both (B, T) or (N,).

    Args:
        num_items: True if ``num_items_in_batch`` was given.
        engine: name to report.
    """
    dtype = tokens.advantages.dtype
    rows = [x.detach().reshape(-1)[tokens.layout.positions].to(dtype) for x in (logps, entropies)]
    done = policy.evaluate(*rows)
    loss = _GivenLoss.apply(logps, entropies, done, tokens.layout)
    if tokens.old_per_token_logps is not None:
        warn_of_ratio(done.terms.token_log_ratio)
    metrics = loss_metrics(config, tokens, rows[1], done, done.has_gradient.sum(), num_items=num_items)
    scores = [tokens.layout.scatter(x) for x in rows]
    return LossOutput(loss, scores[0], scores[1], metrics, engine, "torch")


@first_order
class _GivenLoss(torch.autograd.Function):
    """``forward(ctx, logps, entropies, done, layout)`` -> the loss () of an evaluation that carries its gradient."""

    @staticmethod
    def forward(ctx: Any, logps: Tensor, entropies: Tensor, done: Evaluation, layout: Layout) -> Tensor:
        ctx.layout, ctx.dtypes = layout, (logps.dtype, entropies.dtype)
        ctx.save_for_backward(done.d_logp, done.coefficients.d_entropy)
        return done.loss.clone()

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        found = [None if x is None else ctx.layout.scatter(d_loss * x) for x in ctx.saved_tensors]
        return *(None if x is None else x.to(dtype) for x, dtype in zip(found, ctx.dtypes, strict=True)), None, None
