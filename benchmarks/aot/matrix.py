"""What is compiled: kernels x configurations of the table x variants x targets.

A variant is a launch with tensors of some head's shape: what a kernel is specialised for are flags, absent pointers,
dtypes, and which sizes are multiples of 16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.aot.checks import Result, compile_launch
from benchmarks.aot.launches import Launch, caught
from grpo_kernels.backends.interface import STATISTICS, Chunk, DivergenceStats, LogitTransform, RowStats, Teacher
from grpo_kernels.backends.triton_rows import (
    combine,
    divergence,
    dot,
    fused,
    grad,
    scale,
    single_pass,
    stats,
    teacher_fused,
)  # fmt: skip
from grpo_kernels.backends.triton_rows.configs import (
    ROW_KERNELS,
    DotConfig,
    RowConfig,
    dot_configs,
    family,
    row_configs,
)  # fmt: skip
from grpo_kernels.objective import losses
from grpo_kernels.objective.config import LossConfig
from grpo_kernels.token_loss.record import TokenLoss

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
FALLBACK = "sm_120"  # of the family "default": only what is quick
N, V, H = 4, 151936, 4096
RAGGED_V, RAGGED_H = 50257, 1008  # 1008 is no multiple of a tile, 1009 of nothing
HEADER = f"{'target':8} {'kernel':11} {'variant':50} {'registers':>9} {'spilled':>7} {'shared':>6} {'warps':>5}"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Case:
    """One kernel to compile; `launch` calls its launcher."""

    kernel: str
    variant: str
    arch: str
    launch: Callable[[], Any]
    is_quick: bool = False

    def caught(self) -> Launch:
        with caught() as launches:
            self.launch()
        return next(x for x in launches if x.kernel.__name__ == f"{self.kernel}_kernel")


@cache
def all_cases(quick: bool) -> list[Case]:
    """All of them, in an order that does not change; of the fallback only what is quick, and if `quick`, nothing."""
    made = [case for arch in (*TARGETS, FALLBACK) for kind in (_rows, _dot, _combine, _scale) for case in kind(arch)]
    return [x for x in made if (x.is_quick and not quick if x.arch == FALLBACK else x.is_quick or not quick)]


def line_of(place: int, quick: bool) -> tuple[str, bool]:
    """The line of the case at a place, and whether it breaks a rule."""
    case = all_cases(quick)[place]
    try:
        result = compile_launch(case.caught(), case.arch)
    except Exception as error:  # it is one more thing to report, next to what else breaks
        result = Result(broken=(f"{type(error).__name__}: {error}",))
    line = (
        f"{case.arch:8} {case.kernel:11} {case.variant:50} "
        f"{result.registers:9} {result.spilled:7} {result.shared:6} {result.warps:5}"
    )
    return line + "".join(f"\n  BROKEN: {reason}" for reason in result.broken), bool(result.broken)


def empty(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def transforms(vocab: int) -> dict[str, LogitTransform]:
    bias, inv_t = empty(vocab), empty(N, 1)
    return {
        "plain": LogitTransform(),
        "bias": LogitTransform(scale=2.0, bias=bias),
        "row T": LogitTransform(inv_temperature=inv_t),
        "all": LogitTransform(softcap=30.0, inv_temperature=inv_t, bias=bias, rounded_to=BF16),
        "rounded fp16": LogitTransform(rounded_to=FP16),
    }


def row_statistics() -> RowStats:
    return RowStats(empty(N), empty(N), empty(N), empty(N))


def pair_statistics() -> RowStats:
    """Of rows with a teacher."""
    return replace(row_statistics(), divergence=DivergenceStats(*(empty(N) for _ in range(4))))


def ids() -> Tensor:
    return empty(N, dtype=torch.int64)


def _rows(arch: str) -> Iterator[Case]:
    for kernel in ROW_KERNELS:
        for config in row_configs(kernel, family(arch)):
            yield from row_cases(kernel, arch, config)


def row_cases(kernel: str, arch: str, config: RowConfig) -> Iterator[Case]:
    """The variants of a row kernel by the tile of `config`: those that share it, and those for two heads, too."""
    kinds = {
        "stats": (_stats, _single_pass, _diverge),
        "fused": (_fused, _teacher_fused),
        "grad": (_grad, _teacher_grad),
    }[kernel]
    return (case for kind in kinds for case in kind(arch, config))


def _stats(arch: str, config: RowConfig) -> Iterator[Case]:
    for vocab, extras in product((V, RAGGED_V), ((), STATISTICS)):
        for name, transform in transforms(vocab).items():
            if vocab == V or name == "all":
                chunk = Chunk(empty(N, vocab), ids(), transform)
                launch = partial(stats.launch_stats, chunk, config, entropy=bool(extras), extras=extras)
                variant = f"{_row(config)} V {vocab} {name}{' extras' if extras else ''}"
                yield Case("stats", variant, arch, launch, name == "all" and (vocab == V) == bool(extras))


def _grad(arch: str, config: RowConfig) -> Iterator[Case]:
    for vocab, dtype, has_b in product((V, RAGGED_V), (FP32, BF16, FP16), (False, True)):
        for name, transform in transforms(vocab).items():
            if name in ("plain", "all") if vocab == V else (name == "all" and dtype == BF16):
                chunk, out = Chunk(empty(N, vocab), ids(), transform), empty(N, vocab, dtype=dtype)
                b = empty(N) if has_b else None
                launch = partial(grad.launch_grad, chunk, row_statistics(), empty(N), b, out, config)
                variant = f"{_row(config)} V {vocab} {name} {_short(dtype)}{' b' if has_b else ''}"
                yield Case("grad", variant, arch, launch, (name, dtype, has_b, vocab) == ("all", BF16, True, V))


# The transforms of student and teacher, the size of the vocabulary, and beta, where 0, 1 and 0.5 are functions of their
# own. A kernel for two heads compiles for up to a quarter of a minute, so these are few.
PAIRS = (
    *(("plain", "plain", V, beta) for beta in (0.0, 1.0, 0.5)),
    ("bias", "row T", V, 1.0),
    ("rounded fp16", "all", V, 0.0),
    ("all", "all", V, 0.5),
    ("all", "all", RAGGED_V, 0.5),
)


def with_teacher(names: tuple[str, str], vocab: int, beta: float) -> Chunk:
    """A chunk with a teacher; the transforms by their names."""
    of_student, of_teacher = (transforms(vocab)[name] for name in names)
    return Chunk(empty(N, vocab), ids(), of_student, teacher=Teacher(empty(N, vocab), of_teacher, beta))


def _diverge(arch: str, config: RowConfig) -> Iterator[Case]:
    for student, teacher, vocab, beta in PAIRS:
        chunk, known = with_teacher((student, teacher), vocab, beta), (row_statistics(), row_statistics())
        launch = partial(divergence.launch_diverge, chunk, *known, config)
        variant = f"{_row(config)} V {vocab} {student}, {teacher} beta {beta:g}"
        yield Case("diverge", variant, arch, launch, (student, vocab) == ("all", V))


def _teacher_grad(arch: str, config: RowConfig) -> Iterator[Case]:
    for student, teacher, vocab, beta in PAIRS:
        for dtype, has_b in ((FP32, False), (BF16, True), (FP16, True)):
            if dtype == BF16 or (student, beta) == ("plain", 1.0):
                chunk, out = with_teacher((student, teacher), vocab, beta), empty(N, vocab, dtype=dtype)
                b = empty(N) if has_b else None
                launch = partial(grad.launch_grad, chunk, pair_statistics(), empty(N), b, out, config, empty(N))
                variant = f"{_row(config)} V {vocab} {student}, {teacher} beta {beta:g} {_short(dtype)}"
                yield Case("grad", variant, arch, launch, (student, vocab) == ("all", V))


def _teacher_fused(arch: str, config: RowConfig) -> Iterator[Case]:
    for student, teacher, vocab, beta in PAIRS:
        off_policy = ("clipped", None, False, True, BF16, 0.01)
        loss: Any = ("linear", None, False, False, FP32, 0.0) if student == "bias" else off_policy
        full, out = replace(token_loss(*loss), kl="full"), empty(N, vocab, dtype=loss[4])
        chunk = with_teacher((student, teacher), vocab, beta)
        launch = partial(teacher_fused.launch_teacher_fused, chunk, full, out, config)
        variant = f"{_row(config)} V {vocab} {student}, {teacher} beta {beta:g} {loss[0]} {_short(loss[4])}"
        # the largest takes half a minute to compile: where it is tightest, and elsewhere what the loss needs
        quick = ("all", V, 0.5) if arch in ("sm_80", FALLBACK) else ("plain", V, 1.0)
        yield Case("teacher_fused", variant, arch, launch, (student, vocab, beta) == quick)


def _single_pass(arch: str, config: RowConfig) -> Iterator[Case]:
    """Rows as far apart as the engine lays them: a multiple of 64, whatever the vocabulary."""
    for vocab, name, dtype, extras in (
        (V, "plain", BF16, ()),
        (V, "plain", FP32, ()),
        (V, "all", BF16, ()),
        (V, "all", BF16, STATISTICS),
        (RAGGED_V, "all", BF16, STATISTICS),
    ):
        for in_place in (False, True) if dtype == FP32 else (False,):
            raw, out = (empty(N, -(-vocab // 64) * 64, dtype=kind)[:, :vocab] for kind in (FP32, dtype))
            chunk, options = Chunk(raw, ids(), transforms(vocab)[name]), {"entropy": bool(extras), "extras": extras}
            launch = partial(single_pass.launch_single_pass, chunk, out, config, in_place=in_place, **options)
            suffix = f"{' in place' if in_place else ''}{' extras' if extras else ''}"
            variant = f"{_row(config)} V {vocab} {name} {_short(dtype)}{suffix}"
            yield Case("single_pass", variant, arch, launch, bool(extras) and vocab == V)


# surrogate, KL estimator, whether it is corrected, gate, gradient (None: none is written), entropy bonus
LOSSES: tuple[tuple[str, str | None, bool, bool, torch.dtype | None, float], ...] = (
    ("clipped", None, False, False, FP32, 0.0),
    ("clipped", "k3", True, True, BF16, 0.01),
    ("clipped", "k1", False, False, None, 0.0),
    ("cispo", "k1", False, True, FP16, 0.0),
    ("sapo", "k2", True, False, BF16, 0.0),
    ("constant", None, False, False, BF16, 0.0),
    ("constant", "k3", False, False, BF16, 0.01),
    ("linear", "k3", True, False, FP32, 0.01),
    ("linear", None, False, False, None, 0.0),
)


def _fused(arch: str, config: RowConfig) -> Iterator[Case]:
    for vocab, loss in product((V, RAGGED_V), LOSSES):
        for name, transform in transforms(vocab).items():
            surrogate, kl, _, _, out, _ = loss
            picked = name == "plain" or (name == "all" and loss in LOSSES[1:6:2])
            if picked if vocab == V else (name == "all" and surrogate == "sapo"):
                chunk, gradient = Chunk(empty(N, vocab), ids(), transform), out and empty(N, vocab, dtype=out)
                launch = partial(fused.launch_fused, chunk, token_loss(*loss), gradient, config)
                written = "-" if out is None else _short(out)
                variant = f"{_row(config)} V {vocab} {name} {surrogate} {kl or '-'} {written}"
                yield Case("fused", variant, arch, launch, name == "all" and kl == "k3" and vocab == V)


def token_loss(
    surrogate: str, kl: str | None, corrects_kl: bool, has_gate: bool, _out: torch.dtype | None, b: float
) -> TokenLoss:
    on_policy = surrogate in ("constant", "linear")
    constants = {x.surrogate: x.constants(LossConfig()) for x in losses.LOSSES.values()}.get(surrogate, ())
    return TokenLoss(
        surrogate=surrogate, constants=constants, kl=kl, corrects_kl=corrects_kl,
        advantages=None if on_policy else empty(N), d_logps=empty(N) if on_policy else None, weights=empty(N),
        old=None if on_policy else empty(N), ref=None if kl is None else empty(N), gate=empty(N) if has_gate else None,
        beta=0.04, d_entropy=b,
    )  # fmt: skip


def _dot(arch: str) -> Iterator[Case]:
    for bits, softcap, aligned in product((16, 32), (False, True), (True, False)):
        for config in dot_configs(bits, family(arch), V, softcap=softcap, aligned=aligned):
            for dtype in (BF16, FP16) if bits == 16 else (FP32,):
                yield from dot_cases(arch, config, dtype, softcap=softcap, aligned=aligned)


def dot_cases(arch: str, config: DotConfig, dtype: torch.dtype, *, softcap: bool, aligned: bool) -> Iterator[Case]:
    """The variants of the scoring kernel by the tiles of `config`."""
    for (name, transform), width in product(transforms(V).items(), (H, RAGGED_H) if aligned else (RAGGED_H + 1,)):
        is_wanted = dtype != FP16 or (name, width) in (("plain", H), ("all", RAGGED_H))
        if is_wanted and softcap == (transform.softcap is not None):
            hidden, weight = empty(N, width, dtype=dtype), empty(V, width, dtype=dtype)
            launch = partial(dot.launch_dot, hidden, weight, ids(), transform, config, entropy=True)
            tile = f"{config.block_n}x{config.block_v}x{config.block_h}"
            loads = "descriptors" if config.use_tma and aligned else "pointers"
            is_quick = width != H and (name, dtype) in (("bias", BF16), ("all", BF16), ("all", FP32))
            yield Case("dot", f"{tile} H {width} {name} {_short(dtype)} {loads}", arch, launch, is_quick)


def _combine(arch: str) -> Iterator[Case]:
    for splits, entropy in product((1, 200, 256), (False, True)):
        parts = empty(N, splits)
        launch = partial(combine.launch_combine, parts, parts, parts, empty(N), ids(), V, entropy=entropy)
        yield Case("combine", f"{splits} splits{' entropy' if entropy else ''}", arch, launch, splits == 200)


def _scale(arch: str) -> Iterator[Case]:
    for dtype in (FP32, BF16, FP16):
        launch = partial(scale.launch_scale, empty(V, H), empty(), empty(V, H, dtype=dtype))
        yield Case("scale", _short(dtype), arch, launch, dtype == BF16)


def _row(config: RowConfig) -> str:
    return f"{config.block_n}x{config.block_v}"


def _short(dtype: torch.dtype) -> str:
    return {BF16: "bf16", FP16: "fp16", FP32: "fp32"}[dtype]
