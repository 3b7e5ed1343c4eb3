"""The two autograd Functions: a loss that carries its gradient, and a differentiable log-probability and entropy.

Both keep d hidden and d weight in the accumulator's dtype and apply the upstream gradient before the one rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from grpo_kernels.backends.interface import DivergenceStats, RowBackend, RowStats
from grpo_kernels.base.checks import is_one
from grpo_kernels.engine.device import device_of
from grpo_kernels.engine.first_order import first_order
from grpo_kernels.engine.gradients import Gradients
from grpo_kernels.engine.operands import Coefficients, Head
from grpo_kernels.engine.passes import Differentiated, all_rows, loss_pass, scatter, second_pass
from grpo_kernels.engine.remainder import Remainder, split_off
from grpo_kernels.engine.request import Request, Stored


class Saved(NamedTuple):
    """Tensors that a forward keeps for its backward; None where the backward does not read them."""

    head: Any = None  # Head
    stored: Any = None  # Gradients
    grad_rows: Any = None  # (m,) indices of the rows that `stored` is of
    stats: Any = None  # RowStats of all rows, without extras
    coefficients: Any = Coefficients()  # (n,) the true ones, or those that `stored` was computed with

    def save(self, ctx: Any) -> None:
        """Hand the tensors to autograd, flat."""
        head = [None] * 8 if self.head is None else [*self.head]
        stored = [None] * 5 if self.stored is None else [*self.stored]
        stats: list[Tensor | None] = [None] * 8
        if self.stats is not None:
            divergence = [None] * 4 if self.stats.divergence is None else [*self.stats.divergence]
            stats = [self.stats.logps, self.stats.max_logit, self.stats.log_sum, self.stats.entropies, *divergence]
        ctx.save_for_backward(*head, *stored, *stats, self.grad_rows, *self.coefficients)

    @staticmethod
    def of(ctx: Any) -> Saved:
        """Return what `save` handed over."""
        saved = iter(ctx.saved_tensors)
        head, stored, stats, divergence = (tuple(itertools.islice(saved, count)) for count in (8, 5, 4, 4))
        diverged = None if divergence[0] is None else DivergenceStats(*divergence)
        return Saved(
            None if head[0] is None else Head(*head),
            Gradients(*stored),
            next(saved),
            None if stats[0] is None else replace(RowStats(*stats), divergence=diverged),
            Coefficients(*saved),
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
            Saved(head, stats=stats, coefficients=Coefficients(done.a, done.b, done.c)).save(ctx)
        logps, entropies = (scatter(x, request.rows, head.hidden.shape[0]) for x in (stats.logps, stats.entropies))
        ctx.mark_non_differentiable(logps, entropies)
        return done.loss.clone(), logps, entropies  # what is returned gets attached to the graph, `done` must not

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        request, saved = ctx.request, Saved.of(ctx)
        if not request.engine.recomputes:
            return None, None, *returned(saved.stored, ctx.like, request, saved.grad_rows, d_loss)
        coefficients = Coefficients(*(None if x is None else d_loss * x for x in saved.coefficients))
        with request.gathered_weight():
            grads, indices = second_pass(saved.head, request, saved.stats, coefficients)
        return None, None, *returned(grads, ctx.like, request, indices)


@first_order
class LinearLogprob(torch.autograd.Function):
    """Log-probabilities, entropies and divergences from a teacher, all differentiable.

    ``forward(ctx, request, *head)``, the tensors of a `Head` -> logps (N,), entropies (N,) and divergences (N,), None
    where there are none, and the extras. With a stored gradient for expected coefficients and upstream gradients, the
    backward returns s times what is stored plus, by a second sweep, the gradient of what is left: upstream less s times
    the expected, in the rows where that is more than rounding (`remainder.py`).
    """

    @staticmethod
    def forward(ctx: Any, request: Request, *tensors: Any) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        head = Head(*tensors)
        first = request.engine.first_pass(head, request)
        stats = first.stats
        ctx.request, ctx.like = request, Like.of(head)
        if request.engine.stores is not Stored.NOTHING:
            used = Coefficients() if first.used is None else first.used
            if request.token_loss is not None:  # a fused kernel asks nobody
                used = _all_coefficients(request, stats)
            Saved(head, first.grads, first.grad_rows, stats, used).save(ctx)
        n = head.hidden.shape[0]
        extras = [scatter(stats.extras[name], request.rows, n) for name in request.extras]
        with_entropy = request.entropy and stats.entropies is not None  # a fused kernel always has it
        entropies = scatter(cast(Tensor, stats.entropies), request.rows, n) if with_entropy else None
        divergences = None if stats.divergence is None else scatter(stats.divergence.value, request.rows, n)
        ctx.mark_non_differentiable(*extras)
        return scatter(stats.logps, request.rows, n), entropies, divergences, *extras

    @staticmethod
    def backward(
        ctx: Any,
        d_logps: Tensor | None,
        d_entropies: Tensor | None,
        d_divergences: Tensor | None,
        *d_extras: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        # on every rank of those that share the weight, whatever its own rows will need
        with ctx.request.gathered_weight():
            return None, *_gradient(ctx.request, ctx.like, Saved.of(ctx), d_logps, d_entropies, d_divergences)


def _gradient(request: Request, like: Like, saved: Saved, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of the head's tensors, from those of all positions' results, in the order of `Coefficients`."""
    rows, (head, stored, grad_rows, stats, expected) = request.rows, saved
    dtype, main = request.config.accumulator, request.main
    came = Coefficients(*(None if x is None else x[rows.positions].to(dtype) for x in upstream))
    if getattr(came, main) is None:
        came = came._replace(**{main: stats.logps.new_zeros(len(rows))})
    if request.engine.recomputes:
        total, indices = second_pass(head, request, stats, came)
        return returned(total, like, request, indices)
    if request.engine.stores is Stored.SLOPES:
        g = getattr(came, main)
        factor, rest = g[grad_rows, None], Remainder(came._replace(**{main: g.index_fill(0, grad_rows, 0.0)}))
        alone = all(x is None or x is g for x in came)
        complete = alone and grad_rows.shape[0] == len(rows)  # then there is nothing to ask the device for
        left = not complete and rest.size(came)[0]
    else:
        factor, rest = split_off(came, expected)
        left, far = rest.size(came)
        if far:  # what is stored is far larger than what is wanted: nothing of it would survive
            total, indices = second_pass(head, request, stats, came)
            return returned(total, like, request, indices)
    if not left:
        return returned(stored, like, request, grad_rows, factor)
    more, indices = second_pass(head, request, stats, rest.left)
    scaled = stored.apply(lambda x: _times(x, factor, x.dtype, request.config.backend))
    total = _merge(scaled, grad_rows, more, indices, len(rows), _ratio(came, rest.left, indices))
    every = torch.arange(len(rows), device=rows.positions.device)
    return returned(total, like, request, every)


