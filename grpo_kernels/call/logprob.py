"""One call of `linear_logprob`: its per-position arguments, and the forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kernels.backends.interface import STATISTICS
from grpo_kernels.base.checks import check_ids
from grpo_kernels.call.expected import Expected, ExpectedRows, read_expected
from grpo_kernels.call.options import Execution
from grpo_kernels.call.output import Scores
from grpo_kernels.call.plan import PositionInputs, plan_call
from grpo_kernels.call.within import whole_reference
from grpo_kernels.engine.autograd import LinearLogprob
from grpo_kernels.engine.records import Rows
from grpo_kernels.head.lm_head import LMHead


@dataclass(frozen=True, eq=False)
class ScoreInputs(PositionInputs):
    """The ids to score, (...), and the expected gradient."""

    ids: Tensor
    expected: Expected | None = None

    function = "linear_logprob"
    projects = True

    @property
    def extras(self) -> tuple[str, ...]:
        """Return the outputs other than the entropy, in their order."""
        return tuple(name for name in self.outputs if name != "entropy")

    def check(self, head: LMHead) -> Tensor:
        """Check the ids and the outputs; return the ids."""
        check_ids("ids", self.ids, head.hidden)
        unknown = set(self.outputs) - {"entropy", *STATISTICS}
        if unknown:
            raise ValueError(f"extras: expected some of {', '.join(STATISTICS)}, got {sorted(unknown)}")
        return self.ids

    def read(self, rows: Rows, ids: Tensor, hidden: Tensor, dtype: torch.dtype) -> tuple[Rows, ExpectedRows]:
        """Return the rows, and their expected upstream gradient."""
        return rows, read_expected(self.expected, ids, rows.positions, dtype, entropy=self.entropy)


def score(inputs: PositionInputs, head: LMHead, execution: Execution) -> Scores:
    """Plan the call, run one forward, and return the results in the shape of the positions.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it. With a group, on all of its ranks.
    """
    with whole_reference(head) as whole:
        own, request = plan_call(inputs, whole, execution)
        operands = own.operands(request.rows.positions)
        logps, entropies, divergence, *extras = LinearLogprob.apply(request, operands.teacher, *operands)
    found = {"logps": logps if inputs.scores_ids else None, "entropies": entropies, "divergence": divergence}
    found |= dict(zip(request.extras, extras, strict=True))
    shape = own.hidden.shape[:-1]
    return Scores(**{name: x.view(shape) for name, x in found.items() if x is not None})
