"""The two autograd Functions: a loss that carries its gradient, and a differentiable log-probability and entropy.

Both keep d hidden and d weight in the accumulator's dtype and apply the upstream gradient before the one rounding;
`lean` alone rounds d weight slice by slice, in its second pass.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from grpo_kernels.backends.interface import RowBackend, RowStats
from grpo_kernels.base.checks import is_one, warn_once
from grpo_kernels.base.records import map_tensors
from grpo_kernels.engine.device import device_of
from grpo_kernels.engine.first_order import first_order
from grpo_kernels.engine.passes import all_rows, scatter, second_pass
from grpo_kernels.engine.records import Gradients, HeadTensors, Operands
from grpo_kernels.engine.remainder import check_remainder, split_off
from grpo_kernels.engine.request import ForwardResult, Request, Stored
from grpo_kernels.token_loss.record import NO_COEFFICIENTS, Coefficients


@first_order
class PolicyLoss(torch.autograd.Function):
    """A scalar loss of all rows' log-probabilities and entropies.

    ``forward(ctx, request, loss, first, teacher, *tensors)`` -> loss (), logps (N,), entropies (N,), where `tensors`
    are those of `Operands`. `loss` and the result `first` of the first pass (`of_loss`) are there already; here the
    loss gets its gradient. Engines that recompute save the coefficients for the backward, the others the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        request: Request,
        loss: Tensor,
        first: ForwardResult,
        teacher: HeadTensors[Tensor] | None,
        *tensors: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        head, stats = replace(Operands(*tensors), teacher=teacher), first.stats
        assert stats is not None
        ctx.request, ctx.shapes = request, head.map(shape_and_dtype)
        if first.grads is not None:
            _save(ctx, None, replace(first, stats=None, coefficients=NO_COEFFICIENTS))
        elif request.engine.recomputes:
            _save(ctx, head, first)
        logps, entropies = (
            scatter(x, request.rows, head.hidden.shape[0]) for x in (stats.logps, first.entropies)
        )
        ctx.mark_non_differentiable(logps, entropies)
        return loss.clone(), logps, entropies  # the copy joins the graph, `loss` must not

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        request, (head, first) = ctx.request, _saved(ctx)
        if not request.engine.recomputes:
            return (
                None,
                None,
                None,
                None,
                *returned(first.grads, ctx.shapes, request, first.grad_rows, d_loss),
            )
        with request.gathered_weight():
            grads, indices = second_pass(
                head, request, first.stats, map_tensors(d_loss.mul, first.coefficients)
            )
        return None, None, None, None, *returned(grads, ctx.shapes, request, indices)


