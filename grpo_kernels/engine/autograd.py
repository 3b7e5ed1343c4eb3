"""The two autograd Functions: a loss that carries its gradient, and a differentiable log-probability and entropy.

Both keep d hidden and d weight in the accumulator's dtype and apply the upstream gradient before the one rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.backends.interface import RowStats
from grpo_kernels.base.checks import is_one
from grpo_kernels.engine.first_order import first_order
from grpo_kernels.engine.gradients import Gradients
from grpo_kernels.engine.operands import Head
from grpo_kernels.engine.passes import (
    RECOMPUTING,
    Differentiated,
    Request,
    all_rows,
    first_pass,
    loss_pass,
    second_pass,
    spread,
)
from grpo_kernels.engine.remainder import Remainder, split_off


@first_order
class PolicyLoss(torch.autograd.Function):
    """A scalar loss of all rows' log-probabilities and entropies.

    ``forward(ctx, hidden, weight, bias, lora_u, lora_b, request, finish)`` -> loss, logps (N,), entropies (N,); the last two
    carry no gradient. `finish` maps the statistics of all rows to the loss and its coefficients. ``one_pass`` and
    ``frozen`` store the gradient of the loss, ``two_pass`` and ``lean`` its coefficients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # (N, H)
        weight: Tensor,  # (V, H)
        bias: Tensor | None,  # (V,)
        lora_u: Tensor | None,  # (N, r)
        lora_b: Tensor | None,  # (V, r)
        request: Request,
        finish: Callable[[RowStats], Differentiated],
    ) -> tuple[Tensor, Tensor, Tensor]:
        head = Head(hidden, weight, bias, lora_u, lora_b)
        first, done = loss_pass(head, request, finish)
        stats, grads = first.stats, first.grads
        assert stats.entropies is not None
        ctx.request, ctx.like = request, Like.of(head)
        if grads is not None:
            ctx.save_for_backward(*grads, first.graded)
        elif request.engine in RECOMPUTING:
            known = (stats.logps, stats.max_logit, stats.log_sum, stats.entropies)
            ctx.save_for_backward(*head, *known, done.a, done.b)
        logps, entropies = (spread(x, request.rows, hidden.shape[0]) for x in (stats.logps, stats.entropies))
        ctx.mark_non_differentiable(logps, entropies)
        return done.loss.clone(), logps, entropies  # what is returned gets attached to the graph, `done` must not

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        request, saved = ctx.request, ctx.saved_tensors
        if request.engine in RECOMPUTING:
            a, b = saved[9:]
            a, b = d_loss * a, None if b is None else d_loss * b
            with request.gather():
                grads, places = second_pass(Head(*saved[:5]), request, RowStats(*saved[5:9]), a, b)
            return *returned(grads, ctx.like, request, places), None, None
        *stored, graded = saved
        return *returned(Gradients(*stored), ctx.like, request, graded, d_loss), None, None


