"""Floating-point operations of the fused head alone, in TRL's GRPO trainer and in ours.

The counter runs over the whole training; it is read where autograd enters and leaves the head.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.flop_counter import FlopCounterMode


def counter() -> FlopCounterMode:
    """A counter of products, in place, of grouped experts and of attention on a CPU too."""
    aten = torch.ops.aten
    formulas = {
        aten.addmm: addmm,  # torch's own does not take ``out_dtype``
        aten.addmm_: addmm,
        aten._grouped_mm: _grouped_mm,
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    }
    return FlopCounterMode(display=False, custom_mapping=formulas)


def addmm(_self: Any, a: Any, b: Any, *_: Any, **__: Any) -> int:
    return int(2 * a[0] * a[1] * b[1])


def _grouped_mm(a: Any, b: Any, *_: Any, **__: Any) -> int:
    # the groups cut the first dimension of `a`, or the inner one
    return int(2 * a[0] * a[1] * b[-1])


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Of shapes (batch, heads, tokens, width); torch 2.11 counts no heads that share keys."""
    return int(2 * query[0] * query[1] * query[2] * key[2] * (key[3] + value[3]))


def _attention_backward(_grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """The scores again, their gradient, and those of queries, keys and values."""
    return int(2 * query[0] * query[1] * query[2] * key[2] * (3 * key[3] + 2 * value[3]))


@dataclass
class Counts:
    """Sums over a run. `rows`: positions that the head projects, of calls with gradient; `scored`:
    completion tokens of the loss; `live`: those of them whose advantage is not 0."""

    flops: int = 0
    rows: int = 0
    scored: int = 0
    live: int = 0
    size: int = 0  # V * H
    steps: int = 0


class Watch:
    """Adds the operations of a head's calls with gradient, forward and backward, to `counts`."""

    def __init__(self, counts: Counts) -> None:
        self.counts, self.operations = counts, counter()

    def note(self, sign: int) -> None:
        self.counts.flops += sign * self.operations.get_total_flops()

    def call(
        self,
        compute: Callable[[Tensor, Tensor], Any],
        results: Callable[[Any], list[Tensor | None]],
        hidden: Tensor,
        weight: Tensor,
        rows: int,
    ) -> Any:
        """`compute(hidden, weight)`, counted; its `results` are those that may have a gradient."""
        if not torch.is_grad_enabled():
            return compute(hidden, weight)
        self.counts.rows += rows
        self.counts.size = weight.numel()
        hidden, weight = hidden.view_as(hidden), weight.view_as(weight)
        self.note(-1)
        found = compute(hidden, weight)
        self.note(1)
        for ends, sign, mode in ((results(found), -1, "any"), ([hidden, weight], 1, "all")):
            graded = [x for x in ends if x is not None and x.requires_grad]
            register_multi_grad_hook(graded, lambda _, sign=sign: self.note(sign), mode=mode)
        return found

    def theirs(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(hidden: Tensor, weight: Tensor, *others: Any) -> Any:
            compute = lambda *given: apply(*given, *others)  # noqa: E731
            return self.call(compute, lambda found: [*found[:2]], hidden, weight, len(hidden))

        return wrapped

    def ours(self, score: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(
            hidden: Tensor, head: Any, ids: Tensor, completion_mask: Tensor, **others: Any
        ) -> Any:
            def compute(hidden: Tensor, weight: Tensor) -> Any:
                return score(hidden, replace(head, weight=weight), ids, completion_mask, **others)

            results = lambda found: [found.logps, found.entropies]  # noqa: E731
            return self.call(compute, results, hidden, head.weight, int(completion_mask.sum()))

        return wrapped


@contextmanager
def watched(counts: Counts, compact: bool = False) -> Iterator[Callable[[Any], None]]:
    import trl.trainer.utils as trl_utils

    from grpo_kernels.trl import fused_head

    def prepare(trainer: Any) -> None:
        compute = trainer._compute_loss

        def compute_loss(model: Any, inputs: dict[str, Any]) -> Tensor:
            mask = inputs["completion_mask"].bool()
            counts.scored += int(mask.sum())
            counts.live += int((mask & (inputs["advantages"] != 0).unsqueeze(1)).sum())
            return compute(model, inputs)

        trainer._compute_loss = compute_loss

    theirs, watch = trl_utils._ChunkedLogProbFunction, Watch(counts)
    apply = staticmethod(watch.theirs(theirs.apply))
    stock = type("Counted", (), {"apply": apply, "forward": theirs.forward})
    ours = watch.ours(fused_head.linear_logps)
    with (
        mock.patch.object(trl_utils, "_ChunkedLogProbFunction", stock),
        mock.patch.object(fused_head, "linear_logps", ours),
        # TRL passes the labeled rows alone where it has Triton; its row work still runs in torch
        # here.
        mock.patch.object(trl_utils, "_use_triton", return_value=compact),
        watch.operations,
    ):
        yield prepare


def count(
    trainer_class: type, *, compact: bool = False, steps: int = 2, kind: str = "qwen3",
    **options: Any,
) -> Counts:  # fmt: skip
    from benchmarks import tiny_run

    counts = Counts(steps=steps)
    with tempfile.TemporaryDirectory() as folder, watched(counts, compact) as prepare:
        args = tiny_run.config(folder, steps, **options)
        tiny_run.train(trainer_class, args, kind=kind, prepare=prepare)
    return counts


def table() -> list[str]:
    from trl import GRPOTrainer

    from benchmarks.tables import markdown
    from grpo_kernels.trl import FusedGRPOTrainer

    rows = []
    for name, trainer_class, compact in (
        ("GRPOTrainer (every position)", GRPOTrainer, False),
        ("GRPOTrainer (labeled rows)", GRPOTrainer, True),
        ("FusedGRPOTrainer", FusedGRPOTrainer, False),
    ):
        c = count(trainer_class, compact=compact)
        ours = trainer_class is FusedGRPOTrainer
        expected = c.size * (6 * c.live + 2 * (c.scored - c.live) if ours else 8 * c.rows)
        rows.append({
            "trainer": name, "rows projected": f"{c.rows / c.steps:g}",
            "completion tokens": f"{c.scored / c.steps:g}",
            "with gradient": f"{c.live / c.steps:g}", "counted": f"{c.flops / c.steps:,.0f}",
            "formula": "6VH live + 2VH rest" if ours else "8VH rows",
            "value": f"{expected / c.steps:,.0f}",
        })  # fmt: skip
    return markdown(rows)
