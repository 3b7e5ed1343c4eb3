"""The two passes of a call over its rows: the forward's, and one that a backward may need.

The first pass computes each row's statistics and, in the engines one_pass and frozen, the gradient
on the same logits. The second pass projects again the rows with a coefficient other than 0.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_kernels.backends.interface import Coefficients, FusedLoss, RowStats
from grpo_kernels.base.tensors import is_nonzero, take
from grpo_kernels.engine.plan import Job, RowLoss
from grpo_kernels.engine.slices import sweep_slices
from grpo_kernels.engine.sweep import (
    Index,
    RowWork,
    fused_work,
    gradient_work,
    stats_work,
    sweep,
)
from grpo_kernels.engine.workspace import device_of
from grpo_kernels.head import HeadTensors


class FirstPass(NamedTuple):
    """Results of a first pass: the statistics (n,) of all rows and, if due now, a gradient.

    `grads` is the gradient from the rows `live_rows` (m,), in the accumulator's dtype: of the loss
    in one_pass, and of the sum of the rows' results in frozen. It is None if it is computed later.
    `coefficients` (n,), if asked for, are those of the gradient in one_pass.
    """

    stats: RowStats
    grads: HeadTensors | None = None
    live_rows: Tensor | None = None
    coefficients: Coefficients | None = None

    @property
    def entropies(self) -> Tensor:
        assert self.stats.entropies is not None
        return self.stats.entropies


def first_pass(
    job: Job,
    tensors: HeadTensors,
    reference: HeadTensors | None,
    row_loss: RowLoss,
    *,
    keeps_coefficients: bool = False,
) -> FirstPass:
    """Compute the statistics of all rows and, if due now, the gradient of the live rows.

    Waits for the device once, to count the live rows, unless all rows are live. With
    `keeps_coefficients`, the result has the coefficients that one_pass used.
    """
    with torch.no_grad():
        tensors, reference = job.converted(tensors, reference)
        if job.when in ("never", "later"):
            return FirstPass(sweep(job, tensors, reference, stats_work(job))[0])
        n, live = len(job.rows), row_loss.live
        every = torch.arange(n, device=job.rows.positions.device)
        live_rows = every if live is None else _indices_of(live)
        # an empty batch needs no kernel: its loss is 0
        fuses = n > 0 and job.when == "now" and job.fuses
        fused_loss = row_loss.fused_loss() if fuses else None
        noted: dict[str, Tensor] = {}

        def coefficients_of(at: Index, stats: RowStats) -> Coefficients:
            if job.when == "unit":
                return job.with_d_result(torch.ones_like(stats.logps))
            coefficients = row_loss.coefficients_at(live_rows[at], stats)
            if keeps_coefficients:  # a user's function may answer differently later
                for name, x in coefficients._asdict().items():
                    if x is not None:
                        if name not in noted:
                            noted[name] = x.new_zeros(n, *x.shape[1:])
                        noted[name][live_rows[at]] = x
            return coefficients

        # the rows with gradient; in fp16, d logits need a factor that depends on all coefficients
        # of a chunk, so the kernel computes only statistics and loss
        is_part = live_rows.shape[0] < n
        part = job.at(live_rows) if is_part else job
        work = _value_work(part, take(fused_loss, live_rows) if is_part else fused_loss)
        if fused_loss is None or job.products(tensors.weight).scales_gradient:
            work = gradient_work(part, tensors, coefficients_of, work)
        stats, grads = sweep(part, tensors, reference, work, job.needs_grad)

        if is_part:  # the rows without
            assert live is not None
            others = _indices_of(~live, n - live_rows.shape[0])
            part = job.at(others)
            work = _value_work(part, take(fused_loss, others))
            parts = [stats] if len(live_rows) else []
            stats = RowStats.concatenate([*parts, sweep(part, tensors, reference, work)[0]])
            stats = take(stats, torch.cat([live_rows, others]).argsort())
        if not keeps_coefficients or job.when == "unit":
            return FirstPass(stats, grads, live_rows)
        if fused_loss is None:
            coefficients = Coefficients(**noted)
        else:
            coefficients = row_loss.coefficients_at(every, stats)
        if job.d_result(coefficients) is None:
            coefficients = job.with_d_result(torch.zeros_like(stats.logps), coefficients)
        return FirstPass(stats, grads, live_rows, coefficients)


def _value_work(job: Job, fused_loss: FusedLoss | None) -> RowWork:
    """Row work without a gradient: the statistics and, by a kernel for `fused_loss`, the loss."""
    return stats_work(job) if fused_loss is None else fused_work(job, fused_loss)


def scale_frozen_(first: FirstPass, d_logp: Tensor) -> None:
    """Multiply each row's stored gradient by `d_logp`, in place, for a frozen head."""
    assert first.grads is not None
    first.grads.hidden.mul_(d_logp[first.live_rows, None])


def second_pass(
    job: Job,
    tensors: HeadTensors,
    reference: HeadTensors | None,
    stats: RowStats,
    coefficients: Coefficients,
) -> tuple[HeadTensors, Tensor]:
    """Compute the gradient of rows with a non-zero coefficient (n,); also return the rows' indices.

    Projects the logits of these rows again. Waits for the device once, to count the rows. At least
    one coefficient is not None.
    """
    indices, coefficients = _nonzero(coefficients)
    job = job.at(indices)
    if coefficients.d_divergence is None:  # then the gradient does not need the reference
        job, reference = replace(job, reference_dtype=None), None
    stats, coefficients = take((stats, coefficients), indices)
    if job.order == "slices":
        return sweep_slices(job, tensors, reference, stats, coefficients), indices
    tensors, reference = job.converted(tensors, reference)
    stats_of_first = lambda chunk, rows, at, out: (take(stats, at), None)  # noqa: E731
    coefficients_of = lambda at, _: take(coefficients, at)  # noqa: E731
    work = gradient_work(job, tensors, coefficients_of, stats_of_first, returns_stats=False)
    grads = sweep(job, tensors, reference, work, job.needs_grad)[1]
    assert grads is not None
    return grads, indices


def _nonzero(coefficients: Coefficients) -> tuple[Tensor, Coefficients]:
    """Indices of the rows where any coefficient (n,) is not 0, and the coefficients.

    If there are several coefficients, any that is zero everywhere becomes None.
    """
    nonzero = [None if x is None else is_nonzero(x) for x in coefficients]
    present = [x for x in nonzero if x is not None]
    if len(present) == 1 or device_of(present[0].device).is_capturing():
        return _indices_of(present[0]), coefficients
    any_nonzero = torch.stack(present).any(dim=0)
    count, *counts = torch.stack([any_nonzero.sum(), *(x.sum() for x in present)]).tolist()
    next_count = iter(counts)
    kept = (x if x is not None and next(next_count) else None for x in coefficients)
    return _indices_of(any_nonzero, count), Coefficients(*kept)


def _indices_of(chosen: Tensor, count: int | None = None) -> Tensor:
    """The indices where `chosen` (n,) is True; in a CUDA graph, all n.

    Waits for the device, unless you pass their `count`.
    """
    if count is not None:
        return (~chosen).to(torch.uint8).argsort(stable=True)[:count]
    if device_of(chosen.device).is_capturing():
        return torch.arange(chosen.shape[0], device=chosen.device)
    return chosen.nonzero()[:, 0]
