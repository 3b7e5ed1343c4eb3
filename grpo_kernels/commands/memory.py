"""Compute how much memory the loss of a language-model head needs, without running it.

The result counts the memory that a call allocates beyond its inputs. The engines' own planner
computes it on meta tensors.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from grpo_kernels.backends.cpp_rows import CppRows
from grpo_kernels.engine.plan import Job, JobHead, Rows
from grpo_kernels.engine.slices import plan_slices
from grpo_kernels.engine.sweep import plan_groups
from grpo_kernels.engine.workspace import CPU, CUDA, MIB, large_workspace, meta_tensors_of
from grpo_kernels.head import HeadTensors

R = TypeVar("R")
FP32 = 4  # bytes per accumulated element
MOST = 10**9  # largest plausible size
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MODELS = {  # V, H, from the models' published configurations
    "Qwen3-0.6B": (151936, 1024),
    "Qwen3-1.7B": (151936, 2048),
    "Qwen3-8B": (151936, 4096),
    "Llama-3-8B": (128256, 4096),
    "Gemma-2-2B": (256000, 2304),
    "gpt-oss-20B": (201088, 2880),
}
GPUS: dict[str, float] = {  # advertised GiB; the driver reports up to a tenth less
    "A10G": 24, "A100": 80, "A100-40GB": 40, "B200": 180, "H100": 80, "H200": 141, "L4": 24,
    "L40S": 48, "RTX 3090": 24, "RTX 4090": 24, "RTX 5090": 32, "T4": 16,
}  # fmt: skip
NOTES = """extra: peak memory beyond the inputs and the returned gradients
with gradients: the same plus the gradients of hidden states and weight"""
GPU_NOTE = """last column: "with gradients" as a share of the GPU, without model and optimizer
Computed by the planner for a GPU with enough free memory; with less free memory, calls
use a smaller workspace."""


@dataclass(frozen=True)
class Size:
    """Sizes of a step: the head and the batch."""

    vocab: int  # V
    hidden: int  # H
    dtype: torch.dtype  # of hidden states and weight
    rows: int  # N: positions, B * T
    frozen: bool = False  # True: the weight needs no gradient
    score: bool = False  # True: nothing needs a gradient
    masked: float = 0.0  # share of positions that do not count
    workspace_bytes: int | None = None  # as in `Run`
    on_gpu: bool = False

    @property
    def counted(self) -> int:
        """Number of unmasked positions."""
        return max(1, round(self.rows * (1.0 - self.masked)))

    @property
    def returned(self) -> int:
        """Bytes of the gradients that a step returns."""
        trained = 0 if self.score else self.rows + (0 if self.frozen else self.vocab)
        return trained * self.hidden * self.dtype.itemsize


@dataclass(frozen=True)
class Need:
    """Bytes that a step allocates beyond its inputs."""

    name: str  # the engine
    peak: int  # peak, including the returned gradients
    returned: int  # the returned gradients
    kept: int  # kept from forward to backward, except for a few numbers per token

    @property
    def extra(self) -> int:
        """Peak without the returned gradients, as a benchmark measures it."""
        return self.peak - self.returned


def estimate(size: Size) -> list[Need]:
    """Compute what each usable engine needs for `size`, with C++ or (on a GPU) Triton kernels.

    The first entry is what "auto" uses if the loss does not couple tokens and memory is not short.
    """
    n, trains = size.counted, not (size.score or size.frozen)
    wants = HeadTensors(hidden=not size.score, weight=trains)
    with meta_tensors_of(CUDA if size.on_gpu else CPU):
        new = partial(torch.empty, dtype=size.dtype, device="meta")
        head = HeadTensors(new(size.rows, size.hidden), new(size.vocab, size.hidden))
        indices = new(n, dtype=torch.int64)
        workspace = size.workspace_bytes or large_workspace(head.weight, wants)
        planned = JobHead(head, size.dtype)
        job = Job(Rows(indices, indices), planned, wants, workspace, CppRows())
        # What a step needs besides the sums: `scored` for scores, `graded` for gradients by rows,
        # `slices` for gradients by slices of the vocabulary.
        scored, graded = (
            max(group.workspace for group in plan_groups(job, with_gradient=wanted))
            for wanted in (False, True)
        )
        if size.score:
            return [Need("score", scored, 0, 0)]
        slices = plan_slices(job)[2] if trains else 0
    row, weight = size.hidden * size.dtype.itemsize, size.vocab * size.hidden  # bytes, elements
    d_hidden = n * size.hidden * FP32
    sums = d_hidden + (weight * FP32 if trains else 0)
    # rows that do not count get a gradient of the hidden states too
    if size.dtype.itemsize < FP32:  # the sums are cast
        returning = sums + size.returned + (n * row if n < size.rows else 0)
    else:
        returning = sums + (size.rows * row if n < size.rows else 0)
    name, back = "one_pass" if trains else "frozen", size.returned
    needs = [
        Need(name, max(sums + graded, returning), back, sums),
        Need("two_pass", max(scored, sums + graded, returning), back, 0),
    ]
    if trains:  # lean writes the weight's gradient slice by slice, and accumulates only d_hidden
        backward = slices + d_hidden + weight * size.dtype.itemsize
        needs.append(Need("lean", max(scored, backward), back, 0))
    return needs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``python -m grpo_kernels memory``."""
    add = parser.add_argument
    about = f"{', '.join(MODELS)}, or a folder or Hub name with a config.json"
    add("--model", metavar="NAME", help=about)
    add("--vocab", type=whole_number, help="V, the size of the vocabulary")
    add("--hidden", type=whole_number, help="H, the size of the hidden states")
    add("--dtype", choices=DTYPES, default="bf16", help="dtype of the tensors; default: bf16")
    about = "N, positions in the batch; default: 16,384"
    add("--rows", type=whole_number, default=16384, help=about)
    add("--frozen", action="store_true", help="the head is frozen, as with LoRA on the body")
    about = "no gradient, as for old or reference log-probabilities"
    add("--score", action="store_true", help=about)
    add("--mask", type=share, default=0.0, help="share of positions that do not count")
    about = "workspace_bytes, in MiB; default: the library's"
    add("--workspace", type=whole_number, metavar="MIB", help=about)
    about = f"on this GPU, with the share of its memory: {', '.join(GPUS)}, or a number of GiB"
    add("--gpu", type=_gpu, metavar="NAME", help=about)


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Print the table for `options`, in MiB; with a GPU, also the share of its memory."""
    sizes = options.vocab, options.hidden
    if (options.model is None) == (None in sizes) or (options.model and any(sizes)):
        parser.error("expected --model NAME, or both --vocab V and --hidden H")
    if options.model is not None:
        try:
            sizes = known_or_read(options.model, MODELS, lambda x: (x.vocab_size, x.hidden_size))
        except ValueError as error:
            parser.error(str(error))
    size = Size(
        *sizes,
        DTYPES[options.dtype],
        options.rows,
        frozen=options.frozen,
        score=options.score,
        masked=options.mask,
        workspace_bytes=options.workspace and options.workspace * MIB,
        on_gpu=options.gpu is not None,
    )
    kind = "frozen head" if size.frozen else "trainable head"
    kind = "log-probabilities alone" if size.score else kind
    kind += f", {size.masked:.0%} of the positions masked" if size.masked else ""
    head = f"V {size.vocab:,}, H {size.hidden:,}, {str(size.dtype).removeprefix('torch.')}"
    print(f"N {size.rows:,}, {head}, {kind}; MiB on a {'GPU' if size.on_gpu else 'CPU'}\n")
    needs = estimate(size)
    cells = [["engine", "extra", "with gradients", "kept for backward"]]
    cells += [[x.name, *(f"{b / MIB:,.0f}" for b in (x.extra, x.peak, x.kept))] for x in needs]
    if options.gpu is not None:
        name, gib = options.gpu
        shares = [f"of {name}'s {gib:g} GiB", *(f"{x.peak / (gib * 2**30):.1%}" for x in needs)]
        cells = [[*row, share] for row, share in zip(cells, shares, strict=True)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for name, *numbers in cells:
        row = (x.rjust(width) for x, width in zip(numbers, widths[1:], strict=True))
        print("  ".join([name.ljust(widths[0]), *row]))
    print(f"\n{NOTES}" + (f"\n{GPU_NOTE}" if size.on_gpu else ""))
    return 0


def whole_number(argument: str) -> int:
    """Parse a plausible size; argparse shows the function's name in its errors."""
    if not 1 <= int(argument) <= MOST:
        raise argparse.ArgumentTypeError(f"expected 1 to {MOST:,}, got {argument}")
    return int(argument)


