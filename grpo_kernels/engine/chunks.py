"""Chunks of a sweep over the rows of a head, and the bytes that they take."""

from __future__ import annotations

from grpo_kernels.engine.device import device_of
from grpo_kernels.engine.head_plan import HeadPlan
from grpo_kernels.engine.plan import Costs, Group, plan_groups
from grpo_kernels.engine.records import NeedsGrad, Operands, Rows
from grpo_kernels.engine.vocab_parallel import widest_part


def plan_chunks(rows: Rows, head: Operands, plan: HeadPlan, needs_grad: NeedsGrad | None) -> list[Group]:
    """Return the groups of a sweep over `rows`."""
    costs, device = costs_of(rows, head, plan, needs_grad), device_of(head.weight.device)
    return plan_groups(len(rows), plan.workspace_bytes, costs, device)


def planned_bytes(rows: Rows, head: Operands, plan: HeadPlan, needs_grad: NeedsGrad | None) -> int:
    """Return the peak bytes of a sweep's chunks: at most `HeadPlan.workspace_bytes`, if that is enough for a chunk of
    `Device.fewest_rows`. Works on meta tensors too.
    """
    costs = costs_of(rows, head, plan, needs_grad)
    return max((costs.taken(group) for group in plan_chunks(rows, head, plan, needs_grad)), default=0)


def costs_of(rows: Rows, head: Operands, plan: HeadPlan, needs_grad: NeedsGrad | None) -> Costs:
    """Return the costs of a sweep: a chunk's logits; a group's operands, and its d logits if of another dtype."""
    products, device = plan.products(widest_part(head.weight, plan.shard)), device_of(head.weight.device)
    vocab = products.weight.shape[0]
    width = device.row_width(vocab)
    row_bytes = width * plan.accumulator.itemsize
    separate = needs_grad is not None and products.gradient_dtype != plan.accumulator
    chunk_row_bytes, slice_bytes, with_teacher = row_bytes, products.slice_bytes, plan.teacher is not None
    if rows.top_k is not None:
        chunk_row_bytes += rows.top_k.row_bytes()
    if plan.teacher is not None and head.teacher is not None:
        other = plan.teacher.products(widest_part(head.teacher.weight, plan.shard))
        chunk_row_bytes, slice_bytes = 2 * row_bytes + other.hidden_bytes(), max(slice_bytes, other.slice_bytes)

    group_row_bytes = products.hidden_bytes() + (width * products.gradient_dtype.itemsize if separate else 0)

    def scratch_bytes(m: int) -> int:  # products and row work never run at the same time
        return max(slice_bytes, plan.backend.scratch_rows(m, vocab, teacher=with_teacher) * row_bytes)

    grouped = separate and needs_grad is not None and needs_grad.weight and not products.scales_gradient
    return Costs(chunk_row_bytes, group_row_bytes, grouped, scratch_bytes)
