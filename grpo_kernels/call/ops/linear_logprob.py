"""The two ops behind `linear_logprob`; the backward also serves a loss whose engine recomputes.

The forward returns, besides what was asked for, what the backward needs: statistics of each position from the engines
that recompute, and d logp / d hidden, row by row, from ``frozen``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels.backends.interface import RowStats
from grpo_kernels.call.ops.results import Empty
from grpo_kernels.call.projection import head_config, pick_engine, plan_rows, read_rows
from grpo_kernels.config import LossConfig
from grpo_kernels.engine.autograd import Like, returned
from grpo_kernels.engine.gradients import Wants
from grpo_kernels.engine.operands import Head, Rows
from grpo_kernels.engine.passes import RECOMPUTING, Request, all_rows, first_pass, second_pass, spread
from grpo_kernels.engine.plan import Coupling


class Settings(NamedTuple):
    """As in `linear_logprob`, except where said."""

    temperature: float  # where there are no `temperatures`
    final_logit_softcapping: float | None
    logit_scale: float
    logits_dtype: str
    engine: str  # not "auto"
    backend: str
    workspace_bytes: int | None
    dtype: torch.dtype  # of the products' operands
    wants: list[bool]  # which gradients: hidden, weight, bias


class Results(NamedTuple):
    """Tensors of the shape of `ids` in the accumulator's dtype, except where said."""

    logps: Tensor
    entropies: Tensor
    max_logit: Tensor
    log_sum: Tensor
    slopes: Tensor  # (..., H)
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
) -> Results:
    """The forward on real tensors."""
    settings = Settings(*others)
    config, rows, wants = plan_rows(
        hidden,
        weight,
        ids,
        bias=bias,
        mask=mask,
        temperature=settings.temperature if temperatures is None else temperatures,
        final_logit_softcapping=settings.final_logit_softcapping,
        logit_scale=settings.logit_scale,
        logits_dtype=settings.logits_dtype,
        outputs=(*outputs,),
        engine=settings.engine,
        backend=settings.backend,
        workspace_bytes=settings.workspace_bytes,
        wants=Wants(*settings.wants),
        dtype=settings.dtype,
    )
    rows = read_rows("ids", rows, weight.shape[0])
    entropy, extras = "entropy" in outputs, tuple(name for name in outputs if name != "entropy")
    engine = pick_engine(
        Coupling.COUPLED,
        wants,
        config,
        entropy_gradient=entropy,
        engine=settings.engine,
        only_logps=not extras,
    )
    request = Request(rows=rows, config=config, wants=wants, engine=engine, entropy=entropy, extras=extras)
    first = first_pass(Head(hidden.flatten(0, -2), weight, bias), request)
    new, stats, grads, recomputes = Empty(hidden, settings.dtype), first.stats, first.grads, engine in RECOMPUTING

    def per_token(x: Tensor | None, *, wanted: bool = True) -> Tensor:
        return new() if x is None or not wanted else spread(x, rows, ids.numel()).view(ids.shape)

    slopes = None if grads is None else grads.hidden
    return Results(
        logps=per_token(stats.logps),
        entropies=per_token(stats.entropies),
        max_logit=per_token(stats.max_logit, wanted=recomputes),
        log_sum=per_token(stats.log_sum, wanted=recomputes),
        slopes=new() if slopes is None else all_rows(slopes, rows.positions, ids.numel()).view(hidden.shape),
        extras=[per_token(stats.extras[name]) for name in extras],
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
) -> Results:
    """The shapes of what `run` returns."""
    settings = Settings(*others)
    new, recomputes = Empty(hidden, settings.dtype), settings.engine in RECOMPUTING
    extras = [name for name in outputs if name != "entropy"]
    return Results(
        logps=new(ids.shape),
        entropies=new(ids.shape, wanted="entropy" in outputs),
        max_logit=new(ids.shape, wanted=recomputes),
        log_sum=new(ids.shape, wanted=recomputes),
        slopes=new(hidden.shape, wanted=settings.engine == "frozen"),
        extras=[hidden.new_empty(ids.shape, dtype=torch.bool) if x == "is_top1" else new(ids.shape) for x in extras],
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
    wants = Wants(*settings.wants)
    spec = LossConfig(
        final_logit_softcapping=settings.final_logit_softcapping,
        logit_scale=settings.logit_scale,
        logits_dtype=settings.logits_dtype,
    )
    config = head_config(
        hidden, weight, wants, spec, settings.backend, settings.workspace_bytes, settings.dtype, engine=settings.engine
    )

    def upstream(x: Tensor) -> Tensor:
        x = x.reshape(-1).to(config.accumulator)
        return x if mask is None else torch.where(mask.reshape(-1).ne(0), x, 0.0)

    inv_t: float | Tensor = 1.0 / settings.temperature
    if temperatures is not None:
        inv_t = (1.0 / temperatures.reshape(-1).to(config.accumulator))[:, None]
    flat = ids.reshape(-1).long()
    flat = torch.where((flat < 0) | (flat >= weight.shape[0]), 0, flat)  # masked; or wrong, and its logp is NaN then
    rows = Rows(torch.arange(count, device=ids.device), flat, inv_t)
    known = RowStats(
        logps=logps.reshape(-1),
        max_logit=max_logit.reshape(-1),
        log_sum=log_sum.reshape(-1),
        entropies=None if entropies is None else entropies.reshape(-1),
    )
    head = Head(hidden.flatten(0, -2), weight, bias)
    request = Request(rows=rows, config=config, wants=wants, engine=settings.engine)
    a, b = upstream(d_logps), None if d_entropies is None else upstream(d_entropies)
    grads, places = second_pass(head, request, known, a, b)
    d_hidden, d_weight, d_bias, *_ = returned(grads, Like.of(head), request, places)
    return (
        hidden.new_empty(0) if d_hidden is None else d_hidden.view(hidden.shape),
        hidden.new_empty(0) if d_weight is None else d_weight,
        hidden.new_empty(0) if d_bias is None else d_bias,
    )


def fake_backward(hidden: Tensor, weight: Tensor, bias: Tensor | None, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The shapes of what `run_backward` returns."""

    def like(x: Tensor | None, wanted: bool) -> Tensor:
        return x.new_empty(x.shape) if x is not None and wanted else hidden.new_empty(0)

    wants = Wants(*Settings(*others[-len(Settings._fields) :]).wants)
    return like(hidden, wants.hidden), like(weight, wants.weight), like(bias, wants.bias)