@first_order
class LinearLogprob(torch.autograd.Function):
    """Log-probabilities, entropies and divergences from a teacher, all differentiable.

    ``forward(ctx, request, teacher, *tensors)`` -> logps (N,), entropies (N,) or None, divergences (N,) or None, and
    the extras, where `tensors` are those of `Operands`. If the gradient for expected coefficients is stored, the
    backward scales it by s. A second sweep then adds the gradient of the remainder, upstream less s times the expected,
    in the rows where that is more than rounding (`remainder.py`).
    """

    @staticmethod
    def forward(
        ctx: Any, request: Request, teacher: HeadTensors[Tensor] | None, *tensors: Any
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        head = replace(Operands(*tensors), teacher=teacher)
        first = request.engine.first_pass(head, request)
        stats = first.stats
        assert stats is not None
        ctx.request, ctx.shapes = request, head.map(shape_and_dtype)
        if request.engine.stores is not Stored.NOTHING:
            if request.token_loss is not None:  # a fused kernel records no coefficients
                first = replace(first, coefficients=_all_coefficients(request, stats))
            _save(ctx, head, first)
        n = head.hidden.shape[0]
        extras = [scatter(stats.extras[name], request.rows, n) for name in request.extras]
        with_entropy = (
            request.entropy and stats.entropies is not None
        )  # a fused kernel always computes it
        entropies = (
            scatter(cast(Tensor, stats.entropies), request.rows, n) if with_entropy else None
        )
        divergences = (
            None if stats.divergence is None else scatter(stats.divergence.value, request.rows, n)
        )
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
        # all ranks that share the weight gather it, also one whose rows will not need it
        with ctx.request.gathered_weight():
            head, first = _saved(ctx)
            upstream = Coefficients(d_logps, d_entropies, d_divergences)
            return None, None, *_gradient(ctx.request, ctx.shapes, head, first, upstream)


def _save(ctx: Any, head: Operands | None, first: ForwardResult) -> None:
    """Save a head and the result of a first pass, as a flat list, without statistics that no backward reads."""
    tensors: list[Tensor] = []
    place = torch.empty(0)

    def keep(x: Tensor) -> Tensor:
        tensors.append(x)
        return place

    if first.stats is not None:
        first = replace(first, stats=replace(first.stats, extras={}, terms={}))
    ctx.kept = map_tensors(keep, (head, first))
    ctx.save_for_backward(*tensors)


def _saved(ctx: Any) -> tuple[Any, Any]:  # Operands, ForwardResult
    """Return the head and the result that `_save` saved."""
    tensors = iter(ctx.saved_tensors)
    return map_tensors(lambda _: next(tensors), ctx.kept)


def _gradient(
    request: Request,
    shapes: GradientShapes,
    head: Operands,
    first: ForwardResult,
    upstream: Coefficients,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the head's tensors, from `upstream`, the gradient of each result, (N,)."""
    rows, stats, stored, grad_rows = request.rows, first.stats, first.grads, first.grad_rows
    assert stats is not None
    upstream = map_tensors(lambda x: x[rows.positions].to(request.plan.accumulator), upstream)
    main = request.main(upstream)
    if main is None:
        main = stats.logps.new_zeros(len(rows))
        upstream = request.with_main(main, upstream)
    if stored is None or grad_rows is None:
        total, indices = second_pass(head, request, stats, upstream)
        return returned(total, shapes, request, indices)
    if request.engine.stores is Stored.PER_ROW:
        factor, remainder = (
            main[grad_rows, None],
            request.with_main(main.index_fill(0, grad_rows, 0.0), upstream),
        )
        alone = all(x is None or x is main for x in upstream)
        complete = alone and grad_rows.shape[0] == len(rows)  # then nothing waits for the device
        any_left = not complete and check_remainder(remainder, upstream)[0]
    else:
        factor, remainder = split_off(upstream, first.coefficients)
        any_left, far = check_remainder(remainder, upstream)
        if far:  # stored and remainder are far larger than their sum, and would cancel
            warn_once(WRONG_EXPECTATION)
            total, indices = second_pass(head, request, stats, upstream)
            return returned(total, shapes, request, indices)
    if not any_left:
        return returned(stored, shapes, request, grad_rows, factor)
    more, indices = second_pass(head, request, stats, remainder)
    if request.engine.stores is Stored.GRADIENT and 2 * len(indices) > len(rows):
        warn_once(WRONG_EXPECTATION)
    scaled = map_tensors(lambda x: _times(x, factor, x.dtype, request.plan.backend), stored)
    total = _merge(
        scaled, grad_rows, more, indices, len(rows), _ratio(upstream, remainder, indices)
    )
    every = torch.arange(len(rows), device=rows.positions.device)
    return returned(total, shapes, request, every)


WRONG_EXPECTATION = (
    "expected: the gradient that came is no multiple of the expected one in most tokens, which were projected again. "
    "The result is right, and costs half as much again as two passes: pass the coefficients of the loss as expected= "
    "(or, to linear_logprob, none)"
)


def _all_coefficients(request: Request, stats: RowStats) -> Coefficients:
    """Return the coefficients of all rows of a loss that is fused."""
    assert request.coefficients_of is not None
    return request.coefficients_of(
        torch.arange(len(request.rows), device=request.rows.positions.device), stats
    )


def _ratio(upstream: Coefficients, remainder: Coefficients, indices: Tensor) -> Tensor:
    """Return upstream over remainder, (m,) at `indices`; NaN in rows with more than one coefficient."""
    both = zip(upstream, remainder, strict=True)
    pairs = [(torch.zeros_like(y) if x is None else x, y) for x, y in both if y is not None]
    x, y = (torch.stack(column)[:, indices] for column in zip(*pairs, strict=True))  # (k, m)
    is_one = ((x != 0) | (y != 0)).sum(dim=0) == 1
    return torch.where(is_one, x.sum(dim=0) / y.sum(dim=0), torch.nan)


GradientShapes = HeadTensors[tuple[torch.Size, torch.dtype]]  # of the gradients to return


def shape_and_dtype(x: Tensor) -> tuple[torch.Size, torch.dtype]:
    """Return the shape and dtype that a gradient of `x` must have."""
    return x.shape, x.dtype


def _times(x: Tensor, factor: Tensor | None, dtype: torch.dtype, backend: RowBackend) -> Tensor:
    """Return ``x * factor``, rounded once to `dtype`; may overwrite `x` unless this backward can be called again.

    On a GPU one pass multiplies and rounds. On a CPU torch would need a temporary as large as `x`.
    """
    if factor is None:
        return x.to(dtype)
    if factor.dim() == 0 and is_one(factor):  # as for `loss.backward()`
        return x.to(dtype, copy=_graph_is_kept())  # never give the stored gradient to the caller
    if x.dtype != dtype and not device_of(x.device).casts_into:
        return (x * factor if _graph_is_kept() else x.mul_(factor)).to(dtype)
    in_place = x.dtype == dtype and not _graph_is_kept()
    out = x if in_place else torch.empty_like(x, dtype=dtype)
    backend.scale(x, factor, out)
    return out


def _merge(
    stored: Gradients, grad_rows: Tensor, more: Gradients, indices: Tensor, n: int, ratio: Tensor
) -> Gradients:
    """Add the stored gradients, of rows `grad_rows`, and those of a second sweep of rows `indices`; for all n rows.

    A row with one coefficient gets `ratio` (m,) times its gradient from the second sweep, and nothing stored: their sum
    could be a small difference of large numbers. `ratio` is NaN where a row has more than one coefficient.
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
    grads: Gradients,
    shapes: GradientShapes,
    request: Request,
    indices: Tensor,
    factor: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients times `factor`, () or (m, 1), in the shapes and dtypes of `shapes`, each rounded once.

    Their rows are at `indices` among the rows of the call. With a sharded head, the gradients that a row gets from each
    rank's columns are summed over the ranks.
    """
    rows, shard, backend = request.rows, request.plan.shard, request.plan.backend

    def whole(x: Tensor, dtype: torch.dtype) -> Tensor:
        return _times(x, factor, dtype, backend)

    def row_by_row(x: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if (
            shard is not None
        ):  # sum over all rows of the call: their number is the same on every rank
            summed = shard.sum_(all_rows(_times(x, factor, x.dtype, backend), indices, len(rows)))
            return all_rows(summed.to(dtype), rows.positions, shape[0])
        positions = (
            rows.positions if indices.shape == rows.positions.shape else rows.positions[indices]
        )
        return all_rows(_times(x, factor, dtype, backend), positions, shape[0])

    gradients = HeadTensors(
        None if grads.hidden is None else row_by_row(grads.hidden, *shapes.hidden),
        None if grads.weight is None else whole(grads.weight, shapes.weight[1]),
        None if grads.bias is None or shapes.bias is None else whole(grads.bias, shapes.bias[1]),
        None
        if grads.lora_u is None or shapes.lora_u is None
        else row_by_row(grads.lora_u, *shapes.lora_u),
        None
        if grads.lora_b is None or shapes.lora_b is None
        else whole(grads.lora_b, shapes.lora_b[1]),
    )
    return tuple(gradients)


def _graph_is_kept() -> bool:
    """Return True if this backward may be called again (``retain_graph``), or torch does not tell."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())
