"""One call of `linear_logprob_with`: its per-position arguments, and the forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from grpo_kernels.backends.interface import STATISTICS
from grpo_kernels.base.checks import check_ids
from grpo_kernels.call.expected import Expected, ExpectedRows, read_expected
from grpo_kernels.call.options import Execution, HeadOptions
from grpo_kernels.call.plan import PositionInputs, plan_call
from grpo_kernels.engine.autograd import LinearLogprob
from grpo_kernels.engine.records import Rows
from grpo_kernels.head.lm_head import LMHead


@dataclass(frozen=True, eq=False)
class ScoreInputs(PositionInputs):
    """The ids to score, (...), and the expected gradient."""

    ids: Tensor
    expected: Expected | None = None

    function = "linear_logprob"

    @property
    def extras(self) -> tuple[str, ...]:
        """Return the outputs other than the entropy, in their order."""
        return tuple(name for name in self.outputs if name != "entropy")

    def check(self, head: LMHead) -> Tensor:
        """Check the ids and the outputs; return the ids."""
        check_ids("ids", self.ids, head.hidden)
        unknown = set(self.outputs) - {"entropy", *STATISTICS}
        if unknown:
            raise ValueError(f"outputs: expected some of entropy, {', '.join(STATISTICS)}, got {sorted(unknown)}")
        return self.ids

    def read(self, rows: Rows, ids: Tensor, hidden: Tensor, dtype: torch.dtype) -> tuple[Rows, ExpectedRows]:
        """Return the rows, and their expected upstream gradient."""
        return rows, read_expected(self.expected, ids, rows.positions, dtype, entropy=self.entropy)


def score(inputs: ScoreInputs, head: LMHead, execution: Execution, options: HeadOptions) -> dict[str, Tensor]:
    """Plan the call, run one forward, and return the results in the shape of the ids.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it. With a group, on all of its ranks.
    """
    head, request = plan_call(inputs, head, execution, options)
    operands = head.operands(request.rows.positions)
    logps, entropies, _, *extras = LinearLogprob.apply(request, operands.teacher, *operands)
    results = {"logps": logps, **dict(zip(request.extras, extras, strict=True))}
    if entropies is not None:
        results["entropy"] = entropies
    return {name: x.view(inputs.ids.shape) for name, x in results.items()}