def _all_coefficients(request: Request, stats: RowStats) -> Coefficients:
    """Return the coefficients of all rows of a loss that is fused."""
    assert request.coefficients is not None
    return request.coefficients(torch.arange(len(request.rows), device=request.rows.positions.device), stats)


def _ratio(came: Coefficients, left: Coefficients, indices: Tensor) -> Tensor:
    """Return what came over what is left of it, (m,) at `indices`; NaN in rows with more than one coefficient."""
    pairs = [(torch.zeros_like(y) if x is None else x, y) for x, y in zip(came, left, strict=True) if y is not None]
    x, y = (torch.stack(column)[:, indices] for column in zip(*pairs, strict=True))  # (k, m)
    is_one = ((x != 0) | (y != 0)).sum(dim=0) == 1
    return torch.where(is_one, x.sum(dim=0) / y.sum(dim=0), torch.nan)


@dataclass(frozen=True)
class Like:
    """Number of positions, and dtypes of the gradients to return."""

    positions: int
    dtypes: tuple[torch.dtype | None, ...]  # hidden, weight, bias, lora_u, lora_b

    @staticmethod
    def of(head: Head) -> Like:
        own = (*head,)[: len(fields(Gradients))]
        return Like(head.hidden.shape[0], tuple(None if x is None else x.dtype for x in own))


def _times(x: Tensor, factor: Tensor | None, dtype: torch.dtype, backend: RowBackend) -> Tensor:
    """``x * factor`` rounded once to `dtype`, in the place of `x` if it can be, and nobody will need that again.

    On a GPU one pass over the numbers does both; on a CPU torch would make a temporary of the size of `x`.
    """
    if factor is None:
        return x.to(dtype)
    if factor.dim() == 0 and is_one(factor):  # as for `loss.backward()`
        return x.to(dtype, copy=_graph_is_kept())  # what is stored is not the caller's
    if x.dtype != dtype and not device_of(x.device).casts_into:
        return (x * factor if _graph_is_kept() else x.mul_(factor)).to(dtype)
    in_place = x.dtype == dtype and not _graph_is_kept()
    out = x if in_place else torch.empty_like(x, dtype=dtype)
    backend.scale(x, factor, out)
    return out


def _merge(stored: Gradients, grad_rows: Tensor, more: Gradients, indices: Tensor, n: int, ratio: Tensor) -> Gradients:
    """Add what is stored, of the rows `grad_rows`, to a second sweep of `indices`; row by row for all n rows.

    With one coefficient alone a row's gradient is a multiple of what the second sweep gave it, `ratio` (m,) times: the
    row is then taken from there alone, so that the difference of two numbers does not stand in for a small one. NaN
    says that it has more.
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
        total[indices] = torch.where(ratio.isnan()[:, None], total[indices] + y, y * ratio[:, None])
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
    """Gradients times `factor`, () or (m, 1), in the shapes and dtypes of the head's tensors, each rounded once; None
    for those of the teacher.

    Their rows are those at `indices` among the rows of the call. Of a sharded head each rank has what its own columns
    give to a row: the ranks' parts are added up.
    """
    rows, shard, backend = request.rows, request.config.shard, request.config.backend

    def whole(name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        if name not in ("hidden", "lora_u"):
            return _times(x, factor, dtype, backend)
        if shard is not None:  # of all rows of the call: their number is the same on every rank
            summed = shard.sum_(all_rows(_times(x, factor, x.dtype, backend), indices, len(rows)))
            return all_rows(summed.to(dtype), rows.positions, like.positions)
        positions = rows.positions if indices.shape == rows.positions.shape else rows.positions[indices]
        return all_rows(_times(x, factor, dtype, backend), positions, like.positions)

    pairs = zip(("hidden", "weight", "bias", "lora_u", "lora_b"), grads, like.dtypes, strict=True)
    own = (None if x is None or dtype is None else whole(name, x, dtype) for name, x, dtype in pairs)
    return *own, None, None, None


def _graph_is_kept() -> bool:
    """Return True if this backward may be called again (``retain_graph``), or torch does not tell."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())
