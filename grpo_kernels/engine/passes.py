"""Passes of a call, without autograd: a first one over its rows, and a second one where the gradient needs it.

The autograd Functions (`autograd.py`) and the ops for torch.compile (`grpo_kernels.call.ops`) are both made of these;
which pass is whose, the engines say (`engines.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from grpo_kernels.backends.interface import DotRowBackend, RowStats
from grpo_kernels.engine.device import device_of
from grpo_kernels.engine.gradients import Gradients, NeedsGrad
from grpo_kernels.engine.operands import Coefficients, Head, Index, Rows
from grpo_kernels.engine.request import FirstPass, Request, Stored
from grpo_kernels.engine.slices import sweep_slices
from grpo_kernels.engine.sweep import Asked, sweep


class Differentiated(Protocol):
    """A loss and its gradient in the numbers of its rows."""

    @property
    def loss(self) -> Tensor: ...  # ()

    @property
    def a(self) -> Tensor: ...  # (n,) d loss / d logp

    @property
    def b(self) -> Tensor | None: ...  # (n,) d loss / d entropy

    @property
    def c(self) -> Tensor | None: ...  # (n,) d loss / d divergence


Loss = TypeVar("Loss", bound=Differentiated)


def score(head: Head, request: Request) -> FirstPass:
    """Statistics alone."""
    rows, config = request.rows, request.config
    stats, _ = sweep(config.converted(head), rows, config, _asked(request))
    return FirstPass(stats, None, rows.positions[:0])


def score_without_logits(head: Head, request: Request) -> FirstPass:
    """Statistics alone, by a backend that does the projection itself."""
    config, rows = request.config, request.rows
    assert isinstance(config.backend, DotRowBackend)
    hidden, weight = head.hidden[rows.positions].to(config.compute_dtype), head.weight.to(config.compute_dtype)
    transform = config.transform(head.row_bias(config.accumulator), rows.inv_temperature)
    ids = rows.ids if config.shard is None else config.shard.own(rows.ids)
    stats = config.backend.score_dot(hidden, weight.contiguous(), ids, transform, entropy=request.entropy)
    if config.shard is not None:
        stats = config.shard.joined(stats, rows.ids, transform)
    if rows.invalid is not None:
        stats.logps.masked_fill_(rows.invalid, torch.nan)
    return FirstPass(stats, None, rows.positions[:0])


def store(head: Head, request: Request) -> FirstPass:
    """Statistics of all rows, and the gradient of those that may have one, on the same logits.

    Waits for the device once if not all rows may: how many do?
    """
    rows, config, may_have_grad = request.rows, request.config, request.may_have_grad
    asked, head = _asked(request), config.converted(head)
    every = torch.arange(len(rows), device=rows.positions.device)
    grad_rows = every if may_have_grad is None else indices_of(may_have_grad)
    known = _Known(request, grad_rows)

    def with_gradient(asked: Asked) -> Asked:
        if request.engine.stores is Stored.SLOPES:
            return replace(asked, slopes=True, needs_grad=NeedsGrad(hidden=True))
        return replace(asked, coefficients=known, needs_grad=request.needs_grad)

    if grad_rows.shape[0] == len(rows):
        stats, grads = sweep(head, rows, config, with_gradient(asked))
        return FirstPass(stats, grads, grad_rows, known.used)
    stats, grads = sweep(head, rows.at(grad_rows), config, with_gradient(asked.at(grad_rows)))
    assert may_have_grad is not None
    others = may_have_grad.to(torch.uint8).argsort(stable=True)[: len(rows) - grad_rows.shape[0]]
    more, _ = sweep(head, rows.at(others), config, asked.at(others))
    return FirstPass(_interleave(stats, grad_rows, more, others), grads, grad_rows, known.used)


def recompute(head: Head, request: Request, stats: RowStats, coefficients: Coefficients) -> Gradients:
    """The gradient of all rows of `request`, given their statistics (n,), on logits that are projected again."""
    asked = Asked(stats=stats, coefficients=lambda index, _: coefficients.at(index), needs_grad=request.needs_grad)
    _, grads = sweep(request.config.converted(head), request.rows, request.config, asked)
    assert grads is not None
    return grads


def recompute_slices(head: Head, request: Request, stats: RowStats, coefficients: Coefficients) -> Gradients:
    """Like `recompute`, but one slice of the vocabulary at a time."""
    return sweep_slices(head, request.rows, request.config, stats, coefficients, request.needs_grad)


def loss_pass(head: Head, request: Request, finish: Callable[[RowStats], Loss]) -> tuple[FirstPass, Loss]:
    """The first pass of a loss, `finish` of its rows' statistics: what it stores is then the gradient of the loss."""
    first = request.engine.first_pass(head, request)
    done = finish(first.stats)
    if request.engine.stores is Stored.SLOPES:
        assert done.b is None
        assert done.c is None
        assert first.grads is not None
        assert first.grads.hidden is not None
        first.grads.hidden.mul_(done.a[first.grad_rows, None])
    return first, done


