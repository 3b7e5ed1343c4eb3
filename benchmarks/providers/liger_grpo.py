"""Liger's own GRPO loss in chunks of a sequence, its default; tested with 0.8.5. 8 NVH, 6 with a frozen head.

Its loss mathematics is not compiled, which is not its default: on a CPU compiling took the first call 8 s longer, and
no later call was faster.
"""

from __future__ import annotations

from benchmarks.cases import EPSILON, Inputs
from benchmarks.events import Absence
from benchmarks.providers import Forward, Outcome


def liger_grpo(inputs: Inputs) -> Forward:
    """`LigerFusedLinearGRPOLoss`, its default chunk of one sequence."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    case = inputs.case
    if case.score:
        raise Absence("it has no log-probabilities to give")
    if case.top_entropy < 1:
        raise Absence("it has no top-entropy mask")
    if case.softcap is not None:
        raise Absence("it has no soft-cap")
    loss_fn = LigerFusedLinearGRPOLoss(
        beta=case.beta,
        compiled=False,
        use_ref_model=inputs.ref is not None,
        loss_type="dapo",
        importance_sampling_level="sequence" if case.sequence else "token",
        epsilon_low=EPSILON,
        epsilon_high=EPSILON,
    )

    def forward() -> Outcome:
        loss, _ = loss_fn(
            inputs.hidden,
            inputs.weight,
            inputs.ids,
            inputs.mask,
            inputs.advantages,
            old_per_token_logps=inputs.old,
            ref_per_token_logps=inputs.ref,
        )
        return Outcome(loss, note="chunk_size=1, compiled=False")

    return forward
