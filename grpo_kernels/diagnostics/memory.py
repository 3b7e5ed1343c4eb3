"""Memory that the loss of a language-model head needs, before it is run and without data.

Counted is what a call allocates beyond its inputs, on a CPU: by the planner of the engines, on tensors without data.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from grpo_kernels.backends.cpp_rows import CppRows
from grpo_kernels.diagnostics.model_config import read_config
from grpo_kernels.engine.chunks import planned_bytes
from grpo_kernels.engine.head_plan import HeadPlan
from grpo_kernels.engine.memory import default_workspace
from grpo_kernels.engine.records import Head, NeedsGrad, Rows
from grpo_kernels.engine.slices import plan_slices

MIB = 2**20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FP32 = 4  # bytes of what is accumulated
MODELS = {  # V, H, from the models' published configurations
    "Qwen3-0.6B": (151936, 1024),
    "Qwen3-1.7B": (151936, 2048),
    "Qwen3-8B": (151936, 4096),
    "Llama-3-8B": (128256, 4096),
    "Gemma-2-2B": (256000, 2304),
    "gpt-oss-20B": (201088, 2880),
}
COLUMNS = ("engine", "extra", "with gradients", "kept for backward")
NOTES = """extra: the most that is allocated beyond the inputs and the gradients returned
with gradients: the same, and the gradients of hidden states and weight"""


@dataclass(frozen=True)
class Size:
    """Size of a batch and a head."""

    rows: int  # N: positions, B * T
    vocab: int  # V
    hidden: int  # H
    dtype: torch.dtype = torch.float32  # of hidden states and weight
    frozen: bool = False  # the weight wants no gradient
    score: bool = False  # nothing does
    masked: float = 0.0  # share of the positions that do not count
    workspace_bytes: int | None = None  # as in `grpo_loss`

    @property
    def itemsize(self) -> int:
        """Bytes of a number of hidden states and weight."""
        return self.dtype.itemsize

    @property
    def counted(self) -> int:
        """Positions that the mask counts."""
        return max(1, round(self.rows * (1.0 - self.masked)))

    @property
    def returned(self) -> int:
        """Bytes of the gradients that a step leaves behind."""
        if self.score:
            return 0
        return (self.rows + (0 if self.frozen else self.vocab)) * self.hidden * self.itemsize

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        kind = "log-probabilities alone" if self.score else "frozen head" if self.frozen else "trainable head"
        masked = f", {self.masked:.0%} of the positions masked" if self.masked else ""
        return f"N {self.rows:,}, V {self.vocab:,}, H {self.hidden:,}, {name}, {kind}{masked}; MiB on a CPU"


@dataclass(frozen=True)
class Need:
    """Bytes that a step allocates beyond its inputs."""

    name: str  # of the engine
    peak: int  # the most at once, returned gradients included
    returned: int  # of those
    kept: int  # of what is still there when the forward ends, for the backward; but for a few numbers a token

    @property
    def extra(self) -> int:
        """The peak beyond the gradients that are returned: what a benchmark measures."""
        return self.peak - self.returned


def estimate(size: Size) -> list[Need]:
    """Return the need of each engine that serves `size`; "auto" takes the first where the loss couples no tokens."""
    return _Plan(size).needs()


@dataclass(frozen=True)
class _Plan:
    """Plan of each engine of `grpo_loss` for a batch of a size, with the C++ kernels."""

    size: Size

    def needs(self) -> list[Need]:
        size = self.size
        if size.score:
            return [Need("score", self._swept(None), 0, 0)]
        with_gradient = self._swept(self._wants) + self._accumulated
        first = "frozen" if size.frozen else "one_pass"
        return [
            self._need(first, forward=with_gradient, kept=self._accumulated),
            self._need("two_pass", forward=self._swept(None), backward=with_gradient),
            *([] if size.frozen else [self._lean()]),
        ]

    def _need(self, engine: str, *, forward: int, backward: int = 0, kept: int = 0) -> Need:
        """Return the need of an engine whose backward ends with the accumulated gradients and those returned."""
        returning = self._accumulated + self._rounded
        return Need(engine, max(forward, backward, returning), self.size.returned, kept)

    def _lean(self) -> Need:
        """Return the need of the engine that writes d weight a slice at a time and accumulates d hidden alone."""
        size = self.size
        _, _, slices = plan_slices(self._rows, self._head, self._config, self._wants)
        backward = slices + self._d_hidden + size.vocab * size.hidden * size.itemsize
        return Need("lean", max(self._swept(None), backward), size.returned, 0)

    def _swept(self, wants: NeedsGrad | None) -> int:
        return planned_bytes(self._rows, self._head, self._config, wants)

    @property
    def _wants(self) -> NeedsGrad:
        return NeedsGrad(hidden=True, weight=not self.size.frozen)

    @property
    def _d_hidden(self) -> int:
        """Bytes of the accumulated gradient of the counted rows."""
        return self.size.counted * self.size.hidden * FP32

    @property
    def _accumulated(self) -> int:
        """Bytes of the gradients before they are rounded."""
        return self._d_hidden + (0 if self.size.frozen else self.size.vocab * self.size.hidden * FP32)

    @property
    def _rounded(self) -> int:
        """Bytes of the rounded copies that are returned; fp32 needs none, but of d hidden where not all rows count."""
        size = self.size
        of_hidden, of_weight = (x * size.hidden * size.itemsize for x in (size.rows, 0 if size.frozen else size.vocab))
        whole = size.counted == size.rows
        if size.itemsize == FP32:
            return 0 if whole else of_hidden
        return of_weight + of_hidden + (0 if whole else size.counted * size.hidden * size.itemsize)

    @cached_property
    def _head(self) -> Head:
        size = self.size
        hidden = torch.empty(size.rows, size.hidden, dtype=size.dtype, device="meta")
        return Head(hidden, torch.empty(size.vocab, size.hidden, dtype=size.dtype, device="meta"))

    @cached_property
    def _rows(self) -> Rows:
        some = torch.empty(self.size.counted, dtype=torch.int64, device="meta")
        return Rows(some, some)

    @cached_property
    def _config(self) -> HeadPlan:
        wants = NeedsGrad() if self.size.score else self._wants
        workspace = self.size.workspace_bytes or default_workspace(self._head.weight, wants)
        return HeadPlan(CppRows(), self.size.dtype, workspace)


def render(size: Size, needs: list[Need]) -> str:
    """Return the needs as a table, in MiB."""
    cells = [COLUMNS, *((x.name, *(f"{b / MIB:,.0f}" for b in (x.extra, x.peak, x.kept))) for x in needs)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(COLUMNS))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(x.rjust(w) for x, w in zip(row[1:], widths[1:], strict=True))])
        for row in cells
    ]
    return "\n".join([str(size), "", *lines, "", NOTES])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``python -m grpo_kernels memory``."""
    models = parser.add_mutually_exclusive_group()
    models.add_argument("--model", choices=MODELS, help="take vocabulary and hidden size of this model")
    models.add_argument(
        "--config", type=Path, metavar="DIR", help="take them from the config.json of transformers in DIR"
    )
    parser.add_argument("--vocab", type=int, help="V: the size of the vocabulary")
    parser.add_argument("--hidden", type=int, help="H: the size of the hidden states")
    parser.add_argument("--rows", type=int, required=True, help="N: positions of the batch, B * T")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of hidden states and weight; default: bf16")
    parser.add_argument("--frozen", action="store_true", help="the head does not train, as with LoRA on the body")
    parser.add_argument("--score", action="store_true", help="no gradient: old or reference log-probabilities")
    parser.add_argument("--mask", type=float, default=0.0, help="share of the positions that do not count; default: 0")
    parser.add_argument("--workspace", type=int, metavar="MIB", help="workspace_bytes, in MiB; default: the library's")


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Print the table for `options`."""
    vocab, hidden = MODELS[options.model] if options.model else (None, None)
    if options.config:
        try:
            configured = read_config(options.config)
        except ValueError as error:
            parser.error(f"--config: {error}")
        vocab, hidden = configured.vocab, configured.hidden
    vocab, hidden = options.vocab or vocab, options.hidden or hidden
    if vocab is None or hidden is None:
        parser.error("expected --model, --config, or --vocab and --hidden")
    if not 0.0 <= options.mask < 1.0:
        parser.error(f"--mask: expected a share of at least 0 and less than 1, got {options.mask}")
    for name, value in (("rows", options.rows), ("vocab", vocab), ("hidden", hidden)):
        if value < 1:
            parser.error(f"--{name}: expected at least 1, got {value}")
    if options.workspace is not None and options.workspace < 1:
        parser.error(f"--workspace: expected at least 1, got {options.workspace}")
    size = Size(
        rows=options.rows,
        vocab=vocab,
        hidden=hidden,
        dtype=DTYPES[options.dtype],
        frozen=options.frozen,
        score=options.score,
        masked=options.mask,
        workspace_bytes=None if options.workspace is None else options.workspace * MIB,
    )
    print(render(size, estimate(size)))
    return 0
