"""The two autograd Functions: a differentiable log-probability and entropy, and a loss that carries its gradient.

Both keep d hidden and d weight in the accumulator's dtype and apply the upstream gradient before the one rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.backends.rows import DotRowBackend, RowStats
from grpo_kernels.engine.first_order import first_order
from grpo_kernels.engine.remainder import Remainder, split_off
from grpo_kernels.engine.slices import sweep_slices
from grpo_kernels.engine.sweep import Coefficients, CoefficientsOf, Gradients, Head, HeadConfig, Rows, Wants, sweep
from grpo_kernels.token_loss import TokenLoss

Gather = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Request:
    """What is asked of a Function besides the gradients' tensors."""

    rows: Rows  # n rows; the others are 0 in every result
    config: HeadConfig
    wants: Wants
    engine: str  # one of `plan.ENGINES`
    entropy: bool = True
    extras: tuple[str, ...] = ()
    coefficients: CoefficientsOf | None = None  # the true ones for `OnePassLoss`, the expected for `LinearLogprob`
    token_loss: TokenLoss | None = None  # `OnePassLoss`: the same for a backend that fuses; its terms reach `finish`
    graded: Tensor | None = None  # (n,) bool: rows that may carry gradient; None: all of them
    gather: Gather = nullcontext  # within it the weight is whole, also in the backward (ZeRO-3)


