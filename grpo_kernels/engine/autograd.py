"""The two autograd Functions: a loss that carries its gradient, and a differentiable log-probability and entropy.

Both keep d hidden and d weight in the accumulator's dtype and apply the upstream gradient before the one rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_kernels.backends.interface import RowStats
from grpo_kernels.base.checks import is_one
from grpo_kernels.engine.device import device_of
from grpo_kernels.engine.first_order import first_order
from grpo_kernels.engine.gradients import Gradients
from grpo_kernels.engine.operands import Head
from grpo_kernels.engine.passes import Differentiated, all_rows, loss_pass, scatter, second_pass
from grpo_kernels.engine.remainder import Remainder, split_off
from grpo_kernels.engine.request import Request, Stored


class Saved(NamedTuple):
    """What a forward keeps for its backward; None where that does not read it."""

    head: Any = None  # Head
    stored: Any = None  # Gradients
    grad_rows: Any = None  # (m,) indices of the rows that `stored` is of
    stats: Any = None  # RowStats of all rows, without extras
    a: Any = None  # (n,) d loss / d logp: the true ones, or those that `stored` was computed with
    b: Any = None  # (n,) d loss / d entropy

    def save(self, ctx: Any) -> None:
        """Hand the tensors to autograd, flat."""
        head = [None] * 5 if self.head is None else [*self.head]
        stored = [None] * 5 if self.stored is None else [*self.stored]
        stats: list[Tensor | None] = [None] * 4
        if self.stats is not None:
            stats = [self.stats.logps, self.stats.max_logit, self.stats.log_sum, self.stats.entropies]
        ctx.save_for_backward(*head, *stored, *stats, self.grad_rows, self.a, self.b)

    @staticmethod
    def of(ctx: Any) -> Saved:
        """What `save` handed over."""
        saved = iter(ctx.saved_tensors)
        head, stored, stats = (tuple(itertools.islice(saved, count)) for count in (5, 5, 4))
        return Saved(
            None if head[0] is None else Head(*head),
            Gradients(*stored),
            next(saved),
            None if stats[0] is None else RowStats(*stats),
            *saved,
        )


@first_order
class PolicyLoss(torch.autograd.Function):
    """A scalar loss of all rows' log-probabilities and entropies.

    ``forward(ctx, request, finish, *head)``, the tensors of a `Head` -> loss, logps (N,), entropies (N,); the last two
    carry no gradient. `finish` maps the statistics of all rows to the loss and its coefficients. Engines that store
    keep the gradient of the loss, those that recompute its coefficients.
    """

    @staticmethod
    def forward(
        ctx: Any, request: Request, finish: Callable[[RowStats], Differentiated], *tensors: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        head = Head(*tensors)
        first, done = loss_pass(head, request, finish)
        stats = first.stats
        assert stats.entropies is not None
        ctx.request, ctx.like = request, Like.of(head)
        if first.grads is not None:
            Saved(stored=first.grads, grad_rows=first.grad_rows).save(ctx)
        elif request.engine.recomputes:
            Saved(head, stats=stats, a=done.a, b=done.b).save(ctx)
        logps, entropies = (scatter(x, request.rows, head.hidden.shape[0]) for x in (stats.logps, stats.entropies))
        ctx.mark_non_differentiable(logps, entropies)
        return done.loss.clone(), logps, entropies  # what is returned gets attached to the graph, `done` must not

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        request, saved = ctx.request, Saved.of(ctx)
        if not request.engine.recomputes:
            return None, None, *returned(saved.stored, ctx.like, request, saved.grad_rows, d_loss)
        a, b = d_loss * saved.a, None if saved.b is None else d_loss * saved.b
        with request.gathered_weight():
            grads, indices = second_pass(saved.head, request, saved.stats, a, b)
        return None, None, *returned(grads, ctx.like, request, indices)


@first_order
class LinearLogprob(torch.autograd.Function):
    """Log-probabilities and entropies, both differentiable.

    ``forward(ctx, request, *head)``, the tensors of a `Head` -> logps (N,), entropies (N,) or None, and the extras.
    With stored gradients for coefficients (a, b) and upstream gradients (g, h), the backward returns c times what is
    stored plus, by a second sweep, the gradient of what is left: g - c a and h - c b, in the rows where that is more
    than rounding (`remainder.py`).
    """

    @staticmethod
    def forward(ctx: Any, request: Request, *tensors: Any) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        head = Head(*tensors)
        first = request.engine.first_pass(head, request)
        stats = first.stats
        ctx.request, ctx.like = request, Like.of(head)
        if request.engine.stores is not Stored.NOTHING:
            Saved(head, first.grads, first.grad_rows, stats, *(first.used or (None, None))).save(ctx)
        n = head.hidden.shape[0]
        extras = [scatter(stats.extras[name], request.rows, n) for name in request.extras]
        entropies = None if stats.entropies is None else scatter(stats.entropies, request.rows, n)
        ctx.mark_non_differentiable(*extras)
        return scatter(stats.logps, request.rows, n), entropies, *extras

    @staticmethod
    def backward(
        ctx: Any, d_logps: Tensor | None, d_entropies: Tensor | None, *d_extras: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        # on every rank of those that share the weight, whatever its own rows will need
        with ctx.request.gathered_weight():
            return None, *_gradient(ctx.request, ctx.like, Saved.of(ctx), d_logps, d_entropies)


def _gradient(
    request: Request, like: Like, saved: Saved, d_logps: Tensor | None, d_entropies: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of the head's tensors, from those of all positions' log-probabilities and entropies."""
    rows, (head, stored, grad_rows, stats, a, b) = request.rows, saved
    dtype = request.config.accumulator
    g = stats.logps.new_zeros(len(rows)) if d_logps is None else d_logps[rows.positions].to(dtype)
    h = None if d_entropies is None else d_entropies[rows.positions].to(dtype)
    if request.engine.recomputes:
        total, indices = second_pass(head, request, stats, g, h)
        return returned(total, like, request, indices)
    if request.engine.stores is Stored.SLOPES:
        factor = g[grad_rows, None]
        rest = Remainder(g.index_fill(0, grad_rows, 0.0), h)
        complete = h is None and grad_rows.shape[0] == len(rows)  # then there is nothing to ask the device for
        left = not complete and rest.size(g, h)[0]
    else:
        factor, rest = split_off(g, h, (a, b))
        left, far = rest.size(g, h)
        if far:  # what is stored is far larger than what is wanted: nothing of it would survive
            total, indices = second_pass(head, request, stats, g, h)
            return returned(total, like, request, indices)
    if not left:
        return returned(stored, like, request, grad_rows, factor)
    more, indices = second_pass(head, request, stats, rest.a, rest.b)
    ratio = None if rest.b is not None else (g / rest.a)[indices]
    total = _merge(_scaled(stored, factor), grad_rows, more, indices, len(rows), ratio)
    every = torch.arange(len(rows), device=rows.positions.device)
    return returned(total, like, request, every)


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
    if x.dtype == dtype or not device_of(x.device).casts_into:
        return (x * factor if _graph_is_kept() else x.mul_(factor)).to(dtype)
    return torch.mul(x, factor, out=torch.empty_like(x, dtype=dtype))


