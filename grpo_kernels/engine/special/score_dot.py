"""The engine that scores without any logits in memory: the backend does the projection itself (`DotRowBackend`)."""

from __future__ import annotations

import torch

from grpo_kernels.backends.interface import DotRowBackend
from grpo_kernels.engine.passes import recompute
from grpo_kernels.engine.records import Operands, row_bias
from grpo_kernels.engine.request import Engine, ForwardResult, Request, Stored


def score_without_logits(head: Operands, request: Request) -> ForwardResult:
    """Find the statistics of all rows."""
    plan, rows = request.plan, request.rows
    assert isinstance(plan.backend, DotRowBackend)
    hidden, weight = (
        head.hidden[rows.positions].to(plan.compute_dtype),
        head.weight.to(plan.compute_dtype),
    )
    transform = plan.transform(row_bias(head.bias, plan.accumulator), rows.inv_temperature)
    ids = rows.ids if plan.shard is None else plan.shard.local_ids(rows.ids)
    stats = plan.backend.score_dot(
        hidden, weight.contiguous(), ids, transform, entropy=request.entropy
    )
    if plan.shard is not None:
        stats = plan.shard.joined(stats, rows.ids, transform)
    if rows.invalid is not None:
        stats.logps.masked_fill_(rows.invalid, torch.nan)
    return ForwardResult(stats)


SCORE_DOT = Engine(
    name="score_dot",
    stores=Stored.NOTHING,
    serves=lambda call: call.no_gradient and call.scores_without_logits,
    needs="that no gradient is wanted, no output but the entropy, no lora, and the triton backend",
    first_pass=score_without_logits,
    second_pass=recompute,
)
