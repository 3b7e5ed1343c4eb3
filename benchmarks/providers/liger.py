"""Liger's heads. Tested with 0.8.5.

`liger_grpo` is its own GRPO loss in chunks of a sequence, its default: 8 NVH, 6 with a frozen head.
By default its loss mathematics is compiled, and on a GPU it is here. On a CPU it is not: there
compiling took the first call 8 s longer, and no later call was faster.

`liger_ce` is its per-token cross-entropy with entropies,
`LigerFusedLinearScaledCrossEntropyFunction`. verl calls it with ``impl_backend="liger"``: packed,
always with the entropy. 8 NVH, with a frozen head too. On Hopper it is a CuTe DSL kernel for bf16;
elsewhere torch, 512 tokens at a time, entropies in the dtype of the operands.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from benchmarks.cases import EPSILON, Inputs
from benchmarks.providers import (
    IGNORE,
    Forward,
    Outcome,
    Scored,
    from_rows,
)

TEMPERATURE, TILES = 1.0, 1  # as verl passes them


def liger_grpo(inputs: Inputs, *, compiled: str = "on a GPU") -> Forward:
    """`LigerFusedLinearGRPOLoss` as it comes; not `compiled`, it needs no compiler."""
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    case, compiles = inputs.case, bool(compiled) and inputs.hidden.is_cuda
    loss_fn = LigerFusedLinearGRPOLoss(
        beta=case.beta,
        compiled=compiles,
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
        return Outcome(loss, note=f"chunk_size={loss_fn.chunk_size}, compiled={compiles}")

    return forward


def liger_ce(inputs: Inputs) -> Forward:
    """By its own choice of kernel for the device."""
    from liger_kernel.ops import fused_linear_scaled_cross_entropy as module

    chosen = module._resolve_implementation(
        inputs.hidden.device
    )  # on Hopper: its CuTe DSL kernel, or ImportError
    return _scaled_ce(
        inputs, module.LigerFusedLinearScaledCrossEntropyFunction, chosen.__name__, TILES
    )


def liger_torch(inputs: Inputs) -> Forward:
    """What it runs where it has no kernel of its own."""
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import (
        _FusedLinearPPOFallbackFunction as function,
    )

    return _scaled_ce(inputs, function, function.__name__)


def _scaled_ce(inputs: Inputs, function: Any, note: str, *tiles: int) -> Forward:
    wants_entropy = inputs.case.wants_entropy or not inputs.case.score

    def rows(hidden: Tensor, ids: Tensor) -> Scored:
        found = function.apply(
            hidden, inputs.weight, ids, TEMPERATURE, IGNORE, *tiles, wants_entropy
        )
        nll, entropies = found if isinstance(found, tuple) else (found, None)
        return -nll, entropies

    return from_rows(inputs, rows, note)
