"""Passes of a call, without autograd: a first one over its rows, and a second one if it is needed.

The autograd Functions (`autograd.py`) call these. Each engine names its passes (`engines.py`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from grpo_kernels.backends.interface import RowStats
from grpo_kernels.base.tensors import take
from grpo_kernels.engine.device import device_of
from grpo_kernels.engine.plan import ForwardResult, Request, Stored
from grpo_kernels.engine.records import Gradients, Index, NeedsGrad, Operands, Rows
from grpo_kernels.engine.slices import sweep_slices
from grpo_kernels.engine.sweep import Derive, RowWork, sweep
from grpo_kernels.token_loss.record import NO_COEFFICIENTS, Coefficients, moved


def score(head: Operands, request: Request) -> ForwardResult:
    """Find the statistics alone."""
    plan, work = request.plan, RowWork(request, head)
    sweep(plan.converted(head), request.rows, plan, work)
    return ForwardResult(work.statistics(head.hidden))


def store(head: Operands, request: Request) -> ForwardResult:
    """Find the statistics, and on the same logits the gradient of the rows that may have one.

    Waits for the device once, to count these rows, unless `may_have_grad` is None.
    """
    rows, plan, may_have_grad = request.rows, request.plan, request.may_have_grad
    head, n = plan.converted(head), len(request.rows)
    every = torch.arange(n, device=rows.positions.device)
    grad_rows = every if may_have_grad is None else indices_of(may_have_grad)
    recorded = _Recorded(request, grad_rows)
    graded, loss = rows, request.token_loss
    if grad_rows.shape[0] < n:
        graded, loss = take((rows, loss), grad_rows)
    if request.engine.stores is Stored.PER_ROW:
        work = RowWork(request, head, lambda _, x: request.with_main(torch.ones_like(x.logps)))
        grads = sweep(head, graded, plan, work, NeedsGrad(hidden=True))
    else:
        work = RowWork(request, head, recorded, loss)
        grads = sweep(head, graded, plan, work, request.needs_grad)
    stats = work.statistics(head.hidden)
    if may_have_grad is not None and grad_rows.shape[0] < n:
        others = may_have_grad.to(torch.uint8).argsort(stable=True)[: n - grad_rows.shape[0]]
        work = RowWork(request, head, token_loss=take(request.token_loss, others))
        sweep(head, take(rows, others), plan, work)
        stats = _interleave(stats, grad_rows, work.statistics(head.hidden), others)
    return ForwardResult(stats, grads, grad_rows, recorded.coefficients)


def recompute(
    head: Operands, request: Request, stats: RowStats, coefficients: Coefficients
) -> Gradients:
    """Find the gradient of all rows of `request`, on logits that are projected again."""
    plan, work = request.plan, Derive(request, head, coefficients, stats)
    grads = sweep(plan.converted(head), request.rows, plan, work, request.needs_grad)
    assert grads is not None
    return grads


def recompute_slices(
    head: Operands, request: Request, stats: RowStats, coefficients: Coefficients
) -> Gradients:
    """Do the same as `recompute`, one slice of the vocabulary at a time."""
    return sweep_slices(head, request.rows, request.plan, stats, coefficients, request.needs_grad)


def of_loss(first: ForwardResult, request: Request, coefficients: Coefficients) -> ForwardResult:
    """Return the result of a first pass as that of a loss with these coefficients, (n,) each.

    A gradient that is stored row by row becomes the loss's, in place.
    """
    if request.engine.stores is Stored.PER_ROW:
        d_logp, *others = coefficients
        assert not any(x is not None for x in others) and d_logp is not None
        assert first.grads is not None and first.grads.hidden is not None
        first.grads.hidden.mul_(d_logp[first.grad_rows, None])
    return replace(first, coefficients=coefficients)


def second_pass(
    head: Operands, request: Request, stats: RowStats, coefficients: Coefficients
) -> tuple[Gradients, Tensor]:
    """Find the gradient of the rows with a coefficient that is not 0, and their indices.

    Waits for the device once, to count these rows.

    Args:
        stats: (n,) those of all rows, from the first pass.
        coefficients: (n,) each; at least one is not None.
    """
    indices, coefficients = _nonzero(coefficients)
    request = replace(request, rows=take(request.rows, indices))
    if coefficients.d_divergence is None:  # then the gradient has no part of the teacher's
        head = replace(head, teacher=None)
        request = replace(request, plan=replace(request.plan, teacher=None))
    return request.engine.second_pass(head, request, *take((stats, coefficients), indices)), indices


def scatter(x: Tensor, rows: Rows, n: int) -> Tensor:
    """(rows, ...) -> (n positions, ...), 0 where a position is no row; always a copy."""
    if len(rows) == n:
        return x.clone()
    full = x.new_zeros(n, *x.shape[1:])
    full[rows.positions] = x
    return full


def all_rows(x: Tensor, indices: Tensor, n: int) -> Tensor:
    """Put `x` (m, H) into the rows of (n, H) at rising `indices`; return `x` itself if m = n."""
    if x.shape[0] == n:
        return x
    full = x.new_zeros(n, x.shape[1])
    full[indices] = x
    return full


def indices_of(chosen: Tensor) -> Tensor:
    """Return the indices where `chosen` (n,) is True; in a CUDA graph all n.

    Waits for the device to count them.
    """
    if device_of(chosen.device).is_capturing():
        return torch.arange(chosen.shape[0], device=chosen.device)
    return chosen.nonzero()[:, 0]


class _Recorded:
    """Call a request's `coefficients_of`, by indices into its rows that may have a gradient.

    Attributes:
        coefficients: the results if the backward compares them (a loss has those of its
            evaluation), (n,) each over all rows of the request, 0 in the others.
    """

    def __init__(self, request: Request, grad_rows: Tensor) -> None:
        self._request, self._grad_rows = request, grad_rows
        is_stored = request.engine.stores is Stored.GRADIENT and request.token_loss is None
        self._records = request.compares and is_stored
        self.coefficients = NO_COEFFICIENTS
        if self._records:
            self.coefficients = request.with_main(self._zeros())  # also if there are no rows

    def __call__(self, index: Index, stats: RowStats) -> Coefficients:
        assert self._request.coefficients_of is not None
        indices = self._grad_rows[index]
        coefficients = self._request.coefficients_of(indices, stats)
        if self._records:
            pairs = zip(self.coefficients, coefficients, strict=True)
            self.coefficients = Coefficients(*(self._recorded(x, new, indices) for x, new in pairs))
        return coefficients

    def _recorded(self, every: Tensor | None, new: Tensor | None, indices: Tensor) -> Tensor | None:
        if new is None:
            return every
        every = self._zeros() if every is None else every
        every[indices] = new
        return every

    def _zeros(self) -> Tensor:
        rows = self._request.rows
        return rows.positions.new_zeros(len(rows), dtype=self._request.plan.accumulator)


def _nonzero(coefficients: Coefficients) -> tuple[Tensor, Coefficients]:
    """Return the indices where any coefficient (n,) is not 0, and the coefficients.

    If there are several, any that is zero everywhere becomes None.
    """
    moves = [None if x is None else moved(x) for x in coefficients]
    present = [x for x in moves if x is not None]
    if len(present) == 1 or device_of(present[0].device).is_capturing():
        return indices_of(present[0]), coefficients
    any_moves = torch.stack(present).any(dim=0)
    count, *counts = torch.stack([any_moves.sum(), *(x.sum() for x in present)]).tolist()
    next_count = iter(counts)
    kept = (x if x is not None and next(next_count) else None for x in coefficients)
    return (~any_moves).to(torch.uint8).argsort(stable=True)[:count], Coefficients(*kept)


def _interleave(first: RowStats, at_first: Tensor, second: RowStats, at_second: Tensor) -> RowStats:
    both = RowStats.concatenate(
        [first, second],
        first.logps,
        first.logps.dtype,
        entropy=first.entropies is not None,
        extras=(*first.extras,),
        terms=(*first.terms,),
        divergence=first.divergence is not None,
    )
    return take(both, torch.cat([at_first, at_second]).argsort())