@first_order
class LinearLogprob(torch.autograd.Function):
    """Log-probabilities and entropies, both differentiable.

    ``forward(ctx, hidden, weight, bias, lora_u, lora_b, request)`` -> logps (N,), entropies (N,) or None, and the extras. With
    stored gradients for coefficients (a, b) and upstream gradients (g, h), the backward returns c times what is stored
    plus, by a second sweep, the gradient of what is left: g - c a and h - c b, in the rows where that is more than
    rounding (`remainder.py`).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # (N, H)
        weight: Tensor,  # (V, H)
        bias: Tensor | None,  # (V,)
        lora_u: Tensor | None,  # (N, r)
        lora_b: Tensor | None,  # (V, r)
        request: Request,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        head = Head(hidden, weight, bias, lora_u, lora_b)
        first = first_pass(head, request)
        stats, grads = first.stats, first.grads
        ctx.request, ctx.like = request, Like.of(head)
        if request.engine not in ("score", "score_dot"):
            stored = Gradients() if grads is None else grads
            known = (stats.logps, stats.max_logit, stats.log_sum, stats.entropies)
            ctx.save_for_backward(*head, *stored, first.graded, *known, *(first.used or (None, None)))
        n = hidden.shape[0]
        extras = [spread(stats.extras[name], request.rows, n) for name in request.extras]
        entropies = None if stats.entropies is None else spread(stats.entropies, request.rows, n)
        ctx.mark_non_differentiable(*extras)
        return spread(stats.logps, request.rows, n), entropies, *extras

    @staticmethod
    def backward(
        ctx: Any, d_logps: Tensor | None, d_entropies: Tensor | None, *d_extras: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        with ctx.request.gather():  # on every rank of those that share the weight, whatever its own rows will need
            return *_gradient(ctx, d_logps, d_entropies), None


def _gradient(ctx: Any, d_logps: Tensor | None, d_entropies: Tensor | None) -> tuple[Tensor | None, ...]:
    """The backward of `LinearLogprob`, but for the gradient of its request."""
    request: Request = ctx.request
    rows = request.rows
    saved = ctx.saved_tensors
    head, stored, graded = Head(*saved[:5]), Gradients(*saved[5:10]), saved[10]
    known, expected = RowStats(*saved[11:15]), saved[15:]
    dtype = request.config.accumulator
    g = known.logps.new_zeros(len(rows)) if d_logps is None else d_logps[rows.positions].to(dtype)
    h = None if d_entropies is None else d_entropies[rows.positions].to(dtype)
    if request.engine in RECOMPUTING:
        total, places = second_pass(head, request, known, g, h)
        return returned(total, ctx.like, request, places)
    if request.engine == "frozen":  # what is stored is d logp / d hidden, row by row
        factor = g[graded, None]
        rest = Remainder(g.index_fill(0, graded, 0.0), h)
        complete = h is None and graded.shape[0] == len(rows)  # then there is nothing to ask the device for
        left = not complete and rest.size(g, h)[0]
    else:
        c, rest = split_off(g, h, (expected[0], expected[1]))
        left, far = rest.size(g, h)
        if far:  # what is stored is far larger than what is wanted: nothing of it would survive
            total, places = second_pass(head, request, known, g, h)
            return returned(total, ctx.like, request, places)
        factor = c
    if not left:
        return returned(stored, ctx.like, request, graded, factor)
    more, places = second_pass(head, request, known, rest.a, rest.b)
    ratio = None if rest.b is not None else (g / rest.a)[places]
    total = _merge(_scaled(stored, factor), graded, more, places, len(rows), ratio)
    every = torch.arange(len(rows), device=rows.positions.device)
    return returned(total, ctx.like, request, every)


@dataclass(frozen=True)
class Like:
    """How many positions there are, and the dtypes of the gradients to return."""

    positions: int
    dtypes: tuple[torch.dtype | None, ...]  # hidden, weight, bias, lora_u, lora_b

    @staticmethod
    def of(head: Head) -> Like:
        return Like(head.hidden.shape[0], tuple(None if x is None else x.dtype for x in head))


def _scaled(stored: Gradients, factor: Tensor) -> Gradients:
    """`stored` times `factor`, () or (m, 1), in its own dtype."""
    return stored.apply(lambda x: _times(x, factor, x.dtype))


def _times(x: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``x * factor`` rounded once to `dtype`, in the place of `x` if it can be, and nobody will need that again.

    On a GPU one pass over the numbers does both; on a CPU torch would make a temporary of the size of `x`.
    """
    if factor is None:
        return x.to(dtype)
    if factor.dim() == 0 and is_one(factor):  # as for `loss.backward()`
        return x.to(dtype, copy=_graph_is_kept())  # what is stored is not the caller's
    if x.dtype == dtype or not x.is_cuda:
        return (x * factor if _graph_is_kept() else x.mul_(factor)).to(dtype)
    return torch.mul(x, factor, out=torch.empty_like(x, dtype=dtype))


def _merge(
    stored: Gradients, graded: Tensor, more: Gradients, places: Tensor, n: int, ratio: Tensor | None
) -> Gradients:
    """What is stored, at the places `graded`, and a second sweep at `places` together; row by row for all n rows.

    Without entropies a row's gradient is a multiple of what the second sweep gave it, `ratio` (m,) times: the row is
    then taken from there alone, so that the difference of two numbers does not stand in for a small one.
    """

    def add(x: Tensor | None, y: Tensor | None) -> Tensor | None:
        if x is None or y is None:
            return y if x is None else x
        return x + y if _graph_is_kept() else x.add_(y)

    def row_by_row(x: Tensor | None, y: Tensor | None) -> Tensor | None:
        if x is None or y is None:
            return None
        total = x.new_zeros(n, x.shape[1])
        total[graded] = x
        total[places] = y * ratio[:, None] if ratio is not None else total[places] + y
        return total

    return Gradients(
        hidden=row_by_row(stored.hidden, more.hidden),
        weight=add(stored.weight, more.weight),
        bias=add(stored.bias, more.bias),
        lora_u=row_by_row(stored.lora_u, more.lora_u),
        lora_b=add(stored.lora_b, more.lora_b),
    )


def returned(
    grads: Gradients, like: Like, request: Request, places: Tensor, factor: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """Gradients times `factor`, () or (m, 1), in the shapes and dtypes of the head's tensors, each rounded once.

    Their rows stand at `places` among those of the call. Of a sharded head each rank has what its own columns give to a
    row: the ranks' parts are added up.
    """
    rows, shard = request.rows, request.config.shard

    def whole(name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        if name not in ("hidden", "lora_u"):
            return _times(x, factor, dtype)
        if shard is not None:  # of all rows of the call: their number is the same on every rank
            summed = shard.sum_(all_rows(_times(x, factor, x.dtype), places, len(rows)))
            return all_rows(summed.to(dtype), rows.positions, like.positions)
        positions = rows.positions if places.shape == rows.positions.shape else rows.positions[places]
        return all_rows(_times(x, factor, dtype), positions, like.positions)

    pairs = zip(("hidden", "weight", "bias", "lora_u", "lora_b"), grads, like.dtypes, strict=True)
    return tuple(None if x is None or dtype is None else whole(name, x, dtype) for name, x, dtype in pairs)


def _graph_is_kept() -> bool:
    """Whether this backward may be called again (``retain_graph``); True if torch does not tell."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())
