"""The head of a call after its checks: its tensors, and the plan of its products."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.backends import choose_backend
from grpo_kernels.base.checks import check_budget, check_counted_ids
from grpo_kernels.base.choices import BackendName
from grpo_kernels.call.expected import RowGradient
from grpo_kernels.call.run import Execution
from grpo_kernels.engine.device import device_of
from grpo_kernels.engine.engines import choose_engine
from grpo_kernels.engine.head_plan import HeadPlan
from grpo_kernels.engine.memory import FreeMemory, default_workspace
from grpo_kernels.engine.records import NeedsGrad, Rows
from grpo_kernels.engine.request import Engine, Request, Situation, Stored
from grpo_kernels.engine.vocab_parallel import Shard, widest_part
from grpo_kernels.head.head import Head
from grpo_kernels.head.lm_head import LMHead
from grpo_kernels.head.other_head import OtherHead


@dataclass(frozen=True)
class PlannedHead:
    """A checked `LMHead`, its `HeadPlan`, and the gradients it wants."""

    head: LMHead
    plan: HeadPlan
    needs_grad: NeedsGrad
    execution: Execution

    def divided(self, values: Mapping[str, Any]) -> PlannedHead:
        """Keep this rank's rows of a divided head, and plan by the memory that all ranks have, from agreed `values`.

        Raises:
            ValueError: on all ranks: `vocab_size` does not fit the shards.
        """
        head, shard, memory = self.head.divided(values)
        if shard is None:
            return replace(self, head=head)
        budget = self.execution.workspace_bytes
        if budget is None:
            widest, heads = widest_part(head.weight, shard), 1 if head.reference is None else 2
            budget = default_workspace(widest, self.needs_grad, memory, heads=heads)
        plan = replace(self.plan, shard=shard, memory=memory, workspace_bytes=budget)
        if plan.teacher is not None:
            plan = replace(
                plan, teacher=replace(plan.teacher, memory=memory, workspace_bytes=budget)
            )
        return replace(self, head=head, plan=plan)

    def check_range(self, name: str, rows: Rows) -> Rows:
        """Return `rows` with ids (argument `name`) checked for range and counted from this rank's first row.

        Raises:
            ValueError: on a CPU, an id is out of range.
        """
        shard: Shard | None = self.plan.shard
        vocab, start = (
            (self.head.weight.shape[0], 0) if shard is None else (shard.vocab, shard.start)
        )
        ids, marked = rows.ids, None
        invalid = check_counted_ids(name, ids, vocab)
        if invalid is not None:
            ids, marked = ids.masked_fill(invalid, 0), ids.masked_fill(invalid, -1)
        return replace(rows, ids=ids - start if start else ids, invalid=invalid, marked=marked)

    def choose_engine(self, gradient: RowGradient) -> Engine:
        """Return the requested engine, or the cheapest."""
        needs_grad = self.needs_grad
        frozen_head = (
            needs_grad.hidden and not needs_grad.head
        )  # only then: `of_entropy` may evaluate an objective
        situation = Situation(
            gradient.coupling,
            hidden_trains=needs_grad.hidden,
            head_trains=needs_grad.head,
            entropy_gradient=frozen_head and gradient.of_entropy,
            mixed_gradient=self.plan.teacher is not None and gradient.of_logps,
            tight_memory=self.plan.memory.tight,
        )
        return choose_engine(situation, self.execution.engine)

    def with_backend(self) -> PlannedHead:
        """Return the same head with the backend that its execution names."""
        backend, _ = choose_backend(
            self.execution.backend, self.head.hidden.device, self.plan.compute_dtype
        )
        return replace(self, plan=replace(self.plan, backend=backend))

    def request(
        self,
        rows: Rows,
        gradient: RowGradient,
        engine: Engine,
        *,
        entropy: bool = True,
        extras: tuple[str, ...] = (),
    ) -> Request:
        """Return the request for `rows`, and as much of their gradient as `engine` computes in its first pass."""
        return Request(
            rows=rows,
            plan=self.plan,
            needs_grad=self.needs_grad,
            engine=engine,
            entropy=entropy,
            extras=extras,
            coefficients_of=gradient.coefficients_of,
            compares=gradient.is_expected,
            may_have_grad=gradient.may_have_grad if engine.stores_gradient else None,
            token_loss=gradient.token_loss(self.plan) if engine.stores is Stored.GRADIENT else None,
            gathered_weight=self.execution.gather or nullcontext,
        )


def plan_head(
    head: LMHead, execution: Execution, *, backend: BackendName | None = None, jsd_beta: float = 1.0
) -> PlannedHead:
    """Plan how the rows of a checked `head` are projected. Does not wait for the device.

    Args:
        backend: overrides that of the execution; None: that of the execution.
        jsd_beta: the divergence from the head's reference, if it has one (`backends.interface.Teacher`).

    Raises:
        TypeError, ValueError: a wrong budget or backend.
    """
    budget, weight = execution.workspace_bytes, head.weight
    if budget is not None:
        check_budget(budget)
    needs_grad, dtype = head.needs_grad(), head.compute_dtype()
    _warn_if_promoted("hidden", head.hidden, "weight", weight, dtype)
    other, asks_tight = head.reference, execution.engine == "auto"
    of_reference = None if other is None else (other.weight, other.compute_dtype(dtype))
    memory = FreeMemory.of(
        weight,
        head.hidden,
        needs_grad,
        dtype,
        budget,
        asks_tight=asks_tight,
        reference=of_reference,
    )
    if budget is None:
        budget = default_workspace(weight, needs_grad, memory, heads=1 if other is None else 2)
    row_backend, _ = choose_backend(backend or execution.backend, head.hidden.device, dtype)
    plan = HeadPlan(
        backend=row_backend,
        compute_dtype=dtype,
        workspace_bytes=budget,
        **_constants(head, dtype),
        memory=memory,
    )
    if other is not None:
        plan = replace(plan, teacher=_plan_reference(other, plan, dtype), jsd_beta=jsd_beta)
    return PlannedHead(head, plan, needs_grad, execution)


def _plan_reference(reference: OtherHead, plan: HeadPlan, dtype: torch.dtype) -> HeadPlan:
    """Plan the reference's projection, given the policy's `plan`, whose products take operands of `dtype`."""
    operand_dtype, prefix = reference.compute_dtype(dtype), reference.prefix
    _warn_if_promoted(
        f"{prefix}hidden", reference.hidden, f"{prefix}weight", reference.weight, operand_dtype
    )
    return replace(plan, compute_dtype=operand_dtype, **_constants(reference.head, operand_dtype))


def _constants(head: Head, dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields of a `HeadPlan` that turn products with `head`, of operands of `dtype`, into logits."""
    return {
        "logit_scale": head.logit_scale,
        "softcap": head.final_logit_softcapping,
        "round_logits": head.logits_dtype == "input" and dtype.itemsize < 4,
    }


def _warn_if_promoted(
    name: str, hidden: Tensor, weight_name: str, weight: Tensor, dtype: torch.dtype
) -> None:
    """Warn, once, if dtype promotion makes the products fp32, which is likely a mistake.

    That is, for a 16-bit weight, on a GPU that multiplies 16-bit operands an order of magnitude faster. An fp32 weight
    is taken as meant.
    """
    device = device_of(weight.device)
    if dtype != torch.float32 or weight.dtype.itemsize != 2 or not device.slow_fp32:
        return
    if device.mixed_products:  # else they would be multiplied in fp32 anyway
        _warn_of_promotion(name, hidden.dtype, weight_name, weight.dtype)


@functools.cache
def _warn_of_promotion(
    name: str, hidden: torch.dtype, weight_name: str, weight: torch.dtype
) -> None:
    warnings.warn(
        f"grpo_kernels: {name} in {hidden} with a {weight_name} in {weight}, outside autocast, is multiplied in "
        f"torch.float32, which takes a GPU about ten times as long as 16 bits. Cast {name} to the dtype of "
        f"{weight_name}, or call within torch.autocast; if float32 is meant, cast {weight_name} to it",
        RuntimeWarning,
        stacklevel=3,
    )
