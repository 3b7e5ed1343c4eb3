"""What a call does, without autograd: a first pass over its rows, and a second one where the gradient needs it.

The autograd Functions (`functions.py`) and the ops for torch.compile (`grpo_kernels.call.ops`) are both made of these.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from grpo_kernels.backends.interface import DotRowBackend, RowStats
from grpo_kernels.base.checks import is_captured
from grpo_kernels.engine.gradients import Gradients, NeedsGrad
from grpo_kernels.engine.operands import Coefficients, CoefficientsOf, Head, HeadConfig, Index, Rows
from grpo_kernels.engine.slices import sweep_slices
from grpo_kernels.engine.sweep import Asked, sweep
from grpo_kernels.token_loss.record import TokenLoss

Gather = Callable[[], AbstractContextManager[Any]]

STORING = ("one_pass", "frozen")  # engines whose first pass takes the gradient, or all that is long about it
RECOMPUTING = ("two_pass", "lean")  # those that take it in a second pass


@dataclass(frozen=True)
class Request:
    """What is asked of a call besides the head's tensors."""

    rows: Rows  # n rows; the others are 0 in every result
    config: HeadConfig
    needs_grad: NeedsGrad
    engine: str  # one of `plan.ENGINES`
    entropy: bool = True
    extras: tuple[str, ...] = ()
    coefficients: CoefficientsOf | None = None  # the true ones for `PolicyLoss`, the expected for `LinearLogprob`
    token_loss: TokenLoss | None = None  # `PolicyLoss`: the same for a backend that fuses; its terms reach `finish`
    graded: Tensor | None = None  # (n,) bool: rows that may carry gradient; None: all of them
    gather: Gather = nullcontext  # within it the weight is whole, also in the backward (ZeRO-3)


@dataclass(frozen=True)
class FirstPass:
    """Statistics of all rows; and, from the engines that are `STORING`, a gradient of the graded ones."""

    stats: RowStats  # (n,)
    grads: Gradients | None
    graded: Tensor  # (m,) places among the rows
    used: Coefficients | None = None  # (n,) what `grads` was computed with, where that was asked row by row


class Differentiated(Protocol):
    """A loss and its gradient in the numbers of its rows."""

    @property
    def loss(self) -> Tensor: ...  # ()

    @property
    def a(self) -> Tensor: ...  # (n,) d loss / d logp

    @property
    def b(self) -> Tensor | None: ...  # (n,) d loss / d entropy


Loss = TypeVar("Loss", bound=Differentiated)


def first_pass(head: Head, request: Request) -> FirstPass:
    """The forward of every engine. Waits for the device once if not all rows are graded: how many are?"""
    rows, config = request.rows, request.config
    asked = Asked(entropy=request.entropy, extras=request.extras, token_loss=request.token_loss)
    nowhere = rows.positions[:0]
    if request.engine == "score_dot":
        return FirstPass(_score_without_logits(head, rows, request), None, nowhere)
    head = config.converted(head)
    if request.engine not in STORING:
        return FirstPass(sweep(head, rows, config, asked)[0], None, nowhere)
    every = torch.arange(len(rows), device=rows.positions.device)
    graded = every if request.graded is None else places_of(request.graded)
    known = _Known(request, graded)

    def with_gradient(asked: Asked) -> Asked:
        if request.engine == "frozen":
            return replace(asked, slopes=True, needs_grad=NeedsGrad(hidden=True))
        return replace(asked, coefficients=known, needs_grad=request.needs_grad)

    if graded.shape[0] == len(rows):
        stats, grads = sweep(head, rows, config, with_gradient(asked))
        return FirstPass(stats, grads, graded, known.used)
    stats, grads = sweep(head, rows.at(graded), config, with_gradient(asked.at(graded)))
    assert request.graded is not None
    others = request.graded.to(torch.uint8).argsort(stable=True)[: len(rows) - graded.shape[0]]
    more, _ = sweep(head, rows.at(others), config, asked.at(others))
    return FirstPass(_interleave(stats, graded, more, others), grads, graded, known.used)


