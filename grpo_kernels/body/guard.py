"""Guard of a trunk that is computed in parts: a gradient that would be lost raises.

It costs one wait for the device in each backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_kernels.body.layout import TrunkLayout


def guard(
    hidden: Tensor,  # (B, L, H)
    layouts: Sequence[TrunkLayout],
    rows: range,
    live: Tensor,  # (B,) bool
) -> None:
    """Have the backward raise if gradient arrives at a cell of `hidden` that no layout with a graph has computed.

    Args:
        rows: numbers of the sequences, for the message.
        live: sequences that have a graph.
    """
    if not hidden.requires_grad:
        return
    has_graph = torch.zeros(hidden.shape[0] * hidden.shape[1], dtype=torch.bool, device="cpu")
    for layout in layouts:
        if layout.graph:
            has_graph[layout.cells] = True
    without = (~has_graph).nonzero().squeeze(1)
    if not len(without):
        return
    length = hidden.shape[1]
    without_here = without.to(hidden.device, non_blocking=True)

    def look(gradient: Tensor) -> None:
        reached = (
            gradient.reshape(-1, gradient.shape[-1])
            .index_select(0, without_here)
            .count_nonzero(dim=1)
        )
        if not bool(reached.any()):
            return
        local = (without[reached.nonzero().squeeze(1).cpu()] // length).unique()
        dead = [rows[i] for i in local.tolist() if not live[i]]
        if dead:
            raise RuntimeError(
                f"zero_advantage: expected no gradient for the sequences {dead}, which ran without graph, got one: the "
                "loss has a term that is not known here; pass zero_advantage='train'"
            )
        raise RuntimeError(
            f"layout: expected gradient at completion tokens alone, got one elsewhere in the sequences "
            f"{[rows[i] for i in local.tolist()]}; pass layout='padded'"
        )

    hidden.register_hook(look)
