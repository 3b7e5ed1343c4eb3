"""The one loop of the engines, a sweep: for each chunk of rows project, do the row work, and add up the gradients.

Engines differ in the row work (`row_steps.py`): ``score`` only reduces, ``one_pass`` and ``frozen`` reduce and derive,
and the second pass of ``two_pass`` derives with the statistics of the first. (The second pass of ``lean`` goes by
slices of the vocabulary, `special/slices.py`.)
"""

from __future__ import annotations

import torch

from grpo_kernels.engine.chunks import Group, plan_groups
from grpo_kernels.engine.gradient_sums import GradientSums
from grpo_kernels.engine.head_plan import HeadPlan
from grpo_kernels.engine.projection import Projection
from grpo_kernels.engine.records import Gradients, Index, NeedsGrad, Operands, Rows
from grpo_kernels.engine.row_steps import Reduce


def sweep(
    head: Operands, rows: Rows, plan: HeadPlan, step: Reduce, needs_grad: NeedsGrad | None = None
) -> Gradients | None:
    """Call `step` with the logits of all `rows`, a chunk at a time.

    Returns:
        The gradients that `needs_grad` wants, or None without it. The statistics stay in `step`.
    """
    groups, projection = plan_groups(rows, head, plan, needs_grad), Projection(head, plan)
    sums = None if needs_grad is None else GradientSums(head, len(rows), groups, plan, needs_grad)
    with torch.autocast(head.hidden.device.type, enabled=False), torch.no_grad():
        logits, teacher_logits = projection.new_logits(
            max((group.chunk_rows for group in groups), default=0)
        )
        d_logits = logits if projection.in_place else None
        for group in groups:
            index = _index(group, rows)
            operands = projection.operands(_positions(rows, index, head.hidden.shape[0]))
            for part in group.chunks:
                at, m = _part(index, part), part.stop - part.start
                out = logits[:m], None if teacher_logits is None else teacher_logits[:m]
                chunk, chunk_rows = projection.project(operands, part, rows, at, out)
                if (
                    sums is not None and d_logits is None
                ):  # not before the first product is under way
                    d_logits = projection.new_d_logits(max(group.rows for group in groups))
                target = None if sums is None or d_logits is None else d_logits[part]
                step(chunk, chunk_rows, at, len(group) - part.start, target)
            if sums is not None and d_logits is not None:
                if len(group) < group.rows:
                    d_logits[len(group) : group.rows] = 0.0
                sums.add(
                    group,
                    projection.products,
                    operands[0],
                    d_logits[: group.rows],
                    step.fp16_scale,
                )
    return None if sums is None else sums.gradients()


def _index(group: Group, rows: Rows) -> Index:
    """Return the index of a group's rows among all rows. Padding repeats the group's first row."""
    if len(group) == group.rows:
        return slice(group.start, group.stop)
    index = torch.arange(group.start, group.start + group.rows, device=rows.positions.device)
    index[len(group) :] = group.start
    return index


def _part(index: Index, part: slice) -> Index:
    """Return the index of a `part` of the rows at `index`."""
    return (
        slice(index.start + part.start, index.start + part.stop)
        if isinstance(index, slice)
        else index[part]
    )


def _positions(rows: Rows, index: Index, n: int) -> Index:
    """Return the positions of the rows at `index`; a slice, which needs no copy, if the rows are all n positions."""
    return index if isinstance(index, slice) and len(rows) == n else rows.positions[index]
