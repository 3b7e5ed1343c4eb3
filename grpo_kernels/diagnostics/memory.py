"""How much memory the loss of a language-model head needs, for us and for others: before it is run, without data.

Counted is what a call allocates beyond its inputs, on a CPU: for ours by the planner of the engines, on tensors without
data; for others by formulas (`peer_memory`).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from grpo_kernels.backends.cpp_rows import CppRows
from grpo_kernels.diagnostics.peer_memory import all_logits, liger, trl
from grpo_kernels.diagnostics.sizes import Need, Size
from grpo_kernels.engine.gradients import NeedsGrad
from grpo_kernels.engine.memory import default_workspace
from grpo_kernels.engine.operands import Head, HeadConfig, Rows
from grpo_kernels.engine.slices import plan_slices
from grpo_kernels.engine.sweep import planned_bytes

MIB = 2**20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FP32 = 4  # bytes of what is accumulated
MODELS = {  # V, H, whether the logits have a soft-cap; from the models' published configurations
    "Qwen3-0.6B": (151936, 1024, False),
    "Qwen3-1.7B": (151936, 2048, False),
    "Qwen3-8B": (151936, 4096, False),
    "Llama-3-8B": (128256, 4096, False),
    "Gemma-2-2B": (256000, 2304, True),
    "gpt-oss-20B": (201088, 2880, False),
}
COLUMNS = ("", "extra", "with gradients", "kept for backward")


def estimate(size: Size) -> list[Need]:
    """What each provider needs: ours with each engine that serves, then the others that can do the case."""
    return [*_Plan(size).needs(), *(x for x in (all_logits(size), trl(size), liger(size)) if x is not None)]


@dataclass(frozen=True)
class _Plan:
    """The engines of `grpo_loss` on a batch of a size, with the C++ kernels."""

    size: Size

    def needs(self) -> Iterator[Need]:
        """Of each engine; the first is what "auto" takes where the loss couples no tokens."""
        size = self.size
        if size.score:
            yield Need("grpo_kernels, score", self._swept(None), 0, 0)
            return
        with_gradient = self._swept(self._wants) + self._accumulated
        yield self._need("frozen" if size.frozen else "one_pass", forward=with_gradient, kept=self._accumulated)
        yield self._need("two_pass", forward=self._swept(None), backward=with_gradient)
        if not size.frozen:
            yield self._lean()

    def _need(self, engine: str, *, forward: int, backward: int = 0, kept: int = 0) -> Need:
        """Of an engine whose backward ends with the accumulated gradients and those that are returned."""
        returning = self._accumulated + self._rounded
        return Need(f"grpo_kernels, {engine}", max(forward, backward, returning), self.size.returned, kept)

    def _lean(self) -> Need:
        """d weight is written once, a slice after the other; d hidden alone is accumulated."""
        size = self.size
        _, _, slices = plan_slices(self._rows, self._head, self._config, self._wants)
        backward = slices + self._d_hidden + size.vocab * size.hidden * size.itemsize
        return Need("grpo_kernels, lean", max(self._swept(None), backward), size.returned, 0)

    def _swept(self, wants: NeedsGrad | None) -> int:
        return planned_bytes(self._rows, self._head, self._config, wants)

    @property
    def _wants(self) -> NeedsGrad:
        return NeedsGrad(hidden=True, weight=not self.size.frozen)

    @property
    def _d_hidden(self) -> int:
        """Of the counted rows, accumulated."""
        return self.size.counted * self.size.hidden * FP32

    @property
    def _accumulated(self) -> int:
        """The gradients before they are rounded."""
        return self._d_hidden + (0 if self.size.frozen else self.size.vocab * self.size.hidden * FP32)

    @property
    def _rounded(self) -> int:
        """Copies of them that are returned; fp32 needs none, but of d hidden where not all rows count."""
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
    def _config(self) -> HeadConfig:
        wants = NeedsGrad() if self.size.score else self._wants
        workspace = self.size.workspace_bytes or default_workspace(self._head.weight, wants)
        return HeadConfig(CppRows(), self.size.dtype, workspace)


def render(size: Size, needs: list[Need]) -> str:
    """The needs as a table, in MiB."""
    cells = [COLUMNS, *((x.name, *(f"{b / MIB:,.0f}" for b in (x.extra, x.peak, x.kept))) for x in needs)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(COLUMNS))]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(x.rjust(w) for x, w in zip(row[1:], widths[1:], strict=True))])
        for row in cells
    ]
    return "\n".join([size.describe(), "", *(line.rstrip() for line in lines), "", *size.notes()])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of ``python -m grpo_kernels memory``."""
    parser.add_argument("--model", choices=MODELS, help="take vocabulary, hidden size and soft-cap of this model")
    parser.add_argument("--rows", type=int, required=True, help="N: positions of the batch, B * T")
    parser.add_argument("--vocab", type=int, help="V: the size of the vocabulary")
    parser.add_argument("--hidden", type=int, help="H: the size of the hidden states")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of hidden states and weight; default: bf16")
    parser.add_argument("--frozen", action="store_true", help="the head does not train, as with LoRA on the body")
    parser.add_argument("--score", action="store_true", help="no gradient: old or reference log-probabilities")
    parser.add_argument("--softcap", action="store_true", help="the logits have a soft-cap, as in Gemma 2")
    parser.add_argument("--mask", type=float, default=0.0, help="share of the positions that do not count; default: 0")
    parser.add_argument("--length", type=int, default=1024, help="T: tokens of a sequence; default: 1024")
    parser.add_argument("--workspace", type=int, metavar="MIB", help="workspace_bytes, in MiB; default: the library's")


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Print the table for `options`."""
    vocab, hidden, softcap = MODELS[options.model] if options.model else (None, None, False)
    vocab, hidden = options.vocab or vocab, options.hidden or hidden
    if vocab is None or hidden is None:
        parser.error("expected --model, or --vocab and --hidden")
    if not 0.0 <= options.mask < 1.0:
        parser.error(f"--mask: expected a share of at least 0 and less than 1, got {options.mask}")
    for name, value in (("rows", options.rows), ("vocab", vocab), ("hidden", hidden), ("length", options.length)):
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
        softcap=options.softcap or softcap,
        masked=options.mask,
        length=min(options.length, options.rows),
        workspace_bytes=None if options.workspace is None else options.workspace * MIB,
    )
    print(render(size, estimate(size)))
    return 0
