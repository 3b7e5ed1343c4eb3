"""The Triton row kernels with small tiles, so that their loops have several steps and a tail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from grpo_kernels.backends.interface import LogitTransform, RowStats
from grpo_kernels.backends.triton_rows import TritonRows
from grpo_kernels.backends.triton_rows.configs import RowConfig
from grpo_kernels.backends.triton_rows.fused import launch_fused
from grpo_kernels.backends.triton_rows.grad import launch_grad
from grpo_kernels.backends.triton_rows.single_pass import launch_single_pass
from grpo_kernels.backends.triton_rows.stats import launch_stats
from grpo_kernels.token_loss.record import TokenLoss


def tile(vocab: int) -> RowConfig:
    return RowConfig(block_n=16, block_v=16 if vocab < 40 else 64 if vocab < 128 else 128, num_warps=2, num_stages=1)


class SmallTiles(TritonRows):
    """`TritonRows` with the tile that `tile` gives for a vocabulary, changed by `changes`."""

    def __init__(self, tile: Callable[[int], RowConfig] = tile, **changes: int) -> None:
        self._tile = lambda logits: replace(tile(logits.shape[1]), **changes)

    def stats(
        self, logits: Tensor, ids: Tensor, transform: LogitTransform, *, entropy: bool, extras: tuple[str, ...] = ()
    ) -> RowStats:
        return launch_stats(logits, ids, transform, self._tile(logits), entropy=entropy, extras=extras)

    def grad(
        self,
        logits: Tensor,
        ids: Tensor,
        stats: RowStats,
        a: Tensor,
        b: Tensor | None,
        transform: LogitTransform,
        out: Tensor,
        *,
        first_id: int = 0,
    ) -> None:
        launch_grad(logits, ids, stats, a, b, transform, out, self._tile(logits), first_id=first_id)

    def fused(
        self, logits: Tensor, ids: Tensor, transform: LogitTransform, token_loss: TokenLoss, out: Tensor | None
    ) -> RowStats:
        return launch_fused(logits, ids, transform, token_loss, out, self._tile(logits))

    def single_pass(
        self,
        logits: Tensor,
        ids: Tensor,
        transform: LogitTransform,
        out: Tensor,
        *,
        entropy: bool,
        extras: tuple[str, ...] = (),
    ) -> tuple[RowStats, Tensor]:
        config, in_place = self._tile(logits), out.data_ptr() == logits.data_ptr()
        return launch_single_pass(
            logits, ids, transform, out, config, entropy=entropy, extras=extras, in_place=in_place
        )