def _merge(
    stored: Gradients, grad_rows: Tensor, more: Gradients, indices: Tensor, n: int, ratio: Tensor | None
) -> Gradients:
    """What is stored, of the rows `grad_rows`, and a second sweep of `indices` together; row by row for all n rows.

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
        total[grad_rows] = x
        total[indices] = y * ratio[:, None] if ratio is not None else total[indices] + y
        return total

    return Gradients(
        hidden=row_by_row(stored.hidden, more.hidden),
        weight=add(stored.weight, more.weight),
        bias=add(stored.bias, more.bias),
        lora_u=row_by_row(stored.lora_u, more.lora_u),
        lora_b=add(stored.lora_b, more.lora_b),
    )


def returned(
    grads: Gradients, like: Like, request: Request, indices: Tensor, factor: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """Gradients times `factor`, () or (m, 1), in the shapes and dtypes of the head's tensors, each rounded once.

    Their rows are those at `indices` among the rows of the call. Of a sharded head each rank has what its own columns
    give to a row: the ranks' parts are added up.
    """
    rows, shard = request.rows, request.config.shard

    def whole(name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        if name not in ("hidden", "lora_u"):
            return _times(x, factor, dtype)
        if shard is not None:  # of all rows of the call: their number is the same on every rank
            summed = shard.sum_(all_rows(_times(x, factor, x.dtype), indices, len(rows)))
            return all_rows(summed.to(dtype), rows.positions, like.positions)
        positions = rows.positions if indices.shape == rows.positions.shape else rows.positions[indices]
        return all_rows(_times(x, factor, dtype), positions, like.positions)

    pairs = zip(("hidden", "weight", "bias", "lora_u", "lora_b"), grads, like.dtypes, strict=True)
    return tuple(None if x is None or dtype is None else whole(name, x, dtype) for name, x, dtype in pairs)


def _graph_is_kept() -> bool:
    """Whether this backward may be called again (``retain_graph``); True if torch does not tell."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())
