"""The two ops behind `linear_logprob`; the backward also serves a loss whose engine recomputes.

Besides its outputs the forward returns tensors for the backward: the statistics of each position from the engines that
recompute, and d logp / d hidden, row by row, from ``frozen``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels.backends.interface import RowStats
from grpo_kernels.base.choices import LogitsDtype
from grpo_kernels.call.expected import Expectation
from grpo_kernels.call.plan import plan_call
from grpo_kernels.call.planned_head import plan_head
from grpo_kernels.call.run import Execution
from grpo_kernels.call.scores import ScoreCall
from grpo_kernels.compiled.ops.empty import Empty
from grpo_kernels.engine.autograd import returned, shape_and_dtype
from grpo_kernels.engine.engines import engine_named
from grpo_kernels.engine.passes import all_rows, scatter, second_pass
from grpo_kernels.engine.records import NeedsGrad, Rows
from grpo_kernels.engine.request import Request, Stored
from grpo_kernels.head.lm_head import LMHead
from grpo_kernels.token_loss.record import Coefficients


class Settings(NamedTuple):
    """Arguments of the op; as in `linear_logprob`, unless a comment differs."""

    temperature: float  # not read if there are `temperatures`
    final_logit_softcapping: float | None
    logit_scale: float
    logits_dtype: LogitsDtype
    engine: str  # not "auto"
    backend: str
    workspace_bytes: int | None
    dtype: torch.dtype  # of the products' operands
    wants: list[bool]  # gradients of hidden, weight, bias

    def head(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> LMHead:
        """Return the head of a call."""
        constants = (self.final_logit_softcapping, self.logit_scale, self.logits_dtype)
        return LMHead(weight, bias, None, None, None, *constants, hidden=hidden)

    def execution(self) -> Execution:
        """Return the options that decide how the call is computed."""
        needs_grad = NeedsGrad(*self.wants)
        computed: Any = (self.engine, self.backend, self.workspace_bytes)
        return Execution(*computed, needs_grad=needs_grad, dtype=self.dtype)


class ScoreResults(NamedTuple):
    """Tensors of the shape of `ids` in the accumulator's dtype, unless a comment differs."""

    logps: Tensor
    entropies: Tensor
    max_logit: Tensor
    log_sum: Tensor
    d_hidden: Tensor  # (..., H)
    extras: list[Tensor]  # the outputs other than the entropies, in their order; "is_top1" is bool


@torch.no_grad()
def run(
    hidden: Tensor,  # (..., H)
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    ids: Tensor,  # (...)
    mask: Tensor | None,  # (...)
    temperatures: Tensor | None,  # (...)
    outputs: list[str],
    *others: Any,  # `Settings`
) -> ScoreResults:
    """The forward on real tensors."""
    settings, recomputes = Settings(*others), engine_named(Settings(*others).engine).recomputes
    expected = Expectation(None, has_entropy_gradient="entropy" in outputs)
    temperature = settings.temperature if temperatures is None else temperatures
    call = ScoreCall(mask, temperature, (*outputs,), ids, expected)
    head, request, _ = plan_call(call, settings.head(hidden, weight, bias), settings.execution())
    rows = request.rows
    first = request.engine.first_pass(head.operands(rows.positions), request)
    new, stats, grads = Empty(hidden, settings.dtype), first.stats, first.grads

    def per_token(x: Tensor | None, *, wanted: bool = True) -> Tensor:
        return new() if x is None or not wanted else scatter(x, rows, ids.numel()).view(ids.shape)

    d_hidden = None if grads is None else grads.hidden
    assert stats is not None
    return ScoreResults(
        logps=per_token(stats.logps),
        entropies=per_token(stats.entropies),
        max_logit=per_token(stats.max_logit, wanted=recomputes),
        log_sum=per_token(stats.log_sum, wanted=recomputes),
        d_hidden=new()
        if d_hidden is None
        else all_rows(d_hidden, rows.positions, ids.numel()).view(hidden.shape),
        extras=[per_token(stats.extras[name]) for name in call.extras],
    )


