"""The row backend in C++, for CPUs: csrc/, compiled on first use or shipped in a wheel (`build`).

The kernels read the logits as the products left them, in any floating dtype, and apply the
`LogitTransform` on the fly. They take sums over lanes and logarithms in float64 for every dtype of
logits. The loss of a token follows `backends.formulas` operation by operation. A row's bits depend
on that row alone: not on the number of threads, nor on the processor's instruction set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.backends import (
    LOSS_STATS,
    Chunk,
    Coefficients,
    DivergenceStats,
    FusedLoss,
    FusedRowBackend,
    LogitTransform,
    RowBackend,
    RowStats,
    statistic_dtype,
    warn_of_torch,
)
from grpo_kernels.base import EXTRAS
from grpo_kernels.base.tensors import accumulator_of


def refusal(device: torch.device, dtype: torch.dtype, *, asked_for: bool) -> str | None:
    """Refuse tensors that are not on a CPU, and all tensors if there is no library."""
    if device.type != "cpu":
        return f"it serves CPU tensors, and these are {device.type} tensors"
    from grpo_kernels.backends.cpp_rows import build  # not at import: it is also run as a command

    library = build.load()
    if library.refusal is not None and not asked_for:
        warn_of_torch("CPU", "C++", library.refusal)
    return library.refusal


def load() -> RowBackend:
    """Make the backend; call `build.load` first."""
    return CppRows()


class CppRows(FusedRowBackend):
    """Row work, an op for each method and chunk, by torch's threads. Needs `build.load` first."""

    name = "cpp"
    fuses_reference = True

    def stats(self, chunk: Chunk, *, entropy: bool, extras: tuple[str, ...] = ()) -> RowStats:
        new = _columns(chunk.logits)
        stats: dict[str, Any] = {name: new() for name in ("logps", "max_logit", "log_sum")}
        stats["entropies"] = new() if entropy else None
        extra_stats = {
            name: new(dtype=statistic_dtype(name, stats["logps"].dtype)) for name in extras
        }
        torch.ops.grpo_kernels_cpp.stats(
            *_rows(chunk), **stats, extras=[extra_stats.get(x) for x in EXTRAS]
        )
        return RowStats(**stats, extras=extra_stats)

    def diverge(
        self, chunk: Chunk, stats: RowStats, reference_stats: RowStats
    ) -> tuple[Tensor, Tensor]:
        new = _columns(chunk.logits)
        value, sum_k = new(), new()
        torch.ops.grpo_kernels_cpp.diverge(
            *_rows(chunk),
            *_reference(chunk),
            stats.max_logit, stats.log_sum, reference_stats.max_logit, reference_stats.log_sum,
            value=value, sum_k=sum_k,
        )  # fmt: skip
        return value, sum_k

    def grad(self, chunk: Chunk, stats: RowStats, coefficients: Coefficients, out: Tensor) -> None:
        d_logp, d_entropy, d_divergence, _ = coefficients
        assert d_logp is not None
        divergence = None if d_divergence is None else stats.divergence
        if d_divergence is None:  # then a reference is ignored
            chunk = replace(chunk, reference=None)
        torch.ops.grpo_kernels_cpp.grad(
            *_rows(chunk),
            *_reference(chunk),
            stats.logps, stats.max_logit, stats.log_sum,
            None if d_entropy is None else stats.entropies,
            d_logp.contiguous(),  # the gradient of a sum may be one number, expanded
            None if d_entropy is None else d_entropy.contiguous(),
            None if d_divergence is None else d_divergence.contiguous(),
            *((None,) * 3 if divergence is None else divergence[1:]),
            out=out,
        )  # fmt: skip

    def fused(self, chunk: Chunk, fused_loss: FusedLoss, out: Tensor | None) -> RowStats:
        loss, new = fused_loss, _columns(chunk.logits)
        stats: dict[str, Any] = {
            name: new() for name in ("logps", "max_logit", "log_sum", "entropies")
        }
        loss_stats = {name: new() for name in loss.stat_names}
        full = loss.kl_estimator == "full"  # the divergence from the reference
        diverged = DivergenceStats(loss_stats["kl"], new(), new(), new()) if full else None
        torch.ops.grpo_kernels_cpp.fused(
            *_rows(chunk),
            *_reference(chunk),
            loss.advantages, loss.d_policy, loss.weights, loss.old, loss.ref, loss.gate,
            loss.surrogate or "none", loss.constants, loss.is_linear,
            "none" if full or loss.kl_estimator is None else loss.kl_estimator,
            loss.corrects_kl, loss.beta, loss.d_entropy,
            **stats,
            **dict.fromkeys(LOSS_STATS) | loss_stats,
            sum_k=diverged and diverged.sum_k,
            reference_max_logit=diverged and diverged.reference_max_logit,
            reference_log_sum=diverged and diverged.reference_log_sum,
            out=out,
        )  # fmt: skip
        return RowStats(**stats, loss_stats=loss_stats, divergence=diverged)


def _columns(logits: Tensor) -> Callable[..., Tensor]:
    """Make uninitialized tensors (n,), in the accumulator's dtype unless the call names another."""
    return partial(logits.new_empty, len(logits), dtype=accumulator_of(logits.dtype))


def _rows(chunk: Chunk) -> tuple[Any, ...]:
    """Arguments of an op that describe a chunk: logits, ids, and the logits' transform."""
    return chunk.logits, chunk.ids, *_numbers(chunk.transform)


def _reference(chunk: Chunk) -> tuple[Any, ...]:
    """Arguments of an op for the chunk's reference: logits or None, transform, divergence."""
    if chunk.reference is None:
        return None, *_numbers(LogitTransform()), 0.0
    return chunk.reference.logits, *_numbers(chunk.reference.transform), chunk.jsd_beta


def _numbers(transform: LogitTransform) -> tuple[Any, ...]:
    """Bias, inverse temperatures per row or None, inner, outer, has_softcap, rounded_to."""
    inv_t = transform.inv_temperature
    per_row = inv_t.reshape(-1).contiguous() if isinstance(inv_t, Tensor) else None
    return (
        transform.bias,
        per_row,
        *transform.inner_outer(),
        transform.softcap is not None,
        transform.rounded_to,
    )
