"""The two autograd Functions: a loss that carries its gradient, and differentiable scores.

Both keep d hidden and d weight in the accumulator's dtype and apply the upstream gradient before
the one rounding; `lean` alone rounds d weight slice by slice, in its second pass.

Their gradients cannot be differentiated again, and raise if they are (`first_order`).
``torch.autograd.function.once_differentiable`` raises only if an upstream gradient itself requires
grad: a gradient penalty on ``loss.backward(create_graph=True)`` would pass through it as a
constant, silently. And autograd visits only nodes that lead to the tensors it differentiates in: an
error at any other node is never reached. So the error is tied to everything that the gradient
depends on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from grpo_kernels.backends.interface import RowBackend
from grpo_kernels.base.checks import is_one, warn_once
from grpo_kernels.base.tensors import map_tensors, quantile_of_numbers
from grpo_kernels.engine.device import device_of
from grpo_kernels.engine.passes import all_rows, scatter, second_pass
from grpo_kernels.engine.plan import ForwardResult, Request, Stored
from grpo_kernels.engine.records import Gradients, HeadTensors, Operands
from grpo_kernels.engine.top_k import TOPK_LOGPS
from grpo_kernels.token_loss.record import NO_COEFFICIENTS, Coefficients

F = TypeVar("F", bound=type[torch.autograd.Function])
# remainder over upstream; beyond, more than three bits would cancel in d weight
FAR_TOO_LARGE = 8.0


def first_order(function: F) -> F:
    """Decorate a Function: differentiating its gradients in any tensor raises RuntimeError."""
    forward: Callable[..., Any] = function.forward
    backward: Callable[..., tuple[Tensor | None, ...]] = function.backward

    @functools.wraps(forward)
    def tied(ctx: Any, *inputs: Any) -> Any:
        wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
        with torch.enable_grad():
            ctx.tie = _Tie.apply(*wanted) if wanted else None
        return forward(ctx, *inputs)

    @functools.wraps(backward)
    def once(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        given, vmap = [x for x in upstream if x is not None], torch._C._functorch
        if any(vmap.is_legacy_batchedtensor(x) or vmap.is_batchedtensor(x) for x in given):
            raise RuntimeError(
                "grpo_kernels: several gradients at once (is_grads_batched=True, vectorize=True, "
                "vmap over a backward) are not supported: ask for one after the other"
            )
        differentiable = torch.is_grad_enabled()  # create_graph=True
        with torch.no_grad():
            gradients = backward(ctx, *upstream)
        if not differentiable:
            return gradients
        ties = [x for x in (ctx.tie, *given) if x is not None and x.requires_grad]
        return tuple(None if x is None else _Refusal.apply(x, *ties) for x in gradients)

    function.forward, function.backward = staticmethod(tied), staticmethod(once)  # type: ignore[method-assign]
    return function


class _Tie(torch.autograd.Function):
    """Empty tensor tied to a forward's inputs, without their memory; its backward raises."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, *others: Tensor) -> Tensor:
        return first.new_empty(0)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return _refuse()


class _Refusal(torch.autograd.Function):
    """Identity on a gradient, whose backward raises; `ties` are what the gradient depends on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *ties: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        return _refuse()


def _refuse() -> tuple[Tensor | None, ...]:
    raise RuntimeError("grpo_kernels: differentiating twice is not supported")


@first_order
class PolicyLoss(torch.autograd.Function):
    """A scalar loss of all rows' log-probabilities and entropies.

    ``forward(ctx, request, loss, first, teacher, *tensors)`` -> loss (), logps (N,), entropies
    (N,), where `tensors` are those of `Operands`. `loss` and the result `first` of the first pass
    (`of_loss`) are there already; here the loss gets its gradient. Engines that recompute save the
    coefficients for the backward, the others the gradient.
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
        ctx.request, ctx.shapes = request, head.map(_shape_and_dtype)
        if first.grads is not None:
            _save(ctx, None, replace(first, stats=None, coefficients=NO_COEFFICIENTS))
        elif request.engine.recomputes:
            _save(ctx, head, first)
        n = head.hidden.shape[0]
        logps, entropies = (scatter(x, request.rows, n) for x in (stats.logps, first.entropies))
        ctx.mark_non_differentiable(logps, entropies)
        return loss.clone(), logps, entropies  # the copy joins the graph, `loss` must not

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        request, (head, first) = ctx.request, _saved(ctx)
        if not request.engine.recomputes:
            stored = _returned(first.grads, ctx.shapes, request, first.grad_rows, d_loss)
            return None, None, None, None, *stored
        coefficients = map_tensors(d_loss.mul, first.coefficients)
        with request.gathered_weight():
            grads, indices = second_pass(head, request, first.stats, coefficients)
        return None, None, None, None, *_returned(grads, ctx.shapes, request, indices)


