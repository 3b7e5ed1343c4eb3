"""Calls whose results are numbers per position, above all log-probabilities, and their forward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from grpo_kernels.backends.interface import STATISTICS
from grpo_kernels.base.checks import check_ids, check_mask, check_number, check_shape, check_tensor
from grpo_kernels.batch.tokens import counted_positions
from grpo_kernels.call.expected import ExpectedRows, read_expected
from grpo_kernels.call.module_head import whole_reference
from grpo_kernels.call.output import Scores
from grpo_kernels.call.plan import Call, plan_call
from grpo_kernels.call.planned_head import PlannedHead
from grpo_kernels.call.run import Execution
from grpo_kernels.engine.autograd import LinearLogprob
from grpo_kernels.engine.device import device_of
from grpo_kernels.engine.records import Rows
from grpo_kernels.engine.request import Request
from grpo_kernels.head.lm_head import LMHead


@dataclass(frozen=True, eq=False)
class ScoreCall(Call[ExpectedRows, ExpectedRows]):
    """A call whose results are numbers per position; this class is the call of `linear_logprob`.

    Subclasses override the methods about ids and about the expected gradient.
    """

    mask: Tensor | None  # (...)
    temperature: float | Tensor  # a number, or one per position
    outputs: tuple[str, ...]
    ids: Tensor | None  # (...)
    expected: Any = None  # here `Expected`

    function = "linear_logprob"

    @property
    def scores_ids(self) -> bool:
        """True if the call computes the ids' log-probabilities."""
        return self.ids is not None

    @property
    def entropy(self) -> bool:
        """True if the call computes the entropy."""
        return "entropy" in self.outputs

    @property
    def extras(self) -> tuple[str, ...]:
        """The outputs other than the entropy, in their order."""
        return tuple(name for name in self.outputs if name != "entropy")

    def check(self, head: LMHead, execution: Execution) -> LMHead:
        """Raise unless the tensors fit each other; return the head as it is."""
        head.check()
        self.check_positions(head.hidden)
        if self.mask is not None:
            check_mask("mask", self.mask, self.ids_of(head.hidden))
        return head

    def check_positions(self, hidden: Tensor) -> None:
        """Raise unless ids and outputs fit the hidden states."""
        if self.ids is not None:
            check_ids("ids", self.ids, hidden)
        unknown = set(self.outputs) - {"entropy", *STATISTICS}
        if unknown:
            raise ValueError(
                f"extras: expected some of {', '.join(STATISTICS)}, got {sorted(unknown)}"
            )

    def ids_of(self, hidden: Tensor) -> Tensor:
        """Return the ids, or zeros, one per position of hidden states (..., H)."""
        if self.ids is not None:
            return self.ids
        return hidden.new_zeros((), dtype=torch.long).expand(hidden.shape[:-1])

    def read(self, planned: PlannedHead) -> tuple[Rows, ExpectedRows]:
        """Return the rows and their expected gradient."""
        ids, dtype = self.ids_of(planned.head.hidden), planned.plan.accumulator
        positions = counted_positions("mask", self.mask, ids)
        inverse = _inv_temperature(self.temperature, ids, positions, dtype)
        rows = Rows(positions, ids.detach().reshape(-1)[positions].long(), inverse)
        expected = self.expectation(planned.head.hidden, positions, dtype)
        return rows, replace(expected, is_captured=device_of(positions.device).is_capturing())

    def expectation(self, hidden: Tensor, positions: Tensor, dtype: torch.dtype) -> ExpectedRows:
        """Return the expected gradient at `positions` (n,)."""
        return read_expected(
            self.expected, self.ids_of(hidden), positions, dtype, entropy=self.entropy
        )

    def gradient(self, planned: PlannedHead, read: ExpectedRows) -> ExpectedRows:
        """Return `read`, which is the expected gradient."""
        return read


def score(call: ScoreCall, head: LMHead, execution: Execution) -> Scores:
    """Plan the call, run one forward, and return the results in the shape of the positions.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it. With a group, on all of its ranks.
    """
    with whole_reference(head) as whole:
        return scored(call, *plan_call(call, whole, execution)[:2])


def scored(call: ScoreCall, head: LMHead, request: Request) -> Scores:
    """Run one forward of a planned call."""
    operands = head.operands(request.rows.positions)
    logps, entropies, divergence, *extras = LinearLogprob.apply(
        request, operands.teacher, *operands
    )
    results = {
        "logps": logps if call.scores_ids else None,
        "entropies": entropies,
        "divergence": divergence,
    }
    results |= dict(zip(request.extras, extras, strict=True))
    shape = head.hidden.shape[:-1]
    return Scores(**{name: x.view(shape) for name, x in results.items() if x is not None})


def _inv_temperature(
    temperature: float | Tensor, ids: Tensor, positions: Tensor, dtype: torch.dtype
) -> float | Tensor:
    """Return 1 / temperature of the rows at `positions` (n,) of `ids`: a number, or (n, 1) if it is one per position.

    Raises:
        TypeError, ValueError: a number that is not > 0; a tensor that does not fit the ids, or, on a CPU, has wrong
            numbers.
    """
    if not isinstance(temperature, Tensor):
        check_number("temperature", temperature, 0.0)
        return 1.0 / float(temperature)
    check_tensor("temperature", temperature, like=ids, floating=True)
    check_shape("temperature", temperature, ("that of the ids", tuple(ids.shape)))
    rows = temperature.detach().reshape(-1)[positions].to(dtype)
    bad = ~((rows > 0) & torch.isfinite(rows))
    if rows.device.type == "cpu" and bool(bad.any()):
        got = rows[bad][0].item()
        raise ValueError(
            f"temperature: expected finite numbers > 0 where the mask counts, got {got}"
        )
    return (1.0 / rows)[:, None]
