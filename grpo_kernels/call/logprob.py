"""One call for log-probabilities: its arguments checked, its engine chosen, what is expected of its gradient read."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from grpo_kernels.backends.interface import STATISTICS
from grpo_kernels.base.agreement import check_same, described
from grpo_kernels.base.checks import check_gather, check_ids, check_mask
from grpo_kernels.batch.tokens import counted_positions
from grpo_kernels.call.expected import Expected, ExpectedRows, read_expected
from grpo_kernels.call.options import Execution, HeadOptions
from grpo_kernels.call.projection import PlannedHead, plan_head
from grpo_kernels.engine.records import Rows
from grpo_kernels.engine.request import Coupling, Request
from grpo_kernels.head.lm_head import LMHead


@dataclass(frozen=True, eq=False)
class ScoreInputs:
    """The arguments of `linear_logprob_with` that are about positions, and what of each is asked."""

    ids: Tensor  # (...)
    mask: Tensor | None  # (...)
    outputs: tuple[str, ...]
    expected: Expected | None = None

    @property
    def extras(self) -> tuple[str, ...]:
        """The outputs other than the entropy, in their order."""
        return tuple(name for name in self.outputs if name != "entropy")


def plan_logprob(
    inputs: ScoreInputs, head: LMHead, execution: Execution, options: HeadOptions
) -> tuple[LMHead, Request]:
    """Check the arguments of `linear_logprob_with` and plan its call: the tensors to multiply, and what is asked.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it. With a group, on all of its ranks.
    """
    head = head.grouped()
    with check_same("process_group", head.process_group, "linear_logprob") as values:
        check_gather(execution.gather)
        options, planned, rows, expected = _checked(inputs, head.local(), execution, options)
        if head.process_group is not None:
            values |= planned.described_rows() | _described(inputs, planned, rows, expected)
            values |= options.described(rows.inv_temperature)
    planned = planned.divided(values)
    rows = planned.read_rows("ids", rows)
    coupling = Coupling.CROSS_TOKEN if expected.coefficients is None else Coupling.TOKEN
    engine = planned.choose_engine(coupling, entropy_gradient=expected.of_entropy, only_logps=not inputs.extras)
    request = Request(
        rows=rows,
        plan=planned.plan,
        needs_grad=planned.needs_grad,
        engine=engine,
        entropy="entropy" in inputs.outputs,
        extras=inputs.extras,
        coefficients=expected.coefficients,
        may_have_grad=expected.may_have_grad,
        gathered_weight=execution.gather or nullcontext,
    )
    return planned.head, request


def _checked(
    inputs: ScoreInputs, head: LMHead, execution: Execution, options: HeadOptions
) -> tuple[HeadOptions, PlannedHead, Rows, ExpectedRows]:
    """The rows with ids as they came, which nobody has looked at. Waits for the device only at its end."""
    ids, mask = inputs.ids, inputs.mask
    head.check()
    check_ids("ids", ids, head.hidden)
    if mask is not None:
        check_mask("mask", mask, ids)
    unknown = set(inputs.outputs) - {"entropy", *STATISTICS}
    if unknown:
        raise ValueError(f"outputs: expected some of entropy, {', '.join(STATISTICS)}, got {sorted(unknown)}")
    options = options.checked()
    planned = plan_head(head, execution, options)
    dtype, positions = planned.plan.accumulator, counted_positions("mask", mask, ids)
    inv_t = options.inv_temperature(ids, positions, dtype)
    rows = Rows(positions, ids.detach().reshape(-1)[positions].long(), inv_t)
    expected = read_expected(inputs.expected, ids, positions, dtype, entropy="entropy" in inputs.outputs)
    return options, planned, rows, expected


def _described(inputs: ScoreInputs, planned: PlannedHead, rows: Rows, expected: ExpectedRows) -> dict[str, Any]:
    """Return which positions are scored, and for which of them a gradient is expected, for the ranks to compare."""
    return {
        "outputs": inputs.outputs,
        "hidden": described(planned.head.hidden),
        **planned.execution.described(),
        "mask": rows.positions,
        "ids": rows.ids,
        **expected.described(),
    }