@first_order
class LinearLogprob(torch.autograd.Function):
    """Log-probabilities, entropies and divergences from a teacher, all differentiable.

    ``forward(ctx, request, teacher, *tensors)`` -> logps (N,), entropies (N,) or None, divergences
    (N,) or None, and the extras, of which the log-probabilities of more ids (N, K) are
    differentiable, too, where `tensors` are those of `Operands`. If the gradient for
    expected coefficients is stored, the backward scales it by s. A second sweep then adds the
    gradient of the remainder, upstream less s times the expected, in the rows where that is more
    than rounding (`split_off`).
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
        ctx.request, ctx.shapes = request, head.map(_shape_and_dtype)
        if request.engine.stores is not Stored.NOTHING:
            if request.token_loss is not None:  # a fused kernel records no coefficients
                assert request.coefficients_of is not None
                every = torch.arange(len(request.rows), device=request.rows.positions.device)
                first = replace(first, coefficients=request.coefficients_of(every, stats))
            _save(ctx, head, first)

        def result(x: Tensor | None) -> Tensor | None:
            return None if x is None else scatter(x, request.rows, head.hidden.shape[0])

        extras = [result(stats.extras[name]) for name in request.extras]
        # a fused kernel always computes the entropies
        entropies = result(stats.entropies) if request.entropy else None
        divergences = result(None if stats.divergence is None else stats.divergence.value)
        pairs = zip(request.extras, extras, strict=True)
        ctx.mark_non_differentiable(*(x for name, x in pairs if name != TOPK_LOGPS))
        return result(stats.logps), entropies, divergences, *extras

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
            d_topk = dict(zip(ctx.request.extras, d_extras, strict=True)).get(TOPK_LOGPS)
            upstream = Coefficients(d_logps, d_entropies, d_divergences, d_topk)
            return None, None, *_gradient(ctx.request, ctx.shapes, head, first, upstream)


def _save(ctx: Any, head: Operands | None, first: ForwardResult) -> None:
    # as a flat list, without statistics that no backward reads
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
    tensors = iter(ctx.saved_tensors)
    return map_tensors(lambda _: next(tensors), ctx.kept)


def _gradient(
    request: Request,
    shapes: GradientShapes,
    head: Operands,
    first: ForwardResult,
    upstream: Coefficients,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the head's tensors; `upstream`: the gradient of each result, (N,)."""
    rows, stats, stored, grad_rows = request.rows, first.stats, first.grads, first.grad_rows
    assert stats is not None
    upstream = map_tensors(lambda x: x[rows.positions].to(request.plan.accumulator), upstream)
    main = request.main(upstream)
    if main is None:
        main = stats.logps.new_zeros(len(rows))
        upstream = request.with_main(main, upstream)
    if stored is None or grad_rows is None:
        total, indices = second_pass(head, request, stats, upstream)
        return _returned(total, shapes, request, indices)
    if request.engine.stores is Stored.PER_ROW:
        factor = main[grad_rows, None]
        remainder = request.with_main(main.index_fill(0, grad_rows, 0.0), upstream)
        alone = all(x is None or x is main for x in upstream)
        complete = alone and grad_rows.shape[0] == len(rows)  # then nothing waits for the device
        any_left = not complete and check_remainder(remainder, upstream)[0]
    else:
        factor, remainder = split_off(upstream, first.coefficients)
        any_left, far = check_remainder(remainder, upstream)
        if far:  # stored and remainder are far larger than their sum, and would cancel
            warn_once(WRONG_EXPECTATION)
            total, indices = second_pass(head, request, stats, upstream)
            return _returned(total, shapes, request, indices)
    if not any_left:
        return _returned(stored, shapes, request, grad_rows, factor)
    more, indices = second_pass(head, request, stats, remainder)
    if request.engine.stores is Stored.GRADIENT and 2 * len(indices) > len(rows):
        warn_once(WRONG_EXPECTATION)
    scaled = map_tensors(lambda x: _times(x, factor, x.dtype, request.plan.backend), stored)
    ratio = _ratio(upstream, remainder, indices)
    total = _merge(scaled, grad_rows, more, indices, len(rows), ratio)
    every = torch.arange(len(rows), device=rows.positions.device)
    return _returned(total, shapes, request, every)


WRONG_EXPECTATION = (
    "expected: the gradient that came is no multiple of the expected one in most tokens, which "
    "were projected again. The result is right, and costs half as much again as two passes: pass "
    "the coefficients of the loss as expected= (or, to linear_logprob, none)"
)


def _ratio(upstream: Coefficients, remainder: Coefficients, indices: Tensor) -> Tensor:
    """Return upstream over remainder, (m,) at `indices`; NaN in rows with several coefficients."""
    both = zip(upstream, remainder, strict=True)
    pairs = [(torch.zeros_like(y) if x is None else x, y) for x, y in both if y is not None]
    x, y = (torch.stack(column)[:, indices] for column in zip(*pairs, strict=True))  # (k, m)
    is_one = ((x != 0) | (y != 0)).sum(dim=0) == 1
    return torch.where(is_one, x.sum(dim=0) / y.sum(dim=0), torch.nan)


GradientShapes = HeadTensors[tuple[torch.Size, torch.dtype]]  # of the gradients to return


