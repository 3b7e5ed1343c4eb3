"""Liger's own GRPO loss in chunks of a sequence, its default; tested with 0.8.5. 8 NVH, 6 with a frozen head.

By default its loss mathematics is compiled, and on a GPU it is here. On a CPU it is not: there compiling took the first
call 8 s longer, and no later call was faster.
"""

from __future__ import annotations

from benchmarks.cases import EPSILON, Inputs
from benchmarks.harness.events import Absence
from benchmarks.providers import Forward, Outcome


def liger_grpo(inputs: Inputs) -> Forward:
    """`LigerFusedLinearGRPOLoss` as it comes: a chunk of one sequence, on a GPU compiled."""
    return _liger_grpo(inputs, compiled=inputs.hidden.is_cuda)


def uncompiled(inputs: Inputs) -> Forward:
    """The same with ``compiled=False``, which needs no compiler and may be faster."""
    return _liger_grpo(inputs, compiled=False)


def _liger_grpo(inputs: Inputs, *, compiled: bool) -> Forward:
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
        compiled=compiled,
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
        return Outcome(loss, note=f"chunk_size={loss_fn.chunk_size}, compiled={compiled}")

    return forward
