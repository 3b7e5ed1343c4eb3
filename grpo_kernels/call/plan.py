"""Plan a call: check its options, project its head, and ask an engine for its rows."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.backends import check_backend, choose_backend
from grpo_kernels.base.checks import check_budget, check_counted_ids, check_gather, warn_once
from grpo_kernels.base.choices import BackendName, EngineName
from grpo_kernels.base.distributed import Each, check_same
from grpo_kernels.base.tensors import map_tensors
from grpo_kernels.call.expected import RowGradient
from grpo_kernels.engine.device import FreeMemory, default_workspace, device_of
from grpo_kernels.engine.engines import check_engine, choose_engine
from grpo_kernels.engine.plan import Gather, HeadPlan, Request, Stored
from grpo_kernels.engine.records import NeedsGrad, Rows
from grpo_kernels.engine.top_k import TopKLogps
from grpo_kernels.engine.vocab_parallel import widest_part
from grpo_kernels.head.head import Head
from grpo_kernels.head.lm_head import LMHead


@dataclass(frozen=True, eq=False)
class Run:
    """Options of how a call is computed; the results are the same up to rounding.

    Args:
        engine: one of `grpo_kernels.typing.EngineName`.
        backend: one of `grpo_kernels.typing.BackendName`.
        workspace_bytes: bound on temporary memory, whatever the number of tokens. None: 512 MiB,
            over kept sets 64 MiB; on a GPU up to 3 GiB, by the size of the head and the free
            memory.
        gather: makes a context in which the weight is whole (DeepSpeed ZeRO-3), for a backward that
            reads it again.

    Wrong values raise TypeError or ValueError in the call, before any work is done.
    """

    engine: EngineName = "auto"
    backend: BackendName = "auto"
    workspace_bytes: int | None = None
    gather: Gather | None = None


def check_run(run: Any) -> None:
    """Raise unless `run` is a `Run` of valid options; its engine may still not serve."""
    if not isinstance(run, Run):
        raise TypeError(f"run: expected a Run, got {type(run).__name__}")
    check_gather(run.gather)
    check_engine(run.engine)
    check_backend(run.backend)
    if run.workspace_bytes is not None:
        check_budget(run.workspace_bytes)


class Call:
    """A call while it is planned.

    Attributes:
        head: the head, with this rank's tensors.
        run: the options of the call.
        rows: the rows to compute.
        plan, needs_grad: of the head; there from `make_plan` on.
    """

    head: LMHead
    run: Run
    rows: Rows
    plan: HeadPlan
    needs_grad: NeedsGrad

    def __init__(self, head: LMHead, run: Run) -> None:
        self.head, self.run = head, run

    def make_plan(self, *, backend: BackendName | None = None, jsd_beta: float = 1.0) -> None:
        """Plan how rows of the checked head are projected. Does not wait for the device.

        Args:
            backend: overrides that of the options, unless it is None.
            jsd_beta: the divergence from the head's reference (`backends.interface.Teacher`).
        """
        check_run(self.run)
        head, weight = self.head, self.head.weight
        self.needs_grad, dtype = head.needs_grad(), head.compute_dtype()
        _warn_if_promoted("hidden", head.hidden, "weight", weight, dtype)
        other = head.reference
        memory = FreeMemory.of(
            weight,
            head.hidden,
            self.needs_grad,
            dtype,
            self.run.workspace_bytes,
            asks_tight=self.run.engine == "auto",
            reference=None if other is None else (other.weight, other.compute_dtype(dtype)),
        )
        row_backend, _ = choose_backend(backend or self.run.backend, head.hidden.device, dtype)
        self.plan = HeadPlan(
            backend=row_backend,
            compute_dtype=dtype,
            workspace_bytes=self._budget(weight, memory),
            **_constants(head, dtype),
            memory=memory,
        )
        if other is None:
            return
        of_other, prefix = other.compute_dtype(dtype), other.prefix
        _warn_if_promoted(
            f"{prefix}hidden", other.hidden, f"{prefix}weight", other.weight, of_other
        )
        teacher = replace(self.plan, compute_dtype=of_other, **_constants(other.head, of_other))
        self.plan = replace(self.plan, teacher=teacher, jsd_beta=jsd_beta)

    def _budget(self, weight: Tensor, memory: FreeMemory) -> int:
        """Return the bytes that the options name, else the default of `weight` and the second
        head."""
        if self.run.workspace_bytes is not None:
            return self.run.workspace_bytes
        heads = 1 if self.head.reference is None else 2
        return default_workspace(weight, self.needs_grad, memory, heads=heads)

    def compared(self) -> dict[str, Any]:
        """Return what the ranks of a divided head compare, and this rank's integers."""
        empty = map_tensors(lambda x: x[:0], self.head)  # their numbers of rows may differ
        same = {x.name: getattr(empty, x.name) for x in fields(empty) if x.name != "process_group"}
        same |= {x: getattr(self.run, x) for x in ("engine", "backend", "workspace_bytes")}
        plans = [x for x in (self.plan, self.plan.teacher) if x is not None]
        same |= {
            "hidden": self.head.hidden,
            "counted tokens": len(self.rows),
            "gradients wanted": self.needs_grad,
            "dtype of the products": [x.compute_dtype for x in plans],
            "backend that serves": self.with_backend().plan.backend.name,
        }
        this_rank = {"rows of weight": self.head.weight.shape[0], **asdict(self.plan.memory)}
        return same | {name: Each(x) for name, x in this_rank.items()}

    def divide(self, values: Mapping[str, Any]) -> None:
        """Keep this rank's rows of a divided head, and plan by the memory that all ranks have."""
        self.head, shard, memory = self.head.divided(values)
        if shard is None:
            return
        budget = self._budget(widest_part(self.head.weight, shard), memory)
        plan = replace(self.plan, shard=shard, memory=memory, workspace_bytes=budget)
        if plan.teacher is not None:
            teacher = replace(plan.teacher, memory=memory, workspace_bytes=budget)
            plan = replace(plan, teacher=teacher)
        self.plan = plan

    @property
    def ids_here(self) -> tuple[int, int]:
        """The number of ids of the whole vocabulary, and the first id of this rank's rows."""
        shard = self.plan.shard
        return (self.head.weight.shape[0], 0) if shard is None else (shard.vocab, shard.start)

    def check_range(self, name: str, rows: Rows) -> Rows:
        """Return `rows` with ids in range (argument `name`), counted from this rank's first."""
        vocab, start = self.ids_here
        ids, marked = rows.ids, None
        invalid = check_counted_ids(name, ids, vocab)
        if invalid is not None:
            ids, marked = ids.masked_fill(invalid, 0), ids.masked_fill(invalid, -1)
        return replace(rows, ids=ids - start if start else ids, invalid=invalid, marked=marked)

    def with_backend(self) -> Call:
        """Return the call with the backend that its options name."""
        call, device = copy.copy(self), self.head.hidden.device
        backend, _ = choose_backend(self.run.backend, device, self.plan.compute_dtype)
        call.plan = replace(self.plan, backend=backend)
        return call

    def request(
        self,
        rows: Rows,
        gradient: RowGradient,
        *,
        entropy: bool = True,
        extras: tuple[str, ...] = (),
    ) -> Request:
        """Return the request of `rows` to the engine that the options name, or to the cheapest.

        It has as much of the rows' gradient as the engine computes in its first pass.
        """
        needs_grad = self.needs_grad
        # only with a frozen head is `of_entropy` asked, which may evaluate an objective
        frozen_head = needs_grad.hidden and not needs_grad.head
        engine = choose_engine(
            gradient.coupling,
            self.run.engine,
            hidden_trains=needs_grad.hidden,
            head_trains=needs_grad.head,
            entropy_gradient=frozen_head and gradient.of_entropy,
            mixed_gradient=isinstance(rows.top_k, TopKLogps)
            or (self.plan.teacher is not None and gradient.of_logps),
            tight_memory=self.plan.memory.tight,
        )
        return Request(
            rows=rows,
            plan=self.plan,
            needs_grad=needs_grad,
            engine=engine,
            entropy=entropy,
            extras=extras,
            coefficients_of=gradient.coefficients_of,
            compares=gradient.is_expected,
            may_have_grad=gradient.may_have_grad if engine.stores_gradient else None,
            token_loss=gradient.token_loss(self.plan) if engine.stores is Stored.GRADIENT else None,
            gathered_weight=self.run.gather or nullcontext,
        )


