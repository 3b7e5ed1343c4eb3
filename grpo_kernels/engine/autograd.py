"""The autograd Functions: losses with their gradient, differentiable scores; the second pass.

Those of hidden states keep d hidden and d weight in the accumulator's dtype and apply the upstream
gradient before the one rounding. Only `lean` rounds d weight slice by slice, in its second pass.

Differentiating these gradients again raises an error (`first_order`).
``torch.autograd.function.once_differentiable`` is not enough: it raises only if an upstream
gradient itself requires grad, so a gradient penalty on ``loss.backward(create_graph=True)`` would
silently treat the gradient as a constant. Also, autograd visits only nodes that lead to the tensors
it differentiates with respect to, so it never reaches an error at any other node. So the error is
tied to everything that the gradient depends on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from grpo_kernels.backends import Coefficients, RowBackend, RowStats
from grpo_kernels.base.checks import warn_once
from grpo_kernels.base.tensors import (
    is_nonzero,
    map_tensors,
    quantile_of_numbers,
    scatter,
    spread,
    take,
)
from grpo_kernels.engine.plan import CoefficientSource, Job
from grpo_kernels.engine.slices import sweep_slices
from grpo_kernels.engine.sweep import FirstPass, first_pass, indices_of, sweep
from grpo_kernels.engine.workspace import device_of
from grpo_kernels.head import HeadTensors
from grpo_kernels.tokens import Layout

F = TypeVar("F", bound=type[torch.autograd.Function])
PER_POSITION = ("hidden", "lora_u")  # the head's tensors with one row per position


def first_order(function: F) -> F:
    """Decorate a Function so that differentiating its gradients raises RuntimeError."""
    forward: Callable[..., Any] = function.forward
    backward: Callable[..., tuple[Tensor | None, ...]] = function.backward

    @functools.wraps(forward)
    def tied(ctx: Any, *inputs: Any) -> Any:
        wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
        with torch.enable_grad():
            # empty, so that it does not hold the memory of the inputs
            ctx.tie = _Refusal.apply(wanted[0].new_empty(0), *wanted) if wanted else None
        return forward(ctx, *inputs)

    @functools.wraps(backward)
    def once(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        arrived, vmap = [x for x in upstream if x is not None], torch._C._functorch
        if any(vmap.is_legacy_batchedtensor(x) or vmap.is_batchedtensor(x) for x in arrived):
            raise RuntimeError(
                "grpo_kernels: several gradients at once (is_grads_batched=True, vectorize=True, "
                "vmap over a backward) are not supported: compute one after the other"
            )
        differentiable = torch.is_grad_enabled()  # create_graph=True
        with torch.no_grad():
            gradients = backward(ctx, *upstream)
        if not differentiable:
            return gradients
        ties = [x for x in (ctx.tie, *arrived) if x is not None and x.requires_grad]
        return tuple(None if x is None else _Refusal.apply(x, *ties) for x in gradients)

    function.forward, function.backward = staticmethod(tied), staticmethod(once)  # type: ignore[method-assign]
    return function


class _Refusal(torch.autograd.Function):
    """Identity on `x`; its backward raises. `ties` are what `x` depends on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *ties: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> None:
        raise RuntimeError(
            "grpo_kernels: differentiating twice is not supported; for second derivatives, compute "
            "the loss from all logits with torch"
        )