def fake(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ids: Tensor,
    mask: Tensor | None,
    temperatures: Tensor | None,
    outputs: list[str],
    *others: Any,
) -> ScoreResults:
    """Return tensors with the shapes of the results of `run`."""
    settings = Settings(*others)
    new, engine = Empty(hidden, settings.dtype), engine_named(settings.engine)
    extras = [name for name in outputs if name != "entropy"]
    return ScoreResults(
        logps=new(ids.shape),
        entropies=new(ids.shape, wanted="entropy" in outputs),
        max_logit=new(ids.shape, wanted=engine.recomputes),
        log_sum=new(ids.shape, wanted=engine.recomputes),
        d_hidden=new(hidden.shape, wanted=engine.stores is Stored.PER_ROW),
        extras=[
            hidden.new_empty(ids.shape, dtype=torch.bool) if x == "is_top1" else new(ids.shape)
            for x in extras
        ],
    )


@torch.no_grad()
def run_backward(
    hidden: Tensor,  # (..., H)
    weight: Tensor,  # (V, H)
    bias: Tensor | None,  # (V,)
    ids: Tensor,  # (...), and so are the following
    mask: Tensor | None,
    temperatures: Tensor | None,
    d_logps: Tensor,
    d_entropies: Tensor | None,
    logps: Tensor,
    entropies: Tensor | None,
    max_logit: Tensor,
    log_sum: Tensor,
    *others: Any,  # `Settings`
) -> tuple[Tensor, Tensor, Tensor]:
    """The second pass, over the positions whose upstream gradient is not 0: gradients in the dtypes of the head."""
    settings, count = Settings(*others), ids.numel()
    head = settings.head(hidden, weight, bias)
    planned = plan_head(head, settings.execution())
    plan = planned.plan

    def upstream(x: Tensor) -> Tensor:
        x = x.reshape(-1).to(plan.accumulator)
        return x if mask is None else torch.where(mask.reshape(-1).ne(0), x, 0.0)

    inv_t: float | Tensor = 1.0 / settings.temperature
    if temperatures is not None:
        inv_t = (1.0 / temperatures.reshape(-1).to(plan.accumulator))[:, None]
    flat = ids.reshape(-1).long()
    flat = torch.where(
        (flat < 0) | (flat >= weight.shape[0]), 0, flat
    )  # masked, or invalid and its logp NaN
    rows = Rows(torch.arange(count, device=ids.device), flat, inv_t)
    stats = RowStats(
        logps=logps.reshape(-1),
        max_logit=max_logit.reshape(-1),
        log_sum=log_sum.reshape(-1),
        entropies=None if entropies is None else entropies.reshape(-1),
    )
    request = Request(
        rows=rows, plan=plan, needs_grad=planned.needs_grad, engine=engine_named(settings.engine)
    )
    coefficients = Coefficients(
        upstream(d_logps), None if d_entropies is None else upstream(d_entropies)
    )
    operands = head.operands(rows.positions)
    grads, indices = second_pass(operands, request, stats, coefficients)
    d_hidden, d_weight, d_bias, *_ = returned(
        grads, operands.map(shape_and_dtype), request, indices
    )
    return (
        hidden.new_empty(0) if d_hidden is None else d_hidden.view(hidden.shape),
        hidden.new_empty(0) if d_weight is None else d_weight,
        hidden.new_empty(0) if d_bias is None else d_bias,
    )


def fake_backward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tensors with the shapes of the results of `run_backward`."""

    def like(x: Tensor | None, wanted: bool) -> Tensor:
        return x.new_empty(x.shape) if x is not None and wanted else hidden.new_empty(0)

    needs_grad = NeedsGrad(*Settings(*others[-len(Settings._fields) :]).wants)
    return (
        like(hidden, needs_grad.hidden),
        like(weight, needs_grad.weight),
        like(bias, needs_grad.bias),
    )
