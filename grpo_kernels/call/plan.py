"""Turn the arguments of a call into a `Request` to an engine: check them, compare them over the ranks, plan."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from grpo_kernels.backends.interface import FusedRowBackend
from grpo_kernels.base.agreement import check_same, described
from grpo_kernels.base.checks import check_gather, check_mask
from grpo_kernels.batch.tokens import counted_positions
from grpo_kernels.call.checked_head import CheckedHead, plan_head
from grpo_kernels.call.expected import ExpectedRows
from grpo_kernels.call.options import Execution, described_temperature, inv_temperature
from grpo_kernels.engine.device import device_of
from grpo_kernels.engine.head_plan import HeadPlan
from grpo_kernels.engine.records import Rows
from grpo_kernels.engine.request import Coupling, Engine, Request, Stored
from grpo_kernels.head.lm_head import LMHead
from grpo_kernels.token_loss.record import TokenLoss


@dataclass(frozen=True, eq=False)
class PositionInputs:
    """Per-position arguments of a call, and its outputs; `grpo_loss` has `LossInputs` instead.

    Subclasses override what differs between the calls' plans.
    """

    mask: Tensor | None  # (...)
    temperature: float | Tensor  # a number, or one per position
    outputs: tuple[str, ...]

    function: ClassVar[str]  # the public function's name
    projects: ClassVar[bool] = False  # True if the function takes a `projection`
    jsd_beta = 1.0  # the divergence from the head's reference, see `Teacher`

    @property
    def scores_ids(self) -> bool:
        """True if the ids' log-probabilities are asked for."""
        return True

    @property
    def entropy(self) -> bool:
        """True if the entropy is asked for."""
        return "entropy" in self.outputs

    @property
    def extras(self) -> tuple[str, ...]:
        """Return the statistics to find besides log-probability, entropy and divergence."""
        return ()

    def check(self, head: LMHead) -> Tensor:
        """Return the ids, or zeros of the positions' shape if there are none.

        Raises:
            TypeError, ValueError: an argument does not fit the head.
        """
        raise NotImplementedError

    def read(self, rows: Rows, ids: Tensor, hidden: Tensor, dtype: torch.dtype) -> tuple[Rows, ExpectedRows]:
        """Return the rows, whose ids are not yet checked for range, and their expected upstream gradient."""
        raise NotImplementedError

    def check_range(self, planned: CheckedHead, rows: Rows) -> Rows:
        """Return the rows with ids checked for range and counted from this rank's first row.

        Raises:
            ValueError: on a CPU, an id is out of range.
        """
        return planned.check_range("ids", rows)

    def described(self, rows: Rows) -> dict[str, Any]:
        """Return the values that must be equal on all ranks of a divided head."""
        return {"entropy": self.entropy, "extras": self.extras, "ids": rows.ids}


def check_call(inputs: PositionInputs, head: LMHead, execution: Execution) -> tuple[CheckedHead, Rows, ExpectedRows]:
    """Check the arguments of a call; return this rank's head, the rows, and their expected upstream gradient.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it. With a group, on all of its ranks.
    """
    head = head.grouped()
    with check_same("process_group", head.process_group, inputs.function) as values:
        execution.check(projects=inputs.projects)
        check_gather(execution.gather)
        own = head.local()
        own.check()
        ids = inputs.check(own)
        if inputs.mask is not None:
            check_mask("mask", inputs.mask, ids)
        planned = plan_head(own, execution, jsd_beta=inputs.jsd_beta)
        dtype, positions = planned.plan.accumulator, counted_positions("mask", inputs.mask, ids)
        inverse = inv_temperature(inputs.temperature, ids, positions, dtype)
        rows = Rows(positions, ids.detach().reshape(-1)[positions].long(), inverse)
        rows, expected = inputs.read(rows, ids, own.hidden, dtype)
        if head.process_group is not None:
            values |= planned.described_rows() | {"hidden": described(own.hidden)} | execution.described()
            values |= {"mask": positions, **inputs.described(rows), **expected.described()}
            values |= described_temperature(inputs.temperature, inverse)
    planned = planned.divided(values)
    return planned, inputs.check_range(planned, rows), expected


def plan_call(inputs: PositionInputs, head: LMHead, execution: Execution) -> tuple[LMHead, Request]:
    """Check the arguments of a call and plan it; return this rank's head, and the request.

    Raises:
        TypeError, ValueError: as `check_call`.
    """
    planned, rows, expected = check_call(inputs, head, execution)
    engine = _engine(inputs, planned, expected)
    request = Request(
        rows=rows,
        plan=planned.plan,
        needs_grad=planned.needs_grad,
        engine=engine,
        entropy=inputs.entropy,
        extras=inputs.extras,
        coefficients=expected.coefficients,
        may_have_grad=expected.may_have_grad,
        token_loss=_token_loss(planned.plan, expected) if engine.stores is Stored.GRADIENT else None,
        gathered_weight=execution.gather or nullcontext,
    )
    return planned.head, request


def _engine(inputs: PositionInputs, planned: CheckedHead, expected: ExpectedRows) -> Engine:
    # comparing the upstream gradient with the expected one waits, which the capture of a CUDA graph forbids
    captured = device_of(planned.head.hidden.device).is_capturing()
    unknown = captured or expected.coefficients is None
    nothing_given = expected.coefficients is None and expected.may_have_grad is None
    coupling = Coupling.of(known=expected.given is not None and not unknown, coupled=unknown)
    coupling = Coupling.UNKNOWN if nothing_given and not captured else coupling
    return planned.choose_engine(
        coupling,
        entropy_gradient=expected.of_entropy,
        mixed_gradient=planned.plan.teacher is not None and expected.of_logps,
        only_logps=not inputs.extras,
    )


def _token_loss(plan: HeadPlan, expected: ExpectedRows) -> TokenLoss | None:
    """Return the expected gradient of divergences from another head as a loss, for a backend that fuses."""
    if not fuses(plan) or plan.teacher is None or expected.given is None:
        return None
    weights = expected.given.d_divergence
    assert weights is not None
    return TokenLoss(
        surrogate="constant",
        constants=(),
        kl="full",
        corrects_kl=False,
        advantages=None,
        d_logps=torch.zeros_like(weights) if expected.given.d_logp is None else expected.given.d_logp,
        weights=weights,
        old=None,
        ref=None,
        gate=None,
        beta=1.0,
        d_entropy=0.0,
    )


def no_ids(hidden: Tensor) -> Tensor:
    """Return zeros in the place of ids for the positions of hidden states (..., H)."""
    return hidden.new_zeros((), dtype=torch.long).expand(hidden.shape[:-1])


def fuses(plan: HeadPlan) -> bool:
    """Return True if one kernel can do a whole loss; a divided head's ranks meet between statistics and gradient."""
    return isinstance(plan.backend, FusedRowBackend) and plan.shard is None
