"""What is compiled: kernels x configurations of the table x variants x targets.

A variant is a launch with tensors of some head's shape: what a kernel is specialised for are flags,
absent pointers, dtypes, and which sizes are multiples of 16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.aot.checks import Result, compile_launch
from benchmarks.aot.kernels import BF16, FP16, FP32, META, H, Loss, V, row_runs
from benchmarks.aot.launches import Launch, caught
from grpo_kernels.backends.triton_rows.device import ROW_KERNELS, RowConfig, family, row_configs
from grpo_kernels.backends.triton_rows.grad import launch_scale
from grpo_kernels.base import EXTRAS

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
FALLBACK = "sm_120"  # of the family "default": only what is quick
RAGGED_V = 50257
TRANSFORMS = ("plain", "bias", "row T", "all", "rounded fp16")
SHORT = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}
HEADER = (
    f"{'target':8} {'kernel':11} {'variant':50} "
    f"{'registers':>9} {'spilled':>7} {'shared':>6} {'warps':>5}"
)


@dataclass(frozen=True)
class Case:
    """One kernel to compile; `config` and `options` are those of its launch (`kernels`)."""

    kernel: str
    variant: str
    arch: str
    options: dict[str, Any]
    config: RowConfig | None = None
    is_quick: bool = False

    def caught(self) -> Launch:
        if self.config is None:
            launch = partial(_scale, **self.options)
        else:
            launch = row_runs(self.kernel, **self.options)(self.config)
        with caught() as launches:
            launch()
        return next(x for x in launches if x.kernel.__name__ == f"{self.kernel}_kernel")


def all_cases(quick: bool) -> list[Case]:
    """All of them, in a fixed order; of the fallback only the quick, none if `quick`."""
    made = [x for arch in (*TARGETS, FALLBACK) for kind in (_rows, _scales) for x in kind(arch)]

    def is_wanted(x: Case) -> bool:
        return x.is_quick and not quick if x.arch == FALLBACK else x.is_quick or not quick

    return [x for x in made if is_wanted(x)]


def line_of(case: Case) -> tuple[str, bool]:
    try:
        result = compile_launch(case.caught(), case.arch)
    except Exception as error:  # it is one more thing to report, next to what else breaks
        result = Result(broken=(f"{type(error).__name__}: {error}",))
    line = (
        f"{case.arch:8} {case.kernel:11} {case.variant:50} "
        f"{result.registers:9} {result.spilled:7} {result.shared:6} {result.warps:5}"
    )
    return line + "".join(f"\n  BROKEN: {reason}" for reason in result.broken), bool(result.broken)


def _rows(arch: str) -> Iterator[Case]:
    for kernel in ROW_KERNELS:
        for config in row_configs(kernel, family(arch)):
            yield from row_cases(kernel, arch, config)


def row_cases(kernel: str, arch: str, config: RowConfig) -> Iterator[Case]:
    """The variants of a row kernel by the tile of `config`, and of those that share it."""
    kinds = {
        "stats": (("stats", _stats()), ("diverge", _diverge())),
        "fused": (("fused", _fused()),),
        "grad": (("grad", _grad()), ("grad", _reference_grad())),
    }[kernel]
    for name, variants in kinds:
        for text, is_quick, options in variants:
            variant = f"{config.block_n}x{config.block_v} V {options['vocab']} {text}"
            yield Case(name, variant, arch, options, config, is_quick)


# A variant's text, whether it is quick, and the options of its launch.
Variants = Iterator[tuple[str, bool, dict[str, Any]]]


def _stats() -> Variants:
    for vocab, extras, name in product((V, RAGGED_V), ((), EXTRAS), TRANSFORMS):
        if vocab == V or name == "all":
            options = {"vocab": vocab, "transform": name, "entropy": bool(extras), "extras": extras}
            is_quick = name == "all" and (vocab == V) == bool(extras)
            yield f"{name}{' extras' if extras else ''}", is_quick, options


def _grad() -> Variants:
    for vocab, dtype, has_b, name in product(
        (V, RAGGED_V), (FP32, BF16, FP16), (False, True), TRANSFORMS
    ):
        if name in ("plain", "all") if vocab == V else (name == "all" and dtype == BF16):
            options = {"vocab": vocab, "transform": name, "out": dtype, "entropy": has_b}
            is_quick = (name, dtype, has_b, vocab) == ("all", BF16, True, V)
            yield f"{name} {SHORT[dtype]}{' b' if has_b else ''}", is_quick, options


# and the gradient's dtype; None: none is written
LOSSES: tuple[tuple[Loss, torch.dtype | None], ...] = (
    (Loss("clipped"), FP32),
    (Loss("clipped", "k3", corrects_kl=True, has_gate=True, d_entropy=0.01), BF16),
    (Loss("clipped", "k1"), None),
    (Loss("cispo", "k1", has_gate=True), FP16),
    (Loss("sapo", "k2", corrects_kl=True), BF16),
    (Loss("constant"), BF16),
    (Loss("constant", "k3", d_entropy=0.01), BF16),
    (Loss("linear", "k3", corrects_kl=True, d_entropy=0.01), FP32),
    (Loss("linear"), None),
)


def _fused() -> Variants:
    for vocab, (loss, out), name in product((V, RAGGED_V), LOSSES, ("plain", "all")):
        picked = name == "plain" or (loss, out) in LOSSES[1:6:2]
        if picked if vocab == V else (name == "all" and loss.surrogate == "sapo"):
            text = f"{name} {loss.surrogate} {loss.kl or '-'} {SHORT[out] if out else '-'}"
            is_quick = name == "all" and (loss.kl == "k3" or vocab == RAGGED_V)
            yield text, is_quick, {"vocab": vocab, "transform": name, "loss": loss, "out": out}


# The transforms of student and reference, the size of the vocabulary, and beta, where 0, 1 and 0.5
# are functions of their own. A kernel for two heads compiles for up to a quarter of a minute, so
# these are few.
PAIRS = (
    *(("plain", "plain", V, beta) for beta in (0.0, 1.0, 0.5)),
    ("bias", "row T", V, 1.0),
    ("rounded fp16", "all", V, 0.0),
    ("all", "all", V, 0.5),
    ("all", "all", RAGGED_V, 0.5),
)


def _diverge() -> Variants:
    for student, reference, vocab, beta in PAIRS:
        options = {"vocab": vocab, "transform": student, "reference": (reference, beta)}
        yield f"{student}, {reference} beta {beta:g}", (student, vocab) == ("all", V), options


def _reference_grad() -> Variants:
    for text, is_quick, options in _diverge():
        for dtype, has_b in ((FP32, False), (BF16, True), (FP16, True)):
            if dtype == BF16 or text == "plain, plain beta 1":
                more = {**options, "out": dtype, "entropy": has_b}
                yield f"{text} {SHORT[dtype]}", is_quick, more


def _scales(arch: str) -> Iterator[Case]:
    for dtype in (FP32, BF16, FP16):
        yield Case("scale", SHORT[dtype], arch, {"dtype": dtype}, is_quick=dtype == BF16)


def empty(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def _scale(dtype: torch.dtype) -> None:
    launch_scale(empty(V, H), empty(), empty(V, H, dtype=dtype))
