"""A loss on log-probabilities and entropies that exist already: from another call, or over kept sets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grpo_kernels.batch.tokens import Layout
from grpo_kernels.call.loss import Loss
from grpo_kernels.call.output import LossOutput
from grpo_kernels.engine.first_order import first_order
from grpo_kernels.objective.evaluation import Evaluation


def loss_from_logps(
    loss: Loss, logps: Tensor, entropies: Tensor, *, engine: str = "given"
) -> LossOutput:
    """Return the value of `loss`, with its gradient in `logps` and `entropies`, both (B, T) or (N,).

    Args:
        engine: name to report.
    """
    layout, dtype = loss.tokens.layout, loss.tokens.advantages.dtype
    rows = [x.detach().reshape(-1)[layout.positions].to(dtype) for x in (logps, entropies)]
    evaluation = loss.objective.evaluate(*rows)
    value = _LossFromLogps.apply(logps, entropies, evaluation, layout)
    scores = [layout.scatter(x) for x in rows]
    return LossOutput(
        value, scores[0], scores[1], loss.metrics(rows[1], evaluation), engine, "torch"
    )


@first_order
class _LossFromLogps(torch.autograd.Function):
    """``forward(ctx, logps, entropies, evaluation, layout)`` -> the loss () of `evaluation`, with its gradient."""

    @staticmethod
    def forward(
        ctx: Any, logps: Tensor, entropies: Tensor, evaluation: Evaluation, layout: Layout
    ) -> Tensor:
        ctx.layout, ctx.dtypes = layout, (logps.dtype, entropies.dtype)
        ctx.save_for_backward(evaluation.d_logp, evaluation.coefficients.d_entropy)
        return evaluation.loss.clone()

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        grads = [None if x is None else ctx.layout.scatter(d_loss * x) for x in ctx.saved_tensors]
        return (
            *(
                None if x is None else x.to(dtype)
                for x, dtype in zip(grads, ctx.dtypes, strict=True)
            ),
            None,
            None,
        )
