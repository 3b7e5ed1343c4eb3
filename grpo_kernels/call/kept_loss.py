"""One call of the loss over kept sets: `call.kept` scores, `call.loss_from_logps` computes the loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from grpo_kernels.batch.inputs import LossInputs
from grpo_kernels.call.kept import KeptCall, scored_kept
from grpo_kernels.call.loss import Loss, LossCall
from grpo_kernels.call.loss_from_logps import loss_from_logps
from grpo_kernels.call.output import LossOutput
from grpo_kernels.call.plan import check_call
from grpo_kernels.call.planned_head import PlannedHead
from grpo_kernels.call.run import Execution
from grpo_kernels.engine.records import Rows
from grpo_kernels.head.lm_head import LMHead


@dataclass(frozen=True, eq=False)
class KeptLossCall(KeptCall):
    """A loss, and the sets that its tokens are scored over."""

    loss: LossCall = field(kw_only=True)

    function, ids_name = "grpo_loss", "completion_ids"

    @staticmethod
    def of(loss: LossCall, kept_ids: Any, without_set: Any) -> KeptLossCall:
        """Return the call of `loss` with the arguments `kept_ids` and `without_set`."""
        inputs: LossInputs = loss.inputs
        return KeptLossCall(
            inputs.completion_mask,
            loss.config.temperature,
            (),
            inputs.completion_ids,  # type: ignore[arg-type]  # checked before it is read
            kept_ids=kept_ids,
            without_set=without_set,
            entropy_over=True,
            others=inputs.logps,
            loss=loss,
        )

    def check(self, head: LMHead, execution: Execution) -> LMHead:
        """Check the inputs of the loss, then the sets."""
        if self.loss.config.needs_reference_head:
            raise ValueError(
                "kl_estimator: expected 'k1', 'k2' or 'k3' with kept_ids, which truncate the policy, got 'full', the "
                "divergence over the whole vocabulary"
            )
        head = self.loss.check(head, execution)
        self.check_sets(execution)
        return head

    def read(self, planned: PlannedHead) -> tuple[Rows, Any]:
        """Return the rows, and the tokens that count."""
        return self.loss.read(planned)


def kept_loss(call: KeptLossCall, head: LMHead, execution: Execution) -> LossOutput:
    """Compute the loss over kept sets.

    Raises:
        TypeError, ValueError: a wrong argument; the message names it. With a group, on all of its ranks.
    """
    tokens: Any  # `KeptLossCall.read` returns `Tokens`
    planned, rows, tokens = check_call(call, head, execution)
    loss = Loss.of(call.loss.inputs, tokens, call.loss.config, call.loss.objective)
    expected = loss.expectation() if call.without_set == "full" else None
    scores, set_metrics = scored_kept(call, planned, rows, expected)
    out = loss_from_logps(loss, scores.logps, scores.entropies, engine="kept_sets")
    out.metrics = out.metrics.joined(set_metrics)
    return out