class OnePassLoss(torch.autograd.Function):
    """A scalar loss whose coefficients are known row by row, with its gradient taken in the forward.

    ``forward(ctx, hidden, weight, bias, request, finish)`` -> loss, logps (N,), entropies (N,); the last two carry no
    gradient. `finish` maps the statistics of all rows to the loss.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # (N, H)
        weight: Tensor,  # (V, H)
        bias: Tensor | None,  # (V,)
        request: Request,
        finish: Callable[[RowStats], Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        head = Head(hidden, weight, bias)
        stats, grads, graded, _ = _forward_sweeps(head, request)
        assert grads is not None and stats.entropies is not None
        ctx.request, ctx.like = request, _Like.of(head)
        ctx.save_for_backward(grads.hidden, grads.weight, grads.bias, graded)
        loss = finish(stats)
        logps, entropies = (_spread(x, request.rows, hidden.shape[0]) for x in (stats.logps, stats.entropies))
        ctx.mark_non_differentiable(logps, entropies)
        return loss, logps, entropies

    @staticmethod
    @first_order
    def backward(ctx: Any, d_loss: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        *stored, graded = ctx.saved_tensors
        scaled = _scale(Gradients(*stored), d_loss, overwrite=not _graph_is_kept())
        return *_finish(scaled, ctx.like, ctx.request.rows.positions[graded]), None, None


class LinearLogprob(torch.autograd.Function):
    """Log-probabilities and entropies, both differentiable.

    ``forward(ctx, hidden, weight, bias, request)`` -> logps (N,), entropies (N,) or None, and the extras. With stored
    gradients for coefficients (a, b) and upstream gradients (g, h), the backward returns c times what is stored plus,
    by a second sweep, the gradient of what is left: g - c a and h - c b, in the rows where that is more than rounding
    (`remainder.py`).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # (N, H)
        weight: Tensor,  # (V, H)
        bias: Tensor | None,  # (V,)
        request: Request,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        head = Head(hidden, weight, bias)
        stats, grads, graded, expected = _forward_sweeps(head, request)
        ctx.request, ctx.like = request, _Like.of(head)
        if request.engine not in ("score", "score_dot"):
            stored = (None, None, None) if grads is None else (grads.hidden, grads.weight, grads.bias)
            known = (stats.logps, stats.max_logit, stats.log_sum, stats.entropies)
            ctx.save_for_backward(hidden, weight, bias, *stored, graded, *known, *(expected or (None, None)))
        n = hidden.shape[0]
        extras = [_spread(stats.extras[name], request.rows, n) for name in request.extras]
        entropies = None if stats.entropies is None else _spread(stats.entropies, request.rows, n)
        ctx.mark_non_differentiable(*extras)
        return _spread(stats.logps, request.rows, n), entropies, *extras

    @staticmethod
    @first_order
    def backward(
        ctx: Any, d_logps: Tensor | None, d_entropies: Tensor | None, *d_extras: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        request: Request = ctx.request
        rows, wants = request.rows, request.wants
        saved = ctx.saved_tensors
        head, stored, graded = Head(*saved[:3]), Gradients(*saved[3:6]), saved[6]
        known, expected = RowStats(*saved[7:11]), saved[11:]
        dtype = request.config.accumulator
        g = known.logps.new_zeros(len(rows)) if d_logps is None else d_logps[rows.positions].to(dtype)
        h = None if d_entropies is None else d_entropies[rows.positions].to(dtype)

        def recompute(a: Tensor, b: Tensor | None) -> tuple[Gradients, Tensor]:
            """The gradient of the rows where a or b is not 0, and their places."""
            places = _places(a != 0 if b is None else (a != 0) | (b != 0))
            picked = a[places], None if b is None else b[places]
            with request.gather():
                if request.engine == "lean":
                    return sweep_slices(
                        head, rows.at(places), request.config, known.rows(places), *picked, wants
                    ), places
                _, grads = sweep(
                    head,
                    rows.at(places),
                    request.config,
                    stats=known.rows(places),
                    coefficients=lambda index, _: (picked[0][index], None if picked[1] is None else picked[1][index]),
                    wants=wants,
                )
            assert grads is not None
            return grads, places

        if request.engine in ("two_pass", "lean"):
            total, places = recompute(g, h)
            return *_finish(total, ctx.like, rows.positions[places]), None
        if request.engine == "frozen":  # what is stored is d logp / d hidden, row by row
            scaled = _scale(stored, g[graded, None], overwrite=not _graph_is_kept())
            rest = Remainder(g.index_fill(0, graded, 0.0), h)
            complete = h is None and graded.shape[0] == len(rows)  # then there is nothing to ask the device for
            left = not complete and rest.size(g, h)[0]
        else:
            c, rest = split_off(g, h, (expected[0], expected[1]))
            left, far = rest.size(g, h)
            if far:  # what is stored is far larger than what is wanted: nothing of it would survive
                total, places = recompute(g, h)
                return *_finish(total, ctx.like, rows.positions[places]), None
            scaled = _scale(stored, c, overwrite=not _graph_is_kept())
        if not left:
            return *_finish(scaled, ctx.like, rows.positions[graded]), None
        more, places = recompute(rest.a, rest.b)
        total = _merge(scaled, graded, more, places, len(rows), None if rest.b is not None else (g / rest.a)[places])
        return *_finish(total, ctx.like, rows.positions), None


@dataclass(frozen=True)
class _Like:
    """Shape and dtypes of the gradients to return."""

    hidden_shape: torch.Size
    hidden_dtype: torch.dtype
    weight_dtype: torch.dtype
    bias_dtype: torch.dtype | None

    @staticmethod
    def of(head: Head) -> _Like:
        bias_dtype = None if head.bias is None else head.bias.dtype
        return _Like(head.hidden.shape, head.hidden.dtype, head.weight.dtype, bias_dtype)


def _forward_sweeps(head: Head, request: Request) -> tuple[RowStats, Gradients | None, Tensor, Coefficients | None]:
    """Statistics of all rows; gradients of the graded ones, their places, and the coefficients used on all rows."""
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
        return _score_without_logits(head, rows, request), None, every[:0], None
    if request.engine in ("score", "two_pass", "lean"):
        return score(every), None, every[:0], None
    graded, others = every, every[:0]
    if request.graded is not None:
        graded = _places(request.graded)
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
    return stats, grads, graded, (used[0], used.get(1))


def _score_without_logits(head: Head, rows: Rows, request: Request) -> RowStats:
    config = request.config
    assert isinstance(config.backend, DotRowBackend)
    hidden, weight = head.hidden[rows.positions].to(config.compute_dtype), head.weight.to(config.compute_dtype)
    transform = config.transform(head.row_bias(config.accumulator), rows.inv_temperature)
    stats = config.backend.score_dot(hidden, weight.contiguous(), rows.ids, transform, entropy=request.entropy)
    if rows.invalid is not None:
        stats.logps.masked_fill_(rows.invalid, torch.nan)
    return stats


def _places(chosen: Tensor) -> Tensor:
    """Where `chosen` (n,) is True. Waits for the device, to learn how many; a CUDA graph cannot, and takes all."""
    if chosen.is_cuda and torch.cuda.is_current_stream_capturing():
        return torch.arange(chosen.shape[0], device=chosen.device)
    return chosen.nonzero()[:, 0]


def _scale(stored: Gradients, factor: Tensor, *, overwrite: bool) -> Gradients:
    """`stored` times `factor`, () or (n, 1); in place if nobody will need `stored` again."""

    def times(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        return x.mul_(factor) if overwrite else x * factor

    return Gradients(times(stored.hidden), times(stored.weight), times(stored.bias))


def _merge(
    scaled: Gradients, graded: Tensor, more: Gradients, places: Tensor, n: int, ratio: Tensor | None
) -> Gradients:
    """What is stored, at the places `graded`, and a second sweep at `places` together; the hidden part for all n rows.

    Without entropies a row's gradient is a multiple of what the second sweep gave it, `ratio` (m,) times: the row is
    then taken from there alone, so that the difference of two numbers does not stand in for a small one.
    """

    def add(x: Tensor | None, y: Tensor | None) -> Tensor | None:
        return y if x is None else x if y is None else x.add_(y)

    hidden = None
    if scaled.hidden is not None and more.hidden is not None:
        hidden = scaled.hidden.new_zeros(n, scaled.hidden.shape[1])
        hidden[graded] = scaled.hidden
        hidden[places] = more.hidden * ratio[:, None] if ratio is not None else hidden[places] + more.hidden
    return Gradients(hidden, add(scaled.weight, more.weight), add(scaled.bias, more.bias))


def _finish(grads: Gradients, like: _Like, positions: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients in the shapes and dtypes of the head's tensors."""
    d_hidden = None
    if grads.hidden is not None:
        d_hidden = grads.hidden.new_zeros(like.hidden_shape, dtype=like.hidden_dtype)
        d_hidden[positions] = grads.hidden.to(like.hidden_dtype)
    d_weight = None if grads.weight is None else grads.weight.to(like.weight_dtype)
    d_bias = None if grads.bias is None else grads.bias.to(like.bias_dtype)
    return d_hidden, d_weight, d_bias


def _spread(x: Tensor, rows: Rows, n: int) -> Tensor:
    """(rows,) -> (n,), 0 at the positions that are not among the rows."""
    full = x.new_zeros(n)
    full[rows.positions] = x
    return full


def _interleave(first: RowStats, at_first: Tensor, second: RowStats, at_second: Tensor) -> RowStats:
    both = RowStats.concatenate(
        [first, second], first.logps, first.logps.dtype, entropy=first.entropies is not None, extras=(*first.extras,)
    )
    return both.rows(torch.cat([at_first, at_second]).argsort())


def _graph_is_kept() -> bool:
    """Whether this backward may be called again (``retain_graph``); True if torch does not tell."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())