def second_pass(head: Head, request: Request, stats: RowStats, coefficients: Coefficients) -> tuple[Gradients, Tensor]:
    """The gradient of the rows where a coefficient is not 0, and their indices. Waits for the device once: how many are
    they?

    Args:
        stats: of all rows, from the first pass.
        coefficients: (n,), one of them at least.
    """
    indices, coefficients = _moved(coefficients)
    some = replace(request, rows=request.rows.at(indices))
    if coefficients.c is None:
        head, some = head.alone(), replace(some, config=request.config.without_teacher())
    return request.engine.second_pass(head, some, stats.rows(indices), coefficients.at(indices)), indices


def scatter(x: Tensor, rows: Rows, n: int) -> Tensor:
    """(rows,) -> (n,), 0 at the positions that are not among the rows; always a copy."""
    if len(rows) == n:
        return x.clone()
    full = x.new_zeros(n)
    full[rows.positions] = x
    return full


def all_rows(x: Tensor, indices: Tensor, n: int) -> Tensor:
    """(m, H), the rows at `indices`, which rise -> (n, H), 0 elsewhere."""
    if x.shape[0] == n:
        return x
    full = x.new_zeros(n, x.shape[1])
    full[indices] = x
    return full


def indices_of(chosen: Tensor) -> Tensor:
    """Where `chosen` (n,) is True. Waits for the device, to learn how many; a CUDA graph cannot, and takes all."""
    if device_of(chosen.device).is_capturing():
        return torch.arange(chosen.shape[0], device=chosen.device)
    return chosen.nonzero()[:, 0]


class _Known:
    """The coefficients that a request gives, by indices into its rows that may have a gradient.

    Attributes:
        used: what they were, (n,) for all rows of the request; None where nobody asked.
    """

    def __init__(self, request: Request, grad_rows: Tensor) -> None:
        self._request, self._grad_rows = request, grad_rows
        self.used: Coefficients | None = None
        if request.token_loss is None and request.engine.stores is Stored.GRADIENT:
            self.used = Coefficients(**{request.main: self._zeros()})  # whether or not there are rows

    def __call__(self, index: Index, stats: RowStats) -> Coefficients:
        assert self._request.coefficients is not None
        indices = self._grad_rows[index]
        found = self._request.coefficients(indices, stats)
        if self.used is not None:
            self.used = Coefficients(*(self._noted(x, new, indices) for x, new in zip(self.used, found, strict=True)))
        return found

    def _noted(self, every: Tensor | None, new: Tensor | None, indices: Tensor) -> Tensor | None:
        """`new`, written at the indices among the rows of the request."""
        if new is None:
            return every
        every = self._zeros() if every is None else every
        every[indices] = new
        return every

    def _zeros(self) -> Tensor:
        rows = self._request.rows
        return rows.positions.new_zeros(len(rows), dtype=self._request.config.accumulator)


def _asked(request: Request) -> Asked:
    return Asked(entropy=request.entropy, extras=request.extras, token_loss=request.token_loss)


def _moved(coefficients: Coefficients) -> tuple[Tensor, Coefficients]:
    """The indices where a coefficient (n,) is not 0; and the coefficients, None those that all are, as b is for a loss
    without entropies.
    """
    moves = [None if x is None else x != 0 for x in coefficients]
    present = [x for x in moves if x is not None]
    if len(present) == 1 or device_of(present[0].device).is_capturing():
        return indices_of(present[0]), coefficients
    moved = torch.stack(present).any(dim=0)
    count, *counts = torch.stack([moved.sum(), *(x.sum() for x in present)]).tolist()
    some = iter(counts)
    kept = (x if x is not None and next(some) else None for x in coefficients)
    return (~moved).to(torch.uint8).argsort(stable=True)[:count], Coefficients(*kept)


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
    return both.rows(torch.cat([at_first, at_second]).argsort())