def _shape_and_dtype(x: Tensor) -> tuple[torch.Size, torch.dtype]:
    return x.shape, x.dtype


def _times(x: Tensor, factor: Tensor | None, dtype: torch.dtype, backend: RowBackend) -> Tensor:
    """Return ``x * factor``, rounded once to `dtype`.

    May overwrite `x` unless this backward can be called again. On a GPU one pass multiplies and
    rounds. On a CPU torch would need a temporary as large as `x`.
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
    """Add the stored gradients, of `grad_rows`, and those of a second sweep of rows `indices`.

    A row with one coefficient gets `ratio` (m,) times its gradient from the second sweep, and
    nothing stored: their sum could be a small difference of large numbers. `ratio` is NaN where a
    row has more than one coefficient.
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

    of_each = zip((row_by_row, add, add, row_by_row, add), stored, more, strict=True)
    return Gradients(*(function(x, y) for function, x, y in of_each))


def _returned(
    grads: Gradients,
    shapes: GradientShapes,
    request: Request,
    indices: Tensor,
    factor: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients times `factor`, () or (m, 1), as `shapes` says, each rounded once.

    Their rows are at `indices` among the rows of the call. With a sharded head, the gradients that
    a row gets from each rank's columns are summed over the ranks.
    """
    rows, shard, backend = request.rows, request.plan.shard, request.plan.backend

    def whole(x: Tensor, _: torch.Size, dtype: torch.dtype) -> Tensor:
        return _times(x, factor, dtype, backend)

    def row_by_row(x: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if shard is not None:
            # sum over all rows of the call: their number is the same on every rank
            summed = shard.sum_(all_rows(_times(x, factor, x.dtype, backend), indices, len(rows)))
            return all_rows(summed.to(dtype), rows.positions, shape[0])
        complete = indices.shape == rows.positions.shape
        positions = rows.positions if complete else rows.positions[indices]
        return all_rows(_times(x, factor, dtype, backend), positions, shape[0])

    of_each = (row_by_row, whole, whole, row_by_row, whole)
    return tuple(
        None if x is None or shape is None else function(x, *shape)
        for function, x, shape in zip(of_each, grads, shapes, strict=True)
    )


def _graph_is_kept() -> bool:
    """Return True if this backward may be called again (``retain_graph``)."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())


def check_remainder(remainder: Coefficients, upstream: Coefficients) -> tuple[bool, bool]:
    """Return two flags: there is a remainder to compute; it is far larger than upstream gradients.

    Waits for the device.
    """
    parts = [x for x in remainder if x is not None]
    wanted = torch.stack([_largest(x) for x in upstream if x is not None]).amax()
    largest = torch.stack([_largest(x) for x in parts]).amax()
    nonzero = torch.stack([(x != 0).any() for x in parts]).any()
    any_left, far = torch.stack([nonzero, largest > FAR_TOO_LARGE * wanted]).tolist()
    return any_left, far


def split_off(upstream: Coefficients, expected: Coefficients) -> tuple[Tensor, Coefficients]:
    """Return s, and the remainders (n,), `upstream` less s times `expected`.

    A remainder is 0 where it is only rounding, None where both are None. s is the median ratio,
    which fits most rows if any does. A row fits if s times its expectation is its upstream gradient
    up to rounding: eight units in the last place of the largest of both and of the rows' upper
    quartile. (A trainer's gradient of a token is a sum of terms that may nearly cancel.) Non-finite
    values never fit.
    """
    pairs = list(zip(upstream, expected, strict=True))
    # nan or inf where y = 0
    ratios = torch.cat([x / y for x, y in pairs if x is not None and y is not None])
    finite_ratios = torch.where(torch.isfinite(ratios), ratios, torch.nan)
    s = torch.nan_to_num(quantile_of_numbers(finite_ratios, 0.5), nan=0.0)

    def remainder(x: Tensor, y: Tensor) -> Tensor:
        fit, eps = s * y, torch.finfo(x.dtype).eps
        finite, size = torch.isfinite(x), x.abs()
        sizes = torch.where(finite & (size > 0), size, torch.nan)
        typical = torch.nan_to_num(quantile_of_numbers(sizes, 0.75), nan=0.0)
        rounding = 8 * eps * torch.maximum(torch.maximum(size, fit.abs()), typical)
        return torch.where(finite & ((x - fit).abs() <= rounding), 0.0, x - fit)

    def remainder_or_none(x: Tensor | None, y: Tensor | None) -> Tensor | None:
        if x is None and y is None:
            return None
        zeros = torch.zeros_like(ratios[: len(x if x is not None else y)])  # type: ignore[arg-type]
        return remainder(zeros if x is None else x, zeros if y is None else y)

    return s, Coefficients(*(remainder_or_none(x, y) for x, y in pairs))


def _largest(x: Tensor) -> Tensor:
    # of a finite element: others never fit, and reach the gradient
    return torch.cat([torch.where(torch.isfinite(x), x.abs(), 0.0), x.new_zeros(1)]).amax()
