"""Liger's two heads. Tested with 0.8.5.

`liger_grpo` is its own GRPO loss in chunks of a sequence, its default: 8 NVH, 6 with a frozen head. By default its
loss mathematics is compiled, and on a GPU it is here. On a CPU it is not: there compiling took the first call 8 s
longer, and no later call was faster.

`liger_ce` is its per-token cross-entropy with entropies, `LigerFusedLinearScaledCrossEntropyFunction`. verl calls it
with ``impl_backend="liger"``: packed, always with the entropy. 8 NVH, with a frozen head too. On Hopper it is a CuTe
DSL kernel for bf16; elsewhere torch, 512 tokens at a time, entropies in the dtype of the operands.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from benchmarks.cases import EPSILON, Absence, Inputs
from benchmarks.providers import Forward, Outcome, check_dtypes, from_logps, packed

TEMPERATURE, IGNORE, TILES = 1.0, -100, 1  # as verl passes them


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


def liger_ce(inputs: Inputs) -> Forward:
    """By its own choice of kernel for the device."""
    from liger_kernel.ops import fused_linear_scaled_cross_entropy as module

    chosen = module._resolve_implementation(inputs.hidden.device)  # on Hopper: its CuTe DSL kernel, or ImportError
    function, entropy = module.LigerFusedLinearScaledCrossEntropyFunction, _wants_entropy(inputs)

    def apply(hidden: Tensor, ids: Tensor) -> object:
        return function.apply(hidden, inputs.weight, ids, TEMPERATURE, IGNORE, TILES, entropy)

    return _scaled_ce(inputs, apply, chosen.__name__)


def liger_torch(inputs: Inputs) -> Forward:
    """What it runs where it has no kernel of its own."""
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import _FusedLinearPPOFallbackFunction as function

    entropy = _wants_entropy(inputs)

    def apply(hidden: Tensor, ids: Tensor) -> object:
        return function.apply(hidden, inputs.weight, ids, TEMPERATURE, IGNORE, entropy)

    return _scaled_ce(inputs, apply, function.__name__)


def _wants_entropy(inputs: Inputs) -> bool:
    return inputs.case.wants_entropy or not inputs.case.score


def _scaled_ce(inputs: Inputs, apply: Callable[[Tensor, Tensor], object], note: str) -> Forward:
    if inputs.case.softcap is not None:
        raise Absence("no soft-cap")
    check_dtypes(inputs)

    def rows(hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        found = apply(hidden, ids)
        nll, entropies = found if isinstance(found, tuple) else (found, None)
        return -nll, entropies

    return from_logps(inputs, lambda: packed(inputs, rows), note)