class _ForReading(torch.autograd.Function):
    """Results (n,) that have no gradient, in the caller's shape; a backward through them raises.

    `leaf` ends their graph, so storing them does not hold the loss's graph.
    """

    @staticmethod
    def forward(
        ctx: Any, leaf: Tensor, layout: Layout, logps: Tensor, entropies: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return layout.scatter(logps), layout.scatter(entropies)

    @staticmethod
    def backward(ctx: Any, d_logps: Tensor | None, d_entropies: Tensor | None) -> None:
        for name, upstream in (("logps", d_logps), ("entropies", d_entropies)):
            if upstream is not None:
                raise RuntimeError(
                    f"out.{name}: expected a use without gradient, since only out.loss has one. As "
                    "a constant, pass it detached; for a term of the loss, set entropy_coef or "
                    "pass an objective=, or compute the term from linear_logps"
                )


def for_reading(
    loss: Tensor, layout: Layout, logps: Tensor, entropies: Tensor
) -> tuple[Tensor, Tensor]:
    """The results (n,) beside `loss`, in the caller's shape.

    If the loss has a gradient, a backward through them raises.
    """
    if not loss.requires_grad:
        return layout.scatter(logps), layout.scatter(entropies)
    leaf = torch.empty(0, requires_grad=True)
    results: tuple[Tensor, Tensor] = _ForReading.apply(leaf, layout, logps, entropies)
    return results


@first_order
class LossWithGradient(torch.autograd.Function):
    """A scalar loss of all rows' log-probabilities and entropies.

    ``forward(ctx, job, loss, first, coefficients, *tensors)`` -> loss (), with the tensors of
    `job`. The caller has already computed `loss`, its `coefficients` (n,) and the first pass; this
    Function attaches the gradient to the loss.
    """

    @staticmethod
    def forward(
        ctx: Any,
        job: Job,
        loss: Tensor,
        first: FirstPass,
        coefficients: Coefficients,
        *tensors: Tensor | None,
    ) -> Tensor:
        if job.when == "later":
            save(ctx, job, (first.stats.for_gradient(), coefficients), projects=True)
        else:
            d_logp = coefficients.d_logp if job.when == "now_unscaled" else None
            save(ctx, job, (first.grads, first.grad_rows, d_logp), projects=False)
        return loss.clone()  # the copy joins the graph, `loss` must not

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        job, needed = saved(ctx)
        if job.when == "later":
            stats, coefficients = needed
            coefficients = map_tensors(d_loss.mul, coefficients)
            with job.gather():
                grads, grad_rows = second_pass(job, stats, coefficients)
            factor = None
        else:
            grads, grad_rows, d_logp = needed
            factor = d_loss if d_logp is None else d_loss * d_logp[grad_rows, None]
        gradients = _input_gradients(ctx.shapes_and_dtypes, job, grads, grad_rows, factor)
        return *[None] * 4, *gradients


@first_order
class LossFromLogps(torch.autograd.Function):
    """A scalar loss of given log-probabilities and entropies, (B, T) or (N,) each.

    ``forward(ctx, logps, entropies, loss, d_logp, d_entropy, layout)`` -> loss (). The caller has
    computed `loss` and its derivatives (n,), at the tokens of `layout`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logps: Tensor,
        entropies: Tensor,
        loss: Tensor,
        d_logp: Tensor,
        d_entropy: Tensor | None,
        layout: Layout,
    ) -> Tensor:
        ctx.layout, ctx.dtypes = layout, (logps.dtype, entropies.dtype)
        ctx.save_for_backward(d_logp, d_entropy)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        grads = [
            None if x is None else ctx.layout.scatter(d_loss * x).to(dtype)
            for x, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return *grads, *[None] * 4


@first_order
class LinearScores(torch.autograd.Function):
    """Log-probabilities, entropies and divergences, all differentiable.

    ``forward(ctx, job, first, *tensors)`` -> logps (N,), entropies (N,) or None,
    divergences (N,) or None, log-probabilities (N, K) of K more ids or None, and the extras, which
    are not differentiable. If `first` has the gradient for expected coefficients, the backward
    scales it by s. A second pass then adds the gradient of the remainder, upstream - s * expected,
    in the rows where the remainder exceeds rounding (`split_off`).
    """

    @staticmethod
    def forward(
        ctx: Any, job: Job, first: FirstPass, *tensors: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        stats, positions = first.stats, job.rows.positions
        n = job.head.tensors.hidden.shape[0]
        if job.when == "never":
            save(ctx, job, None, projects=False)
        else:
            save(ctx, job, first._replace(stats=stats.for_gradient()), projects=True)

        def result(x: Tensor | None) -> Tensor | None:
            return None if x is None else scatter(x, positions, n)

        extras = [result(x) for x in stats.extras.values()]
        # a fused kernel always computes the entropies
        entropies = result(stats.entropies) if job.entropy else None
        divergences = result(None if stats.divergence is None else stats.divergence.value)
        ctx.mark_non_differentiable(*extras)
        return result(stats.logps), entropies, divergences, result(stats.topk_logps), *extras

    @staticmethod
    def backward(
        ctx: Any,
        d_logps: Tensor | None,
        d_entropies: Tensor | None,
        d_divergences: Tensor | None,
        d_topk_logps: Tensor | None,
        *d_extras: None,
    ) -> tuple[Tensor | None, ...]:
        # all ranks that share the weight gather it, even a rank whose rows will not need it
        with ctx.job.gather():
            upstream = Coefficients(d_logps, d_entropies, d_divergences, d_topk_logps)
            job, first = saved(ctx)
            gradient = _scores_gradient(job, first, upstream)
            return None, None, *_input_gradients(ctx.shapes_and_dtypes, job, *gradient)


def run_scores(
    job: Job, source: CoefficientSource, shape: torch.Size, *, has_ids: bool = True
) -> dict[str, Tensor]:
    """Run one forward; return the results by name, in the shape of the positions."""
    first = first_pass(job, source)
    logps, *more_scores = LinearScores.apply(job, first, *job.head.tensors)
    names = ("entropies", "divergence", "topk_logps", *first.stats.extras)
    results = {"logps": logps if has_ids else None, **dict(zip(names, more_scores, strict=True))}
    return {name: x.view(*shape, *x.shape[1:]) for name, x in results.items() if x is not None}


def save(ctx: Any, job: Job, needed: Any, *, projects: bool) -> None:
    """Save what a backward needs: the job, with its heads only if the backward `projects` again.

    `needed` holds records of tensors; autograd takes a flat list.
    """
    ctx.shapes_and_dtypes = map_tensors(lambda x: (x.shape, x.dtype), job.head.tensors)
    heads = (job.head.tensors, job.reference and job.reference.tensors) if projects else ()
    ctx.job = job.with_tensors(HeadTensors(None, None), None)
    flat: list[Tensor] = []
    place = torch.empty(0)

    def keep(x: Tensor) -> Tensor:
        flat.append(x)
        return place

    ctx.needed = map_tensors(keep, (heads, needed))
    ctx.save_for_backward(*flat)


def saved(ctx: Any) -> tuple[Job, Any]:
    """What `save` saved."""
    flat = iter(ctx.saved_tensors)
    heads, needed = map_tensors(lambda _: next(flat), ctx.needed)
    return ctx.job.with_tensors(*heads) if heads else ctx.job, needed


def _scores_gradient(
    job: Job, first: FirstPass, upstream: Coefficients
) -> tuple[HeadTensors, Tensor, Tensor | None]:
    """Gradients of the head's tensors, the rows that they are of, and a factor on them.

    `upstream` holds the gradient (N,) of each result.
    """
    rows, stats, stored, grad_rows = job.rows, first.stats, first.grads, first.grad_rows
    upstream = map_tensors(lambda x: x[rows.positions].to(job.accumulator_dtype), upstream)
    d_result = getattr(upstream, job.d_result)
    if d_result is None:
        d_result = stats.logps.new_zeros(len(rows))
        upstream = upstream._replace(**{job.d_result: d_result})
    if stored is None or grad_rows is None:  # later
        return *second_pass(job, stats, upstream), None
    if job.when == "now_unscaled":  # of the result's coefficient nothing is left, in these rows
        factor = d_result[grad_rows, None]
        remainder = upstream._replace(**{job.d_result: d_result.index_fill(0, grad_rows, 0.0)})
        alone = all(x is None or x is d_result for x in upstream)
        complete = alone and grad_rows.shape[0] == len(rows)  # then no check waits for the device
        any_left = not complete and check_remainder(remainder, upstream)[0]
    else:  # now: the expected gradient is stored
        assert first.coefficients is not None
        factor, remainder = split_off(upstream, first.coefficients)
        any_left, far = check_remainder(remainder, upstream)
        if far:  # both parts are far larger than their sum, which would lose precision
            warn_once(WRONG_EXPECTATION)
            return *second_pass(job, stats, upstream), None
    if not any_left:
        return stored, grad_rows, factor
    rest, rest_rows = second_pass(job, stats, remainder)
    if job.when == "now" and 2 * len(rest_rows) > len(rows):
        warn_once(WRONG_EXPECTATION)
    scaled = map_tensors(lambda x: _scaled(x, factor, x.dtype, job.backend), stored)
    ratio = ratio_at(upstream, remainder, rest_rows)
    total = _merge(scaled, grad_rows, rest, rest_rows, len(rows), ratio)
    return total, torch.arange(len(rows), device=rows.positions.device), None


def second_pass(
    job: Job, stats: RowStats, coefficients: Coefficients
) -> tuple[HeadTensors, Tensor]:
    """Compute the gradient of the rows that have a coefficient other than 0, and return both.

    Projects the logits of these rows again. Waits for the device once, to count the rows. At least
    one coefficient is not None.
    """
    grad_rows, coefficients = _nonzero(coefficients)
    job = job.at(grad_rows)
    if coefficients.d_divergence is None:  # then the gradient does not need the reference
        job = replace(job, reference=None)
    stats, coefficients = take((stats, coefficients), grad_rows)
    if job.order == "slices":
        return sweep_slices(job, stats, coefficients), grad_rows
    job = job.converted()
    _, grads = sweep(job, lambda index, _: take(coefficients, index), known_stats=stats)
    assert grads is not None
    return grads, grad_rows


def _nonzero(coefficients: Coefficients) -> tuple[Tensor, Coefficients]:
    """Indices of the rows where any coefficient (n,) is not 0, and the coefficients.

    If there are several coefficients, any that is zero everywhere becomes None.
    """
    nonzero = [None if x is None else is_nonzero(x) for x in coefficients]
    present = [x for x in nonzero if x is not None]
    if len(present) == 1 or device_of(present[0].device).is_capturing():
        return indices_of(present[0]), coefficients
    any_nonzero = torch.stack(present).any(dim=0)
    count, *counts = torch.stack([any_nonzero.sum(), *(x.sum() for x in present)]).tolist()
    next_count = iter(counts)
    kept = (x if x is not None and next(next_count) else None for x in coefficients)
    return indices_of(any_nonzero, count), Coefficients(*kept)


# remainder over upstream; beyond this, more than three bits would cancel in d weight
FAR_TOO_LARGE = 8.0
WRONG_EXPECTATION = (
    "expected: in most tokens the upstream gradient is not a multiple of the expected one, so "
    "their logits were computed again. The result is right, but costs 1.5 times as much as two "
    "passes: pass the coefficients of the loss as expected= (or, to linear_logps, none)"
)


def split_off(upstream: Coefficients, expected: Coefficients) -> tuple[Tensor, Coefficients]:
    """Compute the median ratio s, and the remainders (n,), `upstream` - s * `expected`.

    The backward scales the stored gradient, of `expected`, by s. A second pass computes the
    gradient of the remainder, in the rows that have one.

    A remainder is 0 if it is only rounding, and None if both inputs are None. The median ratio fits
    most rows if any value of s does. A row fits if s times its expectation equals its upstream
    gradient up to rounding: eight units in the last place of the largest of three numbers, which
    are the upstream gradient, s times the expectation, and the upper quartile of the upstream
    gradients. (A trainer's gradient of a token is a sum of terms that may nearly cancel.)
    Non-finite values never fit.
    """
    pairs = list(zip(upstream, expected, strict=True))
    # nan or inf if y = 0
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
        if x is None:
            return None if y is None else remainder(torch.zeros_like(y), y)
        return remainder(x, torch.zeros_like(x) if y is None else y)

    return s, Coefficients(*(remainder_or_none(x, y) for x, y in pairs))


def check_remainder(remainder: Coefficients, upstream: Coefficients) -> tuple[bool, bool]:
    """Check if a remainder is left to compute, and if it far exceeds the upstream gradients.

    Waits for the device.
    """
    parts = [x for x in remainder if x is not None]
    wanted = torch.stack([_largest(x) for x in upstream if x is not None]).amax()
    largest = torch.stack([_largest(x) for x in parts]).amax()
    nonzero = torch.stack([(x != 0).any() for x in parts]).any()
    any_left, far = torch.stack([nonzero, largest > FAR_TOO_LARGE * wanted]).tolist()
    return any_left, far


def ratio_at(upstream: Coefficients, remainder: Coefficients, rows: Tensor) -> Tensor:
    """Upstream over remainder, (m,) at `rows`; NaN in rows with several coefficients."""
    both = zip(upstream, remainder, strict=True)
    pairs = [(torch.zeros_like(y) if x is None else x, y) for x, y in both if y is not None]
    x, y = (torch.stack(column)[:, rows] for column in zip(*pairs, strict=True))  # (k, m)
    is_one = ((x != 0) | (y != 0)).sum(dim=0) == 1
    return torch.where(is_one, x.sum(dim=0) / y.sum(dim=0), torch.nan)


def _largest(x: Tensor) -> Tensor:
    # of finite elements only: non-finite ones never fit, so they reach the gradient anyway
    return torch.cat([torch.where(torch.isfinite(x), x.abs(), 0.0), x.new_zeros(1)]).amax()


def _scaled(x: Tensor, factor: Tensor | None, dtype: torch.dtype, backend: RowBackend) -> Tensor:
    """``x * factor``, rounded once to `dtype`.

    May overwrite `x` unless this backward can be called again. On a GPU one pass multiplies and
    rounds. On a CPU torch would need a temporary as large as `x`.
    """
    if factor is None:
        return x.to(dtype)
    is_number = factor.dim() == 0 and factor.device.type == "cpu"  # no wait for the device
    if is_number and factor.item() == 1.0:  # as in `loss.backward()`
        return x.to(dtype, copy=_retains_graph())  # never give the stored gradient to the caller
    if x.dtype != dtype and not device_of(x.device).casts_into:
        return (x * factor if _retains_graph() else x.mul_(factor)).to(dtype)
    in_place = x.dtype == dtype and not _retains_graph()
    out = x if in_place else torch.empty_like(x, dtype=dtype)
    backend.scale(x, factor, out)
    return out


def _merge(
    stored: HeadTensors,
    stored_rows: Tensor,
    rest: HeadTensors,
    rest_rows: Tensor,
    n: int,
    ratio: Tensor,
) -> HeadTensors:
    """Add the stored gradients, of `stored_rows`, and a second pass's, the `rest`.

    A row with only one coefficient gets `ratio` (m,) times its gradient from the second pass, and
    nothing from the stored gradient: the sum could be a small difference of large numbers. `ratio`
    is NaN where a row has several coefficients.
    """
    retains = _retains_graph()
    total = []
    for name, x, y in zip(HeadTensors._fields, stored, rest, strict=True):
        if name in PER_POSITION and x is not None and y is not None:
            rows = x.new_zeros(n, x.shape[1])
            rows[stored_rows] = x
            added = rows[rest_rows] + y
            rows[rest_rows] = torch.where(ratio.isnan()[:, None], added, y * ratio[:, None])
            total.append(rows)
        elif x is None or y is None:
            total.append(y if x is None else x)
        else:
            total.append(x + y if retains else x.add_(y))
    return HeadTensors(*total)


def _input_gradients(
    shapes_and_dtypes: HeadTensors,
    job: Job,
    grads: HeadTensors,
    grad_rows: Tensor,
    factor: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The gradients times `factor`, () or (m, 1), each rounded once, in the shapes of the inputs.

    Row i of a gradient belongs to row ``grad_rows[i]`` of the call. With a sharded head, each rank
    has the gradients from its own columns, and the rows' gradients are summed over the ranks.
    """
    rows, shard, backend = job.rows, job.shard, job.backend

    def place_rows(x: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if shard is not None:
            # exchange all rows of the call, since every rank has the same number of them
            summed = shard.sum_(spread(_scaled(x, factor, x.dtype, backend), grad_rows, len(rows)))
            return spread(summed.to(dtype), rows.positions, shape[0])
        complete = grad_rows.shape == rows.positions.shape
        positions = rows.positions if complete else rows.positions[grad_rows]
        return spread(_scaled(x, factor, dtype, backend), positions, shape[0])

    returned: list[Tensor | None] = []
    for name, x, spec in zip(HeadTensors._fields, grads, shapes_and_dtypes, strict=True):
        if x is None or spec is None:
            returned.append(None)
        elif name in PER_POSITION:
            returned.append(place_rows(x, *spec))
        else:
            returned.append(_scaled(x, factor, spec[1], backend))
    return tuple(returned)


def _retains_graph() -> bool:
    """True if this backward may be called again (``retain_graph``)."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())
