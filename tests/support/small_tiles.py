"""The Triton row kernels with small tiles, so that their loops have several steps and a tail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from grpo_kernels.backends.interface import Chunk, RowStats
from grpo_kernels.backends.triton_rows.device import RowConfig
from grpo_kernels.backends.triton_rows.divergence import launch_diverge
from grpo_kernels.backends.triton_rows.fused import launch_fused
from grpo_kernels.backends.triton_rows.grad import launch_grad
from grpo_kernels.backends.triton_rows.reduce import launch_stats
from grpo_kernels.backends.triton_rows.rows import TritonRows
from grpo_kernels.token_loss.record import TokenLoss


def tile(vocab: int) -> RowConfig:
    return RowConfig(
        block_n=16,
        block_v=16 if vocab < 40 else 64 if vocab < 128 else 128,
        num_warps=2,
        num_stages=1,
    )


class SmallTiles(TritonRows):
    """`TritonRows` with the tile that `tile` gives for a vocabulary, changed by `changes`."""

    def __init__(self, tile: Callable[[int], RowConfig] = tile, **changes: int) -> None:
        self._tile = lambda logits: replace(tile(logits.shape[1]), **changes)

    def stats(self, chunk: Chunk, *, entropy: bool, extras: tuple[str, ...] = ()) -> RowStats:
        return launch_stats(chunk, self._tile(chunk.logits), entropy=entropy, extras=extras)

    def diverge(self, chunk: Chunk, stats: RowStats, teacher: RowStats) -> tuple[Tensor, Tensor]:
        return launch_diverge(chunk, stats, teacher, self._tile(chunk.logits))

    def grad(
        self,
        chunk: Chunk,
        stats: RowStats,
        a: Tensor,
        b: Tensor | None,
        out: Tensor,
        c: Tensor | None = None,
    ) -> None:
        launch_grad(chunk, stats, a, b, out, self._tile(chunk.logits), c)

    def fused(self, chunk: Chunk, token_loss: TokenLoss, out: Tensor | None) -> RowStats:
        return launch_fused(chunk, token_loss, out, self._tile(chunk.logits))
