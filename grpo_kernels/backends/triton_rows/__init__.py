"""The row backend in Triton, for GPUs, and for a CPU with ``TRITON_INTERPRET=1`` set before Triton is imported.

The logits are read as the products left them: what is done to them first (`LogitTransform`) happens on the fly. All is
computed in float32; its numbers are those of `torch_rows.TorchRows`, which see.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from grpo_kernels.backends.interface import Chunk, LogitTransform, RowStats
from grpo_kernels.backends.sparse import Entries, Thinned
from grpo_kernels.backends.triton_rows import entries as lists
from grpo_kernels.backends.triton_rows import sparse
from grpo_kernels.backends.triton_rows.configs import RowConfig, row_config, sparse_config
from grpo_kernels.backends.triton_rows.device import arch_of, on
from grpo_kernels.backends.triton_rows.divergence import launch_diverge
from grpo_kernels.backends.triton_rows.dot import score_dot
from grpo_kernels.backends.triton_rows.fused import launch_fused
from grpo_kernels.backends.triton_rows.grad import launch_grad
from grpo_kernels.backends.triton_rows.single_pass import launch_single_pass
from grpo_kernels.backends.triton_rows.stats import launch_stats, stats_kernel
from grpo_kernels.backends.triton_rows.teacher_fused import launch_teacher_fused
from grpo_kernels.backends.triton_rows.teacher_grad import launch_teacher_grad
from grpo_kernels.token_loss.record import TokenLoss

INTERPRETED = not isinstance(stats_kernel, triton.JITFunction)


class TritonRows:
    """Row work in one kernel launch a chunk."""

    name = "triton"

    def scratch_rows(self, n: int, vocab: int, *, teacher: bool = False) -> int:
        return 0

    def prepare_(self, logits: Tensor, transform: LogitTransform) -> None:
        """Nothing: the kernels read the raw projection."""

    def stats(self, chunk: Chunk, *, entropy: bool, extras: tuple[str, ...] = ()) -> RowStats:
        config = _config("stats", chunk)
        with on(chunk.logits.device):
            return launch_stats(chunk, config, entropy=entropy, extras=extras)

    def diverge(self, chunk: Chunk, stats: RowStats, teacher: RowStats) -> tuple[Tensor, Tensor]:
        config = _config("stats", chunk)
        with on(chunk.logits.device):
            return launch_diverge(chunk, stats, teacher, config)

    def grad(
        self, chunk: Chunk, stats: RowStats, a: Tensor, b: Tensor | None, out: Tensor, c: Tensor | None = None
    ) -> None:
        config = _config("grad", chunk)
        with on(chunk.logits.device):
            if c is None:
                launch_grad(chunk, stats, a, b, out, config)
            else:
                launch_teacher_grad(chunk, stats, a, b, c, out, config)

    def fused(self, chunk: Chunk, token_loss: TokenLoss, out: Tensor | None) -> RowStats:
        config = _config("fused", chunk)
        with on(chunk.logits.device):
            launch = launch_fused if chunk.teacher is None else launch_teacher_fused
            return launch(chunk, token_loss, out, config)

    def single_pass(
        self, chunk: Chunk, out: Tensor, *, entropy: bool, extras: tuple[str, ...] = ()
    ) -> tuple[RowStats, Tensor]:
        """See `SinglePassRowBackend`; `out` in float16 would overflow."""
        if out.dtype == torch.float16:
            raise ValueError("out: expected float32 or bfloat16, got float16, which e^40 does not fit")
        logits = chunk.logits
        config = _config("stats", chunk)  # whose bits these statistics have
        in_place = out.dtype == logits.dtype and out.data_ptr() == logits.data_ptr()
        with on(logits.device):
            return launch_single_pass(chunk, out, config, entropy=entropy, extras=extras, in_place=in_place)

    def score_dot(
        self, hidden: Tensor, weight: Tensor, ids: Tensor, transform: LogitTransform, *, entropy: bool
    ) -> RowStats:
        return score_dot(hidden, weight, ids, transform, entropy=entropy)

    def largest(self, d_logits: Tensor) -> Tensor:
        config = _sparse_config("largest", d_logits)
        with on(d_logits.device):
            return sparse.launch_largest(d_logits, config)

    def certain(self, d_logits: Tensor, top: Tensor, most: int) -> Entries:
        config = _sparse_config("certain", d_logits)
        with on(d_logits.device):
            return sparse.launch_certain(d_logits, top, most, config)

    def errors(self, d_logits: Tensor, norms: Tensor, top: Tensor) -> Tensor:
        config = _sparse_config("errors", d_logits)
        with on(d_logits.device):
            return sparse.launch_errors(d_logits, norms, top, config)

    def thin(self, d_logits: Tensor, top: Tensor, k: Tensor, keys: Tensor, most: int, first_id: int = 0) -> Thinned:
        config = _sparse_config("thin", d_logits)
        with on(d_logits.device):
            return sparse.launch_thin(d_logits, top, k, keys, most, first_id, config)

    def combine(self, entries: Entries, source: Tensor, out: Tensor, targets: Tensor | None = None) -> None:
        """See `SparseRowBackend`; no two `targets` are alike."""
        _check("source", source)
        config = lists.INTERPRETED if INTERPRETED else lists.ON_GPU[_is_aligned(source)]
        with on(source.device):
            lists.launch_combine_entries(entries, source, out, targets, config)


def _sparse_config(kernel: str, d_logits: Tensor) -> RowConfig:
    """The tile for rows of d logits, if this backend can serve them."""
    if d_logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"backend: expected d logits of at most 32 bits for 'triton', got {d_logits.dtype}")
    _check("d logits", d_logits)
    wide = d_logits.dtype != torch.float32 and _is_aligned(d_logits)
    return sparse_config(kernel, d_logits.shape[1], arch_of(d_logits.device), wide=wide)


def _config(kernel: str, chunk: Chunk) -> RowConfig:
    """The tile for a chunk, if this backend can serve it."""
    for logits in (chunk.logits, *([] if chunk.teacher is None else [chunk.teacher.logits])):
        if logits.dtype != torch.float32:
            raise ValueError(f"backend: expected float32 logits for 'triton', got {logits.dtype}")
        _check("logits", logits)
    return row_config(kernel, chunk.logits.shape[1], arch_of(chunk.logits.device))


def _check(name: str, x: Tensor) -> None:
    """That the rows of `x` (m, n) are contiguous, and where a kernel can read them."""
    if x.stride(1) != 1 and x.shape[1] > 1:
        raise ValueError(f"backend: expected {name} with contiguous rows for 'triton', got strides {x.stride()}")
    if not x.is_cuda and not INTERPRETED:
        raise ValueError(
            "backend: 'triton' expected tensors on a GPU (or TRITON_INTERPRET=1 before Triton is imported), "
            f"got {x.device.type} tensors"
        )


def _is_aligned(x: Tensor) -> bool:
    """Whether rows of `x` (m, n) start where a thread can read 16 bytes at a time, as far as the compiler can tell."""
    return x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0