class _Known:
    """The coefficients that a request gives, by places among its graded rows.

    Attributes:
        used: what they were, (n,) for all rows of the request; None where nobody asked.
    """

    def __init__(self, request: Request, graded: Tensor) -> None:
        self._request, self._graded = request, graded
        self.used: Coefficients | None = None
        if request.token_loss is None and request.engine != "frozen":
            self.used = self._zeros(), None

    def __call__(self, index: Index, stats: RowStats) -> Coefficients:
        assert self._request.coefficients is not None
        places = self._graded[index]
        a, b = self._request.coefficients(places, stats)
        if self.used is not None:
            all_a, all_b = self.used
            all_a[places] = a
            if b is not None:
                all_b = self._zeros() if all_b is None else all_b
                all_b[places] = b
            self.used = all_a, all_b
        return a, b

    def _zeros(self) -> Tensor:
        rows = self._request.rows
        return rows.positions.new_zeros(len(rows), dtype=self._request.config.accumulator)


def loss_pass(head: Head, request: Request, finish: Callable[[RowStats], Loss]) -> tuple[FirstPass, Loss]:
    """The first pass of a loss, `finish` of its rows' statistics: what it stores is then the gradient of the loss."""
    first = first_pass(head, request)
    done = finish(first.stats)
    if request.engine == "frozen" and first.grads is not None:  # what came is d logp / d hidden, row by row
        assert done.b is None
        assert first.grads.hidden is not None
        first.grads.hidden.mul_(done.a[first.graded, None])
    return first, done


def second_pass(head: Head, request: Request, stats: RowStats, a: Tensor, b: Tensor | None) -> tuple[Gradients, Tensor]:
    """The gradient of the rows where a or b is not 0, and their places. Waits for the device once: how many are they?

    Args:
        stats: of all rows, from the first pass.
        a, b: d loss / d logp and d loss / d entropy, (n,).
    """
    places, b = _moved(a, b)
    rows, some = request.rows.at(places), stats.rows(places)
    picked = a[places], None if b is None else b[places]
    if request.engine == "lean":
        return sweep_slices(head, rows, request.config, some, *picked, request.needs_grad), places
    known = Asked(
        stats=some,
        coefficients=lambda index, _: (picked[0][index], None if picked[1] is None else picked[1][index]),
        needs_grad=request.needs_grad,
    )
    _, grads = sweep(request.config.converted(head), rows, request.config, known)
    assert grads is not None
    return grads, places


def spread(x: Tensor, rows: Rows, n: int) -> Tensor:
    """(rows,) -> (n,), 0 at the positions that are not among the rows; always a copy."""
    if len(rows) == n:
        return x.clone()
    full = x.new_zeros(n)
    full[rows.positions] = x
    return full


def all_rows(x: Tensor, places: Tensor, n: int) -> Tensor:
    """(m, H), the rows at `places`, which rise -> (n, H), 0 elsewhere."""
    if x.shape[0] == n:
        return x
    full = x.new_zeros(n, x.shape[1])
    full[places] = x
    return full


def places_of(chosen: Tensor) -> Tensor:
    """Where `chosen` (n,) is True. Waits for the device, to learn how many; a CUDA graph cannot, and takes all."""
    if is_captured(chosen):
        return torch.arange(chosen.shape[0], device=chosen.device)
    return chosen.nonzero()[:, 0]


def _moved(a: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The places where a or b (n,) is not 0; and b, or None if all of it is, as for a loss without entropies."""
    if b is None or is_captured(a):
        return places_of(a != 0), b
    moved = (a != 0) | (b != 0)
    count, of_b = torch.stack([moved.sum(), (b != 0).sum()]).tolist()
    return (~moved).to(torch.uint8).argsort(stable=True)[:count], b if of_b else None


def _score_without_logits(head: Head, rows: Rows, request: Request) -> RowStats:
    config = request.config
    assert isinstance(config.backend, DotRowBackend)
    hidden, weight = head.hidden[rows.positions].to(config.compute_dtype), head.weight.to(config.compute_dtype)
    transform = config.transform(head.row_bias(config.accumulator), rows.inv_temperature)
    ids = rows.ids if config.shard is None else config.shard.own(rows.ids)
    stats = config.backend.score_dot(hidden, weight.contiguous(), ids, transform, entropy=request.entropy)
    if config.shard is not None:
        stats = config.shard.joined(stats, rows.ids, transform)
    if rows.invalid is not None:
        stats.logps.masked_fill_(rows.invalid, torch.nan)
    return stats


def _interleave(first: RowStats, at_first: Tensor, second: RowStats, at_second: Tensor) -> RowStats:
    both = RowStats.concatenate(
        [first, second], first.logps, first.logps.dtype, entropy=first.entropies is not None, extras=(*first.extras,)
    )
    return both.rows(torch.cat([at_first, at_second]).argsort())
