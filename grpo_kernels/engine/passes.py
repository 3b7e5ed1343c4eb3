"""What a call does, without autograd: a first pass over its rows, and a second one where the gradient needs it.

The autograd Functions (`functions.py`) and the ops for torch.compile (`grpo_kernels.ops`) are both made of these.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from grpo_kernels.backends.rows import DotRowBackend, RowStats
from grpo_kernels.engine.operands import Coefficients, CoefficientsOf, Gradients, Head, HeadConfig, Rows, Wants
from grpo_kernels.engine.slices import sweep_slices
from grpo_kernels.engine.sweep import sweep
from grpo_kernels.token_loss import TokenLoss

Gather = Callable[[], AbstractContextManager[Any]]

STORING = ("one_pass", "frozen")  # engines whose first pass takes the gradient, or all that is long about it
RECOMPUTING = ("two_pass", "lean")  # those that take it in a second pass


@dataclass(frozen=True)
class Request:
    """What is asked of a call besides the head's tensors."""

    rows: Rows  # n rows; the others are 0 in every result
    config: HeadConfig
    wants: Wants
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
    used: Coefficients | None  # (n,) what `grads` was computed with


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
    rows, every = request.rows, torch.arange(len(request.rows), device=request.rows.positions.device)
    token_loss = request.token_loss

    def score(index: Tensor) -> RowStats:
        stats, _ = sweep(
            head,
            rows.at(index),
            request.config,
            entropy=request.entropy,
            extras=request.extras,
            token_loss=None if token_loss is None else token_loss.at(index),
        )
        return stats

    if request.engine == "score_dot":
        return FirstPass(_score_without_logits(head, rows, request), None, every[:0], None)
    if request.engine not in STORING:
        return FirstPass(score(every), None, every[:0], None)
    graded, others = every, every[:0]
    if request.graded is not None:
        graded = places_of(request.graded)
        others = request.graded.to(torch.uint8).argsort(stable=True)[: len(rows) - graded.shape[0]]
    zeros = head.hidden.new_zeros(len(rows), dtype=request.config.accumulator)
    used: dict[int, Tensor] = {0: zeros}

    def coefficients(index: Tensor, stats: RowStats) -> Coefficients:
        if request.engine == "frozen":
            return torch.ones_like(stats.logps), None
        assert request.coefficients is not None
        pair = request.coefficients(graded[index], stats)
        for i, x in enumerate(pair):
            if x is not None:
                used.setdefault(i, torch.zeros_like(zeros))[graded[index]] = x
        return pair

    stats, grads = sweep(
        head,
        rows.at(graded),
        request.config,
        entropy=request.entropy,
        extras=request.extras,
        coefficients=coefficients,
        token_loss=None if token_loss is None else token_loss.at(graded),
        wants=Wants(hidden=True) if request.engine == "frozen" else request.wants,
    )
    if others.numel() > 0:
        stats = _interleave(stats, graded, score(others), others)
    return FirstPass(stats, grads, graded, (used[0], used.get(1)))


def loss_pass(head: Head, request: Request, finish: Callable[[RowStats], Loss]) -> tuple[FirstPass, Loss]:
    """The first pass of a loss, `finish` of its rows' statistics: what it stores is then the gradient of the loss."""
    first = first_pass(head, request)
    done = finish(first.stats)
    if request.engine == "frozen" and first.grads is not None:  # what came is d logp / d hidden, row by row
        assert done.b is None and first.grads.hidden is not None
        first = replace(first, grads=Gradients(first.grads.hidden.mul_(done.a[first.graded, None])))
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
        return sweep_slices(head, rows, request.config, some, *picked, request.wants), places
    _, grads = sweep(
        head,
        rows,
        request.config,
        stats=some,
        coefficients=lambda index, _: (picked[0][index], None if picked[1] is None else picked[1][index]),
        wants=request.wants,
    )
    assert grads is not None
    return grads, places


def spread(x: Tensor, rows: Rows, n: int) -> Tensor:
    """(rows,) -> (n,), 0 at the positions that are not among the rows."""
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
    if _is_captured(chosen):
        return torch.arange(chosen.shape[0], device=chosen.device)
    return chosen.nonzero()[:, 0]


def _moved(a: Tensor, b: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The places where a or b (n,) is not 0; and b, or None if all of it is, as for a loss without entropies."""
    if b is None or _is_captured(a):
        return places_of(a != 0), b
    moved = (a != 0) | (b != 0)
    count, of_b = torch.stack([moved.sum(), (b != 0).sum()]).tolist()
    return (~moved).to(torch.uint8).argsort(stable=True)[:count], b if of_b else None


def _is_captured(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


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
