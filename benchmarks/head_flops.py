"""Floating-point operations of the fused head alone, in TRL's GRPO trainer and in ours, counted
while they train.

The counter runs over the whole training; it is read where autograd enters and leaves the head,
forward and backward, so that the transformer and the sampling are not in the figures.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
    """Of shapes (n, k) and (k, m); whatever else is given."""
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
    """Sums over a run. `rows`: positions the head was given with gradient; `scored`: completion
    tokens of the loss; `live`: those of them whose advantage is not 0."""

    flops: int = 0
    rows: int = 0
    scored: int = 0
    live: int = 0
    size: int = 0  # V * H
    steps: int = 0


def counted(
    apply: Callable[..., Any], counter: FlopCounterMode, counts: Counts
) -> Callable[..., Any]:
    """`apply` of a fused head; operations of calls with gradient are added to `counts`."""

    def note(sign: int) -> None:
        counts.flops += sign * counter.get_total_flops()

    def wrapped(hidden: Tensor, weight: Tensor, *others: Any) -> Any:
        if not torch.is_grad_enabled():
            return apply(hidden, weight, *others)
        counts.rows += hidden.size(0)
        counts.size = weight.numel()
        hidden, weight = hidden.view_as(hidden), weight.view_as(weight)
        note(-1)
        logps, entropy, *rest = apply(hidden, weight, *others)
        note(1)
        register_multi_grad_hook(
            [x for x in (logps, entropy) if x.requires_grad], lambda _: note(-1), mode="any"
        )
        register_multi_grad_hook(
            [x for x in (hidden, weight) if x.requires_grad], lambda _: note(1)
        )
        return logps, entropy, *rest

    return wrapped


@contextmanager
def watched(counts: Counts, compact: bool = False) -> Iterator[Callable[[Any], None]]:
    """Counts the head calls of both trainers; yields the hook that counts a trainer's tokens."""
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

    theirs, operations = trl_utils._ChunkedLogProbFunction, counter()
    apply = staticmethod(counted(theirs.apply, operations, counts))
    stock = type("Counted", (), {"apply": apply, "forward": theirs.forward})
    ours = staticmethod(counted(fused_head.FusedHead.apply, operations, counts))
    with (
        mock.patch.object(trl_utils, "_ChunkedLogProbFunction", stock),
        mock.patch.object(fused_head.FusedHead, "apply", ours),
        # TRL passes the labelled rows alone where it has Triton; its row work still runs in torch
        # here.
        mock.patch.object(trl_utils, "_use_triton", return_value=compact),
        operations,
    ):
        yield prepare


def count(
    trainer_class: type,
    *,
    compact: bool = False,
    steps: int = 2,
    kind: str = "qwen3",
    **options: Any,
) -> Counts:
    """Head operations of `steps` optimiser steps of the tiny run of `tiny_run.py`."""
    from benchmarks import tiny_run

    counts = Counts(steps=steps)
    with tempfile.TemporaryDirectory() as folder, watched(counts, compact) as prepare:
        tiny_run.train(
            trainer_class, tiny_run.config(folder, steps, **options), kind=kind, prepare=prepare
        )
    return counts


def table() -> list[str]:
    """Markdown: default options, both trainers, as TRL calls its head without and with Triton."""
    from trl import GRPOTrainer

    from grpo_kernels.trl import FusedGRPOTrainer

    lines = [
        "| trainer | rows given to the head | completion tokens | with gradient | counted | "
        "formula | value |",
        "|---|---|---|---|---|---|---|",
    ]
    for compact in (False, True):
        for trainer_class in (GRPOTrainer, FusedGRPOTrainer):
            c = count(trainer_class, compact=compact)
            ours = trainer_class is FusedGRPOTrainer
            expected = c.size * (6 * c.live + 2 * (c.scored - c.live) if ours else 8 * c.rows)
            formula = "6VH live + 2VH rest" if ours else "8VH rows"
            rows = "labelled rows" if compact else "every position"
            lines.append(
                f"| {trainer_class.__name__} ({rows}) | {c.rows / c.steps:g} | "
                f"{c.scored / c.steps:g} "
                f"| {c.live / c.steps:g} | {c.flops / c.steps:,.0f} | {formula} | "
                f"{expected / c.steps:,.0f} |"
            )
    return lines
