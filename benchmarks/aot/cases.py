"""What is taken apart: launches on meta tensors, caught as `benchmarks.aot` catches them.

Rows of logits begin at multiples of 64 elements, as the engine allocates them; a vocabulary that is no such multiple
must cost no more than one that is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.aot.checks import compile_for, nvidia_usage
from benchmarks.aot.costs import Layout, Taken, parts_of
from benchmarks.aot.launches import Launch
from benchmarks.aot.matrix import BF16, FP32, Case, H, N, V, empty, ids, pair_statistics, row_statistics, token_loss
from benchmarks.aot.sass import disassembled
from grpo_kernels.backends.interface import STATISTICS, Chunk, LogitTransform, Teacher
from grpo_kernels.backends.triton_rows import (
    divergence,
    dot,
    fused,
    grad,
    single_pass,
    stats,
    teacher_fused,
)
from grpo_kernels.backends.triton_rows.configs import dot_config, row_config
from grpo_kernels.engine.device import CUDA

ARCH = "sm_90"
ODD_V = 151665
BYTES = {"fp32": 4, "i64": 8, "bf16": 2, "fp16": 2}
PLAIN, SOFTCAP = LogitTransform(), LogitTransform(softcap=30.0)
# surrogate, KL estimator, whether it is corrected, gate, dtype of the gradient, entropy bonus
CONSTANT = ("constant", None, False, False, BF16, 0.0)
CLIPPED_KL = ("clipped", "k3", False, False, BF16, 0.0)


@dataclass(frozen=True)
class Counted:
    """A launch to take apart."""

    kernel: str
    variant: str
    launch: Callable[[], Any]
    sweeps: int = 1  # over a row
    products: int = 1  # of 2 N V H operations, in the call that the kernel is a part of
    vocab: int = V

    def taken(self) -> Taken:
        """Compiled and taken apart."""
        launch = Case(self.kernel, self.variant, ARCH, self.launch).caught()
        compiled = compile_for(launch, ARCH)
        layout = _layout(launch)
        programs = max(1, launch.programs // N) if self.kernel != "dot" else 1  # of sm_90, which has a row a program
        return Taken(
            kernel=self.kernel,
            variant=self.variant,
            vocab=self.vocab,
            products=self.products,
            loaded=layout.loaded,
            stored=layout.stored,
            programs=programs,
            threads=32 * compiled.metadata.num_warps,
            registers=nvidia_usage(compiled.asm)[0],
            shared=compiled.metadata.shared,
            parts=tuple(parts_of(disassembled(compiled.asm["cubin"]), layout, self.sweeps, programs)),
        )


def cases() -> list[Counted]:
    """All, in an order that does not change; a kernel to come is one more line."""
    return [
        Counted("stats", "plain", _stats()),
        Counted("stats", f"plain, V {ODD_V}", _stats(vocab=ODD_V), vocab=ODD_V),
        Counted("stats", "soft-cap", _stats(SOFTCAP)),
        Counted("stats", "all extras", _stats(extras=STATISTICS)),
        Counted("fused", "constant", _fused(CONSTANT), sweeps=2, products=3),
        Counted("fused", f"constant, V {ODD_V}", _fused(CONSTANT, vocab=ODD_V), sweeps=2, products=3, vocab=ODD_V),
        Counted("fused", "constant, soft-cap", _fused(CONSTANT, SOFTCAP), sweeps=2, products=3),
        Counted("fused", "clipped, KL", _fused(CLIPPED_KL), sweeps=2, products=3),
        Counted("single_pass", "plain", _single_pass(), products=2),
        Counted("single_pass", f"plain, V {ODD_V}", _single_pass(vocab=ODD_V), products=2, vocab=ODD_V),
        Counted("single_pass", "soft-cap", _single_pass(SOFTCAP), products=2),
        Counted("grad", "plain", _grad(), products=3),
        Counted("grad", f"plain, V {ODD_V}", _grad(vocab=ODD_V), products=3, vocab=ODD_V),
        Counted("grad", "soft-cap", _grad(SOFTCAP), products=3),
        Counted("grad", "entropy gradient", _grad(has_b=True), products=3),
        Counted("diverge", "forward", _diverge(0.0), products=2),
        Counted("diverge", "reverse", _diverge(1.0), products=2),
        Counted("diverge", "Jensen-Shannon", _diverge(0.5), products=2),
        Counted("grad", "teacher, reverse", _teacher_grad(1.0), products=4),
        Counted("teacher_fused", "constant, reverse", _teacher_fused(1.0), sweeps=3, products=4),
        Counted("dot", "bf16", _dot),
    ]


def taken_at(place: int) -> Taken | str:
    """The case at a place taken apart, or what went wrong: one more thing to report, next to what else breaks."""
    case = cases()[place]
    try:
        return case.taken()
    except Exception as error:
        return f"{case.kernel} {case.variant}: {type(error).__name__}: {str(error)[-300:]}"


def _stats(transform: LogitTransform = PLAIN, *, vocab: int = V, extras: tuple[str, ...] = ()) -> Callable[[], Any]:
    config = row_config("stats", vocab, ARCH)
    return lambda: stats.launch_stats(_chunk(vocab, transform), config, entropy=True, extras=extras)


def _fused(loss: Any, transform: LogitTransform = PLAIN, *, vocab: int = V) -> Callable[[], Any]:
    config = row_config("fused", vocab, ARCH)
    return lambda: fused.launch_fused(_chunk(vocab, transform), token_loss(*loss), _rows(vocab, BF16), config)


def _single_pass(transform: LogitTransform = PLAIN, *, vocab: int = V) -> Callable[[], Any]:
    config = row_config("stats", vocab, ARCH)
    return lambda: single_pass.launch_single_pass(
        _chunk(vocab, transform), _rows(vocab, BF16), config, entropy=True, extras=(), in_place=False
    )


def _grad(transform: LogitTransform = PLAIN, *, vocab: int = V, has_b: bool = False) -> Callable[[], Any]:
    config = row_config("grad", vocab, ARCH)
    return lambda: grad.launch_grad(
        _chunk(vocab, transform), row_statistics(), empty(N), empty(N) if has_b else None, _rows(vocab, BF16), config
    )


def _diverge(beta: float) -> Callable[[], Any]:
    config, known = row_config("stats", V, ARCH), row_statistics()
    return lambda: divergence.launch_diverge(_pair(beta), known, known, config)


def _teacher_grad(beta: float) -> Callable[[], Any]:
    config = row_config("grad", V, ARCH)
    return lambda: grad.launch_grad(_pair(beta), pair_statistics(), empty(N), None, _rows(V, BF16), config, empty(N))


def _teacher_fused(beta: float) -> Callable[[], Any]:
    config, loss = row_config("fused", V, ARCH), replace(token_loss(*CONSTANT), kl="full")
    return lambda: teacher_fused.launch_teacher_fused(_pair(beta), loss, _rows(V, BF16), config)


def _dot() -> None:
    hidden, weight = empty(N, H, dtype=BF16), empty(V, H, dtype=BF16)
    config = dot_config(H, V, BF16, ARCH, softcap=False, aligned=dot.is_aligned(weight))
    dot.launch_dot(hidden, weight, ids(), PLAIN, config, entropy=True)


def _chunk(vocab: int, transform: LogitTransform) -> Chunk:
    return Chunk(_rows(vocab), ids(), transform)


def _pair(beta: float) -> Chunk:
    """A chunk with a teacher."""
    return replace(_chunk(V, PLAIN), teacher=Teacher(_rows(V), PLAIN, beta))


def _rows(vocab: int, dtype: torch.dtype = FP32) -> Tensor:
    return empty(N, CUDA.row_width(vocab), dtype=dtype)[:, :vocab]


def _layout(launch: Launch) -> Layout:
    """From the types of its pointers; one that is absent is no pointer."""
    names = ("logits_ptr", "bias_ptr", "teacher_logits_ptr", "teacher_bias_ptr", "out_ptr")
    *loaded, stored = (BYTES.get(launch.signature.get(name, "").removeprefix("*"), 0) for name in names)
    return Layout(sum(loaded), stored)