@contextmanager
def planned(
    function: str, head: LMHead, run: Run | None, arguments: Mapping[str, Any]
) -> Iterator[Call]:
    """Yield the `Call` of a public `function`, to be checked and planned within the block.

    What may raise on one rank alone stands in the block, which calls `make_plan` and sets `rows`.
    At its end the ranks of a divided head compare their calls, with the `arguments` by name.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it. With a group, on all ranks.
    """
    head = head.grouped()
    with check_same("process_group", head.process_group, function) as values:
        call = Call(head.local(), Run() if run is None else run)
        yield call
        if head.process_group is not None:
            values |= {**arguments, **call.compared()}
    if head.process_group is not None:
        call.divide(values)


def _constants(head: Head, dtype: torch.dtype) -> dict[str, Any]:
    """Return the fields of a `HeadPlan` that turn products with operands of `dtype` into logits."""
    return {
        "logit_scale": head.logit_scale,
        "softcap": head.final_logit_softcapping,
        "round_logits": head.logits_dtype == "input" and dtype.itemsize < 4,
    }


def _warn_if_promoted(
    name: str, hidden: Tensor, weight_name: str, weight: Tensor, dtype: torch.dtype
) -> None:
    """Warn, once, if dtype promotion makes the products fp32, which is likely a mistake.

    That is, for a 16-bit weight, on a GPU that multiplies 16-bit operands an order of magnitude
    faster. An fp32 weight is taken as meant.
    """
    device = device_of(weight.device)
    if dtype != torch.float32 or weight.dtype.itemsize != 2 or not device.slow_fp32:
        return
    if device.mixed_products:  # else they would be multiplied in fp32 anyway
        warn_once(
            f"{name} in {hidden.dtype} with a {weight_name} in {weight.dtype}, outside autocast, "
            "is multiplied in torch.float32, which takes a GPU about ten times as long as 16 bits. "
            f"Cast {name} to the dtype of {weight_name}, or call within torch.autocast; if float32 "
            f"is meant, cast {weight_name} to it",
            RuntimeWarning,
        )
