"""Memory that the loss of a language-model head needs, before it is run and without data.

It is what a call allocates beyond its inputs, on a CPU or on a GPU, as counted by the engines' planner on meta tensors.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial

import torch

from grpo_kernels.backends.cpp_rows import CppRows
from grpo_kernels.diagnostics import head_shape
from grpo_kernels.diagnostics.head_shape import HeadShape
from grpo_kernels.engine.chunks import planned_bytes
from grpo_kernels.engine.device import CPU, CUDA, meta_tensors_of
from grpo_kernels.engine.head_plan import HeadPlan
from grpo_kernels.engine.memory import default_workspace
from grpo_kernels.engine.records import NeedsGrad, Operands, Rows
from grpo_kernels.engine.special.slices import plan_slices

MIB = 2**20
ROWS = 16 * 1024  # default rows of a step: 16 sequences of 1,024 tokens
FP32 = 4  # bytes per accumulated element
GPUS = {  # GiB as sold; the driver has up to a tenth less
    "A10G": 24,
    "A100": 80,
    "A100-40GB": 40,
    "B200": 180,
    "H100": 80,
    "H200": 141,
    "L4": 24,
    "L40S": 48,
    "RTX 3090": 24,
    "RTX 4090": 24,
    "RTX 5090": 32,
    "T4": 16,
}
MOST_GIB = 1024  # of one GPU
COLUMNS = ("engine", "extra", "with gradients", "kept for backward")
NOTES = """extra: the most that is allocated beyond the inputs and the gradients returned
with gradients: the same, and the gradients of hidden states and weight"""
GPU_NOTE = """last column: "with gradients" as a share of the GPU's memory; the model and its optimizer come on top
Computed by the planner for a GPU with room; where less is free, less is taken."""


@dataclass(frozen=True)
class GPU:
    """A GPU by its name and memory."""

    name: str
    gib: float

    def __str__(self) -> str:
        return f"{self.name}'s {self.gib:g} GiB"


@dataclass(frozen=True)
class Size:
    """Size of a step: a head, and a batch for it."""

    head: HeadShape
    rows: int  # N: positions, B * T
    frozen: bool = False  # the weight wants no gradient
    score: bool = False  # nothing wants a gradient
    masked: float = 0.0  # share of the positions that do not count
    workspace_bytes: int | None = None  # as in `grpo_loss`
    gpu: GPU | None = None  # None: on a CPU

    @property
    def counted(self) -> int:
        """Positions that the mask counts."""
        return max(1, round(self.rows * (1.0 - self.masked)))

    @property
    def returned(self) -> int:
        """Bytes of the gradients that a step leaves behind."""
        if self.score:
            return 0
        return (
            (self.rows + (0 if self.frozen else self.head.vocab))
            * self.head.hidden
            * self.head.itemsize
        )

    def __str__(self) -> str:
        kind = (
            "log-probabilities alone"
            if self.score
            else "frozen head"
            if self.frozen
            else "trainable head"
        )
        masked = f", {self.masked:.0%} of the positions masked" if self.masked else ""
        return f"N {self.rows:,}, {self.head}, {kind}{masked}; MiB on a {'CPU' if self.gpu is None else 'GPU'}"


@dataclass(frozen=True)
class Need:
    """Bytes that a step allocates beyond its inputs."""

    name: str  # the engine's
    peak: int  # the most at once, returned gradients included
    returned: int  # the returned gradients
    kept: int  # kept from forward to backward, without a few numbers per token

    @property
    def extra(self) -> int:
        """The peak without the returned gradients, as a benchmark measures it."""
        return self.peak - self.returned


def estimate(size: Size) -> list[Need]:
    """Return the need of each engine that serves `size`, with the C++ kernels or on a GPU with Triton's.

    The first is the engine that "auto" takes if the loss does not couple tokens, and memory is not short.
    """
    with meta_tensors_of(CPU if size.gpu is None else CUDA):
        return _estimate(size)


def _estimate(size: Size) -> list[Need]:
    shape, wants = (
        size.head,
        NeedsGrad(hidden=not size.score, weight=not (size.score or size.frozen)),
    )
    new = partial(torch.empty, dtype=shape.dtype, device="meta")
    head = Operands(new(size.rows, shape.hidden), new(shape.vocab, shape.hidden))
    indices = new(size.counted, dtype=torch.int64)
    rows = Rows(indices, indices)
    config = HeadPlan(
        CppRows(), shape.dtype, size.workspace_bytes or default_workspace(head.weight, wants)
    )

    scored = planned_bytes(rows, head, config, None)
    if size.score:
        return [Need("score", scored, 0, 0)]
    d_hidden = size.counted * shape.hidden * FP32
    accumulated = d_hidden + (0 if size.frozen else shape.vocab * shape.hidden * FP32)
    graded = accumulated + planned_bytes(rows, head, config, wants)
    returning = accumulated + _rounded(size)
    needs = [
        Need(
            "frozen" if size.frozen else "one_pass",
            max(graded, returning),
            size.returned,
            accumulated,
        ),
        Need("two_pass", max(scored, graded, returning), size.returned, 0),
    ]
    if not size.frozen:  # lean writes d weight a slice at a time, and accumulates only d hidden
        _, _, slices = plan_slices(rows, head, config, wants)
        backward = slices + d_hidden + shape.vocab * shape.hidden * shape.itemsize
        needs.append(Need("lean", max(scored, backward), size.returned, 0))
    return needs


def _rounded(size: Size) -> int:
    """Bytes of the rounded copies that are returned; fp32 needs none, except of d hidden if not all rows count."""
    row_bytes = size.head.hidden * size.head.itemsize
    of_hidden, of_weight = (
        size.rows * row_bytes,
        (0 if size.frozen else size.head.vocab) * row_bytes,
    )
    whole = size.counted == size.rows
    if size.head.itemsize == FP32:
        return 0 if whole else of_hidden
    return of_weight + of_hidden + (0 if whole else size.counted * row_bytes)


def render(size: Size, needs: list[Need]) -> str:
    """Return the needs as a table, in MiB; on a GPU with the share of its memory that has to be free."""
    gpu = size.gpu
    cells = [
        list(COLUMNS),
        *([x.name, *(f"{b / MIB:,.0f}" for b in (x.extra, x.peak, x.kept))] for x in needs),
    ]
    if gpu is not None:
        shares = (f"{x.peak / (gpu.gib * 1024 * MIB):.1%}" for x in needs)
        cells = [[*row, cell] for row, cell in zip(cells, [f"of {gpu}", *shares], strict=True)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(x.rjust(w) for x, w in zip(row[1:], widths[1:], strict=True)),
            ]
        )
        for row in cells
    ]
    return "\n".join([str(size), "", *lines, "", NOTES, *([] if gpu is None else [GPU_NOTE])])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``python -m grpo_kernels memory``."""
    head_shape.add_arguments(parser)
    parser.add_argument(
        "--rows",
        type=int,
        default=ROWS,
        help=f"N: positions of the batch, B * T; default: {ROWS:,}",
    )
    parser.add_argument(
        "--frozen", action="store_true", help="the head does not train, as with LoRA on the body"
    )
    parser.add_argument(
        "--score", action="store_true", help="no gradient: old or reference log-probabilities"
    )
    parser.add_argument(
        "--mask",
        type=float,
        default=0.0,
        help="share of the positions that do not count; default: 0",
    )
    parser.add_argument(
        "--workspace",
        type=int,
        metavar="MIB",
        help="workspace_bytes, in MiB; default: the library's",
    )
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help=f"on a GPU, and as a share of its memory: {', '.join(GPUS)}, or its memory in GiB",
    )


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Print the table for `options`."""
    head = head_shape.described(parser, options)
    if not 0.0 <= options.mask < 1.0:
        parser.error(f"--mask: expected a share of at least 0 and less than 1, got {options.mask}")
    if not 1 <= options.rows <= head_shape.MOST:
        parser.error(f"--rows: expected 1 to {head_shape.MOST:,}, got {options.rows}")
    if options.workspace is not None and options.workspace < 1:
        parser.error(f"--workspace: expected at least 1, got {options.workspace}")
    size = Size(
        head,
        rows=options.rows,
        frozen=options.frozen,
        score=options.score,
        masked=options.mask,
        workspace_bytes=None if options.workspace is None else options.workspace * MIB,
        gpu=None if options.gpu is None else _gpu(parser, options.gpu),
    )
    print(render(size, estimate(size)))
    return 0


def _gpu(parser: argparse.ArgumentParser, argument: str) -> GPU:
    """Return the GPU of this name, with or without its "RTX", or the one with this memory."""
    for name, sold in GPUS.items():
        if argument.casefold() in (name.casefold(), name.casefold().removeprefix("rtx ")):
            return GPU(name, sold)
    try:
        gib = float(argument)
    except ValueError:
        gib = 0.0
    if not 0.0 < gib <= MOST_GIB:
        parser.error(
            f"--gpu: expected {', '.join(GPUS)}, or the GPU's memory in GiB, got {argument}"
        )
    return GPU("the GPU", gib)
