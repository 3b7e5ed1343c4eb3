"""Row work in Triton: one kernel launch for each method and chunk.

The kernels read the logits as the products left them and apply the `LogitTransform` on the fly, in
float32. The formulas are in `torch_rows`.
"""

from __future__ import annotations

import triton
from torch import Tensor

from grpo_kernels.backends import (
    Chunk,
    Coefficients,
    FusedLoss,
    FusedRowBackend,
    RowStats,
)
from grpo_kernels.backends.triton_rows.device import RowConfig, arch_of, on, row_config
from grpo_kernels.backends.triton_rows.divergence import launch_diverge
from grpo_kernels.backends.triton_rows.fused import launch_fused
from grpo_kernels.backends.triton_rows.grad import launch_grad, launch_scale
from grpo_kernels.backends.triton_rows.reduce import launch_stats, stats_kernel

INTERPRETED = not isinstance(stats_kernel, triton.JITFunction)


class TritonRows(FusedRowBackend):
    """Row work in one kernel launch for each method and chunk."""

    name = "triton"
    fuses_reference = False

    def stats(self, chunk: Chunk, *, entropy: bool, extras: tuple[str, ...] = ()) -> RowStats:
        config = self._config("stats", chunk)
        with on(chunk.logits.device):
            return launch_stats(chunk, config, entropy=entropy, extras=extras)

    def diverge(
        self, chunk: Chunk, stats: RowStats, reference_stats: RowStats
    ) -> tuple[Tensor, Tensor]:
        config = self._config("stats", chunk)
        with on(chunk.logits.device):
            return launch_diverge(chunk, stats, reference_stats, config)

    def grad(self, chunk: Chunk, stats: RowStats, coefficients: Coefficients, out: Tensor) -> None:
        config = self._config("grad", chunk)
        with on(chunk.logits.device):
            launch_grad(chunk, stats, coefficients, out, config)

    def scale(self, x: Tensor, factor: Tensor, out: Tensor) -> None:
        """See `RowBackend.scale`. torch applies factors per row, which only d hidden gets."""
        if factor.dim() > 0 or not (x.is_contiguous() and out.is_contiguous()):
            super().scale(x, factor, out)
            return
        with on(x.device):
            launch_scale(x, factor, out)

    def fused(self, chunk: Chunk, fused_loss: FusedLoss, out: Tensor | None) -> RowStats:
        # reduce.py: statistics; fused.py: the loss, with surrogate and KL of formulas.py; grad.py
        config = self._config("fused", chunk)
        with on(chunk.logits.device):
            return launch_fused(chunk, fused_loss, out, config)

    def _config(self, kernel: str, chunk: Chunk) -> RowConfig:
        return row_config(kernel, chunk.logits.shape[1], arch_of(chunk.logits.device))
