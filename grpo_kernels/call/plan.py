"""Turn a call's arguments into a `Request` to an engine: check them, compare them over the ranks, plan."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any, ClassVar, Generic, TypeVar

from grpo_kernels.base.agreement import Each, check_same
from grpo_kernels.base.choices import BackendName
from grpo_kernels.base.records import map_tensors
from grpo_kernels.batch.inputs import LossInputs
from grpo_kernels.call.expected import RowGradient
from grpo_kernels.call.planned_head import PlannedHead, plan_head
from grpo_kernels.call.run import Execution
from grpo_kernels.engine.records import Rows
from grpo_kernels.engine.request import Request
from grpo_kernels.head.lm_head import LMHead
from grpo_kernels.objective.config import LossConfig

T = TypeVar("T")  # the result of `Call.read` beside the rows
G = TypeVar("G", bound=RowGradient)


class Call(Generic[T, G]):
    """One call of a public function: its arguments by position, and how they become rows.

    `check_call` and `plan_call` call its methods in the order in which they stand here.
    """

    function: ClassVar[str]  # the public function's name
    ids_name: ClassVar[str] = "ids"  # the name of its argument
    backend: ClassVar[BackendName | None] = (
        None  # overrides that of the execution, unless it is None
    )
    jsd_beta: float = 1.0  # the divergence from the head's reference, see `Teacher`

    @property
    def entropy(self) -> bool:
        """True if the call computes entropies."""
        return True

    @property
    def extras(self) -> tuple[str, ...]:
        """Names of the results besides log-probability, entropy and divergence."""
        return ()

    def check(self, head: LMHead, execution: Execution) -> LMHead:
        """Return the head as the call uses it.

        Raises:
            TypeError, ValueError: an argument does not fit it.
        """
        raise NotImplementedError

    def read(self, planned: PlannedHead) -> tuple[Rows, T]:
        """Return the rows, with ids not yet checked for range, and the other inputs read."""
        raise NotImplementedError

    def check_range(self, planned: PlannedHead, rows: Rows) -> Rows:
        """Return the rows with ids checked for range and counted from this rank's first row.

        Raises:
            ValueError: on a CPU, an id is out of range.
        """
        return planned.check_range(self.ids_name, rows)

    def gradient(self, planned: PlannedHead, read: T) -> G:
        """Return the rows' gradient as far as it is known."""
        raise NotImplementedError


def check_call(call: Call[T, G], head: LMHead, execution: Execution) -> tuple[PlannedHead, Rows, T]:
    """Check the arguments of a call; return this rank's head, and both results of `Call.read`.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it. With a group, on all of its ranks.
    """
    head = head.grouped()
    with check_same("process_group", head.process_group, call.function) as of_shards:
        local = call.check(head.local(), execution)
        execution.check()
        planned = plan_head(local, execution, backend=call.backend, jsd_beta=call.jsd_beta)
        rows, read = call.read(planned)
        if head.process_group is not None:
            of_shards |= _of_rank(call, planned, rows)
    if head.process_group is not None:
        planned = planned.divided(of_shards)
    return planned, call.check_range(planned, rows), read


def _of_rank(call: Call[T, G], planned: PlannedHead, rows: Rows) -> dict[str, Any]:
    """Return the values that the ranks of a divided head compare, and the integers of this rank."""
    execution, plan, hidden = planned.execution, planned.plan, planned.head.hidden
    same = _arguments(map_tensors(lambda x: x[:0], planned.head)) | _arguments(call)
    same |= {x: getattr(execution, x) for x in ("engine", "backend", "workspace_bytes")}
    same |= {
        "hidden": hidden,
        "counted tokens": len(rows),
        "gradients wanted": planned.needs_grad,
        "dtype of the products": [plan.compute_dtype, plan.teacher and plan.teacher.compute_dtype],
        "backend that serves": planned.with_backend().plan.backend.name,
    }
    this_rank = {"rows of weight": planned.head.weight.shape[0], **asdict(plan.memory)}
    return same | {name: Each(x) for name, x in this_rank.items()}


def _arguments(record: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in (x.name for x in fields(record) if x.name != "process_group"):
        x = getattr(record, name)
        values |= _arguments(x) if isinstance(x, (Call, LossConfig, LossInputs)) else {name: x}
    return values


def plan_call(call: Call[T, G], head: LMHead, execution: Execution) -> tuple[LMHead, Request, G]:
    """Check the arguments of a call and plan it; return this rank's head, the request, and the gradient as far as it is
    known.

    Raises:
        TypeError, ValueError: as `check_call`; or no engine of that name gives this gradient.
    """
    planned, rows, read = check_call(call, head, execution)
    gradient = call.gradient(planned, read)
    engine = planned.choose_engine(gradient)
    request = planned.request(rows, gradient, engine, entropy=call.entropy, extras=call.extras)
    return planned.head, request, gradient
