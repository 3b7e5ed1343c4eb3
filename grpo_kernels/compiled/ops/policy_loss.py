"""The op behind `grpo_loss`.

Besides the loss, its per-token numbers and its metrics it returns tensors for the backward. Engines that store give the
gradient of the loss in hidden states (all rows), weight and bias, in the accumulator's dtype, neither scaled nor
rounded. Engines that recompute give d loss / d logp, d loss / d entropy (if there is an entropy bonus), and the
statistics that `linear_logprob_backward` takes.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels.base.choices import LogitsDtype
from grpo_kernels.batch.inputs import LossInputs
from grpo_kernels.call.loss import LossCall, first_pass
from grpo_kernels.call.plan import plan_call
from grpo_kernels.call.run import Execution
from grpo_kernels.compiled.ops.empty import Empty
from grpo_kernels.engine.engines import engine_named
from grpo_kernels.engine.passes import all_rows, scatter
from grpo_kernels.engine.records import NeedsGrad
from grpo_kernels.head.lm_head import LMHead
from grpo_kernels.objective.config import config_of
from grpo_kernels.objective.measure import metric_names


class Arguments(NamedTuple):
    """Arguments of the op; as in `grpo_loss`, unless a comment differs."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    completion_ids: Tensor
    completion_mask: Tensor | None
    advantages: Tensor
    old_per_token_logps: Tensor | None
    ref_per_token_logps: Tensor | None
    sampling_per_token_logps: Tensor | None
    importance_sampling_ratio: Tensor | None
    num_items_in_batch: Tensor | None  # a number would specialise the graph on its value
    cu_seqlens: Tensor | None
    config: str  # LossConfig.key
    final_logit_softcapping: float | None
    logit_scale: float
    logits_dtype: LogitsDtype
    engine: str  # not "auto"
    backend: str
    workspace_bytes: int | None
    dtype: torch.dtype  # of the products' operands
    wants: list[bool]  # gradients of hidden, weight, bias

    def inputs(self) -> LossInputs:
        """Return the per-token and per-sequence inputs."""
        return LossInputs(**{field.name: getattr(self, field.name) for field in fields(LossInputs)})

    def execution(self) -> Execution:
        """Return the options that decide how the loss is computed."""
        computed: Any = (self.engine, self.backend, self.workspace_bytes)
        return Execution(*computed, needs_grad=NeedsGrad(*self.wants), dtype=self.dtype)


class LossResults(NamedTuple):
    """Per-token tensors have the shape of `completion_ids`; all are in the accumulator's dtype."""

    loss: Tensor  # ()
    logps: Tensor
    entropies: Tensor
    pairs: Tensor  # (K, 2), see `metric_names`
    extremes: Tensor  # (E,)
    d_hidden: Tensor
    d_weight: Tensor
    d_bias: Tensor
    d_logps: Tensor
    d_entropies: Tensor
    max_logit: Tensor
    log_sum: Tensor


@torch.no_grad()
def run(*arguments: Any) -> LossResults:
    """The op on real tensors."""
    args = Arguments(*arguments)
    constants = (args.final_logit_softcapping, args.logit_scale, args.logits_dtype)
    head = LMHead(args.weight, args.bias, None, None, None, *constants, hidden=args.hidden)
    call = LossCall(args.inputs(), config_of(args.config))
    head, request, loss = plan_call(call, head, args.execution())
    new, rows, n = Empty(args.hidden, args.dtype), request.rows, args.completion_ids.numel()
    first, evaluation = first_pass(loss, head.operands(rows.positions), request)
    stats, grads = first.stats, first.grads
    assert stats is not None
    pairs, extremes = loss.metrics(first.entropies, evaluation, request).stacked()

    def per_token(x: Tensor | None, *, wanted: bool = True) -> Tensor:
        return (
            new()
            if x is None or not wanted
            else scatter(x, rows, n).view(args.completion_ids.shape)
        )

    d_hidden, d_weight, d_bias = (
        (None, None, None) if grads is None else (grads.hidden, grads.weight, grads.bias)
    )
    if d_hidden is not None:
        assert first.grad_rows is not None
        d_hidden = all_rows(d_hidden, rows.positions[first.grad_rows], n).view(args.hidden.shape)
    recomputes = request.engine.recomputes
    return LossResults(
        loss=evaluation.loss,
        logps=per_token(stats.logps),
        entropies=per_token(stats.entropies),
        pairs=pairs,
        extremes=extremes,
        d_hidden=new() if d_hidden is None else d_hidden,
        d_weight=new() if d_weight is None else d_weight,
        d_bias=new() if d_bias is None else d_bias,
        d_logps=per_token(evaluation.d_logp, wanted=recomputes),
        d_entropies=per_token(evaluation.coefficients.d_entropy, wanted=recomputes),
        max_logit=per_token(stats.max_logit, wanted=recomputes),
        log_sum=per_token(stats.log_sum, wanted=recomputes),
    )


def fake(*arguments: Any) -> LossResults:
    """Return tensors with the shapes of the results of `run`."""
    args = Arguments(*arguments)
    config, new, ids = config_of(args.config), Empty(args.hidden, args.dtype), args.completion_ids
    engine = engine_named(args.engine)
    stores, recomputes = engine.stores_gradient, engine.recomputes
    pairs, extremes = metric_names(
        config,
        importance_ratio=args.importance_sampling_ratio is not None,
        sampled=args.sampling_per_token_logps is not None,
    )
    return LossResults(
        loss=new(()),
        logps=new(ids.shape),
        entropies=new(ids.shape),
        pairs=new((len(pairs), 2)),
        extremes=new((len(extremes),)),
        d_hidden=new(args.hidden.shape, wanted=stores and args.wants[0]),
        d_weight=new(args.weight.shape, wanted=stores and args.wants[1]),
        d_bias=new()
        if args.bias is None
        else new(args.bias.shape, wanted=stores and args.wants[2]),
        d_logps=new(ids.shape, wanted=recomputes),
        d_entropies=new(ids.shape, wanted=recomputes and config.entropy_coef != 0.0),
        max_logit=new(ids.shape, wanted=recomputes),
        log_sum=new(ids.shape, wanted=recomputes),
    )