def share(argument: str) -> float:
    """Parse a number of at least 0 and less than 1."""
    if not 0.0 <= float(argument) < 1.0:
        raise argparse.ArgumentTypeError(f"expected at least 0 and less than 1, got {argument}")
    return float(argument)


def known_or_read(name: str, known: Mapping[str, R], read: Callable[[Any], R]) -> R:
    """Find a model by `name` in `known`, or `read` its configuration in a folder or on the Hub.

    Names are compared in any case, with or without their organization. `read` gets the
    configuration of the model's text part. The model's own code does not run.
    """
    for model, sizes in known.items():
        if model.casefold() == name.rpartition("/")[2].casefold() and not Path(name).exists():
            return sizes
    try:
        from transformers import AutoConfig  # knows the names and the defaults of every model

        whole = AutoConfig.from_pretrained(name, trust_remote_code=False)
        config = whole.get_text_config(decoder=True)
        v_and_h = config.vocab_size, config.hidden_size
        if not all(type(x) is int and 1 <= x <= MOST for x in v_and_h):
            raise ValueError(f"expected sizes of 1 to {MOST:,}, got {v_and_h}")
        return read(config)
    except Exception as error:  # checks in configs and models may raise any exception
        expected = f"{', '.join(known)}, or a model whose config.json can be read"
        reason = str(error).partition("\n")[0]
        raise ValueError(f"--model: expected {expected}, got {name} ({reason})") from error


def _gpu(argument: str) -> tuple[str, float]:
    """(name, GiB) for a GPU's name, with or without "RTX", or for a number of GiB."""
    for name, gib in GPUS.items():
        if argument.casefold() in (name.casefold(), name.casefold().removeprefix("rtx ")):
            return name, gib
    try:
        gib = float(argument)
    except ValueError:
        gib = 0.0
    if not 0.0 < gib <= 1024:
        expected = f"{', '.join(GPUS)}, or its GiB"
        raise argparse.ArgumentTypeError(f"expected {expected}, got {argument}")
    return "the GPU", gib
